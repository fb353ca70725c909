"""Adaptive drafting beside each of its fixed depths, at imposed conditional acceptance.

    python benchmarks/adaptive.py --preset llama-3.1-8b --json benchmarks/results/DATE-MACHINE-adaptive.jsonl

    python benchmarks/adaptive.py --json benchmarks/results/*-h100-adaptive.jsonl --draw docs/images/adaptive.svg

Weights are random, and a draft is accepted with a given probability if all before it are, whether it is right or not.
Each fixed depth is a program of its own, without the others. The tokens of a round are the expected ones for the depths
that were taken, so chance is in the choices only. Times include the choices, and every call begins at the same context;
what the policy knows goes on from call to call.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import recorded
from jaxtyping import Array, Float, Int, Key

from jspec.analysis.measure_costs import WARM_UP, Case
from jspec.bench import measurement, report
from jspec.bench.acceptance import until_a_miss
from jspec.bench.machine import environment
from jspec.bench.presets import PRESETS, Preset
from jspec.bench.weights import random_weights
from jspec.checkpoints.files import resolve_dtype
from jspec.core import sampling
from jspec.core.method import Method
from jspec.core.types import Acceptance, Drafter, DraftTree, Params
from jspec.drafters import Adaptive, Eagle, Plain
from jspec.generation.costs import only

RATES = (0.3, 0.5, 0.65, 0.8, 0.9)
"""Conditional acceptance."""


@dataclasses.dataclass(frozen=True)
class ImposedByKey:
    """Accepts a draft of a chain with a probability that is part of the sequence's key, see `keys`.

    So one program serves for every probability. The round does its full work.
    """

    for_greedy = True

    def __call__(
        self, key: Key[Array, " B"], draft_tree: DraftTree, logits: Float[Array, "B N V"], position: Int[Array, " B"]
    ) -> Acceptance:
        """The leading drafts whose coins are below the probability; the target's argmax follows."""
        rate, count = jax.random.key_data(key)[:, 0].astype(jnp.float32) / 2.0**32, draft_tree.tokens.shape[1] - 1
        coins = jax.vmap(lambda key: jax.random.uniform(key, (count,)))(sampling.stream(key, sampling.COINS, position))
        return until_a_miss(draft_tree, logits, coins < rate[:, None])


def keys(rate: float, batch: int, call: int) -> Array:
    """Keys of sequences whose drafts are accepted with this probability; other coins in each call."""
    first = np.full(batch, int(rate * 2**32), np.uint32)
    second = np.arange(batch, dtype=np.uint32) + np.uint32(call * batch)
    return jax.random.wrap_key_data(jnp.asarray(np.stack([first, second], axis=1)))


def expected_tokens(depth: int, rate: float) -> float:
    """Tokens of a round with a chain of this depth."""
    return sum(rate**i for i in range(depth + 1))


def fixed_seconds(case: Case, batch: int, rate: float, calls: int) -> float:
    """The median time of a round."""
    return statistics.median([case.run(keys(rate, batch, call)) for call in range(WARM_UP + calls)][WARM_UP:])


def call_seconds(case: Case, repeats: int) -> float:
    """What a call takes beyond its rounds: the difference between calls of all and of a quarter of them."""

    def total(rounds: int) -> float:
        case.rounds = rounds
        return rounds * statistics.median([case.run() for _ in range(WARM_UP + repeats)][WARM_UP:])

    many = case.rounds
    few = many // 4
    short, long = total(few), total(many)
    return short - few * (long - short) / (many - few)


def adaptive_run(case: Case, depths: Sequence[int], batch: int, rate: float, calls: int) -> tuple[float, np.ndarray]:
    """Expected tokens per second and sequence, and the share of rounds of each choice, over many rounds."""
    times, before = [], _counts(case)
    for call in range(calls):
        times.append(case.run(keys(rate, batch, call)))
    taken = _counts(case) - before
    share = taken / taken.sum()
    tokens = float(share @ np.array([expected_tokens(depth, rate) for depth in depths]))
    return tokens / statistics.mean(times), share


def _counts(case: Case) -> np.ndarray:
    """Rounds of each choice so far."""
    assert case.state is not None and case.state.stats.branch_counts is not None
    return np.asarray(case.state.stats.branch_counts).sum((0, 2)).astype(float)


def forget(case: Case) -> None:
    """The policy begins anew."""
    assert case.state is not None
    draft = case.state.draft
    evidence, best = jax.tree.map(jnp.zeros_like, (draft.evidence, draft.best))
    case.state = dataclasses.replace(case.state, draft=dataclasses.replace(draft, evidence=evidence, best=best))


