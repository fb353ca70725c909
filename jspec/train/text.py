"""`jspec train text`: text that a target writes itself, greedily, for its draft to learn from.

A draft is measured on its target's own text, so that is what it should see (Zhou et al., DistillSpec, arXiv
2310.08461).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec.checkpoints import language_model
from jspec.core import accept, decode, stopping
from jspec.core.types import Params
from jspec.drafters import Plain
from jspec.engine.model import locate
from jspec.models import LanguageModel
from jspec.train import batches, tokenizer

_PAGE = 64


def complete(config: LanguageModel, params: Any, prompts: list[list[int]], *, width: int, batch: int) -> np.ndarray:
    """Each prompt with the model's greedy continuation up to `width` tokens: UInt[rows, width].

    The ids have 16 bits, or 32 where the vocabulary needs them. Nothing stops a text early: where it ends, the model
    goes on with another. Rows beyond the last whole batch are left out, unless there is no whole batch.

    Raises:
      ValueError: a width beyond the model's context, or prompts that leave no room.
    """
    if width > config.max_length:
        raise ValueError(f"width={width}: the model's context is {config.max_length} tokens")
    longest = max((len(prompt) for prompt in prompts), default=0)
    if not 0 < longest < width or min(len(prompt) for prompt in prompts) < 1:
        raise ValueError(f"prompts of up to {longest} tokens: give prompts of 1 to {width - 1} tokens (width={width})")
    batch = min(batch, len(prompts))
    rows = []
    for i in tqdm(range(0, len(prompts) - batch + 1, batch), mininterval=5, disable=None):
        rows.append(np.asarray(_complete(config, params, prompts[i : i + batch], width, longest)))
    return np.concatenate(rows).astype(batches.id_dtype(config.vocab_size))


def _complete(config: LanguageModel, params: Any, prompts: list[list[int]], width: int, longest: int) -> jax.Array:
    ids = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    weights, parts = Params(params), {"target": config, "drafter": Plain(), "accept": accept.greedy}
    state = decode.jitted_prefill(
        weights,
        ids,
        length,
        np.full_like(length, width),
        jax.random.split(jax.random.key(0), len(prompts)),
        stopping.init(None, len(prompts)),
        **parts,
        capacity=width,
        page_size=_PAGE,
    )
    state = decode.fastest(weights, state, parts["drafter"])(weights, state, jnp.int32(width), **parts)
    return state.tokens[:, :width]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train text`."""
    parser.add_argument("--model", required=True, help="the target: bundled:NAME or a directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of {prompt}: train_prompts.json")
    parser.add_argument("--out", type=Path, required=True, help="token file to write")
    parser.add_argument("--rows", type=int, default=32768, help="texts to write, at most (default: 32768)")
    parser.add_argument(
        "--width", type=int, default=512, help="tokens of each (default: 512); a prompt takes 3/4 at most"
    )
    parser.add_argument("--batch", type=int, default=1024, help="texts at a time (default: 1024)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train text`."""
    directory = locate(args.model)
    loaded = language_model.load(directory, mtp=False)
    texts = [record["prompt"] for record in json.loads(args.prompts.read_text(encoding="utf-8"))]
    # With the token that begins a text, where there is one, as in `generate`.
    encodings = tokenizer.load(directory).encode_batch_fast(texts)
    prompts = [list(encoding.ids) for encoding in encodings if len(encoding.ids) <= args.width * 3 // 4][: args.rows]
    rows = complete(loaded.config, loaded.params, prompts, width=args.width, batch=args.batch)
    np.save(args.out, rows)
    print(f"{args.out}: {rows.shape[0]} texts of {rows.shape[1]} tokens")
    return 0
