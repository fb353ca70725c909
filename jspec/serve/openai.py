"""Request bodies in OpenAI's format: every field is checked, and what is not supported is refused by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.core.checks import check_flag, check_int, check_number, check_text
from jspec.core.sampling import Sampling
from jspec.generation.options import MAX_SEED
from jspec.serve.fields import ApiError, Fields
from jspec.serve.grammars import GrammarRequest, take_grammar
from jspec.serve.messages import Message, check_messages

_MAX_STOP_STRINGS = 16
_MAX_STOP_BYTES = 256  # of all strings: each byte is a row of their automaton
_DEFAULT_TOKENS = 16  # of completions, as OpenAI documents
_MOST_TOP, _MOST_TOP_IN_CHATS = 5, 20  # most probable tokens beside each, as OpenAI documents

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
}
_OTHERS = (
    *("add_special_tokens", "allowed_token_ids", "audio", "best_of", "chat_template"),
    *("guided_grammar", "guided_decoding_backend", "moderation", "parallel_tool_calls", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_logprobs", "reasoning_effort", "safety_identifier"),
    *("suffix", "truncate_prompt_tokens", "verbosity", "web_search_options"),
)
_REFUSED = dict.fromkeys(_OTHERS, ()) | _NEUTRAL
"""Unsupported fields of OpenAI's API and of other servers -> values that ask for nothing."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    context: tokens of prompt and output together.
    prompt: tokens of a prompt. None: as the context allows.
    output: new tokens of a sequence. None: as the context allows.
    sequences: prompts times n.
    body: bytes of a request's body.

    Raises:
      ValueError, TypeError: a limit below 1.
    """

    context: int
    prompt: int | None = None
    output: int | None = None
    sequences: int = 256
    body: int = 16 * 2**20

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_int(field.name, value, least=1, owner="Limits")


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request for completions.

    prompts: text or ids of each prompt; empty in a chat.
    messages: those of a chat, or None.
    template: variables of the chat template.
    max_tokens: of the output; 0 where only the prompt is echoed. None: `default_tokens`, or what fits if less
      or None.
    length_field: the field of max_tokens.
    sampling: without the grammar.
    logprobs: None: off. k: the log-probability of each token of the answer and the k most probable tokens with theirs.
    echo: whether the answer begins with the prompt.
    seed: of all sequences; None: random.
    """

    prompts: Sequence[str | list[int]]
    messages: list[Message] | None
    template: Mapping[str, Any]
    n: int
    max_tokens: int | None
    length_field: str
    default_tokens: int | None
    sampling: Sampling | None
    grammar: GrammarRequest | None
    stop: list[str]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    salt: str


def constrained(call: Call) -> Sampling | None:
    """Compiles the grammar and adds it to the sampling parameters.

    Raises:
      ApiError: it is invalid, or not supported.
    """
    if call.grammar is None:
        return call.sampling
    free = Sampling(temperature=0.0) if call.sampling is None else call.sampling
    return dataclasses.replace(free, grammar=call.grammar.compile())


def read_completion(body: object, *, vocab_size: int, limits: Limits) -> Call:
    """The body of /v1/completions.

    Raises:
      ApiError: a field is unknown, not supported or invalid.
    """
    # Prompts and samples.
    fields = Fields(body)
    n = fields.take("n", check_int, 1, least=1, most=limits.sequences)
    prompts = fields.require("prompt", _check_prompts, vocab_size=vocab_size, limits=limits, n=n)
    echo = fields.take("echo", check_flag, False)
    max_tokens = fields.take("max_tokens", check_int, None, least=0 if echo else 1)
    logprobs = fields.take("logprobs", check_int, None, least=0, most=_MOST_TOP)
    # Fields of both endpoints.
    return _read_common(
        fields,
        vocab_size,
        prompts=prompts,
        messages=None,
        template={},
        n=n,
        max_tokens=max_tokens,
        length_field="max_tokens",
        default_tokens=_DEFAULT_TOKENS,
        logprobs=logprobs,
        echo=echo,
    )


def read_chat(body: object, *, vocab_size: int, limits: Limits) -> Call:
    """The body of /v1/chat/completions; as `read_completion`."""
    # Messages, and how they are rendered.
    fields = Fields(body)
    n = fields.take("n", check_int, 1, least=1, most=limits.sequences)
    messages = fields.require("messages", check_messages)
    template = fields.take("chat_template_kwargs", _check_template, {})
    # The limit has two names.
    max_tokens = fields.take("max_tokens", check_int, None, least=1)
    newer = fields.take("max_completion_tokens", check_int, None, least=1)
    if None not in (max_tokens, newer) and max_tokens != newer:
        raise ApiError(
            f"max_tokens={max_tokens}: differs from max_completion_tokens={newer}; must be omitted", param="max_tokens"
        )
    # Log-probabilities.
    recorded = fields.take("logprobs", check_flag, False)
    top = fields.take("top_logprobs", check_int, None, least=0, most=_MOST_TOP_IN_CHATS)
    if top and not recorded:
        raise ApiError(f"top_logprobs={top}: requires logprobs=True", param="top_logprobs")
    # Fields of both endpoints.
    return _read_common(
        fields,
        vocab_size,
        prompts=(),
        messages=messages,
        template=template,
        n=n,
        max_tokens=max_tokens if newer is None else newer,
        length_field="max_tokens" if newer is None else "max_completion_tokens",
        default_tokens=None,
        logprobs=(top or 0) if recorded else None,
        echo=False,
    )


