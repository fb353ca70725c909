"""An engine over several processes gives what it gives in one, and ends if one of them dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import engine_work as work
import http_server
import httpx
import jax
import numpy as np
import pytest

import jspec

TESTS = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "engine_process.py"
SECONDS = 240
"""The time after which processes that wait for each other count as stuck."""
MINUTE = 60
"""The time in which the others must end after one has died."""


@pytest.fixture
def start(tmp_path):
    """Starts two processes of a command; the output of each goes to INDEX.log."""
    started = []

    def start(command, devices):
        with socket.socket() as found:
            found.bind(("localhost", 0))
            address = f"localhost:{found.getsockname()[1]}"
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "helpers")])
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # which takes less time, as in other tests
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "PYTHONPATH": paths,
        }
        for index in range(2):
            with open(tmp_path / f"{index}.log", "w") as log:
                given = [sys.executable, *map(str, command(address, index))]
                started.append(subprocess.Popen(given, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def log(directory, index):
    return (directory / f"{index}.log").read_text()[-4000:]


def same(found, expected):
    """Tokens, texts, rounds and where each token came from are equal, and log-probabilities up to rounding."""
    found, expected = dict(found), dict(expected)
    for got, wanted in zip(found.pop("logprobs"), expected.pop("logprobs"), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert found == expected


@pytest.mark.slow
def test_an_engine_over_two_processes_gives_what_one_gives(start, tmp_path):
    """A group of devices in each process, and one over both with a trained draft; in the end process 1 dies."""
    head = tmp_path / "head"
    work.save_head(head)
    leader, follower = start(lambda address, index: (WORKER, address, 2, index, head, tmp_path / f"{index}.json"), 2)
    model = jspec.load(work.MODEL, draft=head)
    with jspec.Engine(model, **work.OPTIONS) as engine:
        together = work.use(engine)
        engine.update(jax.tree.map(lambda x: 2 * x, model.params))
        updated = work.described(engine.generate(work.PROMPTS[:1], sampling=work.GREEDY, **work.GIVEN))
    with jspec.Engine(jspec.load(work.MODEL), **work.OPTIONS) as engine:
        apart = work.described(engine.generate(work.PROMPTS, **work.GIVEN))
    assert sum(together["again"]["rounds"]) < 40, "drafts are accepted"
    assert re.match(r"[a-z ]{2,6}=", together["out"]["text"][2]), "a grammar holds"
    assert follower.wait(SECONDS) == 3, log(tmp_path, 1)
    leader.wait(MINUTE)
    zero, one = (json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2))
    same(zero["apart"], apart)
    assert sorted(zero["given"]) == [1, 2] and one["given"] == [], "both groups had requests, and process 0 all"
    same(zero["together"]["out"], together["out"])
    same(zero["together"]["again"], together["again"])
    assert zero["together"]["streamed"] == together["streamed"] == together["out"]["tokens"][1]
    np.testing.assert_allclose(zero["together"]["scored"], together["scored"], atol=1e-5)
    reason, tokens = zero["together"]["cancelled"]
    assert reason == "cancelled" and 0 < len(tokens) < work.LONG["max_new_tokens"]
    same(zero["updated"], updated)
    assert updated["tokens"] != together["out"]["tokens"][:1]
    assert zero["refused"] != one["refused"] and all(
        "process 1 makes the calls of process 0" in x for x in one["refused"]
    )
    for found in (zero, one):
        assert found["differs"].startswith("slots: differs between process 0 and process 1")
        assert not found["alive"]
    assert zero["one fails"] == "process 1 has refused this call: the reason is in its own error"
    assert one["one fails"].startswith("slots=0: must be at least 1")
    assert zero["lost"].startswith("the engine has failed"), log(tmp_path, 0)


@pytest.mark.slow
def test_two_processes_serve_and_one_ends_with_the_other(start, tmp_path):
    """`jspec serve` answers in process 0 alone; when that is killed, process 1 ends with an error."""
    options = ("--tensor", 2, "--slots", 1, "--context", 32, "--port", 0, "--processes", 2)

    def command(address, index):
        given = ("--coordinator", address, "--process-id", index)
        return "-m", "jspec", "serve", work.MODEL, *options, *given

    leader, follower = start(command, 1)

    def serves():
        assert leader.poll() is None and follower.poll() is None, log(tmp_path, 0) + log(tmp_path, 1)
        return re.search(r"serving .* on (http://.*)/v1", log(tmp_path, 0))

    http_server.wait_for(serves, SECONDS)
    body = {"prompt": work.PROMPTS[0], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{serves()[1]}/v1/completions", json=body, timeout=SECONDS).json()
    assert (
        answer["choices"][0]["text"] == jspec.generate(jspec.load(work.MODEL), work.PROMPTS[0], max_new_tokens=8).text
    )
    follower.send_signal(signal.SIGTERM)
    http_server.wait_for(lambda: "a second signal ends this process now" in log(tmp_path, 1), MINUTE)
    assert "serving" not in log(tmp_path, 1)
    leader.kill()
    assert follower.wait(MINUTE) != 0
    assert "process 0 is gone" in log(tmp_path, 1)


@pytest.mark.slow
def test_two_processes_run_generate_and_one_prints(start, tmp_path):
    """`jspec generate` gives the text of one process, once, also under a grammar."""
    options = ("--tensor", 2, "--max-new-tokens", 8, "--regex", "[a-z ]{4}=[0-9]+", "--json", "--processes", 2)

    def command(address, index):
        return (
            "-m",
            "jspec",
            "generate",
            work.PROMPTS[0],
            "--model",
            work.MODEL,
            *options,
            "--coordinator",
            address,
            "--process-id",
            index,
        )

    ends = [process.wait(SECONDS) for process in start(command, 1)]
    assert ends == [0, 0], log(tmp_path, 0) + log(tmp_path, 1)
    sampling = jspec.Sampling(temperature=0.0, grammar=jspec.Grammar.regex("[a-z ]{4}=[0-9]+"))
    expected = jspec.generate(jspec.load(work.MODEL), work.PROMPTS[0], max_new_tokens=8, sampling=sampling)
    (found,) = (json.loads(line) for line in log(tmp_path, 0).splitlines() if line.startswith("{"))
    assert (found["text"], found["tokens"]) == (expected.text, expected.tokens)
    assert "{" not in log(tmp_path, 1)


@pytest.mark.slow
def test_processes_that_nothing_describes_are_an_error():
    """`--coordinator auto` outside of a cluster; whatever the variables of this machine say."""
    names = ("SLURM", "OMPI", "PMI", "KUBERNETES", "TPU", "JOB_", "MEGASCALE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-m", "jspec", "generate", "x", "--model", work.MODEL, "--tensor", "2"]
    ran = subprocess.run(
        [*command, "--coordinator", "auto"],
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=MINUTE,
    )
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("jspec: --coordinator auto: JAX finds no Slurm, Open MPI, Kubernetes or Cloud TPU")
    assert "give HOST:PORT" in ran.stderr and "Traceback" not in ran.stderr
