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
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec import eagle_checkpoint
from jspec.drafters import Eagle
from jspec.eagle_config import LAYOUTS
from jspec.evaluate import evaluate, read_prompts
from jspec.model import Model, load, locate
from jspec.models import EagleHead, EagleParams, LlamaParams
from jspec.models.llama import require_llama
from jspec.text import Tokenizer
from jspec.train import batches, data, eagle3_card, head, loop, options
from jspec.train.batches import Source
from jspec.train.head import HeadRecipe, HeadSetup, HeadState
from jspec.train.loop import DEFAULT_INTERVALS, Intervals
from jspec.types import Params

_HELDOUT_TOKENS = 2**18
_SHAPE = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")

Judge = Callable[[EagleParams], dict[str, Any]]
"""Figures of a head as it is served, to be logged beside those of the training-time test."""


def train(
    setup: HeadSetup,
    target: LlamaParams,
    sources: tuple[Source, ...],
    heldout: np.ndarray,
    *,
    directory: Path,
    judge: Judge | None = None,
    resume: bool = False,
    intervals: Intervals = DEFAULT_INTERVALS,
    stop_after: int | None = None,
) -> HeadState:
    """Trains to the recipe's last step, or to step `stop_after`, and leaves a checkpoint there.

    Args:
      target: the target's weights, in the setup's precision.
      sources: text to train on; best, what the target wrote itself.
      heldout: text to evaluate on, [tokens].
      directory: gets metrics.jsonl, recipe.json and the checkpoints.
      judge: more figures to log at each evaluation, given the head as it is served; such as `accept_length`.
      resume: continue from the latest checkpoint in `directory`; the steps are those of an unbroken run.

    Raises:
      ValueError: a target, data and recipe that do not fit together, or a checkpoint of another recipe.
      FileNotFoundError: nothing to resume from.
      FileExistsError: checkpoints there, and `resume` not asked for.
    """
    check(setup, sources)
    ids = head.vocabulary(setup, sources)

    def evaluate_state(state: HeadState) -> dict[str, Any]:
        served = state.head(setup.dtype)
        return agreement(served, target, heldout, setup) | ({} if judge is None else judge(served))

    return loop.run(
        directory,
        init=lambda: head.init(setup, target, ids),
        advance=lambda state, step: _advance(setup, target, sources, state, step),
        evaluate=evaluate_state,
        steps=setup.recipe.steps,
        schedule=setup.recipe.schedule(),
        recipe=dataclasses.asdict(setup.recipe) | dataclasses.asdict(setup.config),
        resume=resume,
        intervals=intervals,
        stop_after=stop_after,
    )


def train_head(
    model: Model,
    rows: np.ndarray,
    *,
    steps: int,
    batch_tokens: int = 2048,
    capture: tuple[int, ...] | None = None,
    progress: bool = True,
    **numbers: Any,
) -> Model:
    """Trains a head in memory, and returns the model with it as its draft: for `jspec.generate(..., drafter="eagle")`.

    Args:
      model: the target; a draft that it has is left out of the result.
      rows: Int[rows, T] text that the target wrote itself, such as `jspec.train.text.complete` returns.
      steps: of the training, 2 or more.
      batch_tokens: tokens a step.
      capture: the target's layers that the head reads; None: (2, L // 2, L - 3).
      progress: shows a bar with the loss.
      numbers: other fields of `HeadRecipe`.

    Raises:
      ValueError: arguments that do not fit together; see the message.
    """
    recipe = HeadRecipe(steps=steps, batch_tokens=batch_tokens, length=rows.shape[1], **numbers)
    target, shape = model.params.target, require_llama(model.target, "the training of an EAGLE-3 head")
    config = head.configure(shape, capture=capture, draft_vocab_size=recipe.draft_vocab_size)
    setup, sources = HeadSetup(config, shape, recipe, str(target.embed.dtype)), (Source(np.asarray(rows)),)
    check(setup, sources)
    state = head.init(setup, target, head.vocabulary(setup, sources))
    bar = tqdm(range(steps), disable=not progress)
    for step in bar:
        state, loss, _ = _advance(setup, target, sources, state, step)
        if progress and step % 10 == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
    return dataclasses.replace(model, params=Params(target, state.head(setup.dtype)), draft=config)


def agreement(
    params: EagleParams, target: LlamaParams, heldout: np.ndarray, setup: HeadSetup
) -> dict[str, float | list[float]]:
    """How a head does in the training-time test on held-out text, in windows of the recipe's length.

    Returns:
      heldout_loss, heldout_agreement: of each step, the loss in nats and the share of rows where the head's choice is
        the target's.
      heldout_chain: tokens a round that a chain of `ttt_steps` drafts would give, bonus included, if the target's own
        text were the held-out one; and heldout_estimate, the same from the agreements a_k alone, as though the steps
        were independent: 1 + a_0 + a_0 a_1 + ...
    """
    recipe, sums, rows = setup.recipe, [], []
    size = min(recipe.length, len(heldout))
    for batch in batches.windows(heldout[:_HELDOUT_TOKENS], batch_tokens=recipe.batch_tokens, length=size - 1):
        tokens = jnp.asarray(batch)
        sums.append(jax.device_get(head.measure(params, target, tokens, head.text_mask(tokens), setup=setup)))
        rows.append(len(batch))
    agreed, chained, counted = (
        np.sum([getattr(s, name) for s in sums], 0) for name in ("agreed", "chained", "counted")
    )
    share = agreed / np.maximum(counted, 1)
    return {
        "heldout_loss": np.average([s.loss for s in sums], axis=0, weights=rows).tolist(),
        "heldout_agreement": share.tolist(),
        "heldout_chain": 1 + float(np.sum(chained / np.maximum(counted, 1))),
        "heldout_estimate": 1 + float(np.cumprod(share).sum()),
    }


