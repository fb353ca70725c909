"""The scenarios of `scenarios.py`, with a fake engine, or with a server of a real model at JSPEC_SERVER."""

import concurrent.futures
import gc
import inspect
import os

import agent_scenarios  # noqa: F401, adds to the table, as what it imports
import http_server  # noqa: F401, skips this module where packages are missing
import httpx
import pytest
from scenarios import SCENARIOS, is_installed

SERVER = os.environ.get("JSPEC_SERVER")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<assistant>{# <tool_call> #}"
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, serve, tmp_path, request):
    scenario = SCENARIOS[name]
    if not is_installed(scenario.package):
        pytest.skip(f"{scenario.package} is not installed: pip install -e '.[clients]'")
    if SERVER is None:
        url, model = f"{serve(text=scenario.text, template=TEMPLATE, context=8192).url}/v1", "fake"
    else:
        url, model = SERVER, httpx.get(f"{SERVER}/models").json()["data"][0]["id"]
        if scenario.weak:
            request.applymarker(pytest.mark.xfail(reason=scenario.weak, strict=False))
    folder = {"folder": tmp_path} if "folder" in inspect.signature(scenario.run).parameters else {}
    # Clients leave event loops and connections, which end with a thread and not in another test.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(scenario.run, url, model, **folder).result()
    gc.collect()
