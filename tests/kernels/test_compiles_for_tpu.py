"""The compiler of TPUs takes every TPU kernel at real shapes, and its programs copy no pool."""

import jax
import pytest
from tpu_compiler import TOPOLOGIES, compile_for, needs_libtpu

from pallas_kernels.delta_rule import mosaic_tpu as delta
from pallas_kernels.kv_compact import mosaic_tpu as compaction
from pallas_kernels.mla_attention import mosaic_tpu as latent_attention
from pallas_kernels.paged_attention import mosaic_tpu as attention
from pallas_kernels.topk import mosaic_tpu as best

pytestmark = needs_libtpu
generations = pytest.mark.parametrize("generation", TOPOLOGIES)
new = jax.ShapeDtypeStruct


def copies_a_pool(compiled, pool) -> bool:
    """Whether temporary buffers have room for the pool."""
    return compiled.memory_analysis().temp_size_in_bytes >= pool.size * pool.dtype.itemsize


HEADS = {
    "llama_8b": (32, 8, 128),
    "qwen3_30b": (32, 4, 128),
    "gemma_4b": (8, 4, 256),
    "qwen3_next": (16, 2, 256),
    "gemma4_global": (32, 4, 512),
}
"""Query heads, key heads and head dimensions of models."""
ROUNDS = {
    "decode": {"nodes": 1},
    "chain": {"nodes": 6},
    "tree": {"nodes": 32, "batch": 8, "tree": True},
    "windows": {"nodes": 6, "tree": True, "windows": True, "soft_cap": 50.0},
    "chunk": {"nodes": 512},
    "draft_step": {"nodes": 1, "rows": 8, "tree": True},
}


