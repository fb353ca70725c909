"""Options of a training run: the shape of its draft, its hyperparameters, and how often it logs, evaluates and saves.

Each field has its bounds and its help, from which checks and the command line are derived. No package of the extra
`train` is needed here, so that help is there without it.
"""

import dataclasses
from typing import Any

from jspec.core.options import check_options, option, options_of
from jspec.models.block_head import MARKOV_KINDS, MOST_CANDIDATES

_STEPS = 2**31 - 1
_SIZE = {"least": 1, "most": 2**20}


class Options:
    """Base of dataclasses of options; TypeError or ValueError for values of another type, or out of bounds."""

    def __post_init__(self):
        check_options(self)


def with_default(owner: type, name: str, default: Any) -> Any:
    """An option of another dataclass, with another default."""
    field, _ = options_of(owner)[name]
    return dataclasses.field(default=default, metadata=field.metadata)


@dataclasses.dataclass(frozen=True)
class Recipe(Options):
    """Hyperparameters of a training run; together with the data they determine the result.

    Drafts of large targets need a lower rate: SafeAILab and SpecForge train those of 8B targets at 5e-5 to 1e-4.
    """

    steps: int = option(20000, "optimizer steps of the whole run, at most", least=2, most=_STEPS)
    batch_tokens: int = option(32768, "tokens per step, in chunks that fit into memory", least=1, most=2**26)
    length: int = option(512, "T, tokens of a sequence; those of --rows have their own length", least=3, most=2**24)
    learning_rate: float = option(2e-3, "peak learning rate", above=0)
    warmup: int = option(200, "steps until the learning rate reaches its peak, at most steps - 1", least=0, most=_STEPS)
    weight_decay: float = option(0.0, "weight decay of matrices", least=0)
    clip: float = option(0.5, "largest norm of a gradient; larger ones are scaled down to it", above=0)
    seed: int = option(0, "seed of the initial weights and of the order of the text", least=0, most=2**32 - 1)


@dataclasses.dataclass(frozen=True)
class DraftRecipe(Recipe):
    """Hyperparameters of the training of a draft by the training-time test."""

    ttt_steps: int = option(
        7, "K, the longest chain that is trained: each draft reads the output of the one before", least=1, most=64
    )
    decay: float = option(0.8, "draft k of a chain counts decay^k", least=0, most=1)


