"""The checks of loops that are compiled for TPUs, on the text of a program: each can fail, and on its own."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import loop_checks
import pytest
from compiled import Programs

from jspec.bench import launches

POOL = "bf16[2,2,256,64,2,128]"
POOL_BYTES = 2 * 2 * 256 * 64 * 2 * 128 * 2
LOOP = [
    f'  %kernel.1 = {POOL}{{5,4,3,2,1,0:T(2,128)(2,1)}} custom-call(%p.1), custom_call_target="tpu_custom_call"',
    *(f"  %add.{i} = f32[8,256]{{1,0:T(8,128)}} add(%x.{i}, %y.{i})" for i in range(120)),
]
ENTRY = [
    "  %weights.1 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)",
    "  %copy.1 = s32[8,16]{1,0:T(8,128)} copy(%table.1)",
    f"  ROOT %while.1 = ({POOL}{{5,4,3,2,1,0}}, s32[8]{{0}}) while(%tuple.1), condition=%cond, body=%body",
]
ALIASES = "{0}: (0, {}, may-alias), {1}: (1, {}, may-alias)"


class State(NamedTuple):
    """A pool, and an array that is none."""

    cache: jax.ShapeDtypeStruct
    draft: jax.ShapeDtypeStruct


STATE = State(
    jax.ShapeDtypeStruct((2, 2, 256, 64, 2, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((8,), jnp.int32),
)


def problems(loop=(), entry=(), aliases=ALIASES, arguments=10**9, temporary=0, devices=1, count=None):
    """What does not hold of a program with these operations in addition."""
    head = f"HloModule decode, input_output_alias={{ {aliases} }}, entry_computation_layout={{(f32[])->f32[]}}"
    lines = [head, "", "%body (t: f32[2]) -> f32[2] {", *LOOP[:count], *loop, "}", ""]
    text = "\n".join([*lines, "ENTRY %main (a: f32[2]) -> f32[2] {", *entry, *ENTRY, "}", ""])
    memory = types.SimpleNamespace(argument_size_in_bytes=arguments, temp_size_in_bytes=temporary)
    program = types.SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory)
    return loop_checks.problems(Programs(None, program, {}, None), STATE, 10**9, devices)


SUM = "  %all-reduce.1 = f32[8,256]{1,0:T(8,128)} all-reduce(%x.1), to_apply=%add"


def test_all_checks_hold():
    assert problems() == {}
    assert problems([SUM], devices=4) == {}
    assert problems(arguments=1.09 * 10**9, temporary=POOL_BYTES - 1) == {}


@pytest.mark.parametrize(
    ("change", "check", "message"),
    (
        ({"count": 20}, "one loop", "the loop has 22 operations"),
        ({"entry": ["  %o.1 = token[] outfeed(%x.1)"]}, "no host transfer", None),
        ({"entry": ["  %o.1 = (f32[8]{0}, u32[], token[]) send(%x.1, %t.1)"]}, "no host transfer", "1 x send"),
        ({"loop": ["  %s.1 = (f32[8,512]{1,0}, s32[8,512]{1,0}) sort(%x.1, %y.1)"]}, "no sort", "1 x sort"),
        ({"loop": [SUM]}, "sums over devices in the loop", "1 x all-reduce"),
        ({"devices": 4}, "sums over devices in the loop", "none"),
        ({"entry": [SUM], "devices": 4}, "sums over devices in the loop", "none"),
        ({"loop": [f"  %c.1 = {POOL}{{5,4,3,2,1,0}} copy(%p.1)"]}, "no copy of a pool", f"copy of {POOL}"),
        ({"entry": [f"  %c.1 = ({POOL}{{5,4}}, u32[]{{}}) copy-start(%p.1)"]}, "no copy of a pool", "copy-start of"),
        ({"temporary": POOL_BYTES}, "no copy of a pool", "bytes of temporary memory; a pool has 33,554,432"),
        ({"aliases": "{0}: (0, {}, may-alias)"}, "donated", "1 of 2 arrays"),
        ({"aliases": ""}, "donated", "0 of 2 arrays"),
        ({"entry": ["  %c.1 = bf16[512,256]{0,1:T(8,128)} copy(%weights.1)"]}, "no copy of a weight", "1 matrices"),
        ({"arguments": 1.11 * 10**9}, "memory", "1,000,000,000 by arithmetic"),
        ({"arguments": 0.89 * 10**9}, "memory", "by arithmetic"),
    ),
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_check_fails_alone(change, check, message):
    found = problems(**change)
    assert found.keys() == {check} and (message or "") in found[check]


@pytest.mark.parametrize(
    ("thunks", "message"),
    (
        ("000: kCommandBuffer [source]\n    001: kCustomKernel\n    002: kWhile\n        003: kWhile", ""),
        ("000: kWhile [source]\n    001: kCommandBuffer", "['kWhile'], and inside of these ['kCommandBuffer']"),
        ("000: kCommandBuffer\n    001: kWhile\n002: kMemcpy", "['kCommandBuffer', 'kMemcpy']"),
        ("000: kCommandBuffer\n    001: kCustomKernel", "inside of these ['kCustomKernel']"),
    ),
)
def test_a_loop_is_one_graph(thunks, message):
    problem = launches.problem(thunks)
    assert message in problem and bool(message) == bool(problem)
