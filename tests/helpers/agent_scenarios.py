"""Loops of agents up to the final answer: a request, a call of a tool or an edit, its result; adds to the table.

`aider` pins all of its packages, so it is a program of an environment of its own.
"""

import json

from more_scenarios import WEATHER, command, run_agent, smol
from scenarios import SAID, call_of, scenario

UNFINISHED = "a small model does not finish the task"
TASK = "Write a file hello.py which prints hello."
HELLO = "print('hello')"


def bash(script):
    return "Now this.\n" + call_of("bash", json.dumps({"command": script}))


@scenario("agents", (call_of("weather", WEATHER), SAID) * 4, weak="the client raises where the text reaches the limit")
def agents_loop(url, model):
    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        for stream in (False, True):
            said, cities = run_agent(url, model, kind, stream=stream, tools=True, once=False)
            assert said and said != "sunny" and len(cities) >= 1


@scenario("smolagents", (call_of("weather", WEATHER), call_of("final_answer", '{"answer":"warm"}')) * 2, UNFINISHED)
def smolagents_loop(url, model):
    for stream in (False, True):
        assert smol(url, model, "ToolCallingAgent", max_steps=3, stream_outputs=stream) == "warm"


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat hello.py")


@scenario("$mini", (bash(f'echo "{HELLO}" > hello.py'), bash("python3 hello.py"), SUBMIT), UNFINISHED)
def mini_swe_agent(url, model, folder):
    out = folder / "run.json"
    settings = {
        "agent.step_limit": 5,
        "environment.cwd": folder,
        "model.cost_tracking": "ignore_errors",
        "model.model_kwargs.api_base": url,
        "model.model_kwargs.api_key": "none",
    }
    options = ["mini.yaml", *(f"{name}={value}" for name, value in settings.items())]
    parts = ["-m", f"openai/{model}", "-t", TASK, "-y", "--exit-immediately", "-o", str(out)]
    variables = {"MSWEA_CONFIGURED": "true", "MSWEA_GLOBAL_CONFIG_DIR": str(folder)}
    command("mini", *parts, *(part for option in options for part in ("-c", option)), **variables)
    assert "print" in (folder / "hello.py").read_text()
    assert json.loads(out.read_text())["info"]["exit_status"] == "Submitted"


@scenario("$aider", f"hello.py\n```\n{HELLO}\n```\n", UNFINISHED)
def aider_edits(url, model, folder):
    options = ["--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--no-show-model-warnings"]
    server = ["--model", f"openai/{model}", "--openai-api-base", url, "--openai-api-key", "none"]
    for stream in ("--stream", "--no-stream"):
        file = folder / "hello.py"
        file.write_text("")
        command("aider", *server, *options, stream, "--edit-format", "whole", "--message", TASK, "hello.py", cwd=folder)
        assert "print" in file.read_text()
