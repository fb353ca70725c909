"""Loops to compile for TPUs without hardware: small models of every family, with heads as wide as real ones.

Heads of 64 and more let the TPU's kernels run. The pools are larger than everything else, so a copy of one shows in the
memory of a program, and larger than the memory on the core, into which XLA may move smaller ones and back in each
round. `python benchmarks/small_loops.py` compiles all of them for all chips and prints what does not hold; `--json
FILE` writes it as measurements.
"""

import argparse
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import compiled
import jax.numpy as jnp
import loop_checks
import tpu

from jspec.bench import machine, measurement, report
from jspec.bench.measure import BenchSetup, CaseResult
from jspec.bench.presets import PRESETS, block_draft, eagle_head, gemma4_assistant, gpt_oss_head, mtp_heads
from jspec.core import sharding
from jspec.core.types import Drafter, Params
from jspec.drafters import Adaptive, Block, Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Pruned, Standalone, Suffix
from jspec.models import Deepseek, Gemma4, GptOss, Llama
from jspec.models.assistant import Assistant
from jspec.models.decoder import Decoder
from jspec.models.deepseek import Indexer, Latent
from jspec.models.moe import Routed, Router
from jspec.models.sizes import tree_bytes

CONTEXT, BATCH, PAGE_SIZE = 16_000, 8, 64
_SIZES = {"vocab_size": 512, "hidden_size": 256, "max_length": 16_384}
_SHAPE = {**_SIZES, "intermediate_size": 512}
_LLAMA = Llama(**_SHAPE, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128)
_ROUTED = Routed(Router(count=8, chosen=2, normalize=True), width=128)
_DEEPSEEK = Deepseek(
    **_SHAPE,
    num_layers=2,
    num_heads=4,
    latent=Latent(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts=Routed(Router(count=8, chosen=2), width=128, shared_width=128),
    dense_layers=1,
)


def _shrunk(name: str, **sizes: Any) -> Any:
    """The target of a preset at these sizes."""
    return dataclasses.replace(PRESETS[name].target, **sizes)


def _gemma() -> Gemma4:
    kinds = PRESETS["gemma-4-e4b"].target
    assert isinstance(kinds, Gemma4)
    sliding, full = kinds.attention[0], kinds.attention[5]
    return dataclasses.replace(
        kinds, **_SHAPE, num_heads=4, attention=(sliding, full) * 2, shared_layers=2, per_layer_size=64
    )


TARGETS: dict[str, Decoder] = {
    "llama": _LLAMA,
    "llama-64": dataclasses.replace(_LLAMA, head_dim=64, tie_embeddings=True),
    "llama-8-heads": dataclasses.replace(_LLAMA, num_heads=8, num_kv_heads=8),
    "qwen3": dataclasses.replace(_LLAMA, qk_norm=True, tie_embeddings=True),
    "qwen3-experts": dataclasses.replace(_LLAMA, qk_norm=True, experts=_ROUTED),
    "gemma4": _gemma(),
    "deepseek": _DEEPSEEK,
    "deepseek-dsa": dataclasses.replace(
        _DEEPSEEK,
        latent=dataclasses.replace(_DEEPSEEK.latent, q_rank=128),
        experts=Routed(Router(count=8, chosen=2, sigmoid=True, normalize=True), width=128, shared_width=128),
        indexer=Indexer(heads=8, size=128, top_k=128),
    ),
    "qwen3-next": _shrunk(
        "qwen3-next",
        **_SHAPE,
        num_heads=4,
        num_kv_heads=2,
        is_full_attention=(False, True),
        state=dataclasses.replace(PRESETS["qwen3-next"].target.state, key_heads=2, value_heads=4),  # pyright: ignore
        experts=dataclasses.replace(_ROUTED, shared_width=128, shared_gate=True),
    ),
    "gpt-oss": _shrunk("gpt-oss-20b", **_SIZES, num_heads=4, num_kv_heads=2, windows=(128, None), experts=_ROUTED),
}
_TREE = {"depth": 3, "width": 4, "num_nodes": 10}
_SHAPES = {"chain": {"depth": 3}, "tree": _TREE}


def _eagle(target: Any) -> Any:
    if isinstance(target, GptOss):
        return dataclasses.replace(gpt_oss_head(target), max_length=target.max_length)
    if isinstance(target, Gemma4 | Deepseek):
        return eagle_head(_LLAMA)
    return eagle_head(target if target.experts is None else dataclasses.replace(target, experts=None))


def _block(target: Any) -> Any:
    return dataclasses.replace(block_draft(target, _eagle(target)), num_layers=1, windows=(None,), causal=(False,))


def _smaller(target: Any) -> Any:
    return dataclasses.replace(target if isinstance(target, Llama | Deepseek) else _LLAMA, num_layers=1)


def _assistant(target: Any) -> Any:
    if isinstance(target, Llama):
        sizes = {"vocab_size": target.vocab_size, "hidden_size": 128, "target_hidden_size": target.hidden_size}
        layers = {"target_layers": (0, 1, 1), "head_dims": (target.head_dim,) * 3}
        return Assistant(**sizes, **layers, intermediate_size=256, num_heads=target.num_heads)
    clusters = PRESETS["gemma-4-e4b"].assistant.clusters  # pyright: ignore[reportOptionalMemberAccess]
    return gemma4_assistant(
        target, hidden_size=128, intermediate_size=256, clusters=dataclasses.replace(clusters, count=64, chosen=16)
    )


def _adaptive(**shape: int) -> Adaptive:
    """Between plain decoding, a short chain and this shape."""
    return Adaptive([None, Eagle(depth=1), Eagle(**shape)])


def _pruned(**shape: int) -> Pruned:
    """Chains or trees of a head."""
    return Pruned(Eagle(**shape))


_KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any] | None]] = {
    "adaptive": (_adaptive, _eagle),
    "block": (Block, _block),
    "eagle": (Eagle, _eagle),
    "frozen-kv-mtp": (FrozenKvMtp, _assistant),
    "mtp": (Mtp, mtp_heads),
    "mtp-of-3-heads": (Mtp, functools.partial(mtp_heads, count=3)),
    "ngram": (Ngram, None),
    "pruned": (_pruned, _eagle),
    "standalone": (Standalone, _smaller),
    "suffix": (Suffix, None),
}
"""Drafter -> what makes it in a shape, and what makes its draft for a target."""
_ALL_PREFILLS = "v6e"
_SPLIT = {"eagle", "mtp"}
"""Drafters whose draft is split like the target."""


