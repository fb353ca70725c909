"""Rounds of one model in several variants side by side: as they are, with `exact=True`, and with a grammar.

    python benchmarks/variants.py --preset llama-3.1-8b --batch 1 8 --json DATE-MACHINE-variants.jsonl

Weights are random, and 3 tokens per round are imposed. All programs of a batch are compiled side by side; their timed
calls take turns, so that a change of the machine meets all of them. The grammar is a JSON schema of ten fields over a
made-up vocabulary of 128,256 tokens, see grammar.py; it constrains the target and the drafts.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grammar as schemas
import jax
import jax.numpy as jnp
import recorded

from jspec.analysis.measure_costs import WARM_UP, Case
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.bench.presets import PRESETS
from jspec.bench.weights import random_weights
from jspec.checkpoints.files import resolve_dtype
from jspec.core import grammar as grammar_tables
from jspec.core.accept import Imposed
from jspec.core.method import Method
from jspec.core.types import DecodeState, Drafter, Params, Target
from jspec.drafters import Eagle, Plain
from jspec.text.grammar import Grammar, compile_grammar

MODES: dict[str, Drafter] = {"plain": Plain(), "chain": Eagle(depth=5), "tree": Eagle(depth=5, width=8, num_nodes=32)}
VARIANTS = ("as it is", "exact", "grammar")
RULE = Imposed(3.0)


class Constrained(Case):
    """A `Case` whose sequences all have one grammar."""

    def __init__(self, params: Params, target: Target, drafter: Drafter, batch: int, context: int, rounds: int):
        super().__init__(params, Method(target, drafter, RULE), batch, context, rounds)
        tables, bare = grammar_tables.init([_table()] * batch, schemas.VOCAB), self._make

        def make(params: Params) -> DecodeState:
            return dataclasses.replace(bare(params), grammar=tables)

        self._make = make
        self._shapes = jax.eval_shape(make, params)


@functools.cache
def _table() -> grammar_tables.TokenTable:
    tokenizer = schemas.made_up_tokenizer()
    found = compile_grammar(
        Grammar.json_schema(schemas.ten_fields(0.25)), tokenizer, schemas.VOCAB, [schemas.VOCAB - 1]
    )
    assert found is not None
    return found


def cases(options: argparse.Namespace, params: Params, batch: int) -> dict[tuple[str, str], Case]:
    """Mode and variant -> its case."""
    preset, found = PRESETS[options.preset], {}
    assert preset.head is not None
    for mode in options.mode:
        for variant in options.variant:
            target = preset.target.exactly() if variant == "exact" else preset.target
            drafter = MODES[mode].bind(target, None if mode == "plain" else preset.head)
            sizes = {"batch": batch, "context": options.context, "rounds": options.rounds}
            if variant == "grammar":
                found[mode, variant] = Constrained(params, target, drafter, **sizes)
            else:
                found[mode, variant] = Case(params, Method(target, drafter, RULE), **sizes)
    return found


def compile_all(found: dict[tuple[str, str], Case]) -> None:
    """Compiles all programs; tracing takes turns."""
    with ThreadPoolExecutor() as pool:
        running = [(case, pool.submit(case.lower().compile)) for case in found.values()]
        for case, program in running:
            case.use(program.result())


def times(found: dict[tuple[str, str], Case], repeats: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of a round, `repeats` values of each case, in turns."""
    values: dict[tuple[str, str], list[float]] = {name: [] for name in found}
    for turn in range(WARM_UP + repeats):
        for name, case in found.items():
            seconds = case.run()
            if turn >= WARM_UP:
                values[name].append(1e3 * seconds)
    return values


def lines(
    options: argparse.Namespace, values: dict[tuple[str, str], list[float]], batch: int
) -> list[measurement.Measurement]:
    """A measurement for each mode and variant."""
    here, command = environment(), report.command("python benchmarks/variants.py", sys.argv[1:])
    return [
        report.measurement(
            here,
            *(options.preset, "variants", variant, mode, f"b{batch}"),
            metric="round",
            unit="ms",
            values=each,
            command=command,
            subject=options.preset,
            mode=mode,
            batch=batch,
            context=options.context,
            dtype=options.dtype_name,
            settings={"variant": variant, "rounds": options.rounds},
        )
        for (mode, variant), each in values.items()
    ]


def table(values: dict[tuple[str, str], list[float]], batch: int, base: str) -> str:
    """A line per mode: milliseconds of each variant, and how much more than `base` it takes."""
    text = []
    for mode in dict.fromkeys(mode for mode, _ in values):
        medians = {variant: statistics.median(each) for (of, variant), each in values.items() if of == mode}
        shown = (f"{variant} {each:.3f} ({each / medians[base] - 1:+.1%})" for variant, each in medians.items())
        text.append(f"batch {batch}, {mode}: " + ", ".join(shown))
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> dict[int, dict[tuple[str, str], Case]]:
    """Measures every batch, and prints and records it as soon as it is known."""
    parser = argparse.ArgumentParser(description="Times rounds of several variants side by side.")
    known = [name for name, each in PRESETS.items() if each.head is not None]
    parser.add_argument("--preset", default="llama-3.1-8b", choices=known)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=48, help="rounds of a call, after which the context is rewound")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each program")
    parser.add_argument("--dtype", help="of the weights (default: float32 on a CPU, otherwise bfloat16)")
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args(arguments)
    preset, dtype = PRESETS[options.preset], resolve_dtype(options.dtype)
    assert preset.head is not None
    if "grammar" in options.variant and preset.target.vocab_size != schemas.VOCAB:
        parser.error(f"--variant grammar: the vocabulary must have {schemas.VOCAB} tokens, as that of llama-3.1-8b")
    options.dtype_name = jnp.dtype(dtype).name
    shapes = Params(preset.target.param_shapes(dtype), preset.head.param_shapes(dtype))
    params = jax.block_until_ready(random_weights(shapes, preset.target.vocab_size))
    everything: list[str] = []
    for batch in options.batch:
        began = time.perf_counter()
        found = cases(options, params, batch)
        compile_all(found)
        print(f"batch {batch}: compiled {len(found)} programs in {time.perf_counter() - began:.0f} s", flush=True)
        values = times(found, options.repeats)
        everything.append(table(values, batch, options.variant[0]))
        print(everything[-1], flush=True)
        if options.json is not None:
            recorded.add(options.json, lines(options, values, batch))
    print(f"\n{options.preset}, {options.dtype_name}, context {options.context}, {jax.devices()[0].device_kind}: ms")
    print("\n".join(everything))


if __name__ == "__main__":
    main()
