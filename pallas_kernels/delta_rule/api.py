"""The gated delta rule over a tree: backends and shared checks."""

from jaxtyping import Array, Bool, Float

from pallas_kernels.delta_rule import xla
from pallas_kernels.dispatch import Operation

OPERATION = Operation("tree_delta_rule", "pallas_kernels.delta_rule", xla.tree_delta_rule, ("triton", "mosaic_tpu"))


def tree_delta_rule(
    state: Float[Array, "B Hv K V"] | None,
    q: Float[Array, "B N H K"],
    k: Float[Array, "B R H K"],
    v: Float[Array, "B N Hv V"],
    g: Float[Array, "B R Hv"],
    beta: Float[Array, "B N Hv"],
    mask: Bool[Array, "#B N R"] | None,
    earlier: Float[Array, "B E Hv V"] | None = None,
    live: Bool[Array, " B"] | None = None,
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "B N Hv V"], Float[Array, "B R Hv V"]]:
    """The outputs of N nodes, each from the state after its own path, and the u of all R rows (`reference.py`).

    Args:
      state: before the root; None: zero.
      q, k: of norm 1, except for a factor on q; k, as g, has all rows.
      g: logarithm of the decay, at most 0.
      mask: the node itself and its ancestors among the rows, parents before children; None: all rows up to its own.
      earlier: u of the E = R - N rows before the new ones; None: there are none.
      live: sequences that have a state; the others begin with zeros, whatever `state` holds. None: all.
      backend: as in `dispatch.Operation.run`.

    Raises:
      ValueError: the backend is unknown or cannot run.
    """
    if backend is None and q.shape[1] == 1:
        # With one node there is nothing to solve, and XLA needs few kernels for the rest.
        backend = "xla"
    return OPERATION.run(backend, state, q, k, v, g, beta, mask, earlier, live)
