"""Multi-head latent attention of a round's nodes over a paged prefix and over the round's own rows."""

from pallas_kernels.mla_attention.api import OPERATION, mla_attention

__all__ = ["OPERATION", "mla_attention"]
