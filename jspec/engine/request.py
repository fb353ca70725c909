"""A request as the scheduler sees it: token ids in, token ids out, and where it is on its way."""

import dataclasses
import enum
from collections.abc import Sequence

from jspec.core.checks import check_int, check_text


class QueueFull(RuntimeError):
    """There is no space for a request now, but there will be."""


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue, without slot and pages."""
    READING = "reading"
    """In a slot; its prompt, or what is known of it, is being read."""
    RUNNING = "running"
    """In a slot; it takes part in bursts, or will as soon as the program that reads its end has run."""
    RETRACTED = "retracted"
    """Out of its slot, because pages ran out. It waits for its last flight to land and joins the queue then."""
    DONE = "done"
    CANCELLED = "cancelled"


@dataclasses.dataclass(eq=False)
class Request:
    """What is to be generated. Everything but the first four fields is written by the scheduler only.

    prompt: token ids, at least one.
    max_new_tokens: at least 1.
    priority: requests of a higher priority are admitted first and retracted last.
    salt: requests of different salts share no pages.

    Raises:
      ValueError, TypeError: an invalid value.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    priority: int = 0
    salt: str = ""

    phase: Phase = dataclasses.field(default=Phase.WAITING, init=False)
    arrival: int = dataclasses.field(default=-1, init=False)
    """Place in the order of submission; -1 before it."""
    tokens: list[int] = dataclasses.field(default_factory=list, init=False)
    """New tokens that have landed."""
    known: list[int] = dataclasses.field(init=False)
    """The prompt and those tokens."""
    finish_code: int = dataclasses.field(default=0, init=False)
    """A code of `jspec.core.stopping`; 0 until it is done."""
    rounds: int = dataclasses.field(default=0, init=False)
    accept_counts: list[int] = dataclasses.field(default_factory=list, init=False)
    """Rounds by accepted drafts, as in `jspec.core.types.Stats`; empty before the first round has landed."""
    branch_counts: list[list[int]] | None = dataclasses.field(default=None, init=False)
    """The same by branch; None before the first round has landed, and if the drafter has no branches."""
    retracts: int = dataclasses.field(default=0, init=False)

    slot: int | None = dataclasses.field(default=None, init=False)
    pages: list[int] = dataclasses.field(default_factory=list, init=False)
    hit: int = dataclasses.field(default=0, init=False)
    """Tokens that were shared when it was last admitted."""
    read: int = dataclasses.field(default=0, init=False)
    """Tokens whose rows are in its pages, or will be when what is dispatched has run; at most `reading`."""
    named: int | None = dataclasses.field(default=0, init=False)
    """Pages of its own list that have names; None: they must not be named."""
    cuts: set[int] = dataclasses.field(default_factory=set, init=False)
    """Where chunks end, in pages, so that a recurrent state can be saved there."""
    waits: "tuple[Request, int] | None" = dataclasses.field(default=None, init=False)
    """Why it is passed over in the queue: an older request, until this number of its pages is named."""
    flights: int = dataclasses.field(default=0, init=False)
    """Reads and bursts in the air that it takes part in."""
    flying: int = dataclasses.field(default=0, init=False)
    """Tokens that those may bring at most."""

    def __post_init__(self):
        self.prompt = tuple(self.prompt)
        self.known = list(self.prompt)
        if not self.prompt:
            raise ValueError("prompt=(): must have at least one token")
        self.max_new_tokens = check_int("max_new_tokens", self.max_new_tokens, least=1)
        self.priority = check_int("priority", self.priority, least=-(2**63), most=2**63 - 1)
        self.salt = check_text("salt", self.salt)

    @property
    def limit(self) -> int:
        """The length at which it ends at the latest, prompt included."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def length(self) -> int:
        """Known tokens."""
        return len(self.known)

    @property
    def resumed(self) -> bool:
        """Whether new tokens are known. Reading it then chooses nothing: the last known token is the next root."""
        return bool(self.tokens)

    @property
    def reading(self) -> int:
        """Tokens to read before it runs: the prompt, or what is known but for the root."""
        return len(self.known) - 1 if self.tokens else len(self.known)

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all: the first is admitted first and retracted last. "Older" means earlier in this order."""
        return -self.priority, self.arrival

    @property
    def ended(self) -> bool:
        """Whether it is done or cancelled."""
        return self.phase in (Phase.DONE, Phase.CANCELLED)

    def append(self, tokens: Sequence[int]) -> None:
        """Takes in new tokens that have landed."""
        self.tokens.extend(tokens)
        self.known.extend(tokens)