def _read_common(fields: Fields, vocab_size: int, *, n: int, **others: Any) -> Call:
    """Reads the fields of both endpoints; `others` are the values of the fields of one of them."""
    # The service has checked the model; the user has no effect.
    fields.take("model", check_text)
    fields.take("user", check_text)
    stream = fields.take("stream", check_flag, False)
    # Options of the answer.
    usage = fields.take("stream_options", _check_stream_options)
    if usage is not None and not stream:
        raise ApiError("stream_options: requires stream=True", param="stream_options")
    # Sampling, grammar and scheduling.
    call = Call(
        **others,
        n=n,
        sampling=_sampling(fields, vocab_size),
        grammar=take_grammar(fields),
        stop=fields.take("stop", _check_stop, []),
        ignore_eos=fields.take("ignore_eos", check_flag, False),
        seed=fields.take("seed", check_int, None, least=0, most=MAX_SEED),
        stream=stream,
        include_usage=bool(usage and usage["include_usage"]),
        continuous_usage=bool(usage and usage["continuous_usage_stats"]),
        priority=fields.take("priority", check_int, 0, least=-(2**31), most=2**31 - 1),
        salt=fields.take("cache_salt", check_text, ""),
    )
    fields.end(_REFUSED)
    return call


def _sampling(fields: Fields, vocab_size: int) -> Sampling | None:
    """The sampling parameters; None if tokens are chosen greedily and nothing changes the logits."""
    # Each field under its name in `Sampling`.
    values: dict[str, Any] = {}
    for name, field in _SAMPLING_FIELDS.items():
        value = fields.take(name, _check_sampling, field=field)
        if value is not None and (field, value) not in _WITHOUT_EFFECT:
            values[field] = value
    bias = fields.take("logit_bias", _check_bias, {}, vocab_size=vocab_size)
    if bias:
        values["logit_bias"] = bias
    # Greedy decoding ignores truncation.
    if values.get("temperature") == 0:
        values = {field: value for field, value in values.items() if field not in ("top_k", "top_p", "min_p")}
    sampling = Sampling(**values)
    return None if sampling == Sampling(temperature=0.0) else sampling


def _check_sampling(name: str, value: object, *, field: str) -> int | float:
    whole = field in ("top_k", "min_new_tokens")
    checked_value = check_int(name, value, least=-1, most=2**31 - 1) if whole else check_number(name, value)
    if (field, checked_value) in _WITHOUT_EFFECT:
        return checked_value
    # Report the error under the name of the request.
    try:
        parameter: dict[str, Any] = {field: checked_value}
        Sampling(**parameter)
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {str(error).partition(': ')[2]}") from None
    return checked_value


def _check_bias(name: str, value: object, *, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError(f"{name}: must be an object of token id -> number")
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key and int(key) < vocab_size):
            raise ValueError(f"{name}[{key[:40]!r}]: keys must be token ids from 0 to {vocab_size - 1}")
        bias[int(key)] = check_number(f"{name}[{key!r}]", number)
    return bias


def _check_stop(name: str, value: object) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > _MAX_STOP_STRINGS:
        raise ValueError(f"{name}: must be a string or a list of at most {_MAX_STOP_STRINGS}")
    for i, string in enumerate(strings):
        if not check_text(f"{name}[{i}]", string):
            raise ValueError(f"{name}[{i}]='': must not be empty, which would end every text at once")
    # Bounded, as they are compiled.
    size = sum(len(string.encode()) for string in strings)
    if size > _MAX_STOP_BYTES:
        raise ValueError(f"{name}: {size} bytes; must be at most {_MAX_STOP_BYTES} together")
    return strings


def _check_stream_options(name: str, value: object) -> dict[str, bool]:
    fields = Fields(value, name)
    known = ("include_usage", "continuous_usage_stats")
    options = {option: fields.take(option, check_flag, False) for option in known}
    fields.end({"include_obfuscation": (False,)})
    return options


def _check_template(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name}: must be an object of variables of the chat template")
    for key in value:
        if key in ("messages", "tools", "documents", "add_generation_prompt"):
            raise ValueError(f"{name}.{key}: must be omitted; only other variables of the template can be set")
    return value


def _check_prompts(name: str, value: object, *, vocab_size: int, limits: Limits, n: int) -> list[str | list[int]]:
    # One prompt or a list of them.
    # A single prompt, or a list.
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and value and _is_int(value[0])) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(f"{name}: must be text, a list of token ids, or a list of these that is not empty")
    if len(prompts) * n > limits.sequences:
        raise ValueError(
            f"{name}: {len(prompts)} prompts with n={n}; prompts times n must be at most {limits.sequences}"
        )
    # Texts or ids.
    single = prompts is not value
    names = [name if single else f"{name}[{i}]" for i in range(len(prompts))]
    return [
        check_text(label, prompt)
        if isinstance(prompt, str)
        else check_ids(label, prompt, vocab_size=vocab_size, most=limits.prompt or limits.context)
        for label, prompt in zip(names, prompts, strict=True)
    ]


def check_ids(name: str, value: object, *, vocab_size: int, most: int | None = None) -> list[int]:
    """Token ids of the vocabulary."""
    if not isinstance(value, list):
        raise TypeError(f"{name}: must be text or a list of token ids")
    if most is not None and len(value) > most:
        raise ValueError(f"{name}: {len(value)} tokens; must be at most {most}")
    if not all(type(i) is int and 0 <= i < vocab_size for i in value):
        for i, token in enumerate(value):
            check_int(f"{name}[{i}]", token, least=0, most=vocab_size - 1)
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int | float)


_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
}
"""Fields -> those of `Sampling`."""
_WITHOUT_EFFECT = {("top_p", 1.0), ("top_k", -1), ("top_k", 0), ("min_p", 0.0)}
"""Fields of `Sampling` and values to turn them off, as other servers write them."""