@dataclasses.dataclass(frozen=True)
class TpuCase:
    """A loop: the name of a target, and of a drafter with its shape.

    devices: number of devices of the target.
    """

    target: str
    drafter: str
    shape: str
    devices: int = 1

    def __str__(self) -> str:
        over = "" if self.devices == 1 else f"over-{self.devices}"
        return "-".join(part for part in (self.target, self.drafter, self.shape, over) if part != "")

    def only_loop(self, chip: str) -> bool:
        """Whether prefill is left out: each target has one for each chip, and for one chip one with each drafter.

        A tree has it, or the chain of a drafter without trees; the plain loop is a part of any.
        """
        drafters = [case.drafter for case in CASES if (case.target, case.shape) == (self.target, "tree")]
        if chip == _ALL_PREFILLS:
            return self.drafter in ("", *drafters) and self.shape != "tree"
        return self.devices > 1 or self.shape != "tree" or self.drafter != drafters[0]

    def build(self, devices: tuple[Any, ...]) -> tuple[BenchSetup, Drafter]:
        """The models, as shapes, and the bound drafter; `devices` has at least as many as the case."""
        target, placement, splits = TARGETS[self.target], None, self.drafter in _SPLIT
        kind, draft_of = _KINDS.get(self.drafter, (Plain, None))
        draft = None if draft_of is None else draft_of(target)
        if self.devices > 1:
            placement = sharding.make_placement(self.devices, None, devices)
            assert placement is not None
            placement, target = dataclasses.replace(placement, draft=splits), target.split(self.devices)
            if self.drafter == "mtp":
                draft = mtp_heads(target)  # pyright: ignore[reportArgumentType]
            elif splits:
                draft = draft.split(self.devices)
        drafter = kind(**_SHAPES.get(self.shape, {})).bind(target, draft)
        params = Params(target.param_shapes(jnp.bfloat16), draft and draft.param_shapes(jnp.bfloat16))
        options = {"tokens_per_round": 2.0, "rounds": 8, "repeats": 1, "page_size": PAGE_SIZE}
        return BenchSetup(target, params, **options, draft=draft, placement=placement), drafter


_DRAFTERS: Mapping[str, tuple[str, ...]] = {
    "llama": ("eagle", "block", "standalone", "suffix", "adaptive", "frozen-kv-mtp"),
    "llama-64": ("eagle",),
    "qwen3": ("eagle", "block"),
    "qwen3-experts": ("eagle",),
    "gemma4": ("frozen-kv-mtp", "suffix", "eagle", "block", "standalone", "adaptive"),
    "deepseek": ("standalone", "mtp", "eagle", "block", "suffix", "adaptive"),
    "deepseek-dsa": ("mtp", "eagle", "standalone", "suffix"),
    "qwen3-next": ("eagle", "mtp", "adaptive", "block", "standalone", "suffix"),
    "gpt-oss": ("eagle", "suffix", "block", "standalone", "adaptive"),
}
CASES = [
    *(
        TpuCase(target, drafter, shape)
        for target, drafters in _DRAFTERS.items()
        for drafter, shape in [("", "plain"), *itertools.product(drafters, _SHAPES)]
    ),
    *(TpuCase(target, "ngram", "chain") for target in ("llama", "gemma4", "deepseek", "qwen3-next", "gpt-oss")),
    TpuCase("deepseek", "mtp-of-3-heads", "chain"),
    *(TpuCase(target, "pruned", shape) for target in ("llama", "gemma4") for shape in _SHAPES),
    TpuCase("llama-8-heads", "", "plain", 4),
    *(TpuCase("llama-8-heads", drafter, shape, 4) for drafter in ("eagle", "standalone") for shape in _SHAPES),
    TpuCase("deepseek", "mtp", "tree", 4),
]

