"""The table of kinds of drafts that can be trained: a command each, and a value of `draft.train_draft`.

No package of the extra `train` is needed here: the help of a command is there without it.
"""

import dataclasses
import importlib
from typing import TYPE_CHECKING

from jspec.checkpoints import block, eagle
from jspec.core.options import option
from jspec.models import Assistant, BlockHead, EagleHead
from jspec.train.recipe import AssistantShape, BlockRecipe, BlockShape, DraftRecipe, HeadShape, Options, Recipe

if TYPE_CHECKING:
    from jspec.train.learner import Learner

_HELP = """{first}

Writes a checkpoint with a model card, metrics as JSON lines, and checkpoints to resume from. A draft is best trained on
text that the target wrote itself, since it will also draft for such text.

  jspec train data --out data --tokenizer TARGET --text book.txt
  jspec train text --model TARGET --prompts data/train_prompts.json --out rows.npy
  jspec train {name} --data data --target TARGET --rows rows.npy --rows-share 0.8 --work work --out draft --steps 2000

Other files, and chats: see `jspec train data --help` and `jspec train replies --help`.

{cost}
"""


@dataclasses.dataclass(frozen=True)
class Output(Options):
    """How a checkpoint is written."""

    int8: bool = option(False, "store matrices in 8 bits, with a scale for each output")


@dataclasses.dataclass(frozen=True)
class HeadOutput(Output):
    """How the checkpoint of an EAGLE-3 head is written."""

    layout: str = option(eagle.LAYOUTS[0], "layout of the checkpoint", choices=eagle.LAYOUTS)


@dataclasses.dataclass(frozen=True)
class BlockOutput(Output):
    """How the checkpoint of a block draft is written."""

    layout: str | None = option(
        None, "layout of the checkpoint (default: the first that can hold the draft)", choices=block.LAYOUTS
    )


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of draft.

    name: of the command.
    first, cost: the first and the last paragraphs of its help.
    config: the class of its configuration.
    shape, recipe: dataclasses of options: the draft's shape, and the hyperparameters.
    learner: module and class of the `Learner`.
    output: a dataclass of options about the checkpoint, if there are any.
    """

    name: str
    first: str
    cost: str
    config: type
    shape: type[Options]
    recipe: type[Recipe]
    learner: tuple[str, str]
    output: tuple[type[Output], ...] = ()

    @property
    def help(self) -> str:
        """The help of the command."""
        return _HELP.format(first=self.first, name=self.name, cost=self.cost)

    def load(self) -> "type[Learner]":
        """The learner's class; ModuleNotFoundError without the packages of the extra `train`."""
        module, name = self.learner
        return getattr(importlib.import_module(f"jspec.train.{module}"), name)


_HEAD = Kind(
    name="eagle3",
    first="Trains an EAGLE-3 head for a target (Li et al., EAGLE-3, arXiv 2503.01840, section 3).",
    cost="""\
With --mask-token ID it is a P-EAGLE head (arXiv 2602.01469), which drafts --ttt-steps tokens in one forward.

Cost: a token takes one forward of the target and, in each of the `ttt_steps`, a forward and a backward of the head;
on an accelerator one more forward, because the backward pass recomputes the inside of each step. Memory per token:
the target's logits (4 bytes times its vocabulary), the logits of one step, and what is stored between steps, which
is 29 kB in float32 for a head of width 256. `--batch-tokens` bounds all three. The card of the bundled head states
what its training took.""",
    config=EagleHead,
    shape=HeadShape,
    recipe=DraftRecipe,
    learner=("head", "HeadLearner"),
    output=(HeadOutput,),
)
_BLOCK = Kind(
    name="dspark",
    first="Trains a block draft for a target: DSpark (arXiv 2607.05147), DFlash (2602.06036), DFlash2 or JetSpec.",
    cost="""\
DFlash as published: --fill-in --block-size 16 --markov none --no-confidence --cross-entropy 1 --distance 0 --reach
7. DFlash2 in addition: --block-size 8 --conv-kernel-size 2 --selector-rank 256 --reach 4. JetSpec (arXiv 2606.18394)
in addition: --causal --cross-entropy 0 --divergence 1.

Cost: a token takes one forward of the target; each of the `anchors` of a sequence takes a forward and a backward of
the draft over one block. Memory: the target's logits (4 bytes times its vocabulary for each token), and the
draft's, which are as many for each prediction of a block. `--batch-tokens` and `--anchors` bound both.""",
    config=BlockHead,
    shape=BlockShape,
    recipe=BlockRecipe,
    learner=("block", "BlockLearner"),
    output=(BlockOutput,),
)
_ASSISTANT = Kind(
    name="frozen-kv-mtp",
    first="Trains an assistant for a target, which drafts from the target's keys and values.",
    cost="""\
Targets are models of the Llama shape (Llama, Qwen3) and Gemma 4. Training and cost are those of an EAGLE-3 head
(see `jspec train eagle3`): the assistant predicts from the same states with the same losses, but has no keys and
values of its own. The card of the bundled assistant states what its training took.""",
    config=Assistant,
    shape=AssistantShape,
    recipe=DraftRecipe,
    learner=("assistant", "AssistantLearner"),
)

KINDS = {kind.name: kind for kind in (_HEAD, _BLOCK, _ASSISTANT)}
"""The kinds by name."""
