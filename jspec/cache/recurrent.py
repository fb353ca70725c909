"""Cache of recurrent layers: gated delta nets after a short convolution (Yang et al., arXiv 2412.06464).

Such a layer stores one state per head and the last inputs of its convolution, whatever the length of the sequence. Like
pages, they do not change within a round: a forward reads them and returns the changes by each node as the rows of the
round (key, correction u, decay and input to the convolution: `pallas_kernels.delta_rule`). `commit` applies the rows of
the accepted path only. So a rejected branch leaves no trace, the state after each node is neither stored nor
recomputed, and chains, trees and chunks of a prompt need no separate code.

The state of a sequence without committed tokens is zero, whatever the arrays hold: a new sequence need not clear them.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.core import tree
from jspec.core.slots import SlotCache
from jspec.core.struct import leaf, struct
from pallas_kernels import delta_rule


@struct
class RecurrentRows:
    """The changes of a round's R nodes in one layer."""

    inputs: Float[Array, "B R C"]
    """Inputs of the convolution."""
    k: Float[Array, "B R H K"]
    u: Float[Array, "B R Hv V"]
    g: Float[Array, "B R Hv"]
    """Logarithm of the decay."""


@dataclasses.dataclass(frozen=True)
class RecurrentLayer:
    """The shape of a layer's state.

    key_heads: H, heads of queries and of keys; each serves `value_heads` / H heads of values.
    kernel: width of the convolution, the token itself included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}")
        if self.kernel < 2:
            raise ValueError(f"kernel={self.kernel}: must be at least 2")

    @property
    def channels(self) -> int:
        """C: channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def split(self, devices: int) -> Self:
        """The part of one device: key heads, with their heads of values, are split over the devices."""
        keys, values = self.key_heads // devices, self.value_heads // devices
        return dataclasses.replace(self, key_heads=keys, value_heads=values)

    def empty(self, batch: int, capacity: int, page_size: int, *, layers: int, dtype: DTypeLike) -> "RecurrentCache":
        """The cache of this number of layers. It has no pages, so its size does not depend on `capacity`."""
        states = [jnp.zeros((batch, self.value_heads, self.key_dim, self.value_dim)) for _ in range(layers)]
        return RecurrentCache(tuple(states), jnp.zeros((layers, batch, self.kernel - 1, self.channels), dtype))


@struct
class RecurrentState:
    """The slot state of L layers."""

    layer_states: tuple[Float[Array, "Hv K V"], ...] = leaf(split=-3)
    windows: Float[Array, "L W C"] = leaf(split=-1)