KNOWN: dict[tuple[str, str], str] = {
    # The indexer's keys are gathered: several arrays of one layer's keys, of which the pools have one or two layers.
    (r"deepseek-dsa-.*/v5p", "no copy of a pool"): "temporary memory",
    # The next round reads nothing of what the last one proposed.
    (r".*-pruned-.*", "donated"): "of the state are donated",
    # The pools of its keys fit the memory on the core, and XLA moves them there.
    (r"deepseek-dsa-(?!plain/v5e).*/v[56]e", "no copy of a pool"): "copy-start",
}
"""A regular expression for CASE/CHIP, check -> part of the message. Strict: what is here must fail."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A compiled case.

    problems: check -> what does not hold.
    programs: None if they do not compile.
    expected: bytes of the weights and the state on one device.
    """

    problems: Mapping[str, str]
    programs: compiled.Programs | None = None
    expected: int = 0


def case_of(name: str) -> TpuCase:
    """The case of this name."""
    (found,) = (case for case in CASES if str(case) == name)
    return found


@functools.lru_cache(maxsize=1)
def compile_for(case: TpuCase, chip: str) -> Outcome:
    """Compiles a case for a TPU and checks it."""
    return compile_on(case, tpu.devices(chip), only_loop=case.only_loop(chip))


def compile_on(case: TpuCase, devices: tuple[Any, ...], *, only_loop: bool = False) -> Outcome:
    """Compiles a case for devices without hardware, and checks it."""
    setup, drafter = case.build(devices)
    shapes = CaseResult(case.shape, BATCH, CONTEXT, floor_bytes=0, capacity=CONTEXT + 64)
    try:
        programs = compiled.compile_programs(setup, shapes, drafter, devices[0], only_loop=only_loop)
    except Exception as error:  # whatever the compiler or the lowering raises is the result
        return Outcome({"compiles": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    params, state = setup.params, programs.state
    if setup.placement is not None:
        params, state = setup.placement.local(params), setup.placement.local(state)
    expected = tree_bytes(params) + tree_bytes(state)
    return Outcome(loop_checks.problems(programs, state, expected, case.devices), programs, expected)


def known(case: TpuCase, chip: str) -> dict[str, str]:
    """The entries of `KNOWN` for a case."""
    name = f"{case}/{chip}"
    return {check: message for (part, check), message in KNOWN.items() if re.fullmatch(part, name)}


def main() -> None:
    """Compiles everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--chip", nargs="+", choices=tuple(tpu.CHIPS), default=tuple(tpu.CHIPS))
    options = parser.parse_args()
    lines = []
    for case, chip in itertools.product(CASES, options.chip):
        if options.only and not re.fullmatch(options.only, str(case)):
            continue
        outcome = compile_for(case, chip)
        print(f"{case}/{chip}: {dict(outcome.problems) or 'holds'}", flush=True)
        lines += _lines(case, chip, outcome)
        if options.json:
            measurement.write(options.json, lines)


CHECKS = "checks that fail"
"""The metric of each case."""


def _lines(case: TpuCase, chip: str, outcome: Outcome) -> list[measurement.Measurement]:
    device = f"{tpu.device(chip).device_kind} (compiled, not run)"
    environment = dataclasses.replace(machine.environment(case.devices), device=device)

    def line(metric: str, unit: str, value: float, **fields: Any) -> measurement.Measurement:
        return report.measurement(
            environment,
            "small-loops",
            case,
            **{"metric": metric, "unit": unit, "values": [value], "note": "compiled, not run", **fields},
            subject=f"small {case.target}",
            mode=f"{case.drafter} {case.shape}".strip(),
            batch=BATCH,
            context=CONTEXT,
            dtype="bfloat16",
            settings={"page_size": PAGE_SIZE, "libtpu": tpu.version()},
            command="python benchmarks/small_loops.py --json results.jsonl",
        )

    failed = outcome.problems
    note = "; ".join(f"{check}: {message}" for check, message in failed.items()) or "compiled, not run"
    made = [line(CHECKS, "", len(failed), note=note)]
    if outcome.programs is not None:
        programs, arguments = outcome.programs, compiled.memory_of(outcome.programs.decode).arguments
        made.append(line("arguments of decode", "bytes", arguments, expected=outcome.expected))
        for name, seconds in programs.seconds.items():
            made.append(line(f"compiling {name}", "s", round(seconds, 1)))
            temporary = compiled.memory_of(getattr(programs, name)).temporary
            made.append(line(f"temporary memory of {name}", "bytes", temporary))
    return made


if __name__ == "__main__":
    main()
