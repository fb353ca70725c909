"""More scenarios, of clients in the extra `clients`; importing this adds them to the table."""

import asyncio
import json
import os
import subprocess
from typing import Literal

from scenarios import LIMIT, PET, QUESTION, call_of, is_pet, pet_type, scenario, user

WEATHER = '{"city":"Rome"}'
ASKED = "What is the weather in Rome?"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}

# LiteLLM.


def lite(url, model, messages=None, **options):
    import litellm

    asked = {"api_base": url, "api_key": "none", **LIMIT, **options}
    return litellm.completion(model, user() if messages is None else messages, **asked)


@scenario("litellm")
def litellm_openai(url, model):
    assert lite(url, f"openai/{model}").choices[0].message.content


@scenario("litellm")
def litellm_hosted_vllm(url, model):
    assert lite(url, f"hosted_vllm/{model}").choices[0].message.content


@scenario("litellm")
def litellm_stream(url, model):
    assert "".join(chunk.choices[0].delta.content or "" for chunk in lite(url, f"openai/{model}", stream=True))


@scenario("litellm", PET)
def litellm_pydantic(url, model):
    out = lite(url, f"openai/{model}", response_format=pet_type())
    is_pet(pet_type().model_validate_json(out.choices[0].message.content))


@scenario("litellm")
def litellm_history(url, model):
    message = lite(url, f"openai/{model}").choices[0].message
    assert lite(url, f"openai/{model}", [*user(), message, *user("And then?")]).choices[0].message.content


@scenario("litellm")
def litellm_anthropic(url, model):
    assert lite(url.removesuffix("/v1"), f"anthropic/{model}").choices[0].message.content


# LangChain.


def langchain_model(url, model, **options):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0, **LIMIT, **options)


@scenario("langchain_openai")
def langchain_invoke(url, model):
    assert langchain_model(url, model).invoke("hi").content


@scenario("langchain_openai")
def langchain_stream(url, model):
    assert "".join(chunk.content for chunk in langchain_model(url, model).stream("hi"))


@scenario("langchain_openai")
def langchain_responses(url, model):
    assert langchain_model(url, model, use_responses_api=True).invoke("hi").content


@scenario("langchain_openai", PET)
def langchain_json_schema(url, model):
    is_pet(langchain_model(url, model).with_structured_output(pet_type(), method="json_schema").invoke(QUESTION))


@scenario("langchain_openai", call_of("Pet", PET))
def langchain_function_calling(url, model):
    is_pet(langchain_model(url, model).with_structured_output(pet_type(), method="function_calling").invoke(QUESTION))


@scenario("langchain_openai", PET, weak="any JSON is allowed, of which a small model writes another")
def langchain_json_mode(url, model):
    is_pet(langchain_model(url, model).with_structured_output(pet_type(), method="json_mode").invoke(QUESTION))


@scenario("langchain_openai", call_of("weather", WEATHER))
def langchain_bind_tools(url, model):
    tool = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
    (call,) = langchain_model(url, model).bind_tools([tool], tool_choice="weather").invoke(ASKED).tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")


# OpenAI's agents.


