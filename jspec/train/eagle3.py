"""Training of EAGLE-3 heads (Li et al., EAGLE-3, arXiv 2503.01840, section 3), in memory or by `jspec train eagle3`."""

import argparse
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints import drafts
from jspec.engine.model import Model
from jspec.models import Decoder, EagleHead
from jspec.models.llama import require_llama
from jspec.train import distill, draft, head
from jspec.train.arguments import HEAD_SHAPE
from jspec.train.draft import DraftKind
from jspec.train.head import HeadLearner
from jspec.train.learner import Learner
from jspec.train.recipe import DraftRecipe


def train_head(
    model: Model,
    sequences: np.ndarray,
    *,
    steps: int,
    mask: np.ndarray | None = None,
    batch_tokens: int = 2048,
    capture_layers: tuple[int, ...] | None = None,
    draft_vocab_size: int | None = None,
    progress: bool = True,
    **recipe_options: float,
) -> Model:
    """Trains a head in memory and returns the model with it as its draft, for `jspec.generate(..., drafter="eagle")`.

    Args:
      model: the target; a draft that it has is not in the result.
      sequences: Int[sequences, T] text that the target wrote itself, such as `jspec.train.text.complete` returns.
      steps: training steps, at least 2.
      mask: [sequences, T]: 1 for tokens that count for the loss, 0 for others and for padding; None: all count.
      batch_tokens: tokens per step.
      capture_layers: the target's layers that the head reads; None: (2, L // 2, L - 3).
      draft_vocab_size: tokens that the head can propose, the most common ones of the text; None: all.
      progress: show a bar with the loss.
      recipe_options: other fields of `DraftRecipe`, except for `length`, which is T.

    Raises:
      TypeError, ValueError: an argument of another type or out of bounds, or arguments that do not fit together.
    """
    distill.require_model(model)
    target = require_llama(model.target, "the training of an EAGLE-3 head")
    config = head.configure(target, capture_layers=capture_layers, draft_vocab_size=draft_vocab_size)
    learner = HeadLearner(config, target)
    return distill.train_in_memory(
        learner,
        model,
        sequences,
        mask=mask,
        steps=steps,
        batch_tokens=batch_tokens,
        progress=progress,
        **recipe_options,
    )


def _make_learner(target: Decoder, args: argparse.Namespace) -> HeadLearner:
    shape = require_llama(target, "jspec train eagle3")
    given = {name: getattr(args, name) for name in (*HEAD_SHAPE, "draft_vocab_size")}
    capture_layers = None if args.capture_layers is None else tuple(args.capture_layers)
    return HeadLearner(head.configure(shape, capture_layers=capture_layers, **given), shape)


def _save(directory: Path, learner: Learner, params: PyTree, name: str, args: argparse.Namespace) -> None:
    assert isinstance(learner.config, EagleHead)
    drafts.save(directory, learner.config, params, layout=args.layout, verifier=name)


def _describe(learner: Learner, weights: int, name: str, args: argparse.Namespace) -> str:
    config = learner.config
    assert isinstance(config, EagleHead)
    return (
        f"An EAGLE-3 head (arXiv 2503.01840) for {name}: {weights:,} parameters, one decoder layer of width "
        f"{config.hidden_size} ({config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} key heads, MLP of "
        f"{config.intermediate_size}) on the residual stream that enters the target's layers "
        f"{', '.join(str(layer) for layer in config.capture_layers)}, {config.draft_vocab_size:,} of the target's "
        f"{config.vocab_size:,} tokens, weights in bfloat16, in the layout `{args.layout}`."
    )


KIND = DraftKind(
    name="eagle3",
    noun="head",
    shape=("layout", "capture_layers", *HEAD_SHAPE, "draft_vocab_size"),
    recipe=DraftRecipe,
    make_learner=_make_learner,
    save=_save,
    describe=_describe,
)
"""EAGLE-3 heads, for `draft.main`."""


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train eagle3`; returns its exit status."""
    return draft.main(KIND, args)
