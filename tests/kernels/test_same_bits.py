"""Exact operations give a token the same bits, whatever is computed beside it."""

import dataclasses
import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import FAST_COMPILE, HERE, each_backend, interpreted, skip_interpreted
from cases import ATTENTION_CASES, Case, attention_inputs, normal, page_table, pool, rng_of, tree_mask
from crosslower import cross_lower

from pallas_kernels import exact_attention, exact_matmul, grouped_matmul, parts, split_heads
from pallas_kernels.attention import BLOCK, SEGMENT
from pallas_kernels.exact_attention import triton as attention_triton
from pallas_kernels.exact_matmul import triton as matmul_triton
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.residual_norm import OPERATION as NORM
from pallas_kernels.residual_norm import residual_norm

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def jitted(function, backend):
    return jax.jit(function, compiler_options=FAST_COMPILE if interpreted(backend) else None)


def same_bits(a, b):
    kind = {2: np.uint16, 4: np.uint32}[np.asarray(a).dtype.itemsize]
    return np.array_equal(np.asarray(a).view(kind), np.asarray(b).view(kind))


# Attention against paged attention


def test_a_narrow_pool_is_an_error():
    *args, mask = attention_inputs(Case("narrow", stored="float8_e4m3fn", tree=True))
    with pytest.raises(ValueError, match="pool is float8_e4m3fn: must be float32, as q"):
        jax.eval_shape(partial(exact_attention.exact_attention, layer=0, scale=1.0), *args, mask)


@pytest.mark.slow(
    unless=("page_of_3-xla", "nodes_17_tree-xla", "earlier_rows_chain-xla", "no_prefix_tree-xla", "page_of_3-triton")
)
@each_backend(exact_attention.OPERATION)
@pytest.mark.parametrize(
    "case", [case for case in ATTENTION_CASES if not (case.windows or case.stored)], ids=lambda case: case.name
)
def test_attention_is_that_of_paged_attention(case, backend):
    args = attention_inputs(case)
    options = {"layer": case.layers - 1, "scale": 0.3, "soft_cap": case.soft_cap}
    expected = jax.jit(partial(paged_attention, **options, backend="xla"))(*args)
    result = jitted(partial(exact_attention.exact_attention, **options, backend=backend), backend)(*args)
    assert result.dtype == args[0].dtype
    np.testing.assert_allclose(
        result.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=TOLERANCE[case.dtype]
    )


# Attention: bits