def run_agent(url, model, kind, *, stream=False, tools=False, once=True):
    """Runs an agent; returns its last text and the cities that it asked the weather of. once: ends with a tool."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    cities = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    settings = agents.ModelSettings(**LIMIT, tool_choice="required" if tools else None)
    agent = agents.Agent(
        name="a",
        instructions="Be brief.",
        model=getattr(agents, kind)(model=model, openai_client=client),
        model_settings=settings,
        tools=[weather] if tools else [],
        tool_use_behavior="stop_on_first_tool" if once else "run_llm_again",
    )

    async def run():
        if not stream:
            return (await agents.Runner.run(agent, ASKED)).final_output
        result = agents.Runner.run_streamed(agent, ASKED)
        assert [event async for event in result.stream_events()]
        return result.final_output

    return asyncio.run(run()), cities


@scenario("agents")
def agents_chat(url, model):
    assert run_agent(url, model, "OpenAIChatCompletionsModel")[0]


@scenario("agents", call_of("weather", WEATHER))
def agents_chat_with_tools(url, model):
    said, cities = run_agent(url, model, "OpenAIChatCompletionsModel", tools=True)
    assert said == "sunny" and cities


@scenario("agents", weak="the client raises where the text reaches the limit of tokens")
def agents_responses(url, model):
    assert run_agent(url, model, "OpenAIResponsesModel")[0]


@scenario("agents", call_of("weather", WEATHER))
def agents_responses_with_tools(url, model):
    for stream in (False, True):
        said, cities = run_agent(url, model, "OpenAIResponsesModel", stream=stream, tools=True)
        assert said == "sunny" and cities


# Anthropic's client.


def anthropic_client(url):
    import anthropic

    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


@scenario("anthropic")
def anthropic_message(url, model):
    client = anthropic_client(url)
    out = client.messages.create(model=model, messages=user(), max_tokens=100, system="Be brief.")
    assert out.content[0].text and out.stop_reason in ("end_turn", "max_tokens")
    assert client.messages.count_tokens(model=model, messages=user(), system="Be brief.").input_tokens


@scenario("anthropic", call_of("weather", WEATHER))
def anthropic_tools(url, model):
    tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
    asked = {"model": model, "tools": tools, "max_tokens": 100}
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    client = anthropic_client(url)
    with client.messages.stream(messages=user(ASKED), **asked) as stream:
        out = stream.get_final_message()
    (call,) = [block for block in out.content if block.type == "tool_use"]
    assert out.stop_reason == "tool_use" and call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*user(ASKED), {"role": "assistant", "content": out.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, **asked).content


# smolagents.


def smol(url, model, kind, max_steps=1, **options):
    import smolagents

    @smolagents.tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return "sunny"

    api = smolagents.OpenAIServerModel(model, api_base=url, api_key="none", **LIMIT)
    return getattr(smolagents, kind)([weather], api, max_steps=max_steps, verbosity_level=0, **options).run(ASKED)


@scenario("smolagents", call_of("final_answer", '{"answer":"sunny"}'), weak="a small model may call another function")
def smolagents_tools(url, model):
    assert smol(url, model, "ToolCallingAgent") == "sunny"


@scenario(
    "smolagents",
    "Thought: easy.\n<code>\nfinal_answer('sunny')\n</code>",
    weak="its prompt of 2,300 tokens asks for code, which a small model does not write",
)
def smolagents_code(url, model):
    assert smol(url, model, "CodeAgent") == "sunny"


# Programs.


def command(*parts, cwd=None, **variables):
    environment = {**os.environ, **variables}
    out = subprocess.run(parts, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


@scenario("$llm")
def llm_prompt(url, model, folder):
    lines = ["- model_id: mine", f"  model_name: {model}", f"  api_base: {url}"]
    (folder / "extra-openai-models.yaml").write_text("\n".join(lines))
    assert command(
        "llm", "-m", "mine", "-o", "max_tokens", "20", "hi", LLM_USER_PATH=str(folder), OPENAI_API_KEY="none"
    ).strip()


@scenario("$lm_eval")
def lm_eval_choices(url, model, folder):
    task = {
        **{"task": "sky", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"},
        **{"doc_to_text": "{{question}}", "doc_to_choice": ["blue", "green"], "doc_to_target": 0},
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.json")}},
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "data.json").write_text(json.dumps([{"question": "The sky is"}] * 2))
    (folder / "sky.yaml").write_text(json.dumps(task))
    arguments = f"model={model},base_url={url}/completions,tokenizer_backend=remote,num_concurrent=1"
    parts = ("--model", "local-completions", "--model_args", arguments, "--tasks", "sky", "--include_path", str(folder))
    assert "acc" in command("lm_eval", *parts)


@scenario("$guidellm")
def guidellm_load(url, model, folder):
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"The sky {i} is"}) for i in range(8)))
    backend = f"kind=openai_http,target={url.removesuffix('/v1')},model={model},max_tokens=8"
    limits = ("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3")
    files = ("--data", f"kind=json_file,path={folder}/data.jsonl", "--output", f"kind=json,path={folder}/out.json")
    command("guidellm", "run", "--backend", backend, *limits, *files, "--disable-console")
    assert (folder / "out.json").stat().st_size
