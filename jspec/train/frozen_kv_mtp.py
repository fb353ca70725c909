"""Training of assistants, which draft from the target's keys and values, in memory or by `jspec train frozen-kv-mtp`.

Targets are models of the Llama shape (Llama 3.x, Qwen3) and Gemma 4.
"""

import argparse
from pathlib import Path

import numpy as np
from jaxtyping import PyTree

from jspec.checkpoints import drafts
from jspec.engine.model import Model
from jspec.models import Assistant, Decoder
from jspec.train import assistant, distill, draft
from jspec.train.arguments import ASSISTANT_SHAPE
from jspec.train.assistant import AssistantLearner
from jspec.train.draft import DraftKind
from jspec.train.learner import Learner
from jspec.train.recipe import DraftRecipe


def train_assistant(
    model: Model,
    sequences: np.ndarray,
    *,
    steps: int,
    mask: np.ndarray | None = None,
    batch_tokens: int = 2048,
    reads: tuple[int, ...] | None = None,
    num_layers: int | None = None,
    target_head: bool = False,
    progress: bool = True,
    **recipe_options: float,
) -> Model:
    """Trains an assistant in memory and returns the model with it as its draft, for `jspec.generate`.

    Args:
      model: the target; a draft that it has is not in the result.
      sequences: Int[sequences, T] text that the target wrote itself, such as `jspec.train.text.complete` returns.
      steps: training steps, at least 2.
      mask: [sequences, T]: 1 for tokens that count for the loss, 0 for others and for padding; None: all count.
      batch_tokens: tokens per step.
      reads, num_layers, target_head: shape of the assistant, see `assistant.configure`.
      progress: show a bar with the loss.
      recipe_options: other fields of `DraftRecipe`, except for `length`, which is T.

    Raises:
      TypeError, ValueError: an argument of another type or out of bounds, or arguments that do not fit together.
    """
    distill.require_model(model)
    target = assistant.require_keys(model.target)
    config = assistant.configure(target, reads=reads, num_layers=num_layers, target_head=target_head)
    learner = AssistantLearner(config, target)
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


def _make_learner(target: Decoder, args: argparse.Namespace) -> AssistantLearner:
    shape = assistant.require_keys(target)
    given = {name: getattr(args, name) for name in ASSISTANT_SHAPE}
    reads = None if args.reads is None else tuple(args.reads)
    return AssistantLearner(assistant.configure(shape, reads=reads, **given), shape)


def _save(directory: Path, learner: Learner, params: PyTree, name: str, args: argparse.Namespace) -> None:
    assert isinstance(learner.config, Assistant)
    drafts.save(directory, learner.config, params)


def _describe(learner: Learner, weights: int, name: str, args: argparse.Namespace) -> str:
    config = learner.config
    assert isinstance(config, Assistant)
    heads = " and ".join(f"{size}" for size in sorted(set(config.head_dims)))
    return (
        f"An assistant for {name} (frozen-KV MTP, as the assistants of Gemma 4): {weights:,} parameters, "
        f"{config.num_layers} layers of width {config.hidden_size} ({config.num_heads} heads of {heads}, MLP of "
        f"{config.intermediate_size}) that read the keys and values of the target's layers "
        f"{', '.join(str(layer) for layer in config.target_layers)}, "
        f"{'the LM head of the target' if config.target_head else 'an LM head of its own'}, weights in bfloat16. It "
        "has no cache."
    )


KIND = DraftKind(
    name="frozen-kv-mtp",
    noun="assistant",
    shape=("reads", *ASSISTANT_SHAPE),
    recipe=DraftRecipe,
    make_learner=_make_learner,
    save=_save,
    describe=_describe,
)
"""Assistants, for `draft.main`."""


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train frozen-kv-mtp`; returns its exit status."""
    return draft.main(KIND, args)