def attention_program(
    heads, dtype, page_size, nodes, rows=0, batch=1, tree=False, windows=False, keep_first=0, soft_cap=None
):
    """A call of the kernel at these shapes, and its arguments."""
    query_heads, kv_heads, dim = heads
    own = new((batch, rows or nodes, kv_heads, dim), dtype)
    pool = new((8, 2, 4096 // page_size, page_size, kv_heads, dim), dtype)
    mask = new((batch, nodes, rows or nodes), "bool") if tree else None
    starts = new((batch, nodes), "int32") if windows else None
    table = new((batch, 4096 // page_size // batch), "int32")

    def run(starts, *args):
        options = {"layer": 3, "scale": 0.1, "soft_cap": soft_cap, "prefix_start": starts, "keep_first": keep_first}
        return attention.paged_attention(*args, **options, interpret=False)

    q, length = new((batch, nodes, query_heads, dim), dtype), new((batch,), "int32")
    return run, (starts, q, own, own, pool, table, length, mask)


POINTS = [
    (model, name, (16, 64)[(i + j) % 2], tuple(TOPOLOGIES)[(i + j) % 3])
    for i, model in enumerate(HEADS)
    for j, name in enumerate(ROUNDS)
]
"""All models and rounds, with page sizes and generations in turn."""


@pytest.mark.parametrize(("model", "name", "page_size", "generation"), POINTS)
def test_attention_compiles_and_copies_no_pool(model, name, page_size, generation):
    run, args = attention_program(HEADS[model], "bfloat16", page_size, **ROUNDS[name])
    assert not copies_a_pool(compile_for(generation, run, *args), args[4])


@pytest.mark.parametrize("name", ("windows", "draft_step"))
def test_attention_to_a_window_and_the_first_positions(name):
    shape = {**ROUNDS[name], "windows": True, "keep_first": 4}
    run, args = attention_program(HEADS["llama_8b"], "bfloat16", 64, **shape)
    assert not copies_a_pool(compile_for(next(iter(TOPOLOGIES)), run, *args), args[4])


@generations
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("heads", ((32, 8, 64), (9, 3, 64), (4, 1, 256), (8, 8, 96), (8, 1, 512), (6, 3, 128)), ids=str)
def test_attention_whose_pool_has_another_layout_outside(heads, dtype, generation):
    """The program pads the pool where it enters."""
    run, args = attention_program(heads, dtype, 16, nodes=6, tree=True)
    compile_for(generation, run, *args)


LATENT_ROUNDS = {
    "decode": {"nodes": 1},
    "chain": {"nodes": 6},
    "tree": {"nodes": 32, "batch": 4, "tree": True},
    "selected": {"nodes": 6, "tree": True, "selected": True},
    "chunk": {"nodes": 512, "heads": 16},
    "selected_chunk": {"nodes": 512, "heads": 16, "selected": True},
    "float32": {"nodes": 6, "heads": 16, "dtype": "float32"},
    "unpadded": {"nodes": 6, "rope": 64},
}


def latent_program(nodes, batch=1, heads=128, rope=128, dtype="bfloat16", page_size=16, tree=False, selected=False):
    """A call of the kernel at the size of DeepSeek-V3, whose rows are padded to 640 elements, and its arguments."""
    latent, pages = 512, 4096 // batch // page_size
    queries = [new((batch, nodes, heads, size), dtype) for size in (latent, rope)]
    pool = new((8, 1, 4096 // page_size, page_size, latent + rope), dtype)
    mask = new((batch, nodes, nodes), "bool") if tree else None
    seen = new((batch, nodes, pages * page_size), "bool") if selected else None
    table, length = new((batch, pages), "int32"), new((batch,), "int32")

    def run(seen, *args):
        return latent_attention.mla_attention(*args, layer=3, scale=0.1, prefix_mask=seen, interpret=False)

    return run, (seen, *queries, new((batch, nodes, latent + rope), dtype), pool, table, length, mask)


@generations
@pytest.mark.parametrize("name", LATENT_ROUNDS)
def test_latent_attention_compiles_and_copies_no_pool(name, generation):
    options = LATENT_ROUNDS[name]
    run, args = latent_program(**options)
    compiled = compile_for(generation, run, *args)
    if options.get("rope") is None and options["nodes"] < 512:
        assert not copies_a_pool(compiled, args[4])


@generations
@pytest.mark.parametrize(
    ("shape", "k", "dtype"),
    (
        ((1, 128256), 8, "float32"),
        ((6, 151936), 1, "float32"),
        ((8, 151936), 64, "bfloat16"),
        ((13, 262144), 128, "float32"),
        ((256, 128), 8, "bfloat16"),
        ((2, 3, 17), 4, "float32"),
    ),
    ids=str,
)
def test_topk(shape, k, dtype, generation):
    text = compile_for(generation, lambda x: best.topk(x, k, interpret=False), new(shape, dtype)).as_text()
    assert "sort" not in text


@generations
@pytest.mark.parametrize(("nodes", "batch"), ((2, 1), (6, 8), (32, 8), (64, 1)))
def test_the_delta_rule_compiles(nodes, batch, generation):
    """At the size of Qwen3-Next."""
    sizes = ((32, 128, 128), (nodes, 16, 128), (nodes, 16, 128), (nodes, 32, 128), (nodes, 32), (nodes, 32))
    arrays = [new((batch, *size), "float32") for size in sizes]
    masks = new((batch, nodes, nodes), "bool"), None, new((batch,), "bool")
    compile_for(generation, lambda *args: delta.tree_delta_rule(*args, interpret=False), *arrays, *masks)


@generations
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize(
    "row", ((8, 128), (4, 256), (2, 256), (4, 512), (8, 64), (1, 256), (3, 64), (640,), (128,), (576,)), ids=str
)
def test_compaction_compiles_in_place(row, dtype, generation):
    parts, page_size = len(row), 16
    pool = new((8, parts, 256, page_size, *row), dtype)
    rows, table, count = (new((4, 6, *row), dtype),) * 8 * parts, new((4, 64), "int32"), new((4,), "int32")

    def run(pool, table, start, length, *rows):
        return compaction.kv_compact(pool, rows, table, start, None, length, interpret=False)

    compiled = compile_for(generation, run, pool, table, count, count, *rows, donate=(0,))
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.size * pool.dtype.itemsize
    if row[-1] % 128 == 0 and row[0] > 1:
        assert not copies_a_pool(compiled, pool)
