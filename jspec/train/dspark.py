"""Training of block drafts (DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036), also by `jspec train dspark`."""

import argparse
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints import drafts
from jspec.engine.model import Model
from jspec.models import BlockHead, Decoder
from jspec.models.llama import require_llama
from jspec.train import block, distill, draft
from jspec.train.arguments import BLOCK_SHAPE
from jspec.train.block import BlockLearner
from jspec.train.draft import DraftKind
from jspec.train.learner import Learner
from jspec.train.recipe import BlockRecipe


def train_block(
    model: Model,
    sequences: np.ndarray,
    *,
    steps: int,
    mask: np.ndarray | None = None,
    batch_tokens: int = 2048,
    block_size: int = 8,
    num_layers: int = 2,
    next_token: bool = True,
    markov: Literal["vanilla", "gated", "rnn"] | None = "vanilla",
    markov_rank: int = 64,
    confidence: bool = True,
    capture_layers: tuple[int, ...] | None = None,
    mask_token: int | None = None,
    progress: bool = True,
    **recipe_options: float,
) -> Model:
    """Trains a block draft in memory and returns the model with it as its draft, for `jspec.generate`.

    Args:
      model: the target; a draft that it has is not in the result.
      sequences: Int[sequences, T] text that the target wrote itself, such as `jspec.train.text.complete` returns.
      steps: training steps, at least 2.
      mask: [sequences, T]: 1 for tokens that count for the loss, 0 for others and for padding; None: all count.
      batch_tokens: tokens per step.
      block_size, num_layers, next_token, markov, markov_rank, confidence, capture_layers, mask_token: shape of the
        draft, see `jspec.train.block.configure`. DFlash: next_token=False, markov=None.
      progress: show a bar with the loss.
      recipe_options: other fields of `BlockRecipe`, except for `length`, which is T.

    Raises:
      TypeError, ValueError: an argument of another type or out of bounds, or arguments that do not fit together.
    """
    distill.require_model(model)
    target = require_llama(model.target, "the training of a block draft")
    config = block.configure(
        target,
        block_size=block_size,
        num_layers=num_layers,
        next_token=next_token,
        markov=markov,
        markov_rank=markov_rank,
        confidence=confidence,
        capture_layers=capture_layers,
        mask_token=mask_token,
    )
    return distill.train_in_memory(
        BlockLearner(config, target),
        model,
        sequences,
        mask=mask,
        steps=steps,
        batch_tokens=batch_tokens,
        progress=progress,
        **recipe_options,
    )


def _make_learner(target: Decoder, args: argparse.Namespace) -> BlockLearner:
    shape = require_llama(target, "jspec train dspark")
    capture_layers = None if args.capture_layers is None else tuple(args.capture_layers)
    config = block.configure(
        shape,
        block_size=args.block_size,
        num_layers=args.num_layers,
        next_token=not args.fill_in,
        markov=None if args.markov == "none" else args.markov,
        markov_rank=args.markov_rank,
        confidence=not args.no_confidence,
        capture_layers=capture_layers,
        mask_token=args.mask_token,
    )
    return BlockLearner(config, shape)


def _save(directory: Path, learner: Learner, params: PyTree, name: str, args: argparse.Namespace) -> None:
    assert isinstance(learner.config, BlockHead)
    drafts.save(directory, learner.config, params, layout=args.layout, verifier=name)


def _describe(learner: Learner, weights: int, name: str, args: argparse.Namespace) -> str:
    config = learner.config
    assert isinstance(config, BlockHead)
    markov = (
        "no Markov head" if config.markov is None else f"a {config.markov} Markov head of rank {config.markov_rank}"
    )
    return (
        f"A {config.summary()} (arXiv 2607.05147) for {name}: {weights:,} parameters, {config.num_layers} decoder "
        f"layers of width {config.hidden_size} ({config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} "
        f"key heads, MLP of {config.intermediate_size}) over projections of the residual stream that enters the "
        f"target's layers "
        f"{', '.join(str(layer) for layer in config.capture_layers)}, {markov}, the target's embedding and LM head, "
        f"weights in bfloat16, in the layout `{args.layout}`."
    )


KIND = DraftKind(
    name="dspark",
    noun="draft",
    shape=("layout", "capture_layers", *BLOCK_SHAPE),
    recipe=BlockRecipe,
    make_learner=_make_learner,
    save=_save,
    describe=_describe,
)
"""Block drafts, for `draft.main`."""


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train dspark`; returns its exit status."""
    return draft.main(KIND, args)
