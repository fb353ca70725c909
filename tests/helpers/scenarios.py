"""What applications do with a server, by client: each scenario is a call of a client's library and what must hold.

A scenario has the text that a model writes for it, so that it runs against a fake engine. Against a real model, those
with a reason in `weak` may fail for the model. `more_scenarios.py` and `agent_scenarios.py` have those of the extra
`clients`.
"""

import dataclasses
import importlib.util
import shutil
from collections.abc import Callable
from typing import Literal

import pytest

PET = '{"kind":"cat","indoor":true}'
QUESTION = "My pet is a cat that lives indoors. Describe it as JSON."
SAID = "The sky is blue."
LIMIT = {"temperature": 0, "max_tokens": 100}


def call_of(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A call of a client.

    package: what must be installed; a command for programs.
    run: is called with the address of the server, which ends with /v1, and the name of the model.
    text: what the model writes, or its texts by turn.
    weak: why a small model may fail.
    """

    package: str
    run: Callable[[str, str], object]
    text: str | tuple[str, ...] = SAID
    weak: str = ""


SCENARIOS: dict[str, Scenario] = {}
"""By name, which begins with that of the client."""


def scenario(package, text=SAID, weak=""):
    """Adds a function to the table."""

    def add(run):
        SCENARIOS[run.__name__] = Scenario(package, run, text, weak)
        return run

    return add


def pet_type():
    import pydantic

    class Pet(pydantic.BaseModel):
        """A pet."""

        kind: Literal["cat", "dog"]
        indoor: bool

    return Pet


def is_pet(value):
    assert value.kind in ("cat", "dog") and isinstance(value.indoor, bool)


def user(text=QUESTION):
    return [{"role": "user", "content": text}]


# OpenAI's client.


def openai_client(url):
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def chat(url, model, **options):
    return openai_client(url).chat.completions.create(model=model, **{"messages": user(), **LIMIT, **options})


@scenario("openai")
def openai_chat(url, model):
    out = chat(url, model)
    assert out.choices[0].message.content and out.usage.total_tokens > out.usage.prompt_tokens


@scenario("openai")
def openai_stream_with_usage(url, model):
    *chunks, last = chat(url, model, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) and last.usage.completion_tokens


@scenario("openai")
def openai_completion_with_echo(url, model):
    out = openai_client(url).completions.create(model=model, prompt="The sky", echo=True, logprobs=1, **LIMIT)
    assert out.choices[0].text.startswith("The sky") and out.choices[0].logprobs.token_logprobs[0] is None


@scenario("openai")
def openai_errors(url, model):
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        chat(url, model, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as error:
        chat(url, "no-such-model")
    assert error.value.code == "model_not_found"


@scenario("openai")
def openai_own_objects_as_history(url, model):
    message = chat(url, model).choices[0].message
    assert chat(url, model, messages=[*user(), message, *user("And then?")]).choices[0].message.content


@scenario("openai")
def openai_empty_tools(url, model):
    assert chat(url, model, tools=[]).choices[0].message.tool_calls is None


@scenario("openai", call_of("Pet", PET))
def openai_parse_tools(url, model):
    import openai

    tool = openai.pydantic_function_tool(pet_type(), name="Pet")
    create = openai_client(url).chat.completions.parse
    out = create(model=model, messages=user(), tools=[tool], tool_choice="required", parallel_tool_calls=False, **LIMIT)
    is_pet(out.choices[0].message.tool_calls[0].function.parsed_arguments)


@scenario("openai", PET)
def openai_parse(url, model):
    parse = openai_client(url).chat.completions.parse
    is_pet(parse(model=model, messages=user(), response_format=pet_type(), **LIMIT).choices[0].message.parsed)


@scenario("openai", '{"age":12}', weak="a small model may write digits up to the limit of tokens")
def openai_parse_integers(url, model):
    import pydantic

    class Age(pydantic.BaseModel):
        age: int

    parse = openai_client(url).chat.completions.parse
    assert parse(model=model, messages=user(), response_format=Age, **LIMIT).choices[0].message.parsed.age >= 0


@scenario("openai", weak="the client raises where the text reaches the limit of tokens")
def openai_stream_helper(url, model):
    with openai_client(url).chat.completions.stream(model=model, messages=user("Say hi."), **LIMIT) as stream:
        assert stream.get_final_completion().choices[0].message.content


@scenario("openai")
def openai_responses(url, model):
    create = openai_client(url).responses.create
    out = create(model=model, input="hi", temperature=0, max_output_tokens=100)
    history = [{"role": "user", "content": "hi"}, *out.output, {"role": "user", "content": "And then?"}]
    assert out.output_text
    *_, last = create(model=model, input=history, temperature=0, max_output_tokens=100, stream=True)
    assert last.type in ("response.completed", "response.incomplete") and last.response.output_text


@scenario("openai")
def openai_embeddings(url, model):
    import openai

    with pytest.raises(openai.NotFoundError, match="generates text and makes no embeddings"):
        openai_client(url).embeddings.create(model=model, input="x")


# Instructor.


def instruct(url, model, mode):
    import instructor

    client = instructor.from_openai(openai_client(url), mode=getattr(instructor.Mode, mode))
    is_pet(client.chat.completions.create(model=model, messages=user(), response_model=pet_type(), **LIMIT))


@scenario("instructor", call_of("Pet", PET))
def instructor_default(url, model):
    instruct(url, model, "TOOLS")


@scenario("instructor", PET)
def instructor_json_schema(url, model):
    instruct(url, model, "JSON_SCHEMA")


@scenario("instructor", PET, weak="any JSON is allowed, and a small model repeats the schema")
def instructor_json(url, model):
    instruct(url, model, "JSON")


# Pydantic AI.


def pydantic_agent(url, model, kind, **options):
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = getattr(openai, kind)
    model = kind(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(model, model_settings=LIMIT, retries=0, **options)


@scenario("pydantic_ai")
def pydantic_ai_text(url, model):
    assert pydantic_agent(url, model, "OpenAIChatModel").run_sync("hi").output


@scenario("pydantic_ai", PET)
def pydantic_ai_native(url, model):
    from pydantic_ai import NativeOutput

    is_pet(
        pydantic_agent(url, model, "OpenAIChatModel", output_type=NativeOutput(pet_type())).run_sync(QUESTION).output
    )


@scenario("pydantic_ai", call_of("final_result", PET))
def pydantic_ai_typed(url, model):
    is_pet(pydantic_agent(url, model, "OpenAIChatModel", output_type=pet_type()).run_sync(QUESTION).output)


@scenario("pydantic_ai", call_of("final_result", PET))
def pydantic_ai_responses(url, model):
    is_pet(pydantic_agent(url, model, "OpenAIResponsesModel", output_type=pet_type()).run_sync(QUESTION).output)


def is_installed(package):
    """Whether a package can be imported, or a program is there."""
    if package.startswith("$"):
        return shutil.which(package[1:]) is not None
    return importlib.util.find_spec(package) is not None
