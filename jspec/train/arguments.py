"""Help and options of the commands that train, apart from what trains.

This module needs no package of the extra `train`: the help of a command is there without them.
"""

import argparse

from jspec.checkpoints import block_config
from jspec.checkpoints.eagle_config import LAYOUTS
from jspec.models.block_head import MARKOV_KINDS
from jspec.train import options
from jspec.train.recipe import BlockRecipe, DraftRecipe, Recipe

DEFAULT_PROMPTS = 32
"""Held-out prompts in each evaluation of a draft."""

HEAD_SHAPE = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
"""Options that give the shape of an EAGLE-3 head."""

BLOCK_SHAPE = ("block_size", "num_layers", "fill_in", "markov", "markov_rank", "no_confidence", "mask_token")
"""Options that give the shape of a block draft."""

ASSISTANT_SHAPE = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "target_head")
"""Options that give the shape of an assistant."""

EAGLE3 = """Trains an EAGLE-3 head for a target (Li et al., EAGLE-3, arXiv 2503.01840, section 3).

Writes a checkpoint of the head with a model card, metrics as JSON lines, and checkpoints to resume from. The head is
best trained on text that the target wrote itself (`jspec train text`), since it will also draft for such text.

  jspec train data --out data --tokenizer TARGET --text book.txt
  jspec train text --model TARGET --prompts data/train_prompts.json --out rows.npy
  jspec train eagle3 --data data --target TARGET --rows rows.npy --rows-share 0.8 --work work --out head --steps 2000

Other files, and chats: see `jspec train data --help` and `jspec train replies --help`.

Cost: a token takes one forward of the target and, in each of the `ttt_steps`, a forward and a backward of the head; on
an accelerator one more forward, because the backward pass recomputes the inside of each step. Memory per token: the
target's logits (4 bytes times its vocabulary), the logits of one step, and what is stored between steps, which is 29 kB
in float32 for a head of width 256. `--batch-tokens` bounds all three. The card of the bundled head states what its
training took.
"""

DSPARK = """Trains a block draft for a target: DSpark (arXiv 2607.05147) or, with --fill-in, DFlash (arXiv 2602.06036).

Writes a checkpoint of the draft with a model card, metrics as JSON lines, and checkpoints to resume from. The draft is
best trained on text that the target wrote itself (`jspec train text`), since it will also draft for such text.

  jspec train data --out data --tokenizer TARGET --text book.txt
  jspec train text --model TARGET --prompts data/train_prompts.json --out rows.npy
  jspec train dspark --data data --target TARGET --rows rows.npy --rows-share 0.8 --work work --out draft --steps 2000

Other files, and chats: see `jspec train data --help` and `jspec train replies --help`.

DFlash as published: --fill-in --block-size 16 --markov none --no-confidence --cross-entropy 1 --distance 0 --reach 7.

Cost: a token takes one forward of the target; each of the `anchors` of a sequence takes a forward and a backward of the
draft over one block. Memory: the target's logits (4 bytes times its vocabulary for each token), and the draft's, which
are as many for each prediction of a block. `--batch-tokens` and `--anchors` bound both.
"""

FROZEN_KV_MTP = """Trains an assistant for a target, which drafts from the target's keys and values.

Writes a checkpoint of the assistant with a model card, metrics as JSON lines, and checkpoints to resume from. Targets
are models of the Llama shape (Llama 3.x, Qwen3) and Gemma 4. Each step computes what the assistant reads of its target:
the keys, values and hidden states of a text. It is best trained on text that the target wrote itself.

  jspec train data --out data --tokenizer TARGET --text book.txt
  jspec train text --model TARGET --prompts data/train_prompts.json --out rows.npy
  jspec train frozen-kv-mtp --data data --target TARGET --rows rows.npy --work work --out assistant --steps 2000

Other files, and chats: see `jspec train data --help` and `jspec train replies --help`.

Training and cost are those of an EAGLE-3 head (see `jspec train eagle3`): the assistant predicts from the same states
with the same losses, but has no keys and values of its own. The card of the bundled assistant states what its training
took.
"""

_SIZE = {"least": 1, "most": 2**20}


def add_eagle3(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train eagle3`."""
    _add_draft(parser)
    parser.add_argument(
        "--layout", choices=LAYOUTS, default=LAYOUTS[0], help="layout of the checkpoint (default: %(default)s)"
    )
    read = "the target's layers whose input the head reads (default: 2, L // 2, L - 3)"
    options.add_number(parser, "--capture-layers", bounds={"least": 0}, nargs="+", metavar="LAYER", help=read)
    proposed = "tokens that the head can propose, the most common ones of the data (default: all)"
    options.add_number(parser, "--draft-vocab-size", bounds={"least": 1}, help=proposed)
    for name in HEAD_SHAPE:
        options.add_number(
            parser, "--" + name.replace("_", "-"), bounds=_SIZE, help="of the head (default: the target's)"
        )


def add_frozen_kv_mtp(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train frozen-kv-mtp`."""
    _add_draft(parser)
    read = "for each layer, the target's layer whose keys and values it reads (default: the last ones, of each kind)"
    options.add_number(parser, "--reads", bounds={"least": 0}, nargs="+", metavar="LAYER", help=read)
    count = "of the assistant (default: as many as it reads, otherwise 4)"
    options.add_number(parser, "--num-layers", bounds=_SIZE, help=count)
    for name in ("hidden_size", "intermediate_size", "num_heads"):
        options.add_number(
            parser, "--" + name.replace("_", "-"), bounds=_SIZE, help="of the assistant (default: the target's)"
        )
    parser.add_argument("--target-head", action="store_true", help="use the target's LM head instead of its own")


def add_dspark(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train dspark`."""
    _add_draft(parser, BlockRecipe)
    parser.add_argument("--layout", choices=block_config.LAYOUTS, default="deepspec", help="layout of the checkpoint")
    read = "the target's layers whose input the draft reads, ascending (default: five, evenly spaced)"
    options.add_number(parser, "--capture-layers", bounds={"least": 0}, nargs="+", metavar="LAYER", help=read)
    options.add_number(parser, "--block-size", bounds={"least": 1, "most": 64}, default=8, help="rows of a block")
    options.add_number(parser, "--num-layers", bounds=_SIZE, default=2, help="of the draft")
    parser.add_argument("--fill-in", action="store_true", help="rows predict the token at their own position (DFlash)")
    parser.add_argument("--markov", choices=(*MARKOV_KINDS, "none"), default="vanilla", help="kind of the Markov head")
    options.add_number(parser, "--markov-rank", bounds=_SIZE, default=64, help="of the Markov head")
    parser.add_argument("--no-confidence", action="store_true", help="no confidence head")
    mask = "id of the token of the rows to predict (default: the last one)"
    options.add_number(parser, "--mask-token", bounds={"least": 0}, metavar="ID", help=mask)


def _add_draft(parser: argparse.ArgumentParser, kind: type[Recipe] = DraftRecipe) -> None:
    """Adds the options of all drafts."""
    options.add(parser, kind)
    parser.add_argument("--target", required=True, help="bundled:NAME, a Hugging Face directory or a hub id")
    depth = {"least": 1, "most": 64}
    options.add_number(parser, "--depth", bounds=depth, default=5, help="drafts per round in evaluations")
    prompts = f"held-out prompts in each evaluation (default: {DEFAULT_PROMPTS}, or all if there are fewer)"
    options.add_number(parser, "--prompts", bounds={"least": 1}, help=prompts)