@dataclasses.dataclass
class Row:
    """One acceptance and batch: tokens per second of all sequences, fixed by depth and adaptive."""

    batch: int
    rate: float
    fixed: dict[int, float]
    adaptive: float
    share: np.ndarray

    def cells(self, depths: Sequence[int]) -> list[str]:
        """The cells of the table."""
        ratio = [
            self.adaptive / other for other in (max(self.fixed.values()), self.fixed.get(0), self.fixed.get(5)) if other
        ]
        best = max(self.fixed, key=lambda depth: self.fixed[depth])
        return [
            str(self.batch),
            f"{self.rate:g}",
            *(f"{self.fixed[depth]:.1f}" if depth in self.fixed else "-" for depth in depths),
            f"{self.adaptive:.1f}",
            str(best),
            *(f"{each:.3f}" for each in ratio),
            " ".join(f"{each:.2f}" for each in self.share),
        ]


def measure(
    options: argparse.Namespace, preset: Preset, params: Params, batch: int
) -> tuple[list[Row], dict, dict, dict]:
    """The rows of a batch, milliseconds of each choice, in the program of all and alone, and those of a call."""
    target, head, depths = preset.target, preset.head, options.depths
    assert head is not None
    drafters: list[Drafter] = [Plain() if depth == 0 else Eagle(depth=depth).bind(target, head) for depth in depths]
    adaptive = Adaptive(drafters).bind(target, head)
    sizes = {"batch": batch, "context": options.context, "rounds": options.rounds}
    steered = Case(params, Method(target, adaptive, ImposedByKey()), **sizes)
    cases = {
        depth: Case(params, Method(target, drafter, ImposedByKey()), **sizes)
        for depth, drafter in zip(depths, drafters, strict=True)
    }
    cases = {depth: case for depth, case in cases.items() if depth in options.fixed}

    # One after the other: XLA chooses kernels by timing them, and another program's would disturb it.
    began = time.perf_counter()
    programs = [case.lower().compile() for case in (steered, *cases.values())]
    print(f"batch {batch}: compiled {len(programs)} programs in {time.perf_counter() - began:.0f} s", flush=True)

    calls: dict[str, float] = {}
    fixed: dict[float, dict[int, float]] = {rate: {} for rate in options.rate}
    for (depth, case), program in zip(cases.items(), programs[1:], strict=True):
        case.use(program)
        for rate in options.rate:
            fixed[rate][depth] = fixed_seconds(case, batch, rate, options.repeats)
        calls[f"depth {depth}"] = 1e3 * call_seconds(case, options.repeats)
        case.state = None
    steered.use(programs[0])
    inside = [steered.seconds(index, options.repeats) for index in range(len(depths))]
    steered.steer(only(len(depths) - 1, len(depths)))
    calls["adaptive"] = 1e3 * call_seconds(steered, options.repeats)
    rows = []
    for rate in options.rate:
        forget(steered)
        steered.steer(inside)
        speed, share = adaptive_run(steered, depths, batch, rate, options.calls)
        speeds = {depth: batch * expected_tokens(depth, rate) / each for depth, each in fixed[rate].items()}
        rows.append(Row(batch, rate, speeds, batch * speed, share))
    alone = {depth: statistics.mean(1e3 * fixed[rate][depth] for rate in options.rate) for depth in cases}
    return rows, dict(zip(depths, (1e3 * each for each in inside), strict=True)), alone, calls


def table(rows: Sequence[Row], depths: Sequence[int]) -> str:
    """The rows as aligned text."""
    names = ["batch", "acceptance", *(f"depth {depth}" for depth in depths), "adaptive", "best"]
    cells = [
        [*names, "of best", "of plain", "of depth 5", "share of each choice"],
        *(row.cells(depths) for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=False)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=False)) for line in cells)


def lines(
    options: argparse.Namespace, rows: Sequence[Row], inside: dict, alone: dict, calls: dict
) -> list[measurement.Measurement]:
    """The measurements of a batch."""
    here, command = environment(), report.command("python benchmarks/adaptive.py", sys.argv[1:])
    shared = {"command": command, "subject": options.preset, "context": options.context, "dtype": options.dtype_name}

    def line(row: Row, mode: str, metric: str, unit: str, value: float) -> measurement.Measurement:
        parts = options.preset, "adaptive", mode, f"b{row.batch}", f"a{row.rate:g}"
        settings = {"conditional_acceptance": row.rate, "depths": " ".join(map(str, options.depths))}
        settings["rounds per call"] = options.rounds
        return report.measurement(
            here,
            *parts,
            metric=metric,
            unit=unit,
            values=[value],
            mode=mode,
            batch=row.batch,
            settings=settings,
            **shared,
        )

    found = []
    for row in rows:
        found += [line(row, f"depth {depth}", "speed", "tokens/s", value) for depth, value in row.fixed.items()]
        found.append(line(row, "adaptive", "speed", "tokens/s", row.adaptive))
        found += [
            line(row, f"adaptive depth {depth}", "share of rounds", "", float(share))
            for depth, share in zip(options.depths, row.share, strict=True)
        ]
    first = dataclasses.replace(rows[0], rate=0.0)
    for mode, milliseconds in (("adaptive depth", inside), ("depth", alone)):
        found += [line(first, f"{mode} {depth}", "round", "ms", value) for depth, value in milliseconds.items()]
    found += [line(first, mode, "call without its rounds", "ms", value) for mode, value in calls.items()]
    return found


