"""The gated delta rule over trees equals its recurrence along the path of each node, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import each_backend, params
from crosslower import cross_lower

from pallas_kernels import delta_rule, platform
from pallas_kernels.delta_rule import reference, xla
from pallas_kernels.delta_rule.linear import unit_lower_inverse

B, H, G, K, V = 2, 2, 3, 8, 5
TOLERANCE = dict(rtol=0, atol=1e-5)
backends = each_backend(delta_rule.OPERATION)


def random_inputs(rng, count, slow=False):
    """q, k, v, g, beta of `count` nodes; slow: little decays, and all keys are similar."""
    q, k = rng.normal(size=(2, B, count, H, K)) + (2.0 if slow else 0.0)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    v, beta = rng.normal(size=(B, count, H * G, V)), rng.uniform(size=(B, count, H * G))
    g = -np.exp(rng.normal(size=(B, count, H * G)))
    return (q, k, v, 0.01 * g, np.ones_like(beta)) if slow else (q, k, v, g, beta)


def random_parents(rng, count):
    return np.stack([[0, *[rng.integers(0, n) for n in range(1, count)]] for _ in range(B)])


def ancestors(parents):
    mask = np.zeros((*parents.shape, parents.shape[1]), bool)
    for b, row in enumerate(parents):
        for n, parent in enumerate(row):
            mask[b, n] = mask[b, parent]
            mask[b, n, n] = True
    return mask


def recur(state, q, k, v, g, beta, parents):
    """The output and the state of each node, and its u, one step from its parent's."""
    out, u, states = np.zeros_like(v), np.zeros_like(v), np.zeros((*v.shape, K)).swapaxes(3, 4)
    for b in range(B):
        for n, parent in enumerate(parents[b]):
            for h in range(H * G):
                old = states[b, parent, h] if n else state[b, h]
                new, key = np.exp(g[b, n, h]) * old, k[b, n, h // G]
                u[b, n, h] = beta[b, n, h] * (v[b, n, h] - new.T @ key)
                states[b, n, h] = new + np.outer(key, u[b, n, h])
                out[b, n, h] = states[b, n, h].T @ q[b, n, h // G]
    return out, u, states


def narrow(*arrays):
    return [x.astype(np.float32) for x in arrays]


@pytest.mark.slow(unless=("6-chain-xla", "7-tree"))
@backends
@pytest.mark.parametrize(("count", "shape"), [(1, "chain"), (6, "chain"), (7, "tree"), (24, "tree"), (24, "slow tree")])
def test_every_node_equals_the_recurrence_along_its_path(count, shape, backend):
    rng = np.random.default_rng(count)
    state, parents = rng.normal(size=(B, H * G, K, V)), random_parents(rng, count)
    if shape == "chain":
        parents = np.broadcast_to(np.maximum(np.arange(count) - 1, 0), (B, count))
    inputs = random_inputs(rng, count, slow=shape == "slow tree")
    out, u, states = recur(state, *inputs, parents)
    mask = None if shape == "chain" else jnp.asarray(ancestors(parents))
    given = narrow(state, *inputs)
    got, got_u = jax.jit(partial(delta_rule.tree_delta_rule, backend=backend))(*given, mask)
    np.testing.assert_allclose(got, out, **TOLERANCE)
    np.testing.assert_allclose(got_u, u, **TOLERANCE)
    # The state after any node, from the rows of its path.
    nodes = rng.integers(0, count, B)
    length = ancestors(parents)[np.arange(B), nodes].sum(-1)
    path = np.stack(
        [
            np.nonzero(row[n])[0][np.minimum(np.arange(count), size - 1)]
            for row, n, size in zip(ancestors(parents), nodes, length, strict=True)
        ]
    )
    along = [
        jnp.take_along_axis(x, path[..., None, None] if x.ndim == 4 else path[..., None], axis=1)
        for x in (given[2], got_u, given[4])
    ]
    after = jax.jit(delta_rule.advance)(given[0], *along, jnp.asarray(length))
    np.testing.assert_allclose(after, states[np.arange(B), nodes], **TOLERANCE)


@pytest.mark.slow(unless="sizes1-some-triton")
@pytest.mark.parametrize("backend", params(*delta_rule.OPERATION.kernels))
@pytest.mark.parametrize("held", ["none", "all", "some"])
@pytest.mark.parametrize("sizes", [(8, 5), (40, 37), (64, 32)])
def test_the_kernel_equals_xla_for_any_size(sizes, held, backend):
    """Sizes of keys and values that need several blocks or padding; states of sequences without one are not read."""
    rng = np.random.default_rng(sum(sizes))
    count, (keys, values) = 19, sizes
    q, k = rng.normal(size=(2, B, count, H, keys)) * keys**-0.5
    v, state = rng.normal(size=(B, count, H * G, values)), rng.normal(size=(B, H * G, keys, values))
    g, beta = -rng.uniform(size=(B, count, H * G)), rng.uniform(size=(B, count, H * G))
    live = None
    if held == "some":
        live, state[1] = jnp.array([True, False]), np.nan
    mask = jnp.asarray(ancestors(random_parents(rng, count)))
    given = [None if held == "none" else jnp.asarray(state, jnp.float32), *narrow(q, k, v, g, beta), mask, None, live]
    wanted = jax.jit(partial(delta_rule.tree_delta_rule, backend="xla"))(*given)
    got = jax.jit(partial(delta_rule.tree_delta_rule, backend=backend))(*given)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


def shapes(count, earlier=0):
    """Arguments of `tree_delta_rule` at the size of Qwen3-Next."""
    sizes = [(1, 32, 128, 128), (1, count, 16, 128), (1, count + earlier, 16, 128), (1, count, 32, 128)]
    floats = [jax.ShapeDtypeStruct(size, jnp.float32) for size in (*sizes, (1, count + earlier, 32), (1, count, 32))]
    before = jax.ShapeDtypeStruct((1, earlier, 32, 128), jnp.float32) if earlier else None
    return *floats, jax.ShapeDtypeStruct((1, count, count + earlier), bool), before


@pytest.mark.parametrize(
    ("here", "count", "earlier", "call"),
    [("gpu", 6, 0, True), ("gpu", 32, 0, True), ("gpu", 1, 0, False), ("gpu", 33, 0, False), ("gpu", 6, 2, False)]
    + [("tpu", 6, 0, True), ("tpu", 64, 0, True), ("tpu", 1, 0, False), ("tpu", 65, 0, False), ("tpu", 6, 2, False)],
)
def test_the_best_backend(here, count, earlier, call, monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: here)
    text = cross_lower(delta_rule.tree_delta_rule, "cuda" if here == "gpu" else "tpu", *shapes(count, earlier))
    assert (("gpu.triton" if here == "gpu" else "tpu_custom_call") in text) == call


@pytest.mark.parametrize(
    ("backend", "count", "earlier", "message"),
    [
        ("triton", 33, 0, "q has 33 nodes: must be at most 32"),
        ("mosaic_tpu", 65, 0, "q has 65 nodes: must be at most 64"),
        ("triton", 6, 2, "earlier is given: must be None"),
        ("mosaic_tpu", 6, 2, "earlier is given: must be None"),
    ],
)
def test_unsupported_arguments(backend, count, earlier, message):
    with pytest.raises(ValueError, match=f"tree_delta_rule: backend='{backend}' cannot run: {message}"):
        jax.eval_shape(partial(delta_rule.tree_delta_rule, backend=backend), *shapes(count, earlier))


@pytest.mark.parametrize("live", [(True, False), None])
def test_nodes_of_later_forwards_see_the_rows_of_earlier_ones(live):
    rng = np.random.default_rng(7)
    count, earlier = 12, 5
    state, parents, inputs = rng.normal(size=(B, H * G, K, V)), random_parents(rng, count), random_inputs(rng, count)
    held = state if live is None else np.where(np.array(live)[:, None, None, None], state, 0)
    out, u, _ = recur(held, *inputs, parents)
    if live is not None:
        state[1] = np.nan
        live = np.array(live)

    @jax.jit
    def both(state, q, k, v, g, beta, mask, live):
        first = (q[:, :earlier], k[:, :earlier], v[:, :earlier], g[:, :earlier], beta[:, :earlier])
        a, u1 = delta_rule.tree_delta_rule(state, *first, mask[:, :earlier, :earlier], None, live)
        later = (q[:, earlier:], k, v[:, earlier:], g, beta[:, earlier:], mask[:, earlier:], u1, live)
        return a, *delta_rule.tree_delta_rule(state, *later)

    a, b, u2 = both(*narrow(state, *inputs), ancestors(parents), live)
    np.testing.assert_allclose(np.concatenate([a, b], 1), out, **TOLERANCE)
    np.testing.assert_allclose(u2, u, **TOLERANCE)


@pytest.mark.parametrize("count", [64, 150])
@pytest.mark.parametrize("slow", [False, True])
def test_long_chains_are_read_in_blocks(count, slow):
    rng = np.random.default_rng(count)
    state, inputs = rng.normal(size=(B, H * G, K, V)), random_inputs(rng, count, slow)
    parents = np.broadcast_to(np.maximum(np.arange(count) - 1, 0), (B, count))
    out, u, states = recur(state, *inputs, parents)
    given = narrow(state, *inputs)
    got, got_u = jax.jit(delta_rule.chain_delta_rule)(*given)
    np.testing.assert_allclose(got, out, **TOLERANCE)
    np.testing.assert_allclose(got_u, u, **TOLERANCE)
    length = np.array([count, 70 if count > 70 else 3])
    # Rows after the end of a path are not read.
    read = np.arange(count)[None] < length[:, None]
    poisoned = [
        np.where(read.reshape(B, count, *[1] * (x.ndim - 2)), x, np.float32(np.nan))
        for x in map(np.array, (given[2], got_u, given[4]))
    ]
    after = jax.jit(delta_rule.advance)(given[0], *poisoned, length)
    np.testing.assert_allclose(after, states[np.arange(B), length - 1], **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("live", [(True, False), None])
def test_the_reference_takes_earlier_rows_and_missing_states(live):
    rng = np.random.default_rng(8)
    count, earlier = 5, 2
    arrays = narrow(rng.normal(size=(B, H * G, K, V)), *random_inputs(rng, count))
    state, q, k, v, g, beta = map(jnp.asarray, arrays)
    mask = jnp.asarray(ancestors(random_parents(rng, count)))
    live = None if live is None else jnp.array(live)
    _, u = xla.tree_delta_rule(state, q, k, v, g, beta, mask, None, live)
    later = q[:, earlier:], k, v[:, earlier:], g, beta[:, earlier:], mask[:, earlier:], u[:, :earlier], live
    expected = xla.tree_delta_rule(state, *later)
    for ours, theirs in zip(reference.tree_delta_rule(state, *later), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)


def test_an_empty_path_leaves_the_state_bit_for_bit():
    rng = np.random.default_rng(0)
    state, _, k, v, g, _ = narrow(rng.normal(size=(B, H * G, K, V)), *random_inputs(rng, 6))
    broken = [np.full_like(x, np.nan) for x in (k, v, g)]
    after = jax.jit(delta_rule.advance)(state, *broken, np.array([0, 0]))
    np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 64])
def test_the_inverse_of_unit_lower_triangles(count):
    """Powers of the second one have entries of up to 10^18; its inverse has none above 1."""
    lower = np.tril(np.random.default_rng(0).uniform(-1, 1, (count, count)) / 4, -1)
    for matrix in (lower, np.tril(np.ones((count, count)), -1)):
        inverse = jax.jit(unit_lower_inverse)(matrix.astype(np.float32))
        np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(count) + matrix), atol=2e-6)


@pytest.mark.parametrize("tree", [False, True])
def test_the_convolution_reads_the_nearest_ancestors(tree):
    rng, count, earlier = np.random.default_rng(3), 9, 4
    window, inputs, weight = rng.normal(size=(B, 3, 7)), rng.normal(size=(B, count, 7)), rng.normal(size=(4, 7))
    parents = random_parents(rng, count) if tree else np.broadcast_to(np.maximum(np.arange(count) - 1, 0), (B, count))
    wanted = np.zeros_like(inputs)
    for b in range(B):
        for n in range(count):
            line, node = [inputs[b, n]], n
            while node:
                node = parents[b, node]
                line.append(inputs[b, node])
            line += [*window[b, ::-1]]
            wanted[b, n] = sum(weight[3 - d] * line[d] for d in range(4))
    mask = ancestors(parents) if tree else None
    given, read = narrow(window, inputs, weight), jax.jit(delta_rule.short_conv, static_argnums=4)
    np.testing.assert_allclose(read(*given, mask, count), wanted, atol=1e-5)
    mask = mask[:, earlier:] if tree else None
    last = read(*given, mask, count - earlier)
    np.testing.assert_allclose(last, wanted[:, earlier:], atol=1e-5)
