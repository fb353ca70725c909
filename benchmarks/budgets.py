"""Tokens per second of budgets (`jspec.Pruned`) beside fixed chains and trees, with random acceptance.

    python benchmarks/budgets.py chains --batch 32 64 --json benchmarks/results/DATE-MACHINE-budgets.jsonl
    python benchmarks/budgets.py trees --batch 1 8

The weights are random: every draft at a position is right or wrong at random, whatever the round, so texts are equally
hard for all drafters. A sequence has a skill, a position a probability around it, and the draft a confidence: the
probability with noise. Compilation is not timed.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import functools
import statistics
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import recorded
from jaxtyping import Array, Float, Int, Key

import jspec
from jspec.analysis.measure_costs import Case
from jspec.bench import report, subject
from jspec.bench.machine import Environment, environment
from jspec.bench.options import SubjectOptions
from jspec.core import accept, tree
from jspec.core.method import Method
from jspec.core.types import Acceptance, DecodeState, DraftTree, Params, Proposal
from jspec.drafters import Plain, Pruned

CONCENTRATION, NOISE = 1.6, 0.7
"""Spread of a position's probability around its sequence's skill (beta), and of the confidence's logit around it."""
NEXT = 0.45
"""Probability of the next best draft, where the target's token is none before."""
LEVELS = {"low": (4.2, 5.0), "middle": (8.4, 3.6), "high": (12.0, 2.0)}
"""Beta distributions of skills over sequences."""
LIMIT = 64
"""Most drafts of a sequence and round."""
WARM_UP, FEW, OF_COSTS = 2, 32, 48
"""Calls before the timed ones; batches with other sequences in each repeat; rounds of a call for costs."""
_GRID = 1024

CHAINS = {"plain": Plain(), **{f"chain {depth}": depth for depth in (1, 2, 3, 5)}, "pruned 5": 5}
TREES = {
    "plain": Plain(),
    "chain 3": 3,
    "chain 5": 5,
    "tree 16": (5, 4, 16),
    "tree 32": (5, 8, 32),
    "pruned": (8, 6, 32),
}


@functools.cache
def _quantiles() -> np.ndarray:
    """Quantiles of the beta distribution of a position, [skill, probability]."""
    skill, grid = (np.arange(1, 128) / 128)[:, None], ((np.arange(_GRID * 8) + 0.5) / (_GRID * 8))[None]
    a, b = CONCENTRATION * skill, CONCENTRATION * (1 - skill)
    share = np.cumsum(grid ** (a - 1) * (1 - grid) ** (b - 1), axis=1)
    points = (np.arange(_GRID) + 0.5) / _GRID
    return np.stack([np.interp(points, row / row[-1], grid[0]) for row in share]).clip(0.01, 0.99).astype(np.float32)


