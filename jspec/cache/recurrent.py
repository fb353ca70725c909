"""Cache of recurrent layers: gated delta nets behind a short convolution (Yang et al., arXiv 2412.06464).

All that such a layer remembers of a sequence are one state a head and the last inputs of its convolution, whatever the
length. It is frozen inside a round as pages are: a forward reads it and returns, as the round's rows, what each node
would change (its key, its correction u, its decay, its convolution's input: `pallas_kernels.delta_rule`). `commit` adds
up those of the accepted path and nothing else. So a rejected branch leaves no trace; the state behind each node is
neither kept, which would be as many states as nodes, nor computed again; and chains, trees and chunks of a prompt are
one case.

After no committed tokens the state is zero, whatever the arrays hold: they need not be cleared for another sequence.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.struct import struct
from pallas_kernels import delta_rule


@struct
class RecurrentRows:
    """What a round's R nodes would change in one layer."""

    inputs: Float[Array, "B R C"]
    """Of the convolution."""
    k: Float[Array, "B R H K"]
    u: Float[Array, "B R Hv V"]
    g: Float[Array, "B R Hv"]
    """Logarithm of the decay."""


@dataclasses.dataclass(frozen=True)
class RecurrentLayer:
    """The state that a layer keeps.

    key_heads: H, of queries and of keys; each serves `value_heads` / H heads of values.
    kernel: inputs that the convolution reads, the token's own included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} are no multiple of key_heads={self.key_heads}")
        if self.kernel < 2:
            raise ValueError(f"kernel={self.kernel}: a convolution reads the token before, at least")

    @property
    def channels(self) -> int:
        """C: of the convolution, those of all queries, of all keys and of all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty(self, batch: int, capacity: int, page_size: int, *, layers: int, dtype) -> "RecurrentCache":
        """The cache of so many layers. Its size does not depend on `capacity`, and it has no pages."""
        states = [jnp.zeros((batch, self.value_heads, self.key_dim, self.value_dim)) for _ in range(layers)]
        return RecurrentCache(tuple(states), jnp.zeros((layers, batch, self.kernel - 1, self.channels), dtype))


@struct
class RecurrentCache:
    """What L layers remember of committed tokens."""

    states: tuple[Float[Array, "B Hv K V"], ...]
    """Of each layer, in float32: an array of its own, since a matrix product would copy it out of a larger one."""
    windows: Float[Array, "L B W C"]
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
        """What each of N nodes reads of the layer's state along its own path, in float32, and the rows of the round.

        Args:
          inputs: of the convolution: all queries, all keys, all values.
          conv: its weights, the node's own last.
          g, beta: decay and rate of each node, in float32.
          start: committed tokens before the root; None: none.
          mask: the node itself and its ancestors among the round's R rows; None: all up to its own.
          earlier: R - N rows of this round from earlier forwards, before the new ones.
        """
        state, window = self.states[layer], self.windows[layer]
        nodes, (_, value_heads, key_dim, value_dim) = inputs.shape[1], state.shape
        dtype, live = inputs.dtype, None if start is None else start > 0
        window = jnp.zeros_like(window) if live is None else jnp.where(live[:, None, None], window, 0)
        if earlier is not None:
            inputs = jnp.concatenate([earlier.inputs, inputs], axis=1)
            g = jnp.concatenate([earlier.g, g], axis=1)
        mixed = delta_rule.short_conv(window, inputs, conv, mask, nodes).astype(dtype)
        mixed = jax.nn.silu(mixed).astype(jnp.float32)
        q, k, v = jnp.split(mixed, [split := (mixed.shape[-1] - value_heads * value_dim) // 2, 2 * split], axis=-1)
        q = unit(q.reshape(*q.shape[:2], -1, key_dim)) * key_dim**-0.5
        k, v = unit(k.reshape(q.shape)), v.reshape(*v.shape[:2], value_heads, value_dim)
        if mask is None and earlier is None and nodes > delta_rule.BLOCK:
            first = jnp.zeros_like(state) if live is None else jnp.where(live[:, None, None, None], state, 0)
            out, u = delta_rule.chain_delta_rule(first, q, k, v, g, beta)
        else:
            if earlier is not None:
                k = jnp.concatenate([earlier.k, k], axis=1)
            before = None if earlier is None else earlier.u
            held = None if live is None else state
            out, u = delta_rule.tree_delta_rule(held, q, k, v, g, beta, mask, before, live)
        return out, RecurrentRows(inputs, k, u, g)

    def commit(
        self,
        rows: tuple[RecurrentRows, ...],
        start: Int[Array, " B"],
        path: Int[Array, "B A"] | None,
        length: Int[Array, " B"],
    ) -> Self:
        """The cache behind the first `length[b]` nodes along `path` (None: a chain); as it is where that is 0."""
        live = (start > 0) | (length == 0)
        states, windows = [], []
        for state, window, new in zip(self.states, self.windows, rows, strict=True):
            if path is not None:
                new = jax.tree.map(lambda x: _take(x, path), new)
            states.append(delta_rule.advance(state, new.k, new.u, new.g, length, live))
            windows.append(delta_rule.slide(jnp.where(live[:, None, None], window, 0), new.inputs, length))
        return dataclasses.replace(self, states=tuple(states), windows=jnp.stack(windows))


def unit(x: Float[Array, "B N H K"]) -> Float[Array, "B N H K"]:
    """Vectors of norm 1, but for 1e-6 that is added to the square."""
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _take(x: Array, path: Int[Array, "B A"]) -> Array:
    return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1, mode="clip")
