"""Models over several devices: which drafts are split, and copies of heads for devices that share them."""

from jax.typing import DTypeLike

from jspec.checkpoints.plan import can_split
from jspec.models.draft import Draft
from jspec.models.quantized import quantize_shapes
from jspec.models.sizes import tree_bytes

BYTES_PER_SECOND = 3.58e12
"""What a GPU reads of its memory, here of one H200."""
SUM_SECONDS = 8e-6
"""Time in which its neighbors and it add up a few vectors."""


def splits_draft(config: Draft, dtype: DTypeLike, devices: int, weights: str | None = None) -> bool:
    """Whether a draft is split like its target, unless the caller chooses: if it must be, or is faster so.

    To split a draft saves the time in which a device reads the parts of the others, and adds a sum after each attention
    and each MLP and a gather of logits. So heads of one layer are split, and small models of many layers are not.

    weights: the format of its matrices, as in `Tensors.weights`.
    """
    if devices == 1 or config.follows_target:
        return devices > 1
    if not can_split(config, devices):
        return False
    saved = tree_bytes(quantize_shapes(config.param_shapes(dtype), weights)) * (1 - 1 / devices) / BYTES_PER_SECOND
    return saved > SUM_SECONDS * (2 * config.num_layers + 1)


def refuse_split(config: object) -> None:
    """Raises ValueError if weights of this configuration are split, as the columns of fused ones are then sorted by
    device.
    """
    if (devices := getattr(config, "tensor", 1)) > 1:
        raise ValueError(
            f"the weights are split over {devices} devices: load them without tensor or mesh to write them"
        )
