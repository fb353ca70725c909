"""`jspec train eagle3`: trains an EAGLE-3 head for a target (Li et al., EAGLE-3, arXiv 2503.01840, section 3).

Writes a checkpoint of the head with a model card, metrics as JSON lines, and checkpoints to resume from. The head is
best trained on text that the target wrote itself (`jspec train text`), on which it will be measured, too.

  jspec train data --out data --tokenizer TARGET --processes 16
  jspec train text --model TARGET --prompts data/train_prompts.json --out rows.npy
  jspec train eagle3 --data data --target TARGET --rows rows.npy --rows-share 0.8 --work work --out head --steps 2000

What a run costs: a token takes one forward of the target and, in each of the `ttt_steps`, a forward and a backward of
the head; on an accelerator one forward more, as the backward pass computes what is inside of a step anew. In memory a
token takes the target's logits (4 bytes times its vocabulary), those of one step, and what is kept of the steps: 29 kB
in float32 for a head of width 256. `batch_tokens` bounds all three. The card of the bundled head says what its run
took.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import eagle
from jspec.checkpoints.eagle_config import LAYOUTS
from jspec.engine.model import Model
from jspec.models import EagleHead
from jspec.models.llama import require_llama
from jspec.train import data, distil, draft_card, head
from jspec.train.draft_card import Kind
from jspec.train.head import HeadLearner
from jspec.train.learner import DraftRecipe, DraftSetup
from jspec.train.model import count

_SHAPE = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")


def train_head(
    model: Model,
    rows: np.ndarray,
    *,
    steps: int,
    batch_tokens: int = 2048,
    capture_layers: tuple[int, ...] | None = None,
    draft_vocab_size: int | None = None,
    progress: bool = True,
    **numbers: Any,
) -> Model:
    """Trains a head in memory, and returns the model with it as its draft: for `jspec.generate(..., drafter="eagle")`.

    Args:
      model: the target; a draft that it has is left out of the result.
      rows: Int[rows, T] text that the target wrote itself, such as `jspec.train.text.complete` returns.
      steps: of the training, 2 or more.
      batch_tokens: tokens a step.
      capture_layers: the target's layers that the head reads; None: (2, L // 2, L - 3).
      draft_vocab_size: tokens that the head can propose, the most common ones of the rows; None: all.
      progress: shows a bar with the loss.
      numbers: other fields of `DraftRecipe`.

    Raises:
      ValueError: arguments that do not fit together; see the message.
    """
    shape = require_llama(model.target, "the training of an EAGLE-3 head")
    config = head.configure(shape, capture_layers=capture_layers, draft_vocab_size=draft_vocab_size)
    recipe = DraftRecipe(steps=steps, batch_tokens=batch_tokens, length=rows.shape[1], **numbers)
    setup = DraftSetup(HeadLearner(config, shape), recipe, str(model.params.target.embed.dtype))
    return distil.train_in_memory(setup, model, rows, progress=progress)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train eagle3`."""
    distil.add_arguments(parser)
    parser.add_argument(
        "--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of the checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--capture-layers",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="layers to read the input of (default: 2, L // 2, L - 3)",
    )
    parser.add_argument(
        "--draft-vocab-size", type=int, help="tokens that it can propose, the most common of the data (default: all)"
    )
    for name in _SHAPE:
        parser.add_argument("--" + name.replace("_", "-"), type=int, help="of the head (default: the target's)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train eagle3`."""
    model = distil.load_target(args)
    shape = require_llama(model.target, "jspec train eagle3")
    given = {name: getattr(args, name) for name in (*_SHAPE, "draft_vocab_size")}
    config = head.configure(
        shape, capture_layers=None if args.capture_layers is None else tuple(args.capture_layers), **given
    )
    setup, state = distil.run(HeadLearner(config, shape), model, args)
    name = data.public_name(args.target)
    eagle.save(args.out, config, state.serve(jnp.float32), layout=args.layout, verifier=name)
    kind = describe(config, count(state.params), args)
    card = draft_card.write(setup, state, kind, args, device=jax.devices()[0].device_kind)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return 0


def describe(config: EagleHead, weights: int, args: argparse.Namespace) -> Kind:
    """What a card says of a head of so many weights."""
    kept = f"{config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens"
    return Kind(
        command="eagle3",
        noun="head",
        architecture=f"An EAGLE-3 head (arXiv 2503.01840) for {data.public_name(args.target)}: {weights:,} parameters, "
        f"one decoder layer of width {config.hidden_size} ({config.num_heads} heads of {config.head_dim}, "
        f"{config.num_kv_heads} key heads, MLP of {config.intermediate_size}) over the residual stream entering the "
        f"target's layers {', '.join(str(layer) for layer in config.capture_layers)}, {kept}, weights in bfloat16, "
        f"in the layout `{args.layout}`.",
        options=draft_card.given(args, "layout", "capture_layers", *_SHAPE, "draft_vocab_size"),
    )
