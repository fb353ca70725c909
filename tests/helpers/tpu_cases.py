"""Loops to compile for TPUs that are not there: small models of every family, with heads as wide as real ones.

Heads of 64 and more let the TPU's kernels run. The pools are larger than everything else, so a copy of one shows in the
memory of a program, and larger than the memory on the core, into which XLA may move smaller ones and back in each
round. `python tests/helpers/tpu_cases.py` compiles all of them for all chips and prints what does not hold; `--json
FILE` writes it as measurements.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec.bench import compiled, machine, measurement, report, tpu
from jspec.bench.measure import BenchSetup, CaseResult
from jspec.bench.presets import PRESETS, block_draft, eagle_head, gemma4_assistant, mtp_heads
from jspec.core.types import Drafter, Params
from jspec.drafters import Block, Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone, Suffix
from jspec.models import Deepseek, Gemma4, Llama
from jspec.models.decoder import Decoder
from jspec.models.deepseek import Indexer, Latent
from jspec.models.moe import Routed
from jspec.models.router import Router
from jspec.models.sizes import tree_bytes

CONTEXT, BATCH = 16_000, 8
_SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "max_length": 16_384}
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
    return dataclasses.replace(PRESETS[name].target, **_SHAPE, **sizes)


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
        num_heads=4,
        num_kv_heads=2,
        is_full_attention=(False, True),
        state=dataclasses.replace(PRESETS["qwen3-next"].target.state, key_heads=2, value_heads=4),  # pyright: ignore
        experts=dataclasses.replace(_ROUTED, shared_width=128, shared_gate=True),
    ),
}
_TREE = {"depth": 3, "width": 4, "num_nodes": 10}
_SHAPES = {"chain": {"depth": 3}, "tree": _TREE}


def _eagle(target: Any) -> Any:
    return eagle_head(target if target.experts is None else dataclasses.replace(target, experts=None))


def _block(target: Any) -> Any:
    return dataclasses.replace(block_draft(target, _eagle(target)), num_layers=1, windows=(None,), causal=(False,))


def _smaller(target: Any) -> Any:
    return dataclasses.replace(target, num_layers=1)


def _assistant(target: Any) -> Any:
    clusters = PRESETS["gemma-4-e4b"].assistant.clusters  # pyright: ignore[reportOptionalMemberAccess]
    return gemma4_assistant(
        target, hidden_size=128, intermediate_size=256, clusters=dataclasses.replace(clusters, count=64, chosen=16)
    )


_KINDS: dict[str, tuple[Any, Any]] = {
    "eagle": (Eagle, _eagle),
    "block": (Block, _block),
    "standalone": (Standalone, _smaller),
    "frozen-kv-mtp": (FrozenKvMtp, _assistant),
    "mtp": (Mtp, mtp_heads),
    "ngram": (Ngram, None),
    "suffix": (Suffix, None),
}
"""Drafter -> its class, and what makes its draft for a target."""
_DRAFTERS = {
    "llama": ("eagle", "block", "standalone", "suffix"),
    "llama-64": ("eagle",),
    "qwen3": ("eagle", "block"),
    "qwen3-experts": ("eagle",),
    "gemma4": ("frozen-kv-mtp", "suffix"),
    "deepseek": ("standalone", "mtp"),
    "deepseek-dsa": ("mtp",),
    "qwen3-next": ("eagle", "mtp"),
}


@dataclasses.dataclass(frozen=True)
class TpuCase:
    """A loop: the name of a target, and of a drafter with its shape."""

    target: str
    drafter: str
    shape: str

    def __str__(self) -> str:
        return "-".join(part for part in (self.target, self.drafter, self.shape) if part != "")

    def build(self) -> tuple[BenchSetup, Drafter]:
        """The models, as shapes, and the bound drafter."""
        target = TARGETS[self.target]
        kind, draft_of = _KINDS.get(self.drafter, (Plain, None))
        draft = draft_of and draft_of(target)
        drafter = kind(**_SHAPES.get(self.shape, {})).bind(target, draft)
        params = Params(target.param_shapes(jnp.bfloat16), draft and draft.param_shapes(jnp.bfloat16))
        options = {"tokens_per_round": 2.0, "rounds": 8, "repeats": 1, "page_size": 64, "draft": draft}
        return BenchSetup(target, params, **options), drafter


CASES = [
    TpuCase(target, drafter, shape)
    for target, drafters in _DRAFTERS.items()
    for drafter, shape in [("", "plain"), *itertools.product(drafters, _SHAPES)]
] + [TpuCase("llama", "ngram", "chain")]

KNOWN: dict[tuple[str, str], str] = {
    # XLA pads the pool to 128 columns where it enters and leaves the program.
    (r"llama-64-.*", "no copy of a pool"): "copy of",
    # Something else takes as much.
    (r"deepseek-dsa-mtp-chain/v5p", "no copy of a pool"): "temporary memory",
}
"""A regular expression for CASE/CHIP, check -> part of the message. Strict: what is here must fail."""


@functools.cache
def compile_for(case: TpuCase, chip: str) -> tuple[compiled.Programs, int]:
    """The programs of a case, and the bytes of weights and state."""
    setup, drafter = case.build()
    shapes = CaseResult(case.shape, BATCH, CONTEXT, floor_bytes=0, capacity=CONTEXT + 64)
    programs = compiled.compile_programs(setup, shapes, drafter, tpu.device(chip))
    return programs, tree_bytes(setup.params) + tree_bytes(programs.state)


def problems(case: TpuCase, chip: str) -> dict[str, str]:
    """Check -> what does not hold, for one case."""
    try:
        programs, expected = compile_for(case, chip)
    except Exception as error:  # whatever the compiler or the lowering raises is the result
        return {"compiles": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    text = programs.decode.as_text() or ""
    loop = compiled.loop_lines(text)
    found = {
        "one loop": "" if len(loop) > 100 else f"the loop has {len(loop)} operations",
        "no host transfer": _named(text.splitlines(), _HOST),
        "no sort": _named(loop, {"sort"}),
        "no copy of a pool": _pool_copies(text, programs.state) or _pool_memory(programs),
        "donated": _not_donated(text, programs.state),
        "no copy of a weight": _weight_copies(text),
        "memory": _unexpected(programs.decode, expected),
    }
    return {check: message for check, message in found.items() if message}


_HOST = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
_NAMES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32", "uint32": "u32", "int8": "s8", "bool": "pred"}
_MOVES = {
    "copy",
    "copy-start",
    "copy-done",
    "transpose",
    "pad",
    "slice",
    "concatenate",
    "convert",
    "gather",
    "broadcast",
}


def _opcode(line: str) -> str | None:
    found = re.search(r" = .*?[\]})] ([a-z][a-z0-9-]*)\(", line)
    return found[1] if found else None


def _named(lines: list[str], opcodes: set[str]) -> str:
    found = collections.Counter(opcode for line in lines if (opcode := _opcode(line)) in opcodes)
    return ", ".join(f"{count} x {opcode}" for opcode, count in sorted(found.items()))


def pools(state: Any) -> list[Any]:
    """The largest arrays of a state: those of its caches that are as long as the context."""
    return [leaf for leaf in jax.tree.leaves((state.cache, state.draft)) if leaf.size * leaf.dtype.itemsize > 2**24]


def _pool_copies(text: str, state: Any) -> str:
    """Operations, anywhere in the program, whose result has the shape of a pool, and which move it."""
    found = set()
    for pool in pools(state):
        shape = f"{_NAMES[str(pool.dtype)]}[{','.join(map(str, pool.shape))}]"
        for line in text.splitlines():
            if re.search(rf" = \(?{re.escape(shape)}", line) and _opcode(line) in _MOVES:
                found.add(f"{_opcode(line)} of {shape}")
    return ", ".join(sorted(found))


def _pool_memory(programs: compiled.Programs) -> str:
    """Whether the temporary memory of the loop has room for a copy of the smallest pool."""
    sizes = [pool.size * pool.dtype.itemsize for pool in pools(programs.state)]
    temporary = compiled.memory_of(programs.decode).temporary
    return f"{temporary:,} bytes of temporary memory; a pool has {min(sizes):,}" if temporary >= min(sizes) else ""


def _not_donated(text: str, state: Any) -> str:
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", text)
    count = len(re.findall(r"\(\d+, \{\}", aliases[1])) if aliases else 0
    leaves = len(jax.tree.leaves(state))
    return "" if count == leaves else f"{count} of {leaves} arrays of the state are donated"


def _weight_copies(text: str) -> str:
    """Copies before the loop."""
    entry = text[text.index("\nENTRY ") :].split("\n}\n")[0].splitlines()
    matrices = [line for line in entry if _opcode(line) == "copy" and re.search(r" = \w+\[\d{3,},\d{3,}\]", line)]
    return f"{len(matrices)} matrices are copied" if matrices else ""


def _unexpected(program: Any, expected: int) -> str:
    actual = compiled.memory_of(program).arguments
    close = abs(actual - expected) <= 0.1 * expected
    return "" if close else f"arguments take {actual:,} bytes; {expected:,} by arithmetic"


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
        found = problems(case, chip)
        print(f"{case}/{chip}: {found or 'holds'}", flush=True)
        lines.append(_line(case, chip, found))
        if options.json:
            measurement.write(options.json, lines)
        compile_for.cache_clear()


def _line(case: TpuCase, chip: str, found: dict[str, str]) -> measurement.Measurement:
    device = f"{tpu.device(chip).device_kind} (compiled, not run)"
    environment = dataclasses.replace(machine.environment(), device=device)
    return report.measurement(
        environment,
        "small-loops",
        case,
        metric="checks that fail",
        unit="",
        values=[len(found)],
        subject=f"small {case.target}",
        mode=f"{case.drafter} {case.shape}".strip(),
        batch=BATCH,
        context=CONTEXT,
        dtype="bfloat16",
        settings={"libtpu": tpu.version()},
        command="python tests/helpers/tpu_cases.py",
        note="; ".join(f"{check}: {message}" for check, message in found.items()) or "compiled, not run",
    )


if __name__ == "__main__":
    main()