@dataclasses.dataclass
class Text:
    """Keys, values and queries of a text, and of other texts that part from it at each position."""

    q: np.ndarray  # [T, H, D]
    k: np.ndarray  # [T, K, D]
    v: np.ndarray

    @classmethod
    def random(cls, length, heads, kv_heads, dim, dtype, seed=0):
        rng = np.random.default_rng(seed)
        parts = (rng.normal(size=(length, count, dim)) for count in (heads, kv_heads, kv_heads))
        return cls(*(part.astype(jnp.dtype(dtype)) for part in parts))

    def committed(self, lengths, capacity, page_size, rng, form):
        """A pool of one layer with the first rows of the text for each sequence; NaN elsewhere.

        With a window, only the rows that it reaches, in pages that are a ring.
        """
        each = -(-capacity // page_size)
        ring = each if form.window is None else min(each, -(-form.window // page_size))
        table = rng.permutation(len(lengths) * ring + 2)[: len(lengths) * ring].reshape(len(lengths), ring)
        table = table[:, np.arange(each) % ring]
        full = np.full((1, 2, len(lengths) * ring + 2, page_size, *self.k.shape[1:]), np.nan, self.k.dtype)
        for pages, length in zip(table, lengths, strict=True):
            for t in range(0 if form.window is None else max(length + 1 - form.window, 0), length):
                full[0, :, pages[t // page_size], t % page_size] = self.k[t], self.v[t]
        return full, table.astype(np.int32), np.array(lengths, np.int32)

    def dense(self, position, form):
        """The result at a position by the equations, in float64."""
        first = 0 if form.window is None else max(position + 1 - form.window, 0)
        group = self.q.shape[1] // self.k.shape[1]
        q, k, v = (part.astype(np.float64) for part in (self.q[position], self.k, self.v))
        k, v = (np.repeat(part[first : position + 1], group, axis=1) for part in (k, v))
        scores = SCALE * np.einsum("hd,shd->hs", q, k)
        sinks = np.full(len(q), -np.inf) if form.sinks is None else np.array(form.sinks)
        weights = np.exp(scores)
        return np.einsum("hs,shd->hd", weights / (weights.sum(1) + np.exp(sinks))[:, None], v)


SCALE = 0.2


@dataclasses.dataclass(frozen=True)
class Form:
    """What an attention has besides queries, keys and values."""

    window: int | None = None
    sinks: tuple[float, ...] | None = None
    latent: bool = False
    """Whether the values are the keys."""


PLAIN = Form()
FORMS = {
    "plain": PLAIN,
    "short window": Form(window=24, sinks=(2.0, -1.0, 0.5, 4.0)),
    "long window": Form(window=150, sinks=(2.0, -1.0, 0.5, 4.0)),
    "latents": Form(latent=True),
}


@dataclasses.dataclass(frozen=True)
class Round:
    """A forward in which each sequence reads `nodes` nodes after its prefix, with the text on some path among them."""

    prefix: tuple[int, ...]
    nodes: int
    tree: bool = False
    page_size: int = 16
    capacity: int = 320
    spread: bool = False


SHAPES = {"batch": 1, "kv_heads": 1, "rows": 1, "capacity": 64, "head_dim": 32}


@functools.cache
def attend(backend, spread, form):
    """The operation, jitted once for all rounds of a shape."""

    def run(q, *args):
        sinks = None if form.sinks is None else jnp.array(form.sinks)
        options = {"layer": 0, "scale": SCALE, "window": form.window, "sinks": sinks}
        if backend != "triton":
            return exact_attention.exact_attention(q, *args, **options, backend=backend)
        rows = q.shape[1] * q.shape[2] // args[0].shape[2]
        default = attention_triton.default_config(**SHAPES | {"rows": rows}, dtype=q.dtype)
        return attention_triton.exact_attention(q, *args, **options, config=dataclasses.replace(default, spread=spread))

    return jitted(run, backend)


def outputs(text, each, backend, seed=0, form=PLAIN):
    """The bits of each position of the text that the round computes: a list of (position, result)."""
    rng, batch = np.random.default_rng(seed), len(each.prefix)
    shape = (batch, each.nodes)
    # Every node is first some other token; then those of the path get the text's.
    other = Text.random(each.nodes, *text.q.shape[1:2], *text.k.shape[1:], text.q.dtype, seed + 1)
    q, k, v = (np.broadcast_to(part, (batch, *part.shape)).copy() for part in (other.q, other.k, other.v))
    mask, places = None, []
    if each.tree:
        mask = np.zeros((*shape, each.nodes), bool)
    for b, start in enumerate(each.prefix):
        node = -1
        for depth in range(each.nodes):
            # In a tree the path skips nodes, whose rows are of other branches.
            node += 1 if mask is None else 1 + int(depth > 0 and rng.integers(3) == 0)
            if node >= each.nodes or start + depth >= len(text.q):
                break
            q[b, node], k[b, node], v[b, node] = (part[start + depth] for part in (text.q, text.k, text.v))
            places.append((b, node, start + depth))
    if mask is not None:
        on_path = {(b, node) for b, node, _ in places}
        for b in range(batch):
            parent = np.zeros(each.nodes, bool)
            for node in range(each.nodes):
                before = parent if (b, node) in on_path else mask[b, rng.integers(node)] if node else parent
                mask[b, node] = before
                mask[b, node, node] = True
                if (b, node) in on_path:
                    parent = mask[b, node]
    stored, *rest = text.committed(each.prefix, each.capacity, each.page_size, rng, form)
    v, stored = (None, stored[:, :1]) if form.latent else (v, stored)
    result = np.asarray(attend(backend, each.spread, form)(q, k, v, stored, *rest, mask))
    return [(position, result[b, node]) for b, node, position in places]


AT = SEGMENT + BLOCK
ROUNDS = (
    Round(prefix=(AT - 6,), nodes=6, spread=True),
    Round(prefix=(AT - 1, AT - 4, SEGMENT - 2), nodes=5, page_size=64, capacity=384),
    Round(prefix=(AT - 3, BLOCK - 4), nodes=9, tree=True, spread=True, capacity=352),
    Round(prefix=(SEGMENT - 5,), nodes=17, tree=True, page_size=64),
    Round(prefix=(SEGMENT - 20, AT - 30, 0), nodes=40, page_size=1, capacity=321),
)


@pytest.mark.slow
@each_backend(exact_attention.OPERATION)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bfloat16", "plain"), ("float32", "plain"), *(("bfloat16", name) for name in FORMS if name != "plain")],
)
def test_attention_of_a_token_has_the_same_bits_in_every_round(dtype, name, backend):
    form = FORMS[name]
    if form.latent and backend == "triton":
        pytest.skip("the kernel has no latents")
    text = Text.random(AT + 12, 4, 1 if form.latent else 2, 32, dtype)
    if form.latent:
        text.v = text.k
    alone = {}
    for each in ROUNDS:
        for position, result in outputs(text, each, backend, form=form):
            if position not in alone:
                # One token after its prefix, alone.
                one = Round(prefix=(position,), nodes=1, capacity=AT + 16, spread=position % 2 == 0)
                ((_, alone[position]),) = outputs(text, one, backend, form=form)
                found = alone[position].astype(np.float64)
                np.testing.assert_allclose(found, text.dense(position, form), rtol=0, atol=TOLERANCE[dtype])
            if interpreted(backend) and dtype == "float32":
                # XLA merges a product with a sum in one interpreted kernel and not in another.
                np.testing.assert_allclose(result, alone[position], rtol=0, atol=1e-7)
            else:
                assert same_bits(result, alone[position]), (each, position)
    assert len(alone) > 60


TREES = {
    "edges of blocks": (Case("", prefix=(127, 128, 129), nodes=9, heads=4, pages=10), {}),
    "edges of segments": (Case("", prefix=(256, 255, 192), nodes=33, heads=2, pages=16), {"soft_cap": 2.0}),
    "all pages": (Case("", prefix=(320, 0, 319), nodes=5, heads=16, page_size=64, pages=5, earlier=3), {}),
    "pages of one": (Case("", prefix=(140,), nodes=1, heads=8, kv_heads=1, page_size=1, pages=200), {}),
    "short window": (Case("", prefix=(300, 128, 40), nodes=6, heads=4, pages=20), {"window": 24}),
    "window of one": (Case("", prefix=(200, 0), nodes=6, heads=4, pages=20), {"window": 1}),
    "long window": (Case("", prefix=(310, 191, 128), nodes=6, heads=4, pages=20), {"window": 150, "sinks": True}),
    "many segments": (Case("", prefix=(2300, 70), nodes=3, heads=4, page_size=64, pages=40), {}),
    "large group": (Case("", prefix=(130, 3), nodes=3, heads=40, kv_heads=1, pages=9), {"dtype": "float32"}),
    "nothing stored": (Case("", prefix=None, nodes=7, heads=4), {}),
}
"""Trees of heads of 32 dimensions, on pages of 16 if not said otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_every_division_of_a_tree_has_the_same_bits(name):
    """The interpreter fills states with NaN: a slot that no program has written would show."""
    case, options = TREES[name]
    options = {"layer": 1, "scale": SCALE, **options}
    page_size = 16 if case.page_size == 4 else case.page_size
    case = dataclasses.replace(
        case, name=name, tree=True, head_dim=32, page_size=page_size, dtype=options.pop("dtype", "bfloat16")
    )
    rng, rows = rng_of(case), case.earlier + case.nodes
    q = normal(rng, (case.batch, case.nodes, case.heads, case.head_dim), case.dtype)
    k, v = (normal(rng, (case.batch, rows, case.kv_heads, case.head_dim), case.dtype) for _ in range(2))
    stored = None, None, None
    if case.prefix is not None:
        table, total = page_table(rng, case)
        starts = np.array(case.prefix) + 1 - options.get("window", 10**6)
        stored = pool(rng, case, table, total, case.prefix, starts), table, np.array(case.prefix, np.int32)
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.normal(size=case.heads), jnp.float32)
    args = (q, k, v, *stored, tree_mask(rng, case))
    default = attention_triton.default_config(**SHAPES, dtype=case.dtype)
    configs = [dataclasses.replace(default, spread=spread) for spread in (True, False)]
    if case.dtype == "bfloat16":
        configs += [dataclasses.replace(configs[0], own_block_m=16, own_warps=1, own_stages=1)]
    most, exact = 16 * case.kv_heads // case.heads, len(configs)
    configs += [dataclasses.replace(configs[1], own_block_m=16, stack=stack) for stack in (2, 4) if stack <= most]

    def run(*args):
        return [attention_triton.exact_attention(*args, **options, config=config) for config in configs]

    first, *others = jitted(run, "triton")(*args)
    expected = jax.jit(partial(exact_attention.exact_attention, **options, backend="xla"))(*args)
    np.testing.assert_allclose(
        first.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=TOLERANCE[case.dtype]
    )
    for i, other in enumerate(others, 1):
        if interpreted("triton") and (case.dtype == "float32" or i >= exact):  # a CPU adds more than 16 at once
            np.testing.assert_allclose(other, first, rtol=0, atol=1e-7 if i < exact else TOLERANCE[case.dtype])
        else:
            assert same_bits(other, first)
    if interpreted("triton") and case.dtype == "bfloat16":
        assert same_bits(first, expected)


def test_windows_and_values_that_do_not_fit_are_refused():
    q = jnp.zeros((1, 2, 4, 8))
    run = partial(exact_attention.exact_attention, q, q, q, None, None, None, layer=0, scale=1.0)
    with pytest.raises(ValueError, match="window=0: must be at least 1"):
        run(window=0)
    pool_ = jnp.zeros((1, 2, 3, 4, 4, 8))
    with pytest.raises(ValueError, match=r"pool \(1, 2, 3, 4, 4, 8\): must be \('L', 1, 'P'"):
        exact_attention.exact_attention(
            q, q, None, pool_, jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), layer=0, scale=1.0
        )
    with pytest.raises(ValueError, match="v_rows is None"):
        exact_attention.exact_attention(q, q, None, None, None, None, layer=0, scale=1.0, backend="triton")


# Products


@pytest.mark.slow(unless=("transposed-float32-xla", "plain-bfloat16-xla", "gated-bfloat16-triton"))
@each_backend(exact_matmul.OPERATION)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["plain", "transposed", "gated"])
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(form, dtype, backend):
    skip_interpreted(backend, (form, dtype) == ("gated", "float32"), "XLA's two products for a CPU may differ in a bit")
    skip_interpreted(backend, backend == "mosaic_gpu", "products have the order of those of this processor")
    if (backend, dtype) == ("mosaic_gpu", "float32"):
        pytest.skip("needs a type of 16 bits")
    rng, (inner, columns) = np.random.default_rng(0), (192, 128) if backend == "mosaic_gpu" else (200, 96)
    x = rng.normal(size=(150, inner)).astype(jnp.dtype(dtype))
    weight = (rng.normal(size=(inner, columns)) / 14).astype(jnp.dtype(dtype))
    options = {"activation": jax.nn.silu} if form == "gated" else {"transposed": form == "transposed"}
    given = weight.T.copy() if form == "transposed" else weight
    run = partial(exact_matmul.exact_matmul, backend=backend)
    if backend == "triton":
        few = matmul_triton.Config(block_m=16, block_n=32, block_k=16, parts=3, spread=True, num_warps=4, num_stages=2)

        def run(x, weight, **options):
            config = dataclasses.replace(few, spread=x.shape[0] < 64)
            return matmul_triton.exact_matmul(x, weight, config=config, **options)

    wide = x.astype(np.float64) @ weight.astype(np.float64)
    if form == "gated":
        wide = np.asarray(jax.nn.silu(wide[:, : columns // 2])) * wide[:, columns // 2 :]
    whole = np.asarray(jitted(partial(run, **options), backend)(x, given))
    np.testing.assert_allclose(whole.astype(np.float64), wide, rtol=0, atol=10 * TOLERANCE[dtype])
    for rows in ([0], [149], [3, 7], list(range(40, 57)), list(range(20, 90))):
        assert same_bits(jitted(partial(run, **options), backend)(x[rows], given), whole[rows]), rows
        if form != "gated":
            divided = jitted(partial(run, parts=True, **options), backend)(x[rows], given)
            assert divided.ndim == 2 + (backend == "triton" and len(rows) < 64)
            assert same_bits(parts.whole(divided, 2, x.dtype), whole[rows]), rows


@pytest.mark.slow(unless="bfloat16-xla")
@each_backend(grouped_matmul.OPERATION)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_of_a_grouped_product_has_the_same_bits_among_any_rows(dtype, backend):
    rng = np.random.default_rng(0)
    group = np.sort(rng.integers(0, 5, 60))
    x = rng.normal(size=(60, 96)).astype(jnp.dtype(dtype))
    weight = (rng.normal(size=(5, 96, 64)) / 10).astype(jnp.dtype(dtype))
    run = jitted(partial(grouped_matmul.grouped_matmul, activation=jax.nn.silu, exact=True, backend=backend), backend)
    whole = run(x, weight, np.bincount(group, minlength=5))
    plain = jax.jit(partial(grouped_matmul.grouped_matmul, activation=jax.nn.silu, backend="xla"))
    expected = plain(x, weight, np.bincount(group, minlength=5))
    np.testing.assert_allclose(whole.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=TOLERANCE[dtype])
    for rows in ([0], [59], [3, 30], list(range(10, 50))):
        part = run(x[rows], weight, np.bincount(group[rows], minlength=5))
        assert same_bits(part, np.asarray(whole)[rows]), rows


@pytest.mark.slow(unless=("float32-xla", "bfloat16-triton"))
@each_backend(NORM)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sum_and_its_norm(dtype, backend):
    rng = np.random.default_rng(0)
    x, branch = (rng.normal(size=(5, 7, 96)).astype(jnp.dtype(dtype)) for _ in range(2))
    weight = rng.normal(size=96).astype(jnp.dtype(dtype))
    options = {"eps": 1e-5, "exact": True, "backend": backend}
    run = jitted(lambda x, branch, weight: residual_norm(x, branch, (None, weight), **options), backend)
    stream, normed = run(x, branch, weight)
    wide = np.asarray(stream).astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    np.testing.assert_allclose(np.asarray(normed).astype(np.float64), expected, rtol=0, atol=2 * TOLERANCE[dtype])
    assert same_bits(stream, jnp.asarray(x) + jnp.asarray(branch))
    same = run(stream, None, weight)
    assert same_bits(same[0], stream)
    np.testing.assert_allclose(np.asarray(same[1]).astype(np.float64), expected, rtol=0, atol=2 * TOLERANCE[dtype])
    one = run(x[1:2, 3:4], branch[1:2, 3:4], weight)
    assert same_bits(one[1], normed[1:2, 3:4])
    # A branch in parts, of a product or of devices.
    for kind in ("float32", dtype):
        terms = jnp.asarray(rng.normal(size=(3, *x.shape)), kind)
        whole = run(x, parts.add_parts(terms, dtype), weight)
        assert all(map(same_bits, run(x, terms, weight), whole))
        assert same_bits(run(x[2:3], terms[:, 2:3], weight)[1], whole[1][2:3])


@pytest.mark.slow(unless=("float32-xla", "bfloat16-triton"))
@each_backend(NORM)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wide_norms_and_normed_branches(dtype, backend):
    rng = np.random.default_rng(0)
    x, branch = (rng.normal(size=(5, 7, 96)).astype(jnp.dtype(dtype)) for _ in range(2))
    weight, following = (jnp.asarray(rng.normal(size=96), dtype) for _ in range(2))
    factor = jnp.asarray(0.7, dtype)

    def run(x, branch):
        options = {"eps": 1e-5, "wide": True, "exact": True, "backend": backend}
        alone = [residual_norm(x, None, (None, norm), **options)[1] for norm in (weight, None)]
        return *alone, *residual_norm(x, branch, (weight, following), factor, **options)

    run = jitted(run, backend)
    normed, plain, stream, after = run(x, branch)

    def expected(x, weight):
        wide = np.asarray(x).astype(np.float64)
        return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight).astype(np.float64)

    added = (x.astype(np.float64) + expected(branch, weight)) * float(factor)
    for ours, theirs in (
        (normed, expected(x, weight)),
        (plain, expected(x, 1)),
        (stream, added),
        (after, expected(stream, following)),
    ):
        np.testing.assert_allclose(np.asarray(ours).astype(np.float64), theirs, rtol=0, atol=3 * TOLERANCE[dtype])
    for part in (np.s_[1:2, 3:4], np.s_[2:5, :2]):
        for ours, theirs in zip(run(x[part], branch[part]), (normed, plain, stream, after), strict=True):
            assert same_bits(ours, theirs[part])
    with pytest.raises(ValueError, match=r"norms=\(None, None\): requires a branch, or wide=True"):
        residual_norm(jnp.asarray(x), None, (None, None), eps=1e-5)
    with pytest.raises(ValueError, match="branch=None: requires no norm of the branch and factor=None"):
        residual_norm(jnp.asarray(x), None, (weight, following), eps=1e-5)


@pytest.mark.slow(unless="float32-xla")
@each_backend(split_heads.OPERATION)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heads_of_a_product_in_parts(dtype, backend):
    rng = np.random.default_rng(0)
    divided = jnp.asarray(rng.normal(size=(4, 2, 3, 6, 32)), jnp.float32)
    cos, sin = (rng.normal(size=(2, 3, 16)).astype(jnp.dtype(dtype)) for _ in range(2))
    norms = [rng.normal(size=32).astype(jnp.dtype(dtype)) for _ in range(2)]
    for given in ([None, None], norms):
        options = {"kv_heads": 1, "eps": 1e-5, "exact": True, "backend": backend}
        run = jitted(lambda qkv, *rest, options=options: split_heads.split_heads(qkv, *rest, **options), backend)
        whole = run(parts.add_parts(divided, dtype), cos, sin, *given)
        for found, expected in zip(run(divided, cos, sin, *given), whole, strict=True):
            assert found.dtype == dtype and same_bits(found, expected)


def test_parts_of_another_type_or_shape_are_refused():
    x, weight = jnp.zeros((2, 8), jnp.float16), jnp.zeros(8, jnp.float16)
    for branch, message in (
        (
            jnp.zeros((3, 2, 8), jnp.bfloat16),
            r"branch is bfloat16\[3, 2, 8\]: .* parts before them, in float16 or float32",
        ),
        (jnp.zeros((2, 8), jnp.float32), r"branch is float32\[2, 8\]: must be float16\[2, 8\], as x is$"),
    ):
        with pytest.raises(ValueError, match=message):
            residual_norm(x, branch, (None, weight), eps=1e-5)
    with pytest.raises(ValueError, match=r"qkv is float16\[2, 1, 1, 3, 8\]: parts must be float32"):
        angles = jnp.zeros((1, 1, 4), jnp.float16)
        split_heads.split_heads(jnp.zeros((2, 1, 1, 3, 8), jnp.float16), angles, angles, kv_heads=1, eps=1e-5)
    with pytest.raises(ValueError, match="parts=True: must be False with an activation"):
        exact_matmul.exact_matmul(x, jnp.zeros((8, 8), jnp.float16), activation=jax.nn.silu, parts=True)


# The shapes of a model of 8 billion parameters

needs_gpu = pytest.mark.skipif(HERE != "gpu", reason="needs a GPU: the shapes of a large model")


@needs_gpu
def test_attention_of_a_large_model():
    text = Text.random(9 * SEGMENT + 40, 32, 8, 128, "bfloat16")
    long = 9 * SEGMENT + 2
    rounds = [
        Round(prefix=(long,) * batch, nodes=nodes, tree=tree, page_size=page_size, capacity=capacity)
        for batch, nodes, tree, page_size, capacity in (
            (1, 1, False, 64, 2048),
            (1, 6, False, 16, 1536),
            (3, 6, False, 64, 1408),
            (8, 17, True, 64, 4096),
            (1, 32, True, 16, 2048),
            (32, 6, False, 64, 4096),
            (32, 32, True, 64, 2048),
        )
    ]
    rounds += [Round(prefix=(long - 300, 0), nodes=330, page_size=64, capacity=2048)]
    found = {}
    for each in rounds:
        for position, result in outputs(text, each, None):
            assert same_bits(result, found.setdefault(position, result)), (each, position)
    assert sum(position >= long for position in found) > 20


# What the choices depend on


@pytest.mark.parametrize("kind", matmul_triton.TUNING)
def test_configurations_do_not_depend_on_the_number_of_rows(kind, monkeypatch):
    """But for what changes no bit: whether parts of the work are programs of their own, and tiles on some devices."""
    monkeypatch.setattr(matmul_triton.platform, "for_device_kind", lambda table: table[kind])
    for inner, columns in ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256), (64, 64)):
        for dtype in ("bfloat16", "float32"):
            make = partial(matmul_triton.default_config, inner=inner, columns=columns, dtype=dtype)
            made = [make(rows=rows) for rows in (1, 2, 6, 17, 64, 65, 192, 256, 257, 2048)]
            if kind == "any other" or dtype == "float32":
                assert len({dataclasses.replace(config, spread=False) for config in made}) == 1
            else:
                assert [config.block_m for config in made] == [16, 16, 16, 64, 64, 64, 64, 64, 64, 64]
            assert len({config.parts for config in made}) == 1
            assert made[0].parts == 1 or inner // made[0].parts >= made[0].block_k


@pytest.mark.parametrize("kind", attention_triton.TUNING)
def test_configurations_of_attention_do_not_depend_on_the_number_of_rows(kind, monkeypatch):
    """But for whether segments are programs of their own, and tiles where they change no bit."""
    monkeypatch.setattr(attention_triton.platform, "for_device_kind", lambda table: table[kind])
    for dtype, tree in itertools.product(("bfloat16", "float32"), (False, True)):
        configs = {
            attention_triton.default_config(
                batch=batch, kv_heads=heads, rows=rows, capacity=capacity, head_dim=128, dtype=dtype, tree=tree
            )
            for batch, heads, rows in itertools.product((1, 8, 64), (1, 8), (1, 4, 64, 8192))
            for capacity in (0, 320, 131072)
        }
        assert {config.spread for config in configs} == {False, True}
        hopper = kind != "any other" and dtype == "bfloat16"
        assert len({dataclasses.replace(config, spread=False) for config in configs}) == (4 + tree if hopper else 1)
        assert {config.stack for config in configs} == ({1, 4} if hopper and tree else {1})
        assert len({(config.own_block_m, config.own_stages, config.own_warps) for config in configs}) == 1
        shapes = {"batch": 1, "kv_heads": 8, "capacity": 704, "head_dim": 128, "dtype": "bfloat16", "tree": True}
        assert [attention_triton.default_config(**shapes, rows=rows).spread for rows in (128, 2048)] == [True, False]


# Cross-lowering


def divisions(default):
    """A configuration, one with small tiles for the nodes of a tree and one with two nodes in each, spread and not."""
    small = dataclasses.replace(default, own_block_m=16, own_warps=1, own_stages=1)
    tiles = default, small, dataclasses.replace(small, stack=2)
    return [dataclasses.replace(each, spread=spread) for each in tiles for spread in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, kv_heads, dim, window, sinks, dtype",
    [
        *((32, 8, 128, None, False, dtype) for dtype in ("bfloat16", "float32")),
        (64, 8, 64, 128, True, "bfloat16"),
        (8, 2, 256, 512, False, "bfloat16"),
        (8, 1, 512, None, False, "bfloat16"),
    ],
)
@pytest.mark.parametrize("kind", ("any other", "NVIDIA H100"))
def test_attention_lowers_for_a_gpu(kind, heads, kv_heads, dim, window, sinks, dtype, monkeypatch):
    monkeypatch.setattr(attention_triton.platform, "for_device_kind", lambda table: table[kind])
    wide = 256 if kind == "NVIDIA H100" else 128
    q, k = (jnp.zeros((2, 6, count, dim), dtype) for count in (heads, kv_heads))
    pool_, table = jnp.zeros((2, 2, 130, 16, kv_heads, dim), dtype), jnp.zeros((2, 64), jnp.int32)
    options = {"window": window, "sinks": jnp.zeros(heads) if sinks else None}
    run = partial(attention_triton.exact_attention, layer=1, scale=0.1, interpret=False, **options)
    default = attention_triton.default_config(
        batch=2, kv_heads=kv_heads, rows=6 * heads // kv_heads, capacity=1024, head_dim=dim, dtype=dtype
    )
    assert default.spread and (default.block_m == 16) == (dim > wide or dtype == "float32")
    for given in (None, jnp.ones((2, 6, 6), bool)):
        for config in divisions(default):
            text = cross_lower(partial(run, config=config), "cuda", q, k, k, pool_, table, jnp.array([700, 12]), given)
            assert text.count("exact_attention") >= (1 if given is None and not config.spread else 2)
    assert "exact_attention" in cross_lower(run, "cuda", q, k, k, None, None, None, None)
    for width, least in (("bfloat16", 2 * wide), ("float32", wide)):
        refusal = attention_triton.supported(q.astype(width), k, k, interpret=False)
        assert (refusal is None) == (dim <= least) and (refusal is None or f"must be at most {least}" in refusal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_lower_for_a_gpu(dtype):
    for rows in (1, 384):
        for inner, columns, options in (
            (4096, 6144, {}),
            (4096, 28672, {"activation": jax.nn.silu}),
            (14336, 4096, {}),
            (2048, 8192, {"transposed": True}),
        ):
            x = jnp.zeros((rows, inner), dtype)
            weight = jnp.zeros((columns, inner) if options.get("transposed") else (inner, columns), dtype)
            run = partial(matmul_triton.exact_matmul, interpret=False, **options)
            assert "exact_matmul" in cross_lower(run, "cuda", x, weight)
