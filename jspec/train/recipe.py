"""What a run is told: its hyperparameters, and how often it logs, evaluates and writes checkpoints.

This module needs no package of the extra `train`, so that the command line can describe its options without them.
"""

import dataclasses

from jspec.core.checks import check_int, check_number


def check_fields(values: "Recipe | Intervals", owner: str = "") -> None:
    """Checks each field against the bounds in its metadata, and makes it a plain int or float.

    owner: as in `check_int`.

    Raises:
      TypeError, ValueError: a field of another type, or out of bounds.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        check = check_int if field.type is int else check_number
        object.__setattr__(values, field.name, check(field.name, value, owner=owner, **field.metadata))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training run; together with the data they determine the result.

    Raises:
      TypeError, ValueError: a value of another type, or out of bounds.
    """

    steps: int = dataclasses.field(metadata={"least": 2, "most": 2**31 - 1})
    batch_tokens: int = dataclasses.field(default=131072, metadata={"least": 1, "most": 2**26})
    length: int = dataclasses.field(default=1024, metadata={"least": 1, "most": 2**24})
    """T: tokens of a sequence."""
    learning_rate: float = dataclasses.field(default=3e-3, metadata={"above": 0})
    warmup: int = dataclasses.field(default=200, metadata={"least": 0, "most": 2**31 - 1})
    """Steps over which the learning rate rises, at most `steps` - 1."""
    weight_decay: float = dataclasses.field(default=0.1, metadata={"least": 0})
    clip: float = dataclasses.field(default=1.0, metadata={"above": 0})
    seed: int = dataclasses.field(default=0, metadata={"least": 0, "most": 2**32 - 1})

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class DraftRecipe(Recipe):
    """Hyperparameters of the training of a draft.

    Drafts of large targets need a lower rate: SafeAILab and SpecForge train those of 8B targets at 5e-5 to 1e-4.
    """

    length: int = dataclasses.field(default=512, metadata={"least": 3, "most": 2**24})
    """T: tokens of a sequence; a source of whole sequences has its own."""
    learning_rate: float = dataclasses.field(default=2e-3, metadata={"above": 0})
    weight_decay: float = dataclasses.field(default=0.0, metadata={"least": 0})
    clip: float = dataclasses.field(default=0.5, metadata={"above": 0})
    ttt_steps: int = dataclasses.field(default=7, metadata={"least": 1, "most": 64})
    """K: steps of the training-time test, the longest chain that the draft learns to propose."""
    decay: float = dataclasses.field(default=0.8, metadata={"least": 0, "most": 1})
    """Step k's loss is weighted by decay^k."""


@dataclasses.dataclass(frozen=True)
class BlockRecipe(Recipe):
    """Hyperparameters of the training of a block draft; the defaults are DeepSeek's for DSpark (arXiv 2607.05147).

    DFlash learns by cross-entropy alone: cross_entropy=1, distance=0.
    """

    length: int = dataclasses.field(default=512, metadata={"least": 3, "most": 2**24})
    """T: tokens of a sequence; a source of whole sequences has its own."""
    learning_rate: float = dataclasses.field(default=6e-4, metadata={"above": 0})
    weight_decay: float = dataclasses.field(default=0.0, metadata={"least": 0})
    anchors: int = dataclasses.field(default=64, metadata={"least": 1, "most": 2**20})
    """Blocks of each text and step, or as many as the text has positions."""
    cross_entropy: float = dataclasses.field(default=0.1, metadata={"least": 0})
    """Weight of the cross-entropy on the text."""
    distance: float = dataclasses.field(default=0.9, metadata={"least": 0})
    """Weight of the L1 distance to the target's distribution."""
    confidence: float = dataclasses.field(default=1.0, metadata={"least": 0})
    """Weight of the confidence head's cross-entropy."""
    reach: float = dataclasses.field(default=4.0, metadata={"above": 0})
    """Prediction k, from 1, is weighted by exp(-(k - 1) / reach)."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """How often to log, evaluate and write a checkpoint, in steps.

    Raises:
      TypeError, ValueError: a value that is not an int, or below 1.
    """

    log: int = dataclasses.field(default=50, metadata={"least": 1})
    evaluate: int = dataclasses.field(default=500, metadata={"least": 1})
    checkpoint: int = dataclasses.field(default=1000, metadata={"least": 1})

    def __post_init__(self):
        check_fields(self, "Intervals")


DEFAULT_INTERVALS = Intervals()