def accept_length(
    model: Model,
    config: EagleHead,
    params: EagleParams,
    prompts: Sequence[str],
    *,
    depth: int = 5,
    max_new_tokens: int = 128,
    batch: int = 32,
) -> dict[str, Any]:
    """Speculative decoding after each prompt, with chains of `depth` drafts: tokens a round, and how often each
    position of the draft stands.
    """
    drafted = dataclasses.replace(model, params=Params(model.params.target, params), draft=config)
    out = evaluate(drafted, prompts, Eagle(depth=depth), max_new_tokens=max_new_tokens, batch=batch)
    return {
        "accept_length": out.accept_length,
        "acceptance_by_position": out.acceptance_by_position.tolist(),
        "repeated": out.repeated,
    }


def check(setup: HeadSetup, sources: tuple[Source, ...]) -> None:
    """Refuses what cannot be trained.

    Raises:
      ValueError: sequences longer than the target's context, or numbers that are out of range or contradict.
    """
    recipe, limit = setup.recipe, setup.target.max_length
    widths = [source.tokens.shape[1] for source in sources if source.tokens.ndim == 2]
    for name, length in [("length", recipe.length), *(("the rows' width", width) for width in widths)]:
        if not 2 < length <= limit:
            raise ValueError(f"{name}={length}: give 3 to {limit}, the target's context")
    if recipe.steps < 2:
        raise ValueError(f"steps={recipe.steps}: give at least 2")
    if recipe.ttt_steps < 1:
        raise ValueError(f"ttt_steps={recipe.ttt_steps}: give at least 1")
    if (recipe.draft_vocab_size or setup.target.vocab_size) != setup.config.draft_vocab_size:
        raise ValueError(
            f"draft_vocab_size={recipe.draft_vocab_size}: the head was configured for {setup.config.draft_vocab_size}"
        )


def _advance(setup: HeadSetup, target: LlamaParams, sources: tuple[Source, ...], state: HeadState, step: int):
    recipe = setup.recipe
    # One token less than a language model's batch, whose last column is predicted only.
    batch = batches.draw(
        sources, seed=recipe.seed, step=step, batch_tokens=recipe.batch_tokens, length=recipe.length - 1
    )
    tokens = jnp.asarray(batch)
    return head.train_step(state, target, tokens, head.text_mask(tokens), setup=setup)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train eagle3`."""
    options.add(parser, HeadRecipe)
    parser.add_argument("--target", required=True, help="bundled:NAME, a Hugging Face directory or a hub id")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of the checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--capture",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="layers to read the input of (default: 2, L // 2, L - 3)",
    )
    for name in _SHAPE:
        parser.add_argument("--" + name.replace("_", "-"), type=int, help="of the head (default: the target's)")
    parser.add_argument("--depth", type=int, default=5, help="drafts a round in evaluations (default: 5)")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts to decode in each (default: 32)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train eagle3`."""
    recipe = options.recipe(args, HeadRecipe)
    model = load(args.target)
    target, llama = model.params.target, require_llama(model.target, "jspec train eagle3")
    own, theirs = Tokenizer.load(args.data), Tokenizer.load(locate(args.target))
    if own is None or theirs is None or own.vocabulary() != theirs.vocabulary():
        raise ValueError(f"{args.data}: has another tokenizer than {args.target}; see jspec train data --tokenizer")
    shape = {name: getattr(args, name) for name in _SHAPE}
    capture = None if args.capture is None else tuple(args.capture)
    config = head.configure(llama, capture=capture, draft_vocab_size=recipe.draft_vocab_size, **shape)
    setup = HeadSetup(config, llama, recipe, str(target.embed.dtype))
    prompts = read_prompts(args.data / "heldout_prompts.json")[: args.prompts]
    state = train(
        setup,
        target,
        options.sources(args, model.target.vocab_size),
        batches.open_tokens(args.data / "heldout.npy", vocab_size=model.target.vocab_size),
        directory=args.work,
        judge=lambda params: accept_length(model, config, params, prompts, depth=args.depth),
        resume=args.resume,
        intervals=options.intervals(args),
        stop_after=args.stop_after,
    )
    verifier = data.public_name(args.target)
    eagle_checkpoint.save(args.out, config, state.head(jnp.float32), layout=args.layout, verifier=verifier)
    card = eagle3_card.write(setup, state, args, device=jax.devices()[0].device_kind)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return 0
