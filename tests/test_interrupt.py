"""Ctrl-C at any moment of a command ends it with status 130 and without a traceback."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from jspec.core import interrupt

COMMANDS = {
    "generate": ["generate", "def g(x):", "--max-new-tokens", "900", "--depth", "6"],
    "serve": ["serve", "bundled:python-tiny", "--port", "0"],
    "bench": ["bench", "--preset", "tiny"],
    "train": ["train", "text", "--model", "bundled:python-tiny", "--prompts", "prompts.jsonl", "--out", "text"],
}
BEGINS = "jspec.core.interrupt"
"""In the line that Python prints when it has imported the handler, long before JAX."""
MOMENTS = [
    *(("generate", BEGINS, seconds) for seconds in (0, 0.02, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 1.6)),
    *(("generate", "jspec: compiling", seconds) for seconds in (0, 0.3, 0.7, 1.2)),
    *((name, BEGINS, seconds) for name in ("serve", "bench", "train") for seconds in (0.3, 2.5)),
    ("serve", "jspec: serving", 0.2),
]


@pytest.fixture(autouse=True)
def default_interrupts():
    """In the background of a shell, tests would ignore interrupts, and so would the commands that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(tmp_path):
    """Starts a command without programs compiled before; waits for a text on standard error, then some seconds.

    Returns the process, and a function that returns its standard error so far.
    """
    (tmp_path / "prompts.jsonl").write_text('"def f(x):"\n' * 64)
    path, started = tmp_path / "stderr", []

    def start(arguments, text, seconds):
        command = [sys.executable, "-X", "importtime", "-m", "jspec", *arguments]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
        with path.open("w") as stderr:
            running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
        started.append(running)
        wait_for(running, text)
        time.sleep(seconds)
        return running, path.read_text

    def wait_for(running, text):
        while text not in path.read_text():
            assert running.poll() is None, path.read_text()
            time.sleep(0.01)

    start.wait_for = wait_for
    yield start
    for running in started:
        running.kill()
        running.wait()


@pytest.mark.slow(unless=("generate-jspec.core.interrupt-0.2", "generate-jspec: compiling-0.3"))
@pytest.mark.parametrize("name, text, seconds", MOMENTS)
def test_an_interrupt_ends_a_command_with_status_130(start, name, text, seconds):
    running, stderr = start(COMMANDS[name], text, seconds)
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130, stderr()
    assert "Traceback" not in stderr() and "Fatal" not in stderr()


@pytest.mark.slow
def test_a_reader_that_has_stopped_does_not_hold_up_the_end():
    """Standard output is a full pipe."""
    code = "import sys; sys.argv[0] = 'jspec'; import jspec; print('begins', file=sys.stderr, flush=True); "
    command = [sys.executable, "-c", code + "print('x' * 10**7)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "begins\n"
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130


@pytest.mark.slow
def test_a_program_that_imports_jspec_keeps_its_interrupts():
    code = "import signal, jspec; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "program, original, is_command",
    [
        ("/usr/bin/jspec", ["python", "/usr/bin/jspec", "doctor"], True),
        ("-m", ["python", "-m", "jspec", "doctor"], True),
        ("-m", ["python", "-X", "dev", "-mjspec.cli", "doctor"], True),
        ("-m", ["python", "-m", "pytest", "jspec"], False),
        ("-m", ["python", "-m", "mine.jspec", "doctor"], False),
        ("train.py", ["python", "train.py", "jspec"], False),
        ("-c", ["python", "-c", "import jspec", "jspec"], False),
    ],
)
def test_a_command_is_recognized_by_how_it_was_started(monkeypatch, program, original, is_command):
    monkeypatch.setattr(sys, "argv", [program, original[-1]])
    monkeypatch.setattr(sys, "orig_argv", original)
    assert interrupt._is_command() == is_command


def test_the_first_interrupt_of_a_block_goes_to_its_handler():
    """In a process without the thread, such as one of a library's user, so do all others."""
    numbers = []
    before = signal.getsignal(signal.SIGINT)
    with interrupt.first_to(lambda number, frame: numbers.append(number)):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert numbers == [signal.SIGINT] * 2 and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_server_with_running_requests_drains_and_ends_at_the_second_interrupt(start):
    httpx = pytest.importorskip("httpx")
    arguments = [*COMMANDS["serve"], "--grace", "600"]
    running, stderr = start(arguments, "/v1\n", 0)
    url = re.search(r"on (http://.*/v1)", stderr())[1]
    body = {"prompt": "def f(x):", "max_tokens": 400, "stream": True, "ignore_eos": True, "n": 16}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as answer:
        next(answer.iter_text())
        running.send_signal(signal.SIGINT)
        start.wait_for(running, "draining: 16 running sequences have 600 seconds")
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
