"""A server of a fake engine on a free port of this machine. Importing this skips where its packages are missing."""

import threading
from inspect import signature

import pytest

for package in ("httpx", "msgspec", "openai", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed, which the extra test brings")

import httpx  # noqa: E402, after the check
import openai  # noqa: E402
from waiting import wait_for  # noqa: E402

from jspec.serve import server  # noqa: E402
from jspec.serve.app import Service  # noqa: E402
from jspec.serve.openai import Limits  # noqa: E402


class Running:
    """A server on a free port of this machine, in a thread. options: of the service, the surface and the limits."""

    def __init__(self, engine, *, grace=5.0, **options):
        self.engine = engine
        of_service = {name: options.pop(name) for name in signature(Service).parameters if name in options}
        surface = server.Surface(**{name: options.pop(name) for name in vars(server.Surface()) if name in options})
        self.service = Service(engine, name="fake", limits=Limits(engine.context, **options), **of_service)
        bound = server.bind("127.0.0.1", 0)
        self.port = bound.getsockname()[1]
        self.url = f"http{'s' if surface.certfile else ''}://127.0.0.1:{self.port}"
        self.server = server.make_server(self.service, bound, grace=grace, surface=surface)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [bound]})
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=surface.certfile is None)

    def client(self, **options):
        """OpenAI's client, which checks every answer."""
        options = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path, body, **options):
        return self.http.post(path, json=body, **options)

    def options_of(self, path="/v1/completions", **fields):
        """The options of the engine for a small request with these fields, which is valid."""
        prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        answer = self.post(path, {**prompt, "max_tokens": 1, **fields})
        assert answer.status_code == 200, (fields, answer.text)
        return self.engine.handles[-1].options

    def end(self):
        self.http.close()
        self.server.should_exit = True

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
