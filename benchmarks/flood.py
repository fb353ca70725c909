"""The longest time of /health, and the memory of the server, while eight requests of 15 MB arrive that are too long.

    python benchmarks/flood.py bundled:python-small

The delay is how much longer than 5 ms a process sleeps meanwhile: the time which other programs of the machine take.
Each kind of request comes from processes of its own, as does /health, so that no client waits for another.
"""

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import time
from multiprocessing.synchronize import Event

import httpx

CLIENTS = 8
TEXT = "ab c(d) " * 1_900_000
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "text": ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
    "text beyond ASCII": ("/v1/completions", {"prompt": "\u00e9b c(d) " * 1_500_000, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "tokenize": ("/tokenize", {"prompt": TEXT}),
    "ids": ("/v1/completions", {"prompt": [1] * 5_000_000, "max_tokens": 1}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 400_000}),
}


def ask(url: str, body: bytes, start: Event, answers: "multiprocessing.Queue[tuple[int, float]]") -> None:
    """Sends one request when all clients are ready."""
    start.wait()
    began = time.perf_counter()
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=300)
    answers.put((answer.status_code, time.perf_counter() - began))


def watch(url: str, stop: Event, answers: "multiprocessing.Queue[tuple[float, float]]") -> None:
    """Asks for /health all the time; reports the longest time and the longest delay of a pause, in seconds."""
    longest = delay = 0.0
    with httpx.Client() as client:
        while not stop.is_set():
            began = time.perf_counter()
            client.get(f"{url}/health", timeout=60)
            longest = max(longest, time.perf_counter() - began)
            began = time.perf_counter()
            time.sleep(0.005)
            delay = max(delay, time.perf_counter() - began - 0.005)
    answers.put((longest, delay))


def resident(process: int, name: str) -> float:
    """Memory of a process in MB, on Linux. name: VmRSS, or VmHWM for its peak."""
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) / 1e3 for line in file if line.startswith(name))


def flood(url: str, process: int, path: str, body: bytes) -> str:
    """The measurements of one kind of request, as text."""
    # The peak of memory counts from here on.
    with open(f"/proc/{process}/clear_refs", "w") as file:
        file.write("5")
    before, context = resident(process, "VmRSS"), multiprocessing.get_context("spawn")
    start, stop, answers, longest = context.Event(), context.Event(), context.Queue(), context.Queue()
    clients = [context.Process(target=ask, args=(url + path, body, start, answers)) for _ in range(CLIENTS)]
    watcher = context.Process(target=watch, args=(url, stop, longest))
    for one in (*clients, watcher):
        one.start()
    time.sleep(3)
    start.set()
    results = [answers.get() for _ in clients]
    time.sleep(1)
    stop.set()
    statuses = sorted({status for status, _ in results})
    health, delay = longest.get()
    grown = resident(process, "VmHWM") - before, resident(process, "VmRSS") - before
    return (
        f"statuses {statuses} after {max(seconds for _, seconds in results):.2f} s; "
        f"/health {1000 * health:.0f} ms, delay {1000 * delay:.0f} ms; "
        f"memory {grown[0]:+.0f} MB, then {grown[1]:+.0f} MB"
    )


def main() -> None:
    """Starts a server, and floods it with each kind of request."""
    parser = argparse.ArgumentParser(description="what requests that are too long cost the others")
    parser.add_argument("model")
    parser.add_argument("--context", default="512")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "jspec", "serve", arguments.model, "--port", "0", "--context", arguments.context]
    server = subprocess.Popen([*command, "--slots", "2"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next(match[1] for line in server.stderr if (match := re.search(r"serving .* on (http://.*)/v1", line)))
        for name, (path, body) in BODIES.items():
            print(f"{name}: {flood(url, server.pid, path, json.dumps(body, ensure_ascii=False).encode())}", flush=True)
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    main()
