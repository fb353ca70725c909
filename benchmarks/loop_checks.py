"""What holds of a loop that is compiled for a TPU: checks of its text and of its memory."""

import collections
import re
from collections.abc import Collection, Sequence
from typing import Any

import compiled
import jax
from compiled import Programs

from jspec.bench import launches

_HOST = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
_SUMS = {"all-reduce", "all-reduce-start"}
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


def problems(programs: Programs, state: Any, expected: int, devices: int) -> dict[str, str]:
    """Check -> what does not hold.

    state: the shapes of the state on one device. expected: bytes of the weights and the state on one device.
    devices: over which the loop runs.
    """
    text = programs.decode.as_text() or ""
    loop, prefill = compiled.loop_lines(text), programs.prefill and programs.prefill.as_text() or ""
    problems = {
        "one loop": "" if len(loop) > 100 else f"the loop has {len(loop)} operations",
        "one graph": launches.problem(programs.launches) if programs.launches else "",
        "no host transfer": _named([*text.splitlines(), *prefill.splitlines()], _HOST),
        "no sort": _named(loop, {"sort"}),
        "sums over devices in the loop": ""
        if bool(_named(loop, _SUMS)) == (devices > 1)
        else _named(loop, _SUMS) or "none",
        "no copy of a pool": _pool_copies(text, state) or _pool_memory(programs, state),
        "donated": _not_donated(text, state),
        "no copy of a weight": _weight_copies(text),
        "memory": _unexpected(programs.decode, expected),
    }
    return {check: message for check, message in problems.items() if message}


def _opcode(line: str) -> str | None:
    match = re.search(r" = .*?[\]})] ([a-z][a-z0-9-]*)\(", line)
    return match[1] if match else None


def _named(lines: Sequence[str], opcodes: Collection[str]) -> str:
    counts = collections.Counter(opcode for line in lines if (opcode := _opcode(line)) in opcodes)
    return ", ".join(f"{count} x {opcode}" for opcode, count in sorted(counts.items()))


def pools(state: Any) -> list[Any]:
    """The largest arrays of a state: those of its caches that are as long as the context."""
    return [leaf for leaf in jax.tree.leaves((state.cache, state.draft)) if leaf.size * leaf.dtype.itemsize > 2**24]


def _pool_copies(text: str, state: Any) -> str:
    """Operations, anywhere in the program, whose result has the shape of a pool, and which move it."""
    moves = set()
    for pool in pools(state):
        shape = f"{_NAMES[str(pool.dtype)]}[{','.join(map(str, pool.shape))}]"
        for line in text.splitlines():
            if re.search(rf" = \(?{re.escape(shape)}", line) and _opcode(line) in _MOVES:
                moves.add(f"{_opcode(line)} of {shape}")
    return ", ".join(sorted(moves))


def _pool_memory(programs: Programs, state: Any) -> str:
    """Whether the temporary memory of the loop has room for a copy of the smallest pool."""
    sizes = [pool.size * pool.dtype.itemsize for pool in pools(state)]
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