@dataclasses.dataclass(frozen=True)
class BlockRecipe(Recipe):
    """Hyperparameters of the training of a block draft; the defaults are DeepSeek's for DSpark (arXiv 2607.05147).

    DFlash learns by cross-entropy alone: cross_entropy=1, distance=0. DFlash2 adds its selector's. JetSpec learns by
    divergence alone (arXiv 2606.18394).
    """

    learning_rate: float = with_default(Recipe, "learning_rate", 6e-4)
    clip: float = with_default(Recipe, "clip", 1.0)
    anchors: int = option(64, "blocks per sequence and step, or as many as it has positions", least=1, most=2**20)
    cross_entropy: float = option(0.1, "weight of the cross-entropy on the text", least=0)
    distance: float = option(0.9, "weight of the L1 distance to the target's distribution", least=0)
    divergence: float = option(0.0, "weight of the KL divergence from the target's distribution", least=0)
    confidence: float = option(1.0, "weight of the cross-entropy of the confidence head", least=0)
    selector: float = option(1.0, "weight of the cross-entropy of the selector among its candidates", least=0)
    reach: float = option(4.0, "prediction k of a block, from 1, counts exp(-(k - 1) / reach)", above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals(Options):
    """How often to log, evaluate and write a checkpoint."""

    log_every: int = option(50, "steps between lines of the loss", least=1)
    eval_every: int = option(500, "steps between evaluations", least=1)
    checkpoint_every: int = option(1000, "steps between checkpoints", least=1)


@dataclasses.dataclass(frozen=True)
class LayerSizes(Options):
    """Sizes of a draft's layers; None: the target's."""

    hidden_size: int | None = option(None, "of the draft (default: the target's)", bounds=_SIZE)
    intermediate_size: int | None = option(None, "of the draft (default: the target's)", bounds=_SIZE)
    num_heads: int | None = option(None, "of the draft (default: the target's)", bounds=_SIZE)

    def sizes(self, target: Any, *others: str) -> dict[str, Any]:
        """These sizes, and those of the fields `others`, by name."""
        names = (*options_of(LayerSizes), *others)
        return {name: getattr(target if getattr(self, name) is None else self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class HeadShape(LayerSizes):
    """The shape of an EAGLE-3 head, or of a P-EAGLE head with a `mask_token`."""

    num_layers: int = option(1, "of the draft", bounds=_SIZE)
    mask_token: int | None = option(
        None, "P-EAGLE: all tokens in one forward; id of the token in the place of those to predict", least=0
    )
    num_kv_heads: int | None = option(None, "of the draft (default: the target's)", bounds=_SIZE)
    head_dim: int | None = option(None, "of the draft (default: the target's)", bounds=_SIZE)
    capture_layers: tuple[int, ...] | None = option(
        None,
        "the target's layers whose input the head reads, ascending; L: the output of the last one "
        "(default: 2, L // 2, L - 3)",
        least=0,
    )
    draft_vocab_size: int | None = option(
        None, "tokens that the head can propose, the most common ones of the data (default: all)", least=1
    )
    norm_output: bool = option(
        False, "the next draft reads the output after its norm, and captured layers have norms (EAGLE-3.1, EAGLE-4)"
    )
    sliding_window: int | None = option(
        None, "positions that a row sees, its own included, as in EAGLE-4 (default: all)", least=64, most=2**24
    )


@dataclasses.dataclass(frozen=True)
class BlockShape(Options):
    """The shape of a block draft; DFlash: fill_in=True, markov="none", no_confidence=True.

    DFlash2 has convolutions and a selector in addition, and JetSpec is causal.
    """

    capture_layers: tuple[int, ...] | None = option(
        None,
        "the target's layers whose input the draft reads, ascending; L: the output of the last one "
        "(default: five from 2 to L - 2, evenly spaced)",
        least=0,
    )
    block_size: int = option(8, "rows of a block", least=1, most=64)
    num_layers: int = option(2, "of the draft", bounds=_SIZE)
    fill_in: bool = option(False, "rows predict the token at their own position (DFlash), not the one after")
    markov: str = option("vanilla", "kind of the Markov head", choices=(*MARKOV_KINDS, "none"))
    markov_rank: int = option(64, "of the Markov head", bounds=_SIZE)
    no_confidence: bool = option(False, "no confidence head")
    causal: bool = option(False, "rows see only those up to their own in a block (JetSpec)")
    conv_kernel_size: int = option(0, "taps of convolutions along a block (DFlash2; 0: none)", least=0, most=64)
    conv_group_size: int = option(16, "channels of the convolutions whose kernels move together", bounds=_SIZE)
    selector_rank: int = option(0, "of a selector by the token before (DFlash2; 0: none)", least=0, most=2**20)
    selector_top_k: int = option(16, "candidates of the selector", least=1, most=MOST_CANDIDATES)
    mask_token: int | None = option(None, "id of the token of the rows to predict (default: the last one)", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.fill_in and self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}: must be from 2 to 64 with fill_in")


@dataclasses.dataclass(frozen=True)
class AssistantShape(LayerSizes):
    """The shape of an assistant."""

    num_layers: int | None = option(None, "of the assistant (default: as many as it reads, otherwise 4)", bounds=_SIZE)
    reads: tuple[int, ...] | None = option(
        None,
        "for each layer, the target's layer whose keys and values it reads (default: the last ones, of each kind)",
        least=0,
    )
    target_head: bool = option(False, "use the target's LM head instead of its own")
