"""`jspec train frozen-kv-mtp`: trains an assistant for a target, which drafts from the target's keys and values.

Writes a checkpoint of the assistant with a model card, metrics as JSON lines, and checkpoints to resume from. Targets
are models of the Llama shape (Llama 3.x, Qwen3) and Gemma 4. What the assistant reads of its target, the keys, values
and hidden states of a text, is made in each step. It is best trained on text that the target wrote itself.

  jspec train data --out data --tokenizer TARGET --processes 16
  jspec train text --model TARGET --prompts data/train_prompts.json --out rows.npy
  jspec train frozen-kv-mtp --data data --target TARGET --rows rows.npy --work work --out assistant --steps 2000

The training is that of an EAGLE-3 head (`jspec train eagle3`, which says what a run costs), with the assistant in its
place: it predicts from the same states, by the same losses, but has no keys and values of its own. The card of the
bundled assistant says what its run took.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import assistant as assistant_checkpoint
from jspec.engine.model import Model
from jspec.models import Assistant
from jspec.train import assistant, data, distil, draft_card
from jspec.train.assistant import AssistantLearner
from jspec.train.draft_card import Kind
from jspec.train.learner import DraftRecipe, DraftSetup
from jspec.train.model import count

_SHAPE = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "target_head")


def train_assistant(
    model: Model,
    rows: np.ndarray,
    *,
    steps: int,
    batch_tokens: int = 2048,
    reads: tuple[int, ...] | None = None,
    num_layers: int | None = None,
    target_head: bool = False,
    progress: bool = True,
    **numbers: Any,
) -> Model:
    """Trains an assistant in memory, and returns the model with it as its draft: for `jspec.generate(...)`.

    Args:
      model: the target; a draft that it has is left out of the result.
      rows: Int[rows, T] text that the target wrote itself, such as `jspec.train.text.complete` returns.
      steps: of the training, 2 or more.
      batch_tokens: tokens a step.
      reads, num_layers, target_head: of the assistant, see `assistant.configure`.
      progress: shows a bar with the loss.
      numbers: other fields of `DraftRecipe`.

    Raises:
      ValueError: arguments that do not fit together; see the message.
    """
    target = assistant.require_keys(model.target)
    config = assistant.configure(target, reads=reads, num_layers=num_layers, target_head=target_head)
    recipe = DraftRecipe(steps=steps, batch_tokens=batch_tokens, length=rows.shape[1], **numbers)
    setup = DraftSetup(AssistantLearner(config, target), recipe, str(model.params.target.embed.dtype))
    return distil.train_in_memory(setup, model, rows, progress=progress)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train frozen-kv-mtp`."""
    distil.add_arguments(parser)
    parser.add_argument(
        "--reads",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="for each layer the target's layer whose keys and values it reads (default: the last ones, of each kind)",
    )
    parser.add_argument("--num-layers", type=int, help="of the assistant (default: as many as it reads, or else 4)")
    for name in ("hidden_size", "intermediate_size", "num_heads"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, help="of the assistant (default: the target's)")
    parser.add_argument("--target-head", action="store_true", help="the target's LM head serves, in place of its own")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train frozen-kv-mtp`."""
    model = distil.load_target(args)
    given = {name: getattr(args, name) for name in _SHAPE}
    target = assistant.require_keys(model.target)
    config = assistant.configure(target, reads=None if args.reads is None else tuple(args.reads), **given)
    setup, state = distil.run(AssistantLearner(config, target), model, args)
    assistant_checkpoint.save(args.out, config, state.serve(jnp.float32))
    kind = describe(config, count(state.params), args)
    card = draft_card.write(setup, state, kind, args, device=jax.devices()[0].device_kind)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return 0


def describe(config: Assistant, weights: int, args: argparse.Namespace) -> Kind:
    """What a card says of an assistant of so many weights."""
    heads = " and ".join(f"{size}" for size in sorted(set(config.head_dims)))
    return Kind(
        command="frozen-kv-mtp",
        noun="assistant",
        architecture=f"An assistant for {data.public_name(args.target)} (frozen-KV MTP, as the assistants of Gemma 4): "
        f"{weights:,} parameters, {config.num_layers} layers of width {config.hidden_size} ({config.num_heads} heads "
        f"of {heads}, MLP of {config.intermediate_size}) that read the keys and values of the target's layers "
        f"{', '.join(str(layer) for layer in config.reads)}, "
        f"{'the LM head of the target' if config.target_head else 'an LM head of its own'}, weights in bfloat16. It "
        "keeps no cache.",
        options=draft_card.given(args, "reads", *_SHAPE),
    )
