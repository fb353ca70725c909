"""Request bodies in OpenAI's format: every field is checked, and what is not supported is refused by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.core.checks import check_flag, check_int, check_text
from jspec.core.sampling import Sampling
from jspec.generation.speculation import Speculation
from jspec.serve import grammars, sampling
from jspec.serve.checks import check_object, check_whole
from jspec.serve.embeds import check_embeds
from jspec.serve.fields import REQUIRED, ApiError, Row, Table, hint, read_object, refused, row
from jspec.serve.grammars import GrammarRequest, check_choices, check_schema
from jspec.serve.messages import Message, check_messages
from jspec.serve.sampling import PARAMETERS, check_ids, check_stop
from jspec.serve.tools import Dialect, Tools, check_choice, check_tools, make_tools

_DEFAULT_TOKENS = 16  # of completions, as OpenAI documents
_MOST_TOP = 20  # most probable tokens beside each
_MOST_STOP_IDS = 64
CUT = 8
"""How many times as long as the longest prompt one may be that is truncated."""


_USAGE = {
    **{"include_usage": row(check_flag, False), "continuous_usage_stats": row(check_flag, False)},
    "include_obfuscation": refused(False),
}
_SPECULATION = {"drafter": row(check_text, "auto"), "depth": row(check_whole, least=0)}


# The checks of some fields.


def _check_truncation(name: str, value: object) -> int:
    count = check_whole(name, value, least=-1)
    if count == 0:
        raise ValueError(f"{name}=0: must be -1, for what fits, or at least 1")
    return count


def _check_template(name: str, value: object) -> dict[str, Any]:
    for key in check_object(name, value):
        if key in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
            raise ValueError(f"{name}.{key}: must be omitted; only other variables of the template can be set")
    return check_object(name, value)


def _check_prompts(name: str, value: object, *, vocab_size: int, sequences: int, most: int) -> list[str | list[int]]:
    # A single prompt, or a list.
    of_ids = isinstance(value, list) and value and isinstance(value[0], int | float)
    prompts = [value] if isinstance(value, str) or of_ids else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(f"{name}: must be text, a list of token ids, or a list of these that is not empty")
    if len(prompts) > sequences:
        raise ValueError(f"{name}: {len(prompts)} prompts; must be at most {sequences}")
    # Texts or ids.
    single = prompts is not value
    names = [name if single else f"{name}[{i}]" for i in range(len(prompts))]
    return [
        check_text(label, prompt)
        if isinstance(prompt, str)
        else check_ids(label, prompt, vocab_size=vocab_size, most=most)
        for label, prompt in zip(names, prompts, strict=True)
    ]


def _check_speculation(name: str, value: object) -> Speculation:
    values = read_object(name, value, _SPECULATION)
    # An absent drafter is the engine's, and null is none.
    plain = check_object(name, value).get("drafter", "auto") is None
    return Speculation(None if plain else values["drafter"], values["depth"])


_REFUSED = {
    **dict.fromkeys(("audio", "chat_template", "guided_grammar", "guided_decoding_backend", "moderation"), refused()),
    **dict.fromkeys(("parallel_tool_calls", "reasoning_effort", "web_search_options"), refused()),
    **dict.fromkeys(("documents", "functions", "tools"), refused([])),
    **dict.fromkeys(("early_stopping", "return_tokens_as_token_ids", "use_beam_search"), refused(False)),
    **dict.fromkeys(("function_call", "tool_choice"), refused("none")),
    **dict.fromkeys(("best_of", "length_penalty"), refused(1)),
    **{"add_special_tokens": refused(True), "spaces_between_special_tokens": refused(True, False)},
    **{"modalities": refused(["text"]), "suffix": refused("")},
}
"""Unsupported fields of OpenAI's API and of other servers."""
_ANY: dict[str, Row] = {
    **_REFUSED,
    # The service has checked the model, and hints cannot change the text.
    **dict.fromkeys(("user", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"), hint(check_text)),
    **dict.fromkeys(("model", "service_tier", "request_id", "verbosity"), hint(check_text)),
    **dict.fromkeys(("metadata", "prediction"), hint(check_object)),
    "store": hint(check_flag),
    # The text.
    "n": row(check_whole, 1, least=1, most="sequences"),
    **dict.fromkeys(PARAMETERS, row(sampling.check_parameter)),
    "logit_bias": row(sampling.check_bias, vocab_size="vocab_size"),
    "seed": row(sampling.check_seed),
    "truncate_prompt_tokens": row(_check_truncation),
    "stop": row(check_stop, []),
    "stop_token_ids": row(check_ids, [], vocab_size="vocab_size", most=_MOST_STOP_IDS),
    # Grammars of OpenAI, of vLLM, and older ones of vLLM.
    "response_format": row(grammars.check_response_format),
    "structured_outputs": row(grammars.check_structured_outputs),
    "guided_json": row(check_schema),
    "guided_regex": row(check_text),
    "guided_choice": row(check_choices),
    "guided_whitespace_pattern": row(check_text),
    "allowed_token_ids": row(check_ids, vocab_size="vocab_size", least=1),
    "bad_words": row(check_stop, listed=True),
    # The answer.
    "stream_options": row(_USAGE),
    "skip_special_tokens": row(check_flag, True),
    **dict.fromkeys(("ignore_eos", "stream", "include_stop_str_in_output"), row(check_flag, False)),
    **dict.fromkeys(("return_token_ids", "return_token_origins"), row(check_flag, False)),
    "prompt_logprobs": row(check_whole, least=0, most=_MOST_TOP),
    # Scheduling.
    "priority": row(check_whole, 0, least=-(2**31), most=2**31 - 1),
    "cache_salt": row(check_text, ""),
    "speculation": row(_check_speculation),
}
_TEMPLATE = {
    "tools": row(check_tools, []),
    "chat_template_kwargs": row(_check_template, {}),
    "add_generation_prompt": row(check_flag),
    "continue_final_message": row(check_flag),
}
"""What a chat template makes of messages."""
_COMPLETION = {
    "prompt": row(_check_prompts, vocab_size="vocab_size", sequences="sequences", most="longest"),
    "prompt_embeds": row(check_embeds, sequences="sequences", most="context"),
    **_ANY,
    "echo": row(check_flag, False),
    "max_tokens": row(check_whole, least=0),
    "logprobs": row(check_whole, least=0, most=_MOST_TOP),
}
_CHAT = {
    **_ANY,
    **_TEMPLATE,
    "messages": row(check_messages, REQUIRED),
    "reasoning_effort": row(check_text),
    "tool_choice": row(check_choice, ("auto", None)),
    "parallel_tool_calls": row(check_flag, True),
    "include_reasoning": row(check_flag, True),
    "thinking_token_budget": row(check_whole, least=0),
    "max_tokens": row(check_whole, least=1),
    "max_completion_tokens": row(check_whole, least=1),
    "logprobs": row(check_flag, False),
    "top_logprobs": row(check_whole, least=0, most=_MOST_TOP),
}
_TOKENIZE = {
    "model": row(check_text),
    "prompt": row(check_text),
    "messages": row(check_messages),
    **_TEMPLATE,
    "add_special_tokens": row(check_flag, True),
    "return_token_strs": row(check_flag),
}
_DETOKENIZE = {"model": row(check_text), "tokens": row(check_ids, REQUIRED, vocab_size="vocab_size", most="context")}


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
    """A checked request for completions. Other attributes are fields of a request, see their names in the table.

    prompts: text, ids or embeddings of each prompt; empty in a chat.
    messages: those of a chat, or None.
    template: variables of the chat template.
    tools: those of a chat, or None.
    max_tokens: of the output; 0 where only the prompt is echoed. None: `default_tokens`, or what fits if less
      or None.
    length_field: the field of max_tokens.
    sampling: without the grammar.
    logprobs: None: off. k: the log-probability of each token of the answer and the k most probable tokens with theirs.
    stop: stop strings, and ids of tokens.
    seed: of all sequences; None: random.
    prompt_logprobs: as `logprobs`, of the prompt.
    adapter: the name of an adapter, given as that of the model; None: none.
    truncate_prompt_tokens: how many of the last tokens of a prompt are read; -1: those that fit; None: it must fit.
    """

    n: int
    sampling: Sampling | None
    grammar: GrammarRequest | None
    stop: Sequence[str | int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int | None
    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    return_token_ids: bool
    return_token_origins: bool
    stream: bool
    include_usage: bool
    continuous_usage_stats: bool
    priority: int
    cache_salt: str
    speculation: Speculation | None
    truncate_prompt_tokens: int | None
    length_field: str = "max_tokens"
    default_tokens: int | None = None
    echo: bool = False
    prompts: Sequence[str | Sequence[int]] = ()
    messages: list[Message] | None = None
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: Tools | None = None
    adapter: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether its texts are those of a grammar, which takes a while to compile."""
        return self.grammar is not None or (self.tools is not None and self.tools.is_constrained)


_SAME = {field.name for field in dataclasses.fields(Call)} - {"tools"}
"""Attributes with the values of the fields of their names."""


def constrained(call: Call, dialect: Dialect, prompt_end: str) -> Sampling | None:
    """Compiles the grammar and adds it to the sampling parameters; ApiError if it is not supported.

    prompt_end: of a chat, as `Dialect.prompt_end`.
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
    """The body of /v1/completions; ApiError if a field is unknown, not supported or invalid."""
    fields = _read(body, _COMPLETION, vocab_size, limits)
    # Embeddings have no text and no log-probabilities.
    if fields["prompt_embeds"] is not None:
        names = ("prompt", "echo", "prompt_logprobs", "truncate_prompt_tokens")
        for name in names:
            if fields[name] not in (None, False):
                raise ApiError(f"{name}: must be omitted beside prompt_embeds", param=name)
        fields["prompt"] = fields["prompt_embeds"]
    if fields["prompt"] is None:
        raise ApiError("prompt: is required", param="prompt")
    # Bounds that depend on several fields.
    if (count := len(fields["prompt"])) * fields["n"] > limits.sequences:
        message = f"prompt: {count} prompts with n={fields['n']}; prompts times n must be at most {limits.sequences}"
        raise ApiError(message, param="prompt")
    if fields["max_tokens"] == 0 and not fields["echo"]:
        raise ApiError("max_tokens=0: must be at least 1 without echo=True", param="max_tokens")
    return _make_call(fields, limits, prompts=fields["prompt"], default_tokens=_DEFAULT_TOKENS)


def read_chat(body: object, *, vocab_size: int, limits: Limits) -> Call:
    """The body of /v1/chat/completions; as `read_completion`."""
    # What the chat template gets.
    fields = _read(body, _CHAT, vocab_size, limits)
    if (effort := fields["reasoning_effort"]) is not None:
        # Templates without efforts turn thinking off by a variable.
        off = {"enable_thinking": False} if effort == "none" else {}
        fields["chat_template_kwargs"] = {"reasoning_effort": effort, **off, **fields["chat_template_kwargs"]}
    # Log-probabilities.
    if fields["top_logprobs"] and not fields["logprobs"]:
        raise ApiError(f"top_logprobs={fields['top_logprobs']}: requires logprobs=True", param="top_logprobs")
    fields["logprobs"] = (fields["top_logprobs"] or 0) if fields["logprobs"] else None
    # The limit has two names: the newer wins.
    length_field = "max_tokens" if fields["max_completion_tokens"] is None else "max_completion_tokens"
    fields["max_tokens"] = fields[length_field]
    others = {"messages": fields["messages"], "template": make_template(fields), "tools": make_tools(fields)}
    return _make_call(fields, limits, length_field=length_field, **others)


def read_tokenize(body: object, *, vocab_size: int, limits: Limits) -> dict[str, Any]:
    """The fields of /tokenize; as `read_completion`."""
    fields = _read(body, _TOKENIZE, vocab_size, limits)
    if (fields["messages"] is None) == (fields["prompt"] is None):
        raise ApiError("prompt: give either prompt or messages", param="prompt")
    return fields


def read_detokenize(body: object, *, vocab_size: int, limits: Limits) -> list[int]:
    """The ids of /detokenize; as `read_completion`."""
    return _read(body, _DETOKENIZE, vocab_size, limits)["tokens"]


def _read(body: object, table: Table, vocab_size: int, limits: Limits) -> dict[str, Any]:
    longest = CUT * (limits.prompt or limits.context)
    bounds = {**vars(limits), "vocab_size": vocab_size, "longest": longest}
    return read_object("", body, table, bounds, ignore_unknown=limits.ignore_unknown)


def _make_call(fields: Mapping[str, Any], limits: Limits, **others: Any) -> Call:
    """A call of checked fields. others: of one endpoint."""
    # What several fields say together.
    usage, scored = fields["stream_options"], fields["prompt_logprobs"]
    if usage is not None and not fields["stream"]:
        raise ApiError("stream_options: requires stream=True", param="stream_options")
    if fields["stop"] and not fields["skip_special_tokens"]:
        reason = "must be True beside stop, whose strings are found in the text without special tokens"
        raise ApiError(f"skip_special_tokens=False: {reason}", param="skip_special_tokens")
    if scored is not None and fields["stream"]:
        raise ApiError(f"prompt_logprobs={scored}: must be omitted with stream=True", param="prompt_logprobs")
    if fields["truncate_prompt_tokens"] is not None and fields.get("echo"):
        name = "truncate_prompt_tokens"
        raise ApiError(f"{name}: must be omitted with echo=True", param=name)
    # Attributes.
    same = {name: fields[name] for name in _SAME if name in fields}
    derived = {
        "sampling": sampling.make_sampling(fields, limits.defaults),
        "grammar": grammars.find_grammar(fields),
        "stop": [*fields["stop"], *fields["stop_token_ids"]],
        **{name: bool(usage and usage[name]) for name in ("include_usage", "continuous_usage_stats")},
    }
    return Call(**same | derived | others)


def make_template(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a chat template: its variables, the tools, and how the prompt ends."""
    if fields["add_generation_prompt"] and fields["continue_final_message"]:
        name = "continue_final_message"
        raise ApiError(f"{name}=True: must be omitted beside add_generation_prompt=True", param=name)
    values = {name: fields[name] for name in ("add_generation_prompt", "continue_final_message")}
    values["tools"] = fields["tools"] or None
    return fields["chat_template_kwargs"] | {name: value for name, value in values.items() if value is not None}
