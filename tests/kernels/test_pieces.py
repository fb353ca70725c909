"""Attention to rows that all sequences share: prompts cut into pieces, each a sequence of the batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import FAST_COMPILE, each_backend, interpreted
from crosslower import cross_lower

from pallas_kernels import exact_attention, paged_attention
from pallas_kernels.exact_attention import triton as exact_triton
from pallas_kernels.paged_attention import mosaic_tpu
from pallas_kernels.paged_attention import triton as paged_triton

SIZE, HEADS, KV_HEADS, DIM, PAGE, PAGES = 16, 4, 2, 32, 8, 10
PREFIX = (0, 30, 64, 5)
COUNT = (40, 7, 16, 33)
FIRST = np.repeat([0, 3, 4, 5, 8], [3, 1, 1, 3, 1])
"""The first piece of each piece's prompt; the last piece is padding."""
PROMPT = np.repeat([0, 1, 2, 3, 3], [3, 1, 1, 3, 1])
WINDOW = 20


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def text(request):
    """Queries, keys and values of each prompt, and a pool of pages in any order, NaN where nothing is committed."""
    rng = np.random.default_rng(0)

    def new(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(request.param))

    prompts = [(new(c, HEADS, DIM), new(c, KV_HEADS, DIM), new(c, KV_HEADS, DIM)) for c in COUNT]
    pool = np.full((1, 2, len(PREFIX) * PAGES, PAGE, KV_HEADS, DIM), np.nan, jnp.dtype(request.param))
    table = rng.permutation(len(PREFIX) * PAGES).reshape(len(PREFIX), PAGES)
    for pages, length in zip(table, PREFIX, strict=True):
        position = np.arange(length)
        pool[0, :, pages[position // PAGE], position % PAGE] = new(length, 2, KV_HEADS, DIM)
    return prompts, pool, table


def packed(parts):
    """The rows of prompts in pieces, [V * SIZE, ...]; the last piece is NaN, as a prompt of someone else might be."""
    rows = [np.pad(x, ((0, -len(x) % SIZE), (0, 0), (0, 0))) for x in parts]
    return np.concatenate([*rows, np.full((SIZE, *parts[0].shape[1:]), np.nan, parts[0].dtype)])


def arrays(text):
    prompts, pool, table = text
    q, k, v = (packed(parts) for parts in zip(*prompts, strict=True))
    q = np.nan_to_num(q.reshape(len(FIRST), SIZE, HEADS, DIM))
    prefix = np.array([*PREFIX, 0])[np.searchsorted([0, 3, 4, 5, 8], FIRST)]
    return (q, k[None], v[None], pool, table[PROMPT], prefix)


def compiled(function, backend):
    return jax.jit(function, compiler_options=FAST_COMPILE if interpreted(backend) else None)


def prompts_of(out):
    """The results of each prompt's tokens."""
    rows = np.asarray(out.astype(jnp.float32)).reshape(-1, HEADS, DIM)
    return [rows[first * SIZE :][:count] for first, count in zip((0, 3, 4, 5), COUNT, strict=True)]


OPTIONS = [{}, {"windows": True}, {"sinks": True, "soft_cap": 5.0}]


@pytest.mark.slow(unless=("xla", "float32-options0-triton"))
@each_backend(paged_attention.OPERATION)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_prompt_in_pieces_is_read_as_alone(text, options, backend):
    prompts, pool, table = text
    options = {"layer": 0, "scale": 0.2, "soft_cap": options.get("soft_cap")} | options
    windows, sinks = options.pop("windows", False), options.pop("sinks", False)
    if sinks:
        options["sinks"] = jnp.linspace(-1, 1, HEADS)
    q, *others = arrays(text)
    row = np.arange(len(FIRST) * SIZE).reshape(len(FIRST), SIZE)
    first = np.broadcast_to(FIRST[:, None] * SIZE, row.shape)
    more = {}
    if windows:
        position = others[-1][:, None] + row - first
        more["prefix_start"] = np.maximum(position - WINDOW + 1, 0)
        first = np.maximum(first, row - WINDOW + 1)
    attend = partial(paged_attention.paged_attention, **options, backend=backend)
    xla = partial(paged_attention.paged_attention, **options, backend="xla")
    plain = jax.jit(lambda args, more: xla(*args, **more))
    out = compiled(lambda args, more: attend(*args, None, **more), backend)((q, *others), more | {"first_row": first})
    for index, (alone, result) in enumerate(zip(prompts, prompts_of(out), strict=True)):
        q, k, v = (x[None] for x in alone)
        node, mask, more = np.arange(q.shape[1]), None, {}
        if windows:
            mask = ((node <= node[:, None]) & (node > node[:, None] - WINDOW))[None]
            more = {"prefix_start": np.maximum(PREFIX[index] + node - WINDOW + 1, 0)[None]}
        args = q, k, v, pool, table[index : index + 1], np.array(PREFIX[index : index + 1]), mask
        expected = plain(args, more)
        tolerance = 2e-2 if q.dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(result, expected.astype(jnp.float32)[0], rtol=0, atol=tolerance)


@pytest.mark.slow
@each_backend(exact_attention.OPERATION)
@pytest.mark.parametrize("options", OPTIONS)
def test_pieces_change_no_bit(text, options, backend):
    prompts, pool, table = text
    options = {"layer": 0, "scale": 0.2, "soft_cap": options.get("soft_cap")} | options
    if options.pop("windows", False):
        options["window"] = WINDOW
    if options.pop("sinks", False):
        options["sinks"] = jnp.linspace(-1, 1, HEADS)
    exact = partial(exact_attention.exact_attention, **options, backend=backend)
    attend = compiled(lambda *args: exact(*args[:7], first_row=args[7] if args[7:] else None), backend)
    q, *others = arrays(text)
    results = prompts_of(attend(q, *others, None, FIRST * SIZE))
    # One token of each prompt alone sees all rows before it by a mask.
    seen = np.arange(len(FIRST) * SIZE)[None, None]
    mask = (seen >= 5 * SIZE) & (seen <= 5 * SIZE + 32)
    last = attend(q[7:8, :1], *others[:3], table[3:4], np.array(PREFIX[3:]), mask)
    np.testing.assert_array_equal(last[0, 0].astype(jnp.float32), results[3][32])
    for index, (alone, result) in enumerate(zip(prompts, results, strict=True)):
        q, k, v = (x[None] for x in alone)
        expected = attend(q, k, v, pool, table[index : index + 1], np.array(PREFIX[index : index + 1]), None)
        np.testing.assert_array_equal(result, expected.astype(jnp.float32)[0])


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_is_compiled_for_accelerators(platform, windows):
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    number = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows, pool = shape((1, 1024, 8, 128)), shape((2, 2, 100, 64, 8, 128))
    args = shape((32, 32, 32, 128)), rows, rows, pool, number((32, 32)), number((32,)), None
    module = {"cuda": paged_triton, "tpu": mosaic_tpu}[platform]
    run = partial(module.paged_attention, layer=1, scale=0.1, interpret=False)
    more = {"first_row": number((32, 32))} | ({"prefix_start": number((32, 32))} if windows else {})
    text = cross_lower(lambda args, more: run(*args, **more), platform, args, more)
    assert "paged_attention" in text
    if platform == "cuda":
        run = partial(exact_triton.exact_attention, layer=1, scale=0.1, interpret=False, window=64 if windows else None)
        text = cross_lower(lambda *args: run(*args[:7], first_row=args[7]), platform, *args, number((32,)))
        assert "exact_attention" in text


@pytest.mark.parametrize(("rows", "masked"), [((1, 31), False), ((2, 32), False), ((1, 32), True)])
def test_rows_of_pieces_must_fit(rows, masked):
    q, k = jnp.zeros((2, 16, 4, 32)), jnp.zeros((*rows, 2, 32))
    mask, first = jnp.ones((2, 16, 32), bool) if masked else None, jnp.zeros((2, 16), jnp.int32)
    with pytest.raises(ValueError, match=r"requires no mask, and k_rows \(.*\) of the shape \(1, 32\)"):
        paged_attention.paged_attention(q, k, k, None, None, None, mask, layer=0, scale=1.0, first_row=first)
