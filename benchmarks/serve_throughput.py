"""Tokens per second through the server, beside those of the engine alone.

    python benchmarks/serve_throughput.py --model DIR --json benchmarks/results/DATE-MACHINE-serve.jsonl

The server runs in the process of the engine, as `jspec serve` does, and its clients in a process of their own, one
connection per request. All ways have the same prompts and the same numbers of new tokens. With a spread these are
lognormal, as in traffic of a server; without one all requests of a wave end together, and the next wave waits for HTTP.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import jspec
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.serve import openai, server
from jspec.serve.app import Service

PROMPT_TOKENS = 32
PIECES = {"chunks": True, "whole answers": False}
"""The ways of HTTP -> whether answers are streams."""


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Random ids, the same in every run."""
    return np.random.default_rng(0).integers(1000, vocab_size - 1000, (count, PROMPT_TOKENS)).tolist()


def limits(options: argparse.Namespace) -> list[int]:
    """The new tokens of each request, the same in every run: at most 4 times the median."""
    sampled = np.random.default_rng(0).lognormal(np.log(options.tokens), options.spread, options.requests)
    return np.clip(sampled.round(), 1, 4 * options.tokens).astype(int).tolist()


async def request(host: str, port: int, body: dict[str, object], gate: asyncio.Semaphore) -> int:
    """The new tokens of one request, as its usage tells them."""
    async with gate:
        reader, writer = await asyncio.open_connection(host, port)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        # The last object with a usage is the answer, or the last chunk.
        answer = await reader.read()
        writer.close()
    at = answer.rindex(b'"completion_tokens":') + len(b'"completion_tokens":')
    return int(answer[at : at + 12].split(b",")[0])


async def clients(options: argparse.Namespace) -> None:
    """Prints the seconds and the new tokens of all requests."""
    host, port = options.client.split(":")
    gate = asyncio.Semaphore(options.streams)
    shared = {"temperature": 0, "ignore_eos": True, "stream": options.stream}
    if options.stream:
        shared["stream_options"] = {"include_usage": True}
    began = time.perf_counter()
    every = zip(prompts(options.requests, options.vocab_size), limits(options), strict=True)
    bodies = [{"prompt": ids, "max_tokens": most, **shared} for ids, most in every]
    counts = await asyncio.gather(*(request(host, int(port), body, gate) for body in bodies))
    print(time.perf_counter() - began, sum(counts))


def over_http(options: argparse.Namespace, port: int, vocab_size: int, stream: bool) -> float:
    """Tokens per second of the clients."""
    names = ("streams", "requests", "tokens", "spread")
    sizes = {**{name: getattr(options, name) for name in names}, "vocab-size": vocab_size}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, __file__, f"--client=127.0.0.1:{port}", *arguments, *(["--stream"] if stream else [])]
    seconds, tokens = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(tokens) == sum(limits(options)), tokens
    return int(tokens) / float(seconds)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second by way."""
    model = jspec.load(options.model)
    sizes = {"slots": options.streams, "context": PROMPT_TOKENS + max(limits(options)), "prefix_cache": False}
    with jspec.Engine(model, drafter=None, **sizes) as engine:
        # The server, in a thread.
        service = Service(engine, name="m", limits=openai.Limits(context=engine.context))
        bound = server.bind("127.0.0.1", 0)
        port, running = bound.getsockname()[1], server.make_server(service, bound, grace=1.0)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        vocab_size = model.target.vocab_size
        every, new = prompts(options.requests, vocab_size), limits(options)

        def alone() -> float:
            began = time.perf_counter()
            engine.generate(every, max_new_tokens=new, ignore_eos=True)
            return sum(new) / (time.perf_counter() - began)

        # All ways in turn; the first two turns compile.
        ways: dict[str, Callable[[], float]] = {"engine": alone}
        for name, stream in PIECES.items():
            ways[name] = lambda stream=stream: over_http(options, port, vocab_size, stream)
        values: dict[str, list[float]] = {}
        for repeat in range(-2, options.repeats):
            for name, way in ways.items():
                speed = round(way(), 1)
                if repeat >= 0:
                    values.setdefault(name, []).append(speed)
        running.should_exit = True
        thread.join()
    return values


def main() -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="the median of new tokens")
    parser.add_argument("--spread", type=float, default=0.0, help="sigma of the logarithm of new tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(clients(options))
        return
    values = measure(options)
    base = statistics.median(values["engine"])
    for way, speeds in values.items():
        print(f"{way}: {statistics.median(speeds):.0f} tokens/s, {statistics.median(speeds) / base:.2f} {speeds}")
    if options.json is not None:
        command = report.command("python benchmarks/serve_throughput.py", sys.argv[1:], {"--model": "MODEL"})
        settings = {"requests": options.requests, "new tokens": options.tokens, "spread": options.spread}
        labels = {"mode": None, "batch": options.streams, "context": PROMPT_TOKENS, "settings": settings}
        lines = [
            report.measurement(
                environment(),
                *("serve", way),
                metric="tokens per second",
                unit="tokens/s",
                values=speeds,
                command=command,
                subject=Path(options.model).name,
                **{**labels, "mode": way},
            )
            for way, speeds in values.items()
        ]
        measurement.write(options.json, lines)


if __name__ == "__main__":
    main()
