"""Dispatch of the gated delta rule over a tree: a table of backends, and the checks every backend relies on."""

from jaxtyping import Array, Bool, Float

from pallas_kernels import platform
from pallas_kernels.delta_rule import gpu, reference

BACKENDS = {"xla": reference.tree_delta_rule, "triton": gpu.tree_delta_rule}


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
    """What N nodes read of the state, each along its own path, and the u of all R rows (`reference.py`).

    Args:
      state: before the root; None: zero.
      q, k: of norm 1 but for a factor of q's; k, as g, of all rows.
      g: logarithm of the decay, at most 0.
      mask: the node itself and its ancestors among the rows, parents before children; None: all up to its own.
      earlier: u of the E = R - N rows before the new ones; None: there are none.
      live: sequences that have a state; the others begin with zero, whatever `state` holds. None: all.
      backend: a name in `BACKENDS`, which runs or raises; on a CPU kernels run in Pallas' interpreter.
        None: the best one of this platform that takes these arguments.

    Raises:
      ValueError: an unknown backend, or one that cannot run here, or cannot take these arguments.
    """

    if backend is None and q.shape[1] == 1:
        # With one node there is nothing to solve, and XLA makes fewer kernels of the rest than are saved.
        backend = "xla"

    def refuses(name: str) -> str | None:
        return None if name == "xla" else gpu.refuses(q, earlier)

    chosen = platform.choose("tree_delta_rule", backend, BACKENDS, refuses)
    return chosen(state, q, k, v, g, beta, mask, earlier, live)