def odds(
    key: Key[Array, " B"], position: Int[Array, " B"], count: int, width: int
) -> tuple[Int[Array, "B count"], Float[Array, "B count W"]]:
    """The rank of the target's token among the drafts of the next positions (`width`: not among them), and the draft's
    log-probability of each rank."""

    def uniforms(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, position), (3,), minval=1e-6, maxval=1.0 - 1e-6)

    positions = position[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    level, hit, noise = jnp.moveaxis(jax.vmap(jax.vmap(uniforms, (None, 0)))(key, positions), 2, 0)
    # The skill is the first word of the key.
    skill = (jax.random.key_data(key)[:, 0] & 0xFFFF).astype(jnp.int32) * 127 >> 16
    table = jnp.asarray(_quantiles())
    right = table[skill[:, None], (level * _GRID).astype(jnp.int32)]
    logit = jnp.log(right / (1 - right)) + NOISE * jax.scipy.special.ndtri(noise)
    confidence = jax.nn.sigmoid(logit)
    # Ranks after the first share what is left.
    share = np.array([NEXT * (1 - NEXT) ** rank for rank in range(width - 1)], np.float32)
    bounds = jnp.concatenate([right[..., None], right[..., None] + (1 - right[..., None]) * np.cumsum(share)], axis=2)
    rank = (hit[..., None] >= bounds).sum(2, dtype=jnp.int32)
    rest = (1 - confidence[..., None]) * share
    return rank, jnp.log(jnp.concatenate([confidence[..., None], rest], axis=2))


@dataclasses.dataclass(frozen=True)
class Ranked(jspec.Eagle):
    """An EAGLE head whose drafts have 1 + their rank as token, and the random confidence as score.

    Nodes that did not grow have the token 0, which is never accepted.
    """

    scores: ClassVar[Any] = None

    def draft(self, params: Params, s: DecodeState) -> tuple[DraftTree, Any]:
        """As of the head, which runs as usual."""
        here, state = copy.copy(self), s.draft
        object.__setattr__(here, "scores", odds(s.key, s.length + 1, self.depth, self.width)[1])
        path = jnp.zeros((len(s.length), 1, 0), jnp.int32)
        first = here.ranked(state.proposal, path)
        drafted, _ = jspec.Eagle.draft(
            here, params, dataclasses.replace(s, draft=dataclasses.replace(state, proposal=first))
        )
        return drafted, state

    def propose(self, s: DecodeState, logits: Array, path: Array, ids: Array | None = None) -> Proposal:
        """The head's proposals, renamed within `draft`."""
        proposal = super().propose(s, logits, path, ids)
        return proposal if self.scores is None else self.ranked(proposal, path)

    def ranked(self, proposal: Proposal, path: Array) -> Proposal:
        """Tokens by rank; the head's own ones are still computed."""
        tokens = 1 + jnp.arange(proposal.tokens.shape[2], dtype=jnp.int32) + jnp.minimum(proposal.tokens, 0)
        if proposal.scores is None:
            return Proposal(tokens, None, None)
        scores = self.scores[:, None, path.shape[2], : tokens.shape[2]] + jnp.maximum(proposal.scores, 0.0)
        return Proposal(tokens, scores, None)


@dataclasses.dataclass(frozen=True)
class RankRule:
    """Accepts the drafts of the ranks in `odds`."""

    width: int
    for_greedy: ClassVar[bool] = True

    def __call__(self, key: Array, draft_tree: DraftTree, logits: Array, position: Array) -> Acceptance:
        """Follows the ranks; the logits are still computed."""
        rank, _ = odds(key, position + 1, draft_tree.generations + 1, max(self.width, 2))
        if draft_tree.parents is not None:
            rank = jnp.take_along_axis(rank, tree.depths(draft_tree), axis=1)
        return accept.follow(draft_tree, 1 + rank + jnp.minimum(jnp.argmax(logits, axis=-1).astype(jnp.int32), 0))


@dataclasses.dataclass
class Timed:
    """A drafter of one batch: milliseconds of rounds and tokens per sequence and round, by level."""

    case: Case
    table: tuple[float, ...] = ()
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    lengths: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def rate(self, level: str) -> float:
        """Tokens per sequence and millisecond."""
        return statistics.mean(self.lengths[level]) / statistics.median(self.times[level])


def drafter_of(name: str, shape: Any) -> Any:
    """The drafter of a column."""
    if not isinstance(shape, int | tuple):
        return shape
    depth, width, nodes = (shape, 1, None) if isinstance(shape, int) else shape
    pruned = name.startswith("pruned")
    drafter = Ranked(depth=depth, width=width, num_nodes=nodes, scored=pruned)
    return Pruned(drafter) if pruned else drafter


def keys(level: str, batch: int, seed: int = 0) -> Array:
    """Keys of sequences, whose first word is their skill."""
    random = np.random.default_rng(100 + seed)
    skill = (random.beta(*LEVELS[level], batch) * 65535).astype(np.uint32)
    words = np.stack([skill, random.integers(2**32, size=batch, dtype=np.uint32)], axis=1)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def measure(options: argparse.Namespace, model: Any, params: Params, batch: int) -> dict[str, Timed]:
    """Compiles all drafters of a batch in threads, and measures one after the other, as each has caches of its own."""
    every, timed = CHAINS if options.kind == "chains" else TREES, {}
    shapes = {name: shape for name, shape in every.items() if options.mode is None or name in options.mode}
    width = 2 if options.kind == "chains" else 8
    for name, shape in shapes.items():
        drafter = drafter_of(name, shape).bind(model.target, model.draft)
        method = Method(model.target, drafter, RankRule(width))
        timed[name] = Timed(Case(params, method, batch, options.context, options.rounds))
    lowered = {name: column.case.lower() for name, column in timed.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {name: pool.submit(program.compile) for name, program in lowered.items()}
    for name, column in timed.items():
        case = column.case
        case.use(programs[name].result())
        if case.state.draft_limits is not None:
            limits = jnp.full_like(case.state.draft_limits, LIMIT)
            case.state = dataclasses.replace(case.state, draft_limits=limits)
        if name.startswith("pruned"):
            count = case.state.costs.shape[-1]
            case.run(keys("middle", batch))
            case.rounds = min(options.rounds, OF_COSTS)
            column.table = tuple(1e3 * case.seconds(index, 3) for index in range(count))
            case.rounds = options.rounds
            case.steer(column.table)
        for level in options.level:
            for seed in range(-WARM_UP, options.repeats):
                # A few sequences at a time are different ones in each repeat.
                seconds = case.run(keys(level, batch, seed if batch < FEW else 0))
                if seed >= 0:
                    tokens = np.asarray(case.state.length) - options.context
                    column.times.setdefault(level, []).append(1e3 * seconds)
                    column.lengths.setdefault(level, []).append(float(tokens.mean()) / options.rounds)
        case.state = None  # free the caches
    return timed


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Compares budgets of nodes with fixed chains and trees.")
    parser.add_argument("kind", choices=("chains", "trees"))
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--mode", nargs="+", choices=sorted({*CHAINS, *TREES}), help="columns (default: all)")
    parser.add_argument("--level", nargs="+", choices=tuple(LEVELS), default=["middle"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="add the lines to this file")
    options = parser.parse_args()
    model = subject.of(SubjectOptions(preset=options.preset, drafter="eagle", dtype=options.dtype))
    params, machine = model.make(), environment()
    for batch in options.batch:
        timed = measure(options, model, params, batch)
        for level in options.level:
            best = max(column.rate(level) for name, column in timed.items() if not name.startswith("pruned"))
            print(f"\n{options.kind}, batch {batch}, acceptance {level}")
            print("| | ms | tokens per round | tokens/s | of the best |\n|---|---|---|---|---|")
            for name, column in timed.items():
                rate, times = column.rate(level), column.times[level]
                tokens = f"{statistics.mean(column.lengths[level]):.3f} | {1e3 * rate * batch:,.0f}"
                print(f"| {name} | {statistics.median(times):.2f} | {tokens} | {rate / best:.3f} |")
                if column.table:
                    print(f"| costs | {', '.join(f'{x:.2f}' for x in column.table)} | | | |")
            print(flush=True)
            if options.json is not None:
                recorded.add(options.json, lines(options, level, batch, timed, machine))


def lines(options: argparse.Namespace, level: str, batch: int, timed: dict[str, Timed], machine: Environment) -> list:
    """The measurements of a batch."""
    out = []
    for name, column in timed.items():
        shared: dict[str, Any] = {
            "command": f"python benchmarks/budgets.py {options.kind}",
            "subject": options.preset,
            "mode": name,
            "batch": batch,
            "context": options.context,
            "dtype": options.dtype,
            "settings": {"acceptance": level, "costs": ", ".join(f"{x:.4g}" for x in column.table) or None},
            "note": "random weights, random acceptance by sequence and position",
        }
        values = {("round", "ms"): column.times[level], ("accept length", "tokens"): column.lengths[level]}
        for (metric, unit), numbers in values.items():
            parts = "budgets", options.kind, options.preset, name, f"b{batch}", level
            rounded = [round(x, 4) for x in numbers]
            out.append(report.measurement(machine, *parts, metric=metric, unit=unit, values=rounded, **shared))
    return out


if __name__ == "__main__":
    main()
