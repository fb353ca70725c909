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
    """No room for this request until others end."""


class Phase(enum.Enum):
    """Phase of a request."""

    WAITING = "waiting"
    """In the queue, without slot and pages."""
    READING = "reading"
    """In a slot, in prefill."""
    RUNNING = "running"
    """In a slot, in decode; its last read may still be in flight."""
    PREEMPTED = "preempted"
    """Without slot and pages, which ran out; returns to the queue when none of its programs is in flight."""
    DONE = "done"
    CANCELLED = "cancelled"


class Needs(NamedTuple):
    """What a program must support to run a request; larger values include smaller ones.

    options: index in `jspec.runner.device.OPTION_SETS`; 0: no sequence samples, and the greedy acceptance rule applies.
    grammar: whether there is one.
    record: one of `jspec.runner.device.TOP_SIZES`, the most probable tokens to record; -1: no log-probabilities.
    stop_level, grammar_level: sizes of the tables (`AutomatonPool.at`).
    embeds: whether reads take embeddings; bursts ignore it.
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
        """The needs of a program that runs all of these."""
        return cls._make(map(max, zip(cls(), *needs, strict=True)))


@dataclasses.dataclass(eq=False)
class Request:
    """What to generate, with its options. Fields from `phase` on are internal to the engine.

    prompt, max_new_tokens: token ids, and the limit of new ones; at least one each.
    priority: lower values are admitted first and preempted last, as in vLLM.
    salt: requests with different salts share no pages.
    seed: the seed, and the index of the sequence.
    adapter: number of its adapter, as in `jspec.models.adapted.Adapted`; -1: none.
    logprobs: whether the log-probabilities of its tokens are recorded.
    top_logprobs: number of most probable tokens recorded with each.
    support: maximum number of ids of possible tokens recorded with each; 0: none.
    speculation: limits of its drafts; None: those of the drafter.
    embeds: the prompt, if it holds embeddings; their digest becomes part of the salt.
    start_state, start_grammar: first states of its stop automaton and its grammar, in their pools.
    needs: what its programs must support.

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
    """Place in the order of submission; -1 before submission."""
    tokens: list[int] = dataclasses.field(default_factory=list, init=False)
    """New tokens, as reported so far."""
    all_tokens: list[int] = dataclasses.field(init=False)
    """The prompt and the new tokens."""
    finish_code: int = dataclasses.field(default=0, init=False)
    """A code of `jspec.core.stopping`; 0 until done."""
    rounds: int = dataclasses.field(default=0, init=False)
    accept_counts: list[int] = dataclasses.field(default_factory=list, init=False)
    """Number of rounds by accepted drafts, as in `jspec.core.types.Stats`; empty before the first burst reports."""
    branch_counts: list[list[int]] | None = dataclasses.field(default=None, init=False)
    """`accept_counts` per branch; None before the first report, and if the drafter has no branches."""
    preemptions: int = dataclasses.field(default=0, init=False)

    slot: int | None = dataclasses.field(default=None, init=False)
    pages: list[int] = dataclasses.field(default_factory=list, init=False)
    cached: int = dataclasses.field(default=0, init=False)
    """Tokens found in the prefix cache at its last admission; their rows are in its first pages, in all caches."""
    restore: int | None = dataclasses.field(default=None, init=False)
    """The snapshot after the `cached` tokens, for a target with slot state; None: the state begins with zeros."""
    prefilled: int = dataclasses.field(default=0, init=False)
    """Tokens prefilled, programs in flight included; at most `prefill_length`."""
    registered: int | None = dataclasses.field(default=0, init=False)
    """Number of its pages in the prefix cache; None: they must not be registered."""
    save_points: set[int] = dataclasses.field(default_factory=set, init=False)
    """Lengths, in pages, at which a chunk must end so that a snapshot can be saved."""
    waits_for: "tuple[Request, int] | None" = dataclasses.field(default=None, init=False)
    """While queued, it waits for an older request to register this many pages of a shared prefix."""
    awaited: set[Hashable] = dataclasses.field(default_factory=set, init=False)
    """Programs for whose compilation it has waited."""
    in_flight: int = dataclasses.field(default=0, init=False)
    """Number of its programs in flight."""
    tokens_in_flight: int = dataclasses.field(default=0, init=False)
    """Most new tokens that these programs can report."""

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
        """The grammar of its text; None: no constraint."""
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
        """Number of known tokens, prompt included."""
        return len(self.all_tokens)

    @property
    def resumed(self) -> bool:
        """Whether prefill resumes known tokens after a preemption. It chooses none: the last known one is the root."""
        return bool(self.tokens)

    @property
    def prefill_length(self) -> int:
        """Number of tokens to prefill: the prompt, or all known tokens but the root."""
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
