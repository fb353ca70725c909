"""Multi-head latent attention of a round's rows over a paged prefix and over themselves."""

from pallas_kernels.mla_attention.api import BACKENDS, mla_attention

__all__ = ["BACKENDS", "mla_attention"]
