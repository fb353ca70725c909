"""The gated delta rule and its short convolution over the nodes of a token tree, and the state after a path."""

from pallas_kernels.delta_rule.api import OPERATION, tree_delta_rule
from pallas_kernels.delta_rule.conv import short_conv, slide
from pallas_kernels.delta_rule.xla import BLOCK, advance, chain_delta_rule

__all__ = ["BLOCK", "OPERATION", "advance", "chain_delta_rule", "short_conv", "slide", "tree_delta_rule"]
