"""An engine over several processes gives what it gives in one, and ends if one of them dies."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import engine_work as work
import jax
import numpy as np
import pytest
import several
from waiting import wait_for

import jspec


@pytest.fixture
def start(tmp_path):
    """Starts processes, as `several.start_all` does, and ends them after the test."""
    started = []

    def start(command, kind, devices=None):
        started.extend(several.start_all(command, kind, tmp_path, devices))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def same(found, expected):
    """Tokens, texts, rounds and where each token came from are equal, and log-probabilities up to rounding."""
    found, expected = dict(found), dict(expected)
    for got, wanted in zip(found.pop("logprobs"), expected.pop("logprobs"), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", several.KINDS)
def test_an_engine_over_two_processes_gives_what_one_gives(start, kind, tmp_path):
    """A group of devices in each process, and one over both with a trained draft; in the end process 1 dies."""
    head = tmp_path / "head"
    work.save_head(head)
    leader, follower = start(several.worker("engine_process.py", tmp_path, head), kind)
    model = work.load(draft=head)
    with jspec.Engine(model, **work.OPTIONS) as engine:
        together = work.use(engine)
        engine.update(jax.tree.map(lambda x: 2 * x, model.params))
        updated = work.described(engine.generate(work.PROMPTS[:1], sampling=work.GREEDY, **work.GIVEN))
    # The default drafter goes by measured costs.
    with jspec.Engine(work.load(), drafter="ngram", **work.OPTIONS) as engine:
        apart = work.described(engine.generate(work.PROMPTS, **work.GIVEN))
    assert sum(together["again"]["rounds"]) < 40, "drafts are accepted"
    assert re.match(r"[a-z ]{2,6}=", together["out"]["text"][2]), "a grammar holds"
    assert follower.wait(several.SECONDS) == 3, several.logs(tmp_path)[1]
    leader.wait(several.MINUTE)
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
    assert zero["lost"].startswith("the engine has failed"), several.logs(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", several.KINDS)
def test_two_processes_serve_and_one_ends_with_the_other(start, kind, tmp_path, needs):
    """`jspec serve` answers in process 0 alone; when that is killed, process 1 ends with an error."""
    for package in ("msgspec", "starlette", "uvicorn"):
        needs(package)
    options = ("--tensor", 2, "--dtype", "float32", "--slots", 1, "--context", 32, "--port", 0, "--processes", 2)

    def command(address, index):
        given = ("--coordinator", address, "--process-id", index)
        return "-m", "jspec", "serve", work.MODEL, *options, *given

    leader, follower = start(command, kind, 1)

    def serves():
        assert leader.poll() is None and follower.poll() is None, several.logs(tmp_path)
        return re.search(r"serving .* on (http://.*)/v1", several.logs(tmp_path)[0])

    wait_for(serves, several.SECONDS)
    body = {"prompt": work.PROMPTS[0], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{serves()[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=several.SECONDS))
    assert answer["choices"][0]["text"] == jspec.generate(work.load(), work.PROMPTS[0], max_new_tokens=8).text
    follower.send_signal(signal.SIGTERM)
    wait_for(lambda: "a second signal ends this process now" in several.logs(tmp_path)[1], several.MINUTE)
    assert "serving" not in several.logs(tmp_path)[1]
    leader.kill()
    assert follower.wait(several.MINUTE) != 0
    assert "process 0 is gone" in several.logs(tmp_path)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", several.KINDS)
def test_two_processes_run_generate_and_one_prints(start, kind, tmp_path):
    """`jspec generate` gives the text of one process, once, also under a grammar."""
    options = (
        "--tensor",
        2,
        "--dtype",
        "float32",
        "--max-new-tokens",
        8,
        "--regex",
        "[a-z ]{4}=[0-9]+",
        "--json",
        "--processes",
        2,
    )

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

    ends = [process.wait(several.SECONDS) for process in start(command, kind, 1)]
    assert ends == [0, 0], several.logs(tmp_path)
    sampling = jspec.Sampling(temperature=0.0, grammar=jspec.Grammar.regex("[a-z ]{4}=[0-9]+"))
    expected = jspec.generate(work.load(), work.PROMPTS[0], max_new_tokens=8, sampling=sampling)
    (found,) = (json.loads(line) for line in several.logs(tmp_path)[0].splitlines() if line.startswith("{"))
    assert (found["text"], found["tokens"]) == (expected.text, expected.tokens)
    assert "{" not in several.logs(tmp_path)[1]


@pytest.mark.slow
def test_processes_that_nothing_describes_are_an_error():
    """`--coordinator auto` outside of a cluster; whatever the variables of this machine say."""
    names = ("SLURM", "OMPI", "PMI", "KUBERNETES", "TPU", "JOB_", "MEGASCALE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-m", "jspec", "generate", "x", "--model", work.MODEL, "--tensor", "2"]
    ran = subprocess.run(
        [*command, "--coordinator", "auto"],
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(several.TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=several.MINUTE,
    )
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("jspec: --coordinator auto: JAX finds no Slurm, Open MPI, Kubernetes or Cloud TPU")
    assert "give HOST:PORT" in ran.stderr and "Traceback" not in ran.stderr
