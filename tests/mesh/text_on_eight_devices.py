"""The text of an engine's rounds over several devices.

test_mesh.py runs this test in a process with eight CPU devices.
"""

import re

import jax
import on_eight_devices as split
import pytest
import tiny_targets as tiny
from hlo import check_in_place, opcode

import jspec
from jspec.drafters import Standalone
from jspec.runner import programs

TEXT_AS_SHIPPED = True
directories, load = split.directories, split.load


@pytest.mark.slow
def test_rounds_over_devices_copy_no_pool(load):
    """One loop, with its communication; outputs reuse the pools."""
    found, model = [], load("tied", "draft of tied", 4, True)

    program = programs.burst.variant(devices=4)

    def keep(*args, **static):
        found.append(program.lower(*args, **static).compile().as_text())
        return program(*args, **static)

    keep.lower = program.lower
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs.burst, "variant", lambda **options: keep)
        sizes = dict(slots=3, context=48, page_size=4, pages=23, prefill_tokens=16)
        with jspec.Engine(model, drafter=Standalone(**tiny.TREE), **sizes) as engine:
            leaves = jax.tree.leaves(engine.groups[0].device.runner.state)
            pools = [x.addressable_shards[0].data.shape for x in leaves if x.ndim == 6]
            engine.generate([[1, 2, 3]], max_new_tokens=4)
    lines = found[0].splitlines()
    opcodes = [opcode(line) for line in lines]
    assert opcodes.count("while") == 1 and "all-reduce" in opcodes
    shapes = [f"f32[{','.join(map(str, shape))}]" for shape in pools]
    assert len(shapes) >= 2
    for shape in set(shapes):
        check_in_place(lines, shape, writes=shapes.count(shape))
    assert len(re.findall("(?:may|must)-alias", lines[0])) == len(leaves) - len(pools)
