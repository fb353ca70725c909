"""Request bodies in OpenAI's format: every field is checked, and what is not supported is refused by name."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.core.checks import check_flag, check_int, check_text
from jspec.core.sampling import Sampling
from jspec.serve.fields import ApiError, Fields, check_object
from jspec.serve.grammars import GrammarRequest, take_grammar
from jspec.serve.messages import Message, check_messages
from jspec.serve.sampling import check_ids, check_seed, check_stop, take_sampling
from jspec.serve.tools import Dialect, Tools, take_tools

_DEFAULT_TOKENS = 16  # of completions, as OpenAI documents
_MOST_TOP = 20  # most probable tokens beside each
_MOST_STOP_IDS = 64

_HINTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("user", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"), check_text),
    **dict.fromkeys(("service_tier", "request_id", "verbosity"), check_text),
    **dict.fromkeys(("metadata", "prediction"), check_object),
    "store": check_flag,
}
"""Fields that cannot change the text; only their types are checked."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
}
_OTHERS = (
    *("audio", "chat_template", "guided_grammar", "guided_decoding_backend", "moderation", "parallel_tool_calls"),
    *("reasoning_effort", "truncate_prompt_tokens", "web_search_options"),
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
    defaults: sampling parameters where a request has none, such as those that a checkpoint recommends.
    ignore_unknown: whether unknown fields are ignored, with a line in the log.

    Raises:
      ValueError, TypeError: a limit below 1.
    """

    context: int
    prompt: int | None = None
    output: int | None = None
    sequences: int = 256
    body: int = 16 * 2**20
    defaults: Sampling = Sampling()
    ignore_unknown: bool = False

    def __post_init__(self):
        for name in ("context", "prompt", "output", "sequences", "body"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, least=1, owner="Limits")


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request for completions.

    prompts: text or ids of each prompt; empty in a chat.
    messages: those of a chat, or None.
    template: variables of the chat template.
    tools: those of a chat, or None.
    max_tokens: of the output; 0 where only the prompt is echoed. None: `default_tokens`, or what fits if less
      or None.
    length_field: the field of max_tokens.
    sampling: without the grammar.
    logprobs: None: off. k: the log-probability of each token of the answer and the k most probable tokens with theirs.
    echo: whether the answer begins with the prompt.
    stop: stop strings, and ids of tokens.
    include_stop: whether the answer has the one that ended it.
    seed: of all sequences; None: random.
    prompt_logprobs: as `logprobs`, of the prompt.
    special: whether the answer has the names of special tokens.
    token_ids: whether the answer has the ids of all tokens.
    """

    prompts: Sequence[str | list[int]]
    messages: list[Message] | None
    template: Mapping[str, Any]
    tools: Tools | None
    n: int
    max_tokens: int | None
    length_field: str
    default_tokens: int | None
    sampling: Sampling | None
    grammar: GrammarRequest | None
    stop: Sequence[str | int]
    include_stop: bool
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    special: bool
    token_ids: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    salt: str

    @property
    def is_constrained(self) -> bool:
        """Whether its texts are those of a grammar, which takes a while to compile."""
        return self.grammar is not None or (self.tools is not None and self.tools.is_constrained)


def constrained(call: Call, dialect: Dialect, prompt_end: str) -> Sampling | None:
    """Compiles the grammar and adds it to the sampling parameters.

    prompt_end: of a chat, as `Dialect.prompt_end`.

    Raises:
      ApiError: it is invalid, or not supported.
    """
    grammar = None if call.grammar is None else call.grammar.compile()
    if call.tools is not None:
        grammar = dialect.constrain(call.tools, grammar, prompt_end)
    if grammar is None:
        return call.sampling
    free = Sampling(temperature=0.0) if call.sampling is None else call.sampling
    budget = None if call.tools is None else call.tools.budget
    return dataclasses.replace(free, grammar=grammar, thinking_budget=budget)


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
        limits,
        prompts=prompts,
        messages=None,
        template={},
        tools=None,
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
    tools, template = take_tools(fields), take_template(fields)
    if (effort := fields.take("reasoning_effort", check_text)) is not None:
        # Templates without efforts turn thinking off by a variable.
        off = {"enable_thinking": False} if effort == "none" else {}
        template = {"reasoning_effort": effort, **off, **template}
    if tools.listed:
        template = {**template, "tools": tools.listed}
    # The limit has two names: the newer wins.
    max_tokens = fields.take("max_tokens", check_int, None, least=1)
    newer = fields.take("max_completion_tokens", check_int, None, least=1)
    # Log-probabilities.
    recorded = fields.take("logprobs", check_flag, False)
    top = fields.take("top_logprobs", check_int, None, least=0, most=_MOST_TOP)
    if top and not recorded:
        raise ApiError(f"top_logprobs={top}: requires logprobs=True", param="top_logprobs")
    # Fields of both endpoints.
    return _read_common(
        fields,
        vocab_size,
        limits,
        prompts=(),
        messages=messages,
        template=template,
        tools=tools,
        n=n,
        max_tokens=max_tokens if newer is None else newer,
        length_field="max_tokens" if newer is None else "max_completion_tokens",
        default_tokens=None,
        logprobs=(top or 0) if recorded else None,
        echo=False,
    )


def _read_common(fields: Fields, vocab_size: int, limits: Limits, *, n: int, **others: Any) -> Call:
    """Reads the fields of both endpoints; `others` are the values of the fields of one of them."""
    # The service has checked the model; hints have no effect.
    for name, check in {"model": check_text, **_HINTS}.items():
        fields.take(name, check)
    stream = fields.take("stream", check_flag, False)
    # Options of the answer.
    usage = fields.take("stream_options", _check_stream_options)
    if usage is not None and not stream:
        raise ApiError("stream_options: requires stream=True", param="stream_options")
    special = not fields.take("skip_special_tokens", check_flag, True)
    stop = fields.take("stop", check_stop, [])
    if special and stop:
        reason = "must be True beside stop, whose strings are found in the text without special tokens"
        raise ApiError(f"skip_special_tokens=False: {reason}", param="skip_special_tokens")
    scored = fields.take("prompt_logprobs", check_int, least=0, most=_MOST_TOP)
    if scored is not None and stream:
        raise ApiError(f"prompt_logprobs={scored}: must be omitted with stream=True", param="prompt_logprobs")
    # Sampling, grammar and scheduling.
    call = Call(
        **others,
        n=n,
        sampling=take_sampling(fields, vocab_size, limits.defaults),
        grammar=take_grammar(fields, vocab_size),
        stop=[*stop, *fields.take("stop_token_ids", check_ids, [], vocab_size=vocab_size, most=_MOST_STOP_IDS)],
        include_stop=fields.take("include_stop_str_in_output", check_flag, False),
        ignore_eos=fields.take("ignore_eos", check_flag, False),
        seed=fields.take("seed", check_seed),
        prompt_logprobs=scored,
        special=special,
        token_ids=fields.take("return_token_ids", check_flag, False),
        stream=stream,
        include_usage=bool(usage and usage["include_usage"]),
        continuous_usage=bool(usage and usage["continuous_usage_stats"]),
        priority=fields.take("priority", check_int, 0, least=-(2**31), most=2**31 - 1),
        salt=fields.take("cache_salt", check_text, ""),
    )
    fields.end(_REFUSED, ignore_unknown=limits.ignore_unknown)
    return call


def _check_stream_options(name: str, value: object) -> dict[str, bool]:
    fields = Fields(value, name)
    known = ("include_usage", "continuous_usage_stats")
    options = {option: fields.take(option, check_flag, False) for option in known}
    fields.end({"include_obfuscation": (False,)})
    return options


def take_template(fields: Fields) -> dict[str, Any]:
    """The arguments of a chat template: its variables, and how the prompt ends."""
    values = fields.take("chat_template_kwargs", _check_template, {})
    begins, continues = (fields.take(name, check_flag) for name in ("add_generation_prompt", "continue_final_message"))
    if begins and continues:
        name = "continue_final_message"
        raise ApiError(f"{name}=True: must be omitted beside add_generation_prompt=True", param=name)
    flags = {"add_generation_prompt": begins, "continue_final_message": continues}
    return values | {name: flag for name, flag in flags.items() if flag is not None}


def _check_template(name: str, value: object) -> dict[str, Any]:
    for key in check_object(name, value):
        if key in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
            raise ValueError(f"{name}.{key}: must be omitted; only other variables of the template can be set")
    return check_object(name, value)


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


def _is_int(value: object) -> bool:
    return isinstance(value, int | float)
