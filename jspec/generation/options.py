"""The options of a generation: one frozen value, validated when it is built."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar, cast

import numpy as np

from jspec import drafters
from jspec.cache.pages import DEFAULT_PAGE_SIZE
from jspec.core import optional
from jspec.core.accept import RULES, Imposed
from jspec.core.checks import check_each, check_hashable, check_int, check_kind, entries_of, shorten
from jspec.core.grammar import TokenGrammar
from jspec.core.method import Records
from jspec.core.options import check_options, option, set_checked
from jspec.core.sampling import Sampling, each_of
from jspec.core.types import Accept, Drafter, Target
from jspec.generation.speculation import Speculation
from jspec.loading import memory
from jspec.loading.model import Model
from jspec.text.stream import Stops, check_stop
from pallas_kernels import platform

MAX_SEED = 2**32 - 1
DEFAULT_CONTEXT = 8192
"""Tokens of the longest request, prompt included, unless the model's context is shorter."""
BURST_MS = {"cpu": 100.0}
"""Platform -> default of `burst_ms`, 25 elsewhere. On a CPU the host's work for a burst takes cores from the rounds."""
MAX_TOP_LOGPROBS = 20
"""Largest number of most probable tokens to record with each new token."""
MAX_SUPPORT = 1024
"""Most ids of possible tokens to record with each new token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The per-request options of a generation; see `jspec.generate`.

    Raises:
      ValueError, TypeError: an invalid option; the message has its name, its value and the valid ones.
    """

    max_new_tokens: int | Sequence[int] = 128
    sampling: Sampling | Sequence[Sampling | None] | None = None
    stop: Stops = ()
    ignore_eos: bool = option(False)
    seed: int | Sequence[int | tuple[int, int]] = 0
    logprobs: bool | int = False
    support: int = option(0, least=0, most=MAX_SUPPORT)
    speculation: Speculation | Sequence[Speculation | None] | None = None

    def __post_init__(self):
        # Convert: equal options must compare equal.
        check_options(self)
        of_sampling = partial(check_kind, kind=Sampling, otherwise="None (greedy)")
        set_checked(
            self,
            max_new_tokens=check_each("max_new_tokens", self.max_new_tokens, partial(check_int, least=1)),
            stop=tuple(check_stop(self.stop)),
            seed=check_each("seed", self.seed, _check_seed),
            logprobs=_check_logprobs(self.logprobs),
            sampling=check_each("sampling", self.sampling, of_sampling),
            speculation=check_each("speculation", self.speculation, partial(check_kind, kind=Speculation)),
        )

    @property
    def top_logprobs(self) -> int:
        """How many of the most probable tokens to record with each new token."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs

    @property
    def records(self) -> Records | None:
        """What to record with each new token; None: nothing."""
        return Records(self.top_logprobs, self.support) if self.logprobs or self.support else None

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if more of the most probable tokens are to be recorded than there are."""
        if self.top_logprobs > size:
            raise ValueError(f"logprobs={self.logprobs}: must be at most {size}, the vocabulary of the model")

    def limits(self, batch: int) -> list[int]:
        """The maximum number of new tokens of each of `batch` sequences; ValueError for another number of entries."""
        return entries_of("max_new_tokens", self.max_new_tokens, batch)

    def entries(self, batch: int) -> dict[str, list[Any]]:
        """The options that may differ, by sequence of a batch; ValueError for another number of entries."""
        values = {name: getattr(self, name) for name in ("sampling", "speculation")}
        lists = {name: entries_of(name, value, batch) for name, value in values.items()}
        return {"seed": self.seeds(batch), "max_new_tokens": self.limits(batch), **lists}

    def seeds(self, batch: int) -> list[tuple[int, int]]:
        """The seed and the index of each sequence, as `seeds_to_keys` takes them; ValueError for another number."""
        if isinstance(self.seed, int):
            return [(self.seed, i) for i in range(batch)]
        return [(one, 0) if isinstance(one, int) else one for one in entries_of("seed", self.seed, batch)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(RequestOptions):
    """The options of a generation. Their meaning is documented at `jspec.generate`, whose keywords they are.

    `generate` and `stream` build this value from their keywords; code in between builds it itself and
    hands it to `jspec.generation.run.Run`. What depends on the model or on the prompts is validated there.

    Raises:
      ValueError, TypeError: as `RequestOptions`.
    """

    drafter: str | Drafter | None = "auto"
    accept: str | Accept | None = None
    page_size: int = option(DEFAULT_PAGE_SIZE, least=1)
    debug: bool = option(False)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.drafter, str) or self.drafter != "auto":
            check_hashable("drafter", drafters.resolve(self.drafter))
        check_rule(self.accept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine. Their meaning is documented at `jspec.Engine`, whose keywords they are.

    Raises:
      ValueError, TypeError: an option of another type, or out of bounds; the message has its name and its value.
    """

    drafter: str | Drafter | None = "auto"
    accept: str | Accept | None = None
    slots: int = option(64, "sequences that are generated at the same time, by each group of devices", least=1)
    context: int | None = option(
        None, "tokens of the longest sequence, prompt included (default: the model's, at most 8192)", least=2
    )
    pages: int | None = option(None, "cache pages of each group (default: as many as fit)", least=2)
    memory_fraction: float | None = option(
        None,
        "fraction of the device's memory that may be in use, weights included (default: 0.9; on a CPU 0.75)",
        above=0.0,
        most=1.0,
    )
    page_size: int = option(DEFAULT_PAGE_SIZE, "rows per cache page", metavar="ROWS", least=1)
    prefill_tokens: int = option(1024, "prompt tokens that are read between two bursts of rounds", least=1)
    burst_ms: float | None = option(
        None, "time that rounds run before new tokens are sent (default: 25; on a CPU 100)", metavar="MS", above=0.0
    )
    prefix_cache: bool = option(True, "do not share the cache pages of equal beginnings")
    max_queue: int | None = option(
        None, "requests that may wait for a slot, of all groups together (default: any number)", least=0
    )
    learn: Any = None
    """How the draft learns, a `jspec.train.online.Learn`; None: it does not."""

    def __post_init__(self):
        check_options(self)
        if self.learn is not None and not hasattr(self.learn, "begin"):
            raise TypeError(f"learn={shorten(self.learn)}: must be a jspec.train.online.Learn, or None")

    def for_model(self, model: Model) -> "EngineOptions":
        """Fills in what depends on the model and the device; ValueError for a context beyond the model's."""
        longest = model.target.max_length
        context = min(longest, DEFAULT_CONTEXT) if self.context is None else self.context
        check_int("context", context, least=2, most=longest)
        fraction = memory.usable_fraction() if self.memory_fraction is None else self.memory_fraction
        burst_ms = BURST_MS.get(platform.platform(), 25.0) if self.burst_ms is None else self.burst_ms
        return dataclasses.replace(self, context=context, memory_fraction=fraction, burst_ms=burst_ms)


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions`, as keywords of a function."""

    drafter: str | Drafter | None
    accept: str | Accept | None
    slots: int
    context: int | None
    pages: int | None
    memory_fraction: float | None
    page_size: int
    prefill_tokens: int
    burst_ms: float | None
    prefix_cache: bool
    max_queue: int | None
    learn: Any


class _SharedKeywords(TypedDict, total=False):
    stop: Stops
    ignore_eos: bool
    logprobs: bool | int
    support: int


class RequestKeywords(_SharedKeywords, total=False):
    """The fields of `RequestOptions` for a single prompt, as keywords of a function."""

    max_new_tokens: int
    sampling: Sampling | None
    seed: int | Sequence[int | tuple[int, int]]
    speculation: Speculation | None


class BatchKeywords(_SharedKeywords, total=False):
    """The fields of `RequestOptions`, as keywords of a function."""

    max_new_tokens: int | Sequence[int]
    sampling: Sampling | Sequence[Sampling | None] | None
    seed: int | Sequence[int | tuple[int, int]]
    speculation: Speculation | Sequence[Speculation | None] | None


class GenerateKeywords(BatchKeywords, total=False):
    """The fields of `GenerateOptions`, as keywords of a function."""

    drafter: str | Drafter | None
    accept: str | Accept | None
    page_size: int
    debug: bool


R = TypeVar("R", bound=RequestOptions)
F = TypeVar("F", bound=Callable[..., Any])


def takes(kind: type) -> Callable[[F], F]:
    """Shows the fields of a dataclass, with defaults, in the signature of a function with these keywords."""

    def show(function: F) -> F:
        # Keywords in the place of `**keywords`.
        signature = inspect.signature(function)
        fields = dataclasses.fields(kind)
        keywords = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                annotation=field.type,
            )
            for field in fields
        ]
        taken = signature.replace(parameters=[*list(signature.parameters.values())[:-1], *keywords])
        has_sampling = any(field.name == "sampling" for field in fields)
        misplaced = {field.name for field in dataclasses.fields(Sampling)} if has_sampling else set()

        @functools.wraps(function)
        def checked(*arguments: Any, **keywords_given: Any) -> Any:
            # Other libraries take sampling parameters here.
            for name in misplaced & keywords_given.keys():
                value = shorten(keywords_given[name])
                raise TypeError(f"{name}={value}: is a sampling parameter: sampling=jspec.Sampling({name}={value})")
            for name in keywords_given.keys() - taken.parameters.keys():
                value, valid = shorten(keywords_given[name]), ", ".join(taken.parameters)
                raise TypeError(f"{name}={value}: is no argument of {function.__qualname__}, which takes {valid}")
            return function(*arguments, **keywords_given)

        setattr(checked, "__signature__", taken)  # noqa: B010
        return cast(F, checked)

    return show


def grammars_of(
    sampling: Sampling | Sequence[Sampling | None] | None,
    batch: int,
    accept: str | Accept | None,
    *,
    ignore_eos: bool = False,
) -> list[TokenGrammar | None]:
    """The grammar of each of `batch` sequences; ValueError if another option is in conflict with one."""
    grammars = [None if one is None else one.grammar for one in each_of(sampling, batch)]
    if any(one is not None for one in grammars):
        check_grammar_options(accept, ignore_eos=ignore_eos)
    return grammars


def check_grammar_options(accept: str | Accept | None, *, ignore_eos: bool) -> None:
    """Raises ValueError for options in conflict with a grammar."""
    if ignore_eos:
        raise ValueError("ignore_eos=True: a text of a grammar ends with an id that ends the text; omit it")
    if isinstance(accept, Imposed):
        raise ValueError(f"accept={accept}: accepts tokens that a grammar forbids; use another rule")


def check_fits(target: Target, longest: int, max_new_tokens: int) -> None:
    """Raises ValueError if the longest prompt and its new tokens exceed the context of the model."""
    if longest >= target.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens, which leaves no space for new ones in the model's context of "
            f"{target.max_length}"
        )
    if longest + max_new_tokens > target.max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: with a prompt of {longest} tokens, at most "
            f"{target.max_length - longest} fit in the model's context of {target.max_length}"
        )


def check_draft_fits(drafter: Drafter, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    """Raises ValueError if even the shortest sequence exceeds the context of a bound drafter's model.

    Longer ones cost a batch nothing: where a draft proposes nothing useful, they decode plainly.
    """
    context = optional.max_length(drafter)
    length, new = min(((len(prompt), new) for prompt, new in zip(prompts, limits, strict=True)), key=sum)
    if context is not None and length + new > context:
        raise ValueError(
            f"max_new_tokens={new}: with a prompt of {length} tokens, this exceeds the draft's context of {context}, "
            "after which it proposes nothing useful; use drafter=None or 'ngram', or at most "
            f"{max(0, context - length)} new tokens"
        )


def longest_sequence(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[int, int]:
    """The length of the prompt and the new tokens of the longest possible sequence."""
    return max(((len(prompt), new) for prompt, new in zip(prompts, limits, strict=True)), key=sum)


def repeat(options: R, prompts: int, n: int) -> R:
    """The options of n samples of each of `prompts` prompts: an entry per prompt becomes one per sample.

    Raises:
      ValueError: `sampling`, `speculation` or `max_new_tokens` have another number of entries than there are prompts.
    """
    values = {name: getattr(options, name) for name in ("sampling", "speculation")}
    lists = {name: value for name, value in values.items() if isinstance(value, Sequence)}
    entries = {name: entries_of(name, value, prompts, "prompt") for name, value in lists.items()}
    entries["max_new_tokens"] = options.limits(prompts)
    repeated = {name: [entry for entry in listed for _ in range(n)] for name, listed in entries.items()}
    return dataclasses.replace(options, **repeated)  # pyright: ignore[reportArgumentType]


def _check_seed(name: str, seed: object) -> int | tuple[int, int]:
    """Checks a seed, or a pair (seed, index)."""
    if not isinstance(seed, Sequence):
        return check_int(name, seed, least=0, most=MAX_SEED)
    if len(seed) != 2:
        raise ValueError(f"{name}={shorten(seed)}: must be an int, or a pair (seed, index)")
    first, index = (check_int(f"{name}[{i}]", one, least=0, most=MAX_SEED) for i, one in enumerate(seed))
    return first, index


def _check_logprobs(logprobs: object) -> bool | int:
    if isinstance(logprobs, bool | np.bool_):
        return bool(logprobs)
    valid = f"True, False, or a number of most probable tokens from 1 to {MAX_TOP_LOGPROBS}"
    try:
        return check_int("logprobs", logprobs, least=1, most=MAX_TOP_LOGPROBS)
    except (TypeError, ValueError) as error:
        raise type(error)(f"logprobs={shorten(logprobs)}: must be {valid}") from None


def check_rule(rule: object) -> None:
    """Raises TypeError or ValueError unless `rule` is None, the name of an acceptance rule, or may be one."""
    # None, a name, or a callable object.
    if rule is None:
        return
    valid = f"one of {', '.join(RULES)}, or a callable"
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"accept={shorten(rule)}: must be {valid}")
    elif isinstance(rule, type):
        raise TypeError(f"accept={rule.__name__}: must be an object, not a class")
    elif not callable(rule):
        raise TypeError(f"accept={shorten(rule)}: must be {valid}")
    else:
        check_hashable("accept", rule)
