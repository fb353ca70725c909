"""`jspec train text`: writes a target's greedy text, for its draft to learn from.

A draft predicts its target's own text, so that is what it should be trained on (Zhou et al., DistillSpec, arXiv
2310.08461).
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from tqdm import tqdm

from jspec.checkpoints import language_model
from jspec.core import accept, decode, stopping
from jspec.core.types import Params
from jspec.drafters import Plain
from jspec.engine.model import locate
from jspec.models.decoder import Decoder
from jspec.train import batches, tokenizer

_PAGE_SIZE = 64


def complete(config: Decoder, params: PyTree, prompts: list[list[int]], *, width: int, batch: int) -> np.ndarray:
    """Each prompt with the model's greedy continuation up to `width` tokens: UInt[sequences, width].

    The ids have 16 bits, or 32 if the vocabulary needs them. Nothing stops a text early: after its end the model
    starts another one. Prompts that do not fill a batch are omitted, unless there are fewer than `batch` in total.

    Raises:
      ValueError: a width beyond the model's context, or a prompt that is empty or fills `width`.
    """
    if width > config.max_length:
        raise ValueError(f"width={width}: exceeds the model's context of {config.max_length} tokens")
    longest = max((len(prompt) for prompt in prompts), default=0)
    if not 0 < longest < width or min(len(prompt) for prompt in prompts) < 1:
        raise ValueError(f"prompts of up to {longest} tokens: must have 1 to {width - 1} tokens (width={width})")
    batch = min(batch, len(prompts))
    sequences = []
    for i in tqdm(range(0, len(prompts) - batch + 1, batch), mininterval=5, disable=None):
        sequences.append(np.asarray(_complete(config, params, prompts[i : i + batch], width, longest)))
    return np.concatenate(sequences).astype(batches.id_dtype(config.vocab_size))


def _complete(config: Decoder, params: PyTree, prompts: list[list[int]], width: int, longest: int) -> jax.Array:
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
        page_size=_PAGE_SIZE,
    )
    state = decode.fastest(weights, state, parts["drafter"])(weights, state, jnp.int32(width), **parts)
    return state.tokens[:, :width]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train text`."""
    parser.add_argument("--model", required=True, help="the target: bundled:NAME or a directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of {prompt}: train_prompts.json")
    parser.add_argument("--out", type=Path, required=True, help="token file to write")
    parser.add_argument("--rows", type=int, default=32768, help="most texts to write (default: 32768)")
    parser.add_argument(
        "--width",
        type=int,
        default=512,
        help="tokens of a text (default: 512); prompts over 3/4 of it are skipped",
    )
    parser.add_argument("--batch", type=int, default=1024, help="texts at a time (default: 1024)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train text`; returns its exit status."""
    directory = locate(args.model)
    loaded = language_model.load(directory, mtp=False)
    texts = [record["prompt"] for record in json.loads(args.prompts.read_text(encoding="utf-8"))]
    # Adds the token that begins a text, if the tokenizer has one, as `generate` does.
    encodings = tokenizer.load(directory).encode_batch_fast(texts)
    prompts = [list(encoding.ids) for encoding in encodings if len(encoding.ids) <= args.width * 3 // 4][: args.rows]
    sequences = complete(loaded.config, loaded.params, prompts, width=args.width, batch=args.batch)
    np.save(args.out, sequences)
    print(f"{args.out}: {sequences.shape[0]} texts of {sequences.shape[1]} tokens")
    return 0
