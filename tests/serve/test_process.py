"""What remains of a server that is told to end, or killed, while it streams: nothing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import http_server
import httpx
import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
pytestmark = pytest.mark.slow


@pytest.fixture
def process():
    """Starts servers in sessions of their own; returns the process and its address."""
    started = []

    def start(*command):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])])}
        running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        started.append(running)
        lines = []
        for line in running.stderr:
            lines.append(line)
            if match := re.search(r"serving .* on (http://.*)/v1", line):
                return running, match[1]
        raise AssertionError("".join(lines))

    yield start
    for running in started:
        running.kill()
        running.communicate()


def group_is_gone(running):
    """No process is in the session that the server has begun."""
    try:
        os.killpg(running.pid, 0)
    except ProcessLookupError:
        return True
    return False


BODY = {"prompt": "x", "max_tokens": 1200, "stream": True}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_signal_in_mid_stream_leaves_no_process(process, name):
    running, url = process(sys.executable, str(HELPERS / "serve_fake.py"), "0.2")
    end = ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20) as answer:
            parts = answer.iter_text()
            assert "text_completion" in next(parts)
            running.send_signal(getattr(signal, name))
            for part in parts:
                end += part
    except httpx.RemoteProtocolError:
        assert name == "SIGKILL"
    running.wait(20)
    http_server.wait_for(lambda: group_is_gone(running))
    assert name == "SIGKILL" or "the server is shutting down" in end
    assert "Traceback" not in running.stderr.read()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_second_signal_does_not_wait(process):
    running, url = process(sys.executable, str(HELPERS / "serve_fake.py"), "600")
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20) as answer:
        next(answer.iter_text())
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGINT)
        running.wait(20)