@struct
class RecurrentCache(SlotCache):
    """States of L layers after the committed tokens."""

    layer_states: tuple[Float[Array, "B Hv K V"], ...] = leaf(split=-3)
    """One float32 array per layer, because a matrix product would copy a layer out of a larger array."""
    windows: Float[Array, "L B W C"] = leaf(split=-1)
    """Inputs of the convolutions before the next token, oldest first."""

    def attend(
        self,
        layer: int,
        inputs: Float[Array, "B N C"],
        conv: Float[Array, "W1 C"],
        g: Float[Array, "B N Hv"],
        beta: Float[Array, "B N Hv"],
        start: Int[Array, " B"] | None,
        mask: Bool[Array, "#B N R"] | None,
        earlier: RecurrentRows | None = None,
    ) -> tuple[Float[Array, "B N Hv V"], RecurrentRows]:
        """The output of N nodes along their paths, in float32, and the rows of the round.

        inputs: inputs of the convolution: all queries, all keys, all values.
        conv: weights of the convolution, the node's own last.
        g, beta: decay and rate of each node, in float32.
        start: committed tokens before the root; None: none.
        mask: each node and its ancestors among the round's R rows; None: a chain.
        earlier: R - N rows of this round from earlier forwards, before the new ones.
        """
        # The state before the root, and all rows of the round.
        state, window = self.layer_states[layer], self.windows[layer]
        nodes, (_, value_heads, key_dim, value_dim) = inputs.shape[1], state.shape
        dtype, live = inputs.dtype, None if start is None else start > 0
        window = jnp.zeros_like(window) if live is None else jnp.where(live[:, None, None], window, 0)
        if earlier is not None:
            inputs = jnp.concatenate([earlier.inputs, inputs], axis=1)
            g = jnp.concatenate([earlier.g, g], axis=1)
        # The convolution, then queries, keys and values of each head.
        mixed = delta_rule.short_conv(window, inputs, conv, mask, nodes).astype(dtype)
        mixed = jax.nn.silu(mixed).astype(jnp.float32)
        q, k, v = jnp.split(mixed, [split := (mixed.shape[-1] - value_heads * value_dim) // 2, 2 * split], axis=-1)
        q = unit(q.reshape(*q.shape[:2], -1, key_dim)) * key_dim**-0.5
        k, v = unit(k.reshape(q.shape)), v.reshape(*v.shape[:2], value_heads, value_dim)
        # Long chains, such as prompts, are computed in blocks; everything else as a tree.
        if mask is None and earlier is None and nodes > delta_rule.BLOCK:
            first = jnp.zeros_like(state) if live is None else jnp.where(live[:, None, None, None], state, 0)
            out, u = delta_rule.chain_delta_rule(first, q, k, v, g, beta)
        else:
            if earlier is not None:
                k = jnp.concatenate([earlier.k, k], axis=1)
            before = None if earlier is None else earlier.u
            initial = None if live is None else state
            out, u = delta_rule.tree_delta_rule(initial, q, k, v, g, beta, mask, before, live)
        return out, RecurrentRows(inputs, k, u, g)

    def commit(
        self,
        rows: tuple[RecurrentRows, ...],
        start: Int[Array, " B"],
        path: Int[Array, "B A"] | None,
        length: Int[Array, " B"],
    ) -> Self:
        """The cache after the first `length[b]` nodes along `path` (None: a chain); unchanged where that is 0."""
        live = (start > 0) | (length == 0)
        states, windows = [], []
        for state, window, new in zip(self.layer_states, self.windows, rows, strict=True):
            if path is not None:
                new = jax.tree.map(lambda x: tree.take_path(x, path), new)
            states.append(delta_rule.advance(state, new.k, new.u, new.g, length, live))
            windows.append(delta_rule.slide(jnp.where(live[:, None, None], window, 0), new.inputs, length))
        return dataclasses.replace(self, layer_states=tuple(states), windows=jnp.stack(windows))

    def take(self, slots: Int[Array, " R"]) -> Self:
        """The states of these sequences, copied."""
        return dataclasses.replace(
            self, layer_states=tuple(x[slots] for x in self.layer_states), windows=self.windows[:, slots]
        )

    def put(self, slots: Int[Array, " R"], part: Self) -> Self:
        """The states with those of `part` written back."""
        states = tuple(x.at[slots].set(new) for x, new in zip(self.layer_states, part.layer_states, strict=True))
        return dataclasses.replace(self, layer_states=states, windows=self.windows.at[:, slots].set(part.windows))

    def state_of(self, slot: Int[Array, ""]) -> RecurrentState:
        """The states and windows of a sequence, after its last committed token only."""
        return RecurrentState(tuple(x[slot] for x in self.layer_states), self.windows[:, slot])

    def with_state(self, slot: Int[Array, ""], state: RecurrentState) -> Self:
        """The cache with these states and windows of a sequence."""
        states = tuple(x.at[slot].set(new) for x, new in zip(self.layer_states, state.layer_states, strict=True))
        return dataclasses.replace(self, layer_states=states, windows=self.windows.at[:, slot].set(state.windows))


def unit(x: Float[Array, "B N H K"]) -> Float[Array, "B N H K"]:
    """x / sqrt(|x|^2 + 1e-6)."""
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)
