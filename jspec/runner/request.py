"""A request as the scheduler sees it: token ids in, token ids out, and its phase."""

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jspec.core.checks import check_int, check_text
from jspec.core.grammar import TokenGrammar
from jspec.core.sampling import Sampling
from jspec.generation.embeds import PromptEmbeds
from jspec.generation.speculation import Speculation


class EngineError(RuntimeError):
    """The engine has failed; all its requests have ended with this error."""


class CompilationError(EngineError):
    """A program for a request does not compile; only this request has ended with the error."""


class QueueFull(RuntimeError):
    """There is no space for a request until others end."""


class Phase(enum.Enum):
    """Phase of a request."""

    WAITING = "waiting"
    """In the queue, without slot and pages."""
    READING = "reading"
    """In a slot, in prefill."""
    RUNNING = "running"
    """In a slot, in decode; its last read may still be in flight."""
    PREEMPTED = "preempted"
    """Out of its slot, because pages ran out; returns to the queue when nothing of it is in flight."""
    DONE = "done"
    CANCELLED = "cancelled"


class Needs(NamedTuple):
    """What a program must have for a request; larger values include smaller ones.

    options: index in `jspec.runner.device.OPTION_SETS`; 0: no sequence samples, and the greedy acceptance rule applies.
    grammar: whether there is one.
    record: one of `jspec.runner.device.TOP_SIZES`, the most probable tokens to record; -1: no log-probabilities.
    stop_level, grammar_level: sizes of the tables (`AutomatonPool.at`).
    embeds: whether reads take embeddings; nothing in a burst.
    support: one of `jspec.runner.device.SUPPORT_SIZES`, the ids of possible tokens to record.
    """

    options: int = 0
    grammar: bool = False
    record: int = -1
    stop_level: int = 0
    grammar_level: int = 0
    support: int = 0
    embeds: bool = False

    @classmethod
    def joined(cls, needs: Iterable["Needs"]) -> "Needs":
        """What a program of all must have."""
        return cls._make(map(max, zip(cls(), *needs, strict=True)))


@dataclasses.dataclass(eq=False)
class Request:
    """What to generate, with its options. The fields after them are written by the scheduler only.

    prompt: token ids, at least one.
    max_new_tokens: at least 1.
    priority: requests of a lower priority are admitted first and preempted last, as in vLLM.
    salt: requests of different salts share no pages.
    adapter: number of its adapter, as in `jspec.models.adapted.Adapted`; -1: none.
    logprobs: whether the log-probabilities of its tokens are recorded.
    top_logprobs: number of most probable tokens recorded with each.
    support: most ids of possible tokens recorded with each; 0: none.
    speculation: limits of its drafts; None: those of the drafter.
    embeds: the prompt, if it holds embeddings, which become part of the salt.
    start_state, start_grammar: first states of its stop automaton and its grammar, in their pools.
    needs: of its programs.

    Raises:
      ValueError, TypeError: an invalid value.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    priority: int = 0
    salt: str = ""
    sampling: Sampling | None = None
    seed: tuple[int, int] = 0, 0
    stop: tuple[str | int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    support: int = 0
    speculation: Speculation | None = None
    embeds: PromptEmbeds | None = None
    start_state: int = 0
    start_grammar: int = 0
    adapter: int = -1
    needs: Needs = Needs()

    phase: Phase = dataclasses.field(default=Phase.WAITING, init=False)
    arrival: int = dataclasses.field(default=-1, init=False)
    """Place in the order of submission; -1 before it."""
    tokens: list[int] = dataclasses.field(default_factory=list, init=False)
    """New tokens, as reported so far."""
    all_tokens: list[int] = dataclasses.field(init=False)
    """The prompt and these tokens."""
    finish_code: int = dataclasses.field(default=0, init=False)
    """A code of `jspec.core.stopping`; 0 until done."""
    rounds: int = dataclasses.field(default=0, init=False)
    accept_counts: list[int] = dataclasses.field(default_factory=list, init=False)
    """Rounds by accepted drafts, as in `jspec.core.types.Stats`; empty before the first report of rounds."""
    branch_counts: list[list[int]] | None = dataclasses.field(default=None, init=False)
    """The same by branch; None before the first report, and if the drafter has no branches."""
    preemptions: int = dataclasses.field(default=0, init=False)

    slot: int | None = dataclasses.field(default=None, init=False)
    pages: list[int] = dataclasses.field(default_factory=list, init=False)
    cached: int = dataclasses.field(default=0, init=False)
    """Tokens found in the prefix cache at its last admission; their rows are in its first pages, in all caches."""
    restore: int | None = dataclasses.field(default=None, init=False)
    """The snapshot after these tokens, for a recurrent target; None: the state begins with zeros."""
    prefilled: int = dataclasses.field(default=0, init=False)
    """Tokens prefilled, programs in flight included; at most `prefill_length`."""
    registered: int | None = dataclasses.field(default=0, init=False)
    """Number of its pages in the prefix cache; None: they must not be registered."""
    save_points: set[int] = dataclasses.field(default_factory=set, init=False)
    """Lengths, in pages, at which a chunk must end for a snapshot of a recurrent state."""
    waits_for: "tuple[Request, int] | None" = dataclasses.field(default=None, init=False)
    """Prefix it waits for in the queue: an older request, until this number of its pages is registered."""
    awaited: set[Hashable] = dataclasses.field(default_factory=set, init=False)
    """Programs whose compilation it has waited for."""
    in_flight: int = dataclasses.field(default=0, init=False)
    """Number of its programs in flight."""
    tokens_in_flight: int = dataclasses.field(default=0, init=False)
    """Maximum tokens of these programs."""

    def __post_init__(self):
        self.prompt = tuple(self.prompt)
        self.all_tokens = list(self.prompt)
        if not self.prompt:
            raise ValueError("prompt=(): must have at least one token")
        self.max_new_tokens = check_int("max_new_tokens", self.max_new_tokens, least=1)
        self.priority = check_int("priority", self.priority, least=-(2**63), most=2**63 - 1)
        self.salt = check_text("salt", self.salt)
        if self.embeds is not None:
            self.salt += f" embeds {self.embeds.digest}"

    @property
    def grammar(self) -> TokenGrammar | None:
        """Constrains its text; None: no constraint."""
        return None if self.sampling is None else self.sampling.grammar

    @property
    def stop_set(self) -> tuple[tuple[str | int, ...], bool]:
        """What ends its text: stop strings and ids, and whether EOS is ignored."""
        return self.stop, self.ignore_eos

    @property
    def limit(self) -> int:
        """Maximum length, prompt included."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def length(self) -> int:
        """Known tokens."""
        return len(self.all_tokens)

    @property
    def resumed(self) -> bool:
        """Whether it continues after a preemption. Prefill chooses no token: the last known one is the next root."""
        return bool(self.tokens)

    @property
    def prefill_length(self) -> int:
        """Tokens to prefill: the prompt, or all known tokens but the root."""
        return len(self.all_tokens) - 1 if self.tokens else len(self.all_tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the first is admitted first and preempted last. "Older" means earlier in this order."""
        return self.priority, self.arrival

    @property
    def ended(self) -> bool:
        """Whether it is done or cancelled."""
        return self.phase in (Phase.DONE, Phase.CANCELLED)

    def append(self, tokens: Sequence[int]) -> None:
        """Appends new tokens."""
        self.tokens.extend(tokens)
        self.all_tokens.extend(tokens)
