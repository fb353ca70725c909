"""`jspec train text`: writes a target's own text, greedy and sampled, for its draft to learn from.

A draft predicts its target's own text and is best trained on it (Zhou et al., DistillSpec, arXiv 2310.08461). Sampled
text repeats itself less than greedy text; a draft for both uses learns from both.
"""

import dataclasses
import sys
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree
from tqdm import tqdm

from jspec.analysis.records import read_records
from jspec.checkpoints import atomic, language_model
from jspec.core import accept, stopping
from jspec.core.checks import check_int, check_number
from jspec.core.loop import fastest
from jspec.core.method import Method
from jspec.core.options import check_options, option
from jspec.core.prefill import jitted_prefill
from jspec.core.sampling import Sampling, per_row
from jspec.core.types import Params, Prompts
from jspec.drafters import Plain
from jspec.engine.hub import locate
from jspec.models.decoder import Decoder
from jspec.train import batches, options, tokenizer
from jspec.train.rows import Made

_PAGE_SIZE = 64


def complete(
    config: Decoder,
    params: PyTree,
    prompts: list[list[int]],
    *,
    width: int,
    batch: int,
    sampled_share: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """Each prompt with the model's continuation up to `width` tokens: UInt[sequences, width].

    The ids have 16 bits, or 32 if the vocabulary needs them. Nothing stops a text early: after its end the model
    starts another one.

    Args:
      batch: prompts at a time.
      sampled_share: the fraction of texts sampled at temperature 1, chosen by the seed; the others are greedy.
      seed: of the choice, and of the sampling.

    Raises:
      TypeError: a prompt of another type than a list of ints.
      ValueError: a width beyond the model's context, no prompts, an empty prompt, or one that fills `width` or has ids
        outside of the vocabulary, or a share outside of 0 to 1.
    """
    width, batch = check_int("width", width, least=2), check_int("batch", batch, least=1)
    share = check_number("sampled_share", sampled_share, least=0, most=1)
    seed = check_int("seed", seed, least=0, most=2**32 - 1)
    if width > config.max_length:
        raise ValueError(f"width={width}: exceeds the model's context of {config.max_length} tokens")
    _check_prompts(prompts, config.vocab_size)
    longest = max((len(prompt) for prompt in prompts), default=0)
    if not 0 < longest < width or min(len(prompt) for prompt in prompts) < 1:
        raise ValueError(f"prompts of up to {longest} tokens: must have 1 to {width - 1} tokens (width={width})")
    batch, sequences = min(batch, len(prompts)), []
    keys = jax.random.split(jax.random.key(seed), len(prompts))
    sampled = np.random.default_rng(seed).permutation(len(prompts)) < round(share * len(prompts))
    for i in tqdm(range(0, len(prompts), batch), mininterval=5, disable=None):
        # The last batch is filled up, because a batch of another size would compile anew.
        index = np.minimum(np.arange(i, i + batch), len(prompts) - 1)
        samplings = [Sampling() if sampled[j] else None for j in index] if sampled.any() else None
        texts = _complete(config, params, [prompts[j] for j in index], keys[index], samplings, width, longest)
        sequences.append(np.asarray(texts)[: len(prompts) - i])
    return np.concatenate(sequences).astype(batches.id_dtype(config.vocab_size))


def _check_prompts(prompts: list[list[int]], vocab_size: int) -> None:
    if not isinstance(prompts, list | tuple) or not prompts:
        raise ValueError(f"prompts={prompts!r:.60}: must be a list of at least one prompt")
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        if not isinstance(prompt, list | tuple | np.ndarray):
            raise TypeError(f"{name}={prompt!r:.60}: must be a list of token ids")
        if len(prompt):  # `complete` refuses empty ones
            batches.check_ids(name, batches.check_tokens(name, prompt, axes=(1,)), vocab_size)


def _complete(
    config: Decoder,
    params: PyTree,
    prompts: list[list[int]],
    keys: Key[Array, " B"],
    samplings: list[Sampling | None] | None,
    width: int,
    longest: int,
) -> Int[Array, "B width"]:
    ids = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    # None if all are greedy: the coupled rule would need a temperature.
    temperatures = per_row(samplings, len(prompts), config.vocab_size)
    rule = accept.greedy if temperatures is None else accept.coupled
    weights, method = Params(params), Method(config, Plain(), rule)
    stop = stopping.init(None, len(prompts))
    columns = (cast(Array, x) for x in (ids, length, np.full_like(length, width)))
    padded = Prompts(*columns, key=keys, stop=stop, sampling=temperatures)
    state = jitted_prefill(weights, padded, method=method, capacity=width, page_size=_PAGE_SIZE)
    state = fastest(weights, state, method)(weights, state, jnp.int32(width), method=method)
    return state.tokens[:, :width]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of `jspec train text`.

    Raises:
      TypeError, ValueError: a value of another type or out of bounds.
    """

    model: str = option(help="the target: bundled:NAME or a directory")
    prompts: Path = option(help="JSON list of {prompt}: train_prompts.json", metavar="FILE")
    out: Path = option(help="token file to write", metavar="FILE")
    rows: int = option(32768, "most texts to write", least=1)
    width: int = option(512, "tokens of a text; prompts over 3/4 of it are skipped", least=2)
    batch: int = option(1024, "texts at a time", least=1, most=2**20)
    sampled_share: float = option(
        0.0, "fraction of the texts that are sampled at temperature 1; the others are greedy", least=0, most=1
    )
    seed: int = option(0, "seed of the sampled texts, and of which ones are sampled", least=0, most=2**32 - 1)

    def __post_init__(self):
        check_options(self)


def main(command: TextOptions) -> int:
    """Runs `jspec train text`; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    out = command.out if command.out.suffix == ".npy" else command.out.with_name(command.out.name + ".npy")
    options.open_output("--out", out)
    # Read prompts and model, then write all texts.
    directory = locate(command.model)
    prompts = _read_prompts(command, directory)
    loaded = language_model.load(directory, mtp=False)
    sequences = complete(
        loaded.config,
        loaded.params,
        prompts,
        width=command.width,
        batch=command.batch,
        sampled_share=command.sampled_share,
        seed=command.seed,
    )
    atomic.write_file(out, lambda file: np.save(file, sequences))
    Made(command.sampled_share, command.seed).write(out)
    print(f"{out}: {sequences.shape[0]} texts of {sequences.shape[1]} tokens")
    return 0


def _read_prompts(command: TextOptions, directory: Path) -> list[list[int]]:
    """The prompts short enough for the width, as tokens, at most --rows of them.

    Raises:
      ValueError: prompts of chats, or only longer ones.
    """
    records = read_records(command.prompts)
    if any(record.get("rendered") for record in records):
        raise ValueError(f"{command.prompts}: has prompts of chats; use `jspec train replies`, whose replies end")
    # Begin with the first token of all texts, if the tokenizer has one, as `generate` does.
    encodings = tokenizer.load(directory).encode_batch_fast([record["prompt"] for record in records])
    longest = command.width * 3 // 4
    prompts = [list(encoding.ids) for encoding in encodings if 0 < len(encoding.ids) <= longest]
    if skipped := len(records) - len(prompts):
        print(f"jspec: {skipped} prompts are empty or longer than {longest} tokens, and are skipped", file=sys.stderr)
    if len(prompts) > command.rows:
        beyond = len(prompts) - command.rows
        print(f"jspec: {beyond} prompts beyond --rows={command.rows} are left out", file=sys.stderr)
    if not prompts:
        raise ValueError(f"{command.prompts}: has no prompt of 1 to {longest} tokens (--width {command.width})")
    return prompts[: command.rows]
