"""What the loop on the device is worth: chains whose rounds the host calls, as engines do whose loop runs on the host.

    python benchmarks/from_host.py --preset tiny-gemma-4 --json FILE

Modes: chain, the loop on the device; stepped, a call of the device for each round; unfolded, another call before each
round for the seed of an assistant's draft. docs/bench.md names the other options.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import cli
from jspec.bench import machine, measurement, report
from jspec.bench import subject as subjects
from jspec.bench.measure import Rounds, compile_case, method_of, new_case, time_rounds
from jspec.bench.options import SHAPE, SHAPE_GROUP, CaseOptions
from jspec.cli.arguments import Parser, check_output, set_options
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.types import Committed, DecodeState, DraftTree, Params, Proposal, Target
from jspec.drafters import FrozenKvMtp
from jspec.models import Assistant

MODES = ("chain", "stepped", "unfolded")
Seed = Callable[[DecodeState], DecodeState]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CaseOptions):
    """The options of the script."""

    mode: tuple[str, ...] = option(MODES, "who calls rounds and seeds (default: all three)", choices=MODES)
    repeats: int = option(5, "repetitions of each measurement", least=1, most=10_000)


@struct
class SeededState:
    """The drafter's state and the results of `seed`, which are valid from a seed to the end of its round."""

    state: Float[Array, "B 1 E"]
    hidden: Float[Array, "B 1 E"]
    first: Proposal


@dataclasses.dataclass(frozen=True)
class Unfolded:
    """A chain of a bound `FrozenKvMtp` whose first generation comes from `seed`, called before each round."""

    folded: FrozenKvMtp

    def __post_init__(self):
        if self.folded.width > 1 or self.folded.sampled or self.folded.model is None:
            raise ValueError(f"Unfolded({self.folded}): must be a bound chain that is not sampled")

    @property
    def depth(self) -> int:
        """Tokens of the chain."""
        return self.folded.depth

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Those of the folded drafter."""
        return self.folded.capture_layers

    @property
    def model(self) -> Assistant | None:
        """The assistant's configuration."""
        return self.folded.model

    def bind(self, target: Target, draft: object) -> "Unfolded":
        """Returns itself; it is already bound."""
        return self

    def init(self, params: Params, batch: int, capacity: int, page_size: int) -> SeededState:
        """The drafter's state, with placeholders for the results of `seed`."""
        state = self.folded.init(params, batch, capacity, page_size)
        return SeededState(state, state, Proposal(jnp.zeros((batch, 1, 1), jnp.int32), None, None))

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, SeededState]:
        """Runs all forwards except the first."""
        return self.folded.grow_from(params, s, s.draft.hidden, s.draft.first), s.draft

    def extend(self, params: Params, s: DecodeState, committed: Committed) -> SeededState:
        """Extends the folded drafter's state."""
        bare = dataclasses.replace(s, draft=s.draft.state)
        return dataclasses.replace(s.draft, state=self.folded.extend(params, bare, committed))


@partial(jax.jit, static_argnames=("drafter",), donate_argnames=("s",))
def seed(params: Params, s: DecodeState, *, drafter: Unfolded) -> DecodeState:
    """Computes the first generation of the next round's draft."""
    hidden, first = drafter.folded.seed(params, s, s.draft.state)
    return dataclasses.replace(s, draft=dataclasses.replace(s.draft, hidden=hidden, first=first))


def from_host(rounds: Rounds, seed: Seed | None, s: DecodeState, until: Int[Array, ""] | int) -> DecodeState:
    """The first `until` rounds, one call of `rounds` each, after a call of `seed` if there is one."""
    for index in range(int(until)):
        s = s if seed is None else seed(s)
        s = rounds(s, _device_int(index + 1))
    return s


@functools.cache
def _device_int(value: int) -> Int[Array, ""]:
    """An integer on the device. Cached, to time no transfer."""
    return jnp.int32(value)


def run(options: Options) -> int:
    """Measures and prints; returns the exit status.

    Raises:
      ValueError: options unlike the model, or a case beyond the memory.
    """
    if options.json:
        check_output("--json", options.json)
    subject = subjects.of(options)
    drafters = subjects.drafters_of(options, subject)
    if "unfolded" in drafters:
        folded = drafters["unfolded"]
        if not isinstance(folded, FrozenKvMtp):
            raise ValueError(f"--mode unfolded: requires the drafter frozen-kv-mtp, not {type(folded).__name__}")
        drafters["unfolded"] = Unfolded(folded)
    params, here, lines = subject.make(), machine.environment(), []
    setup = subjects.setup_of(options, subject, params, repeats=options.repeats)
    settings = subjects.settings_of(options, subject, (*SHAPE, "rounds", "repeats", "page_size"))
    # Each case, whose programs are the same but for the seed.
    cases = [(mode, batch, context) for context in options.context for batch in options.batch for mode in options.mode]
    for mode, batch, context in cases:
        result, drafter = new_case(setup, mode, drafters[mode], batch, context), drafters[mode]
        compiled = None if result.problem else compile_case(setup, result, method_of(setup, drafter))
        if compiled is None:
            raise ValueError(f"{mode} {batch} x {context}: {result.problem}")
        prefill, rounds = compiled
        if mode != "chain":
            call = partial(seed, params, drafter=drafter) if isinstance(drafter, Unfolded) else None
            rounds = partial(from_host, rounds, call)
        time_rounds(setup, result, rounds, prefill())
        milliseconds = [1e3 * seconds for seconds in result.round_seconds]
        print(f"{mode} {batch} x {context}: {statistics.median(milliseconds):.4f} ms per round", flush=True)
        shape = {"subject": subject.name, "mode": mode, "batch": batch, "context": context}
        fields = {**shape, "dtype": str(params.target.embed.dtype), "settings": settings, "command": options.command}
        parts = subject.name, mode, f"b{batch}", f"c{context}"
        lines.append(report.measurement(here, *parts, metric="round", unit="ms", values=milliseconds, **fields))
    if options.json:
        measurement.write(options.json, lines)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    parser = Parser(prog="python benchmarks/from_host.py", description=__doc__)
    set_options(parser, Options, run, SHAPE_GROUP)
    return cli.main(arguments, parser)


if __name__ == "__main__":
    sys.exit(main())