def draw(path: Path, measurements: Sequence[measurement.Measurement]) -> None:
    """Draws tokens per second by conditional acceptance, a panel for each batch."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "adaptive"  # the same file each time
    from matplotlib import pyplot

    speeds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for each in measurements:
        if each.metric == "speed" and each.superseded_by is None and each.batch is not None:
            assert each.mode is not None and each.median is not None
            point = float(each.settings["conditional_acceptance"] or 0), each.median
            speeds.setdefault(each.batch, {}).setdefault(each.mode, []).append(point)
    rows, columns = -(-len(speeds) // 2), min(len(speeds), 2)
    page, panels = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 3.6 * rows), squeeze=False)
    for panel in panels.flat[len(speeds) :]:
        panel.set_axis_off()
    fixed = {mode for modes in speeds.values() for mode in modes if mode != "adaptive"}
    fixed = sorted(fixed, key=lambda mode: int(mode.removeprefix("depth ")))
    colors = pyplot.get_cmap("Blues")([0.35 + 0.6 * i / max(len(fixed) - 1, 1) for i in range(len(fixed))])
    for panel, (batch, modes) in zip(panels.flat, sorted(speeds.items()), strict=False):
        for mode, color in zip(fixed, colors, strict=True):
            if mode in modes:
                label = "plain" if mode == "depth 0" else mode
                panel.plot(*zip(*sorted(modes[mode]), strict=True), color=color, label=label)
        if "adaptive" in modes:
            panel.plot(*zip(*sorted(modes["adaptive"]), strict=True), "o--", color="C1", label="adaptive")
        panel.set(title=f"batch {batch}", xlabel="conditional acceptance", ylim=(0, None))
    for row in panels:
        row[0].set_ylabel("tokens per second, all sequences")
    panels[0][0].legend(frameon=False)
    page.tight_layout()
    page.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Measures every batch, and prints and records its rows as soon as they are known."""
    parser = argparse.ArgumentParser(description="Adaptive drafting beside fixed depths, at imposed acceptance.")
    parser.add_argument(
        "--preset", default="llama-3.1-8b", choices=[name for name, each in PRESETS.items() if each.head]
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rate", type=float, nargs="+", default=list(RATES), help="conditional acceptance")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[0, 1, 2, 5, 8], help="the choices; 0 is plain decoding"
    )
    parser.add_argument("--fixed", type=int, nargs="*", help="depths that also run alone (default: all)")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=64, help="rounds of a call, after which the context is rewound")
    parser.add_argument("--repeats", type=int, default=5, help="calls that are timed with one depth")
    parser.add_argument("--calls", type=int, default=24, help="calls with the policy")
    parser.add_argument("--dtype", help="of the weights (default: float32 on a CPU, otherwise bfloat16)")
    parser.add_argument(
        "--json", type=Path, nargs="+", default=[], help="file of measurements to which those of this run are added"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="FILE.svg", help="draw the measurements of --json, of several files; run nothing"
    )
    options = parser.parse_args()
    if options.draw is not None:
        if not options.json:
            parser.error("--draw: needs --json, the files of measurements to draw")
        draw(options.draw, [each for path in options.json for each in recorded.read(path)])
        return
    if len(options.json) > 1:
        parser.error(f"--json: {len(options.json)} files; must be one, unless --draw is given")
    options.fixed = options.depths if options.fixed is None else options.fixed
    preset, dtype = PRESETS[options.preset], resolve_dtype(options.dtype)
    assert preset.head is not None
    options.dtype_name = jnp.dtype(dtype).name
    shapes = Params(preset.target.param_shapes(dtype), preset.head.param_shapes(dtype))
    params = jax.block_until_ready(random_weights(shapes, preset.target.vocab_size))
    everything: list[Row] = []
    for batch in options.batch:
        rows, inside, alone, calls = measure(options, preset, params, batch)
        everything += rows
        for name, milliseconds in (("in the program of all", inside), ("alone", alone)):
            shown = ", ".join(f"{depth}: {each:.2f}" for depth, each in milliseconds.items())
            print(f"batch {batch}: ms per round {name}, by depth: {shown}", flush=True)
        shown = ", ".join(f"{mode}: {each:.2f}" for mode, each in calls.items())
        print(f"batch {batch}: ms per call without its rounds: {shown}", flush=True)
        print(table(rows, options.depths), flush=True)
        for path in options.json:
            recorded.add(path, lines(options, rows, inside, alone, calls))
    print(
        f"\n{options.preset}, {options.dtype_name}, context {options.context}, {jax.devices()[0].device_kind}: tokens/s"
    )
    print(table(everything, options.depths))


if __name__ == "__main__":
    main()
