"""The gated delta rule and its short convolution over the nodes of a token tree, and the state behind a path."""

from pallas_kernels.delta_rule.api import BACKENDS, tree_delta_rule
from pallas_kernels.delta_rule.reference import BLOCK, advance, chain_delta_rule, short_conv, slide

__all__ = ["BACKENDS", "BLOCK", "advance", "chain_delta_rule", "short_conv", "slide", "tree_delta_rule"]
