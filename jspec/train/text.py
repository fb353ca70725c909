"""`jspec train text`: writes a target's own text, greedy and sampled, for its draft to learn from.

A draft predicts its target's own text and is best trained on it (Zhou et al., DistillSpec, arXiv 2310.08461). Sampled
text repeats itself less than greedy text; a draft for both uses learns from both.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from jaxtyping import PyTree
from tqdm import tqdm

from jspec.analysis.records import read_records
from jspec.checkpoints import atomic, language_model
from jspec.core.checks import check_int, check_number
from jspec.core.options import option
from jspec.core.sampling import Sampling
from jspec.core.types import Params
from jspec.generation.options import GenerateOptions
from jspec.generation.run import in_batches
from jspec.loading.hub import locate
from jspec.loading.model import Model
from jspec.models.decoder import Decoder
from jspec.train import batches, options, tokenizer
from jspec.train.recipe import Options


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

    batch: prompts at a time.
    sampled_share: the fraction of texts sampled at temperature 1, chosen by the seed; the others are greedy.
    seed: of the choice, and of the sampling.
    """
    # Check everything before the first text is written.
    width, batch = check_int("width", width, least=2), check_int("batch", batch, least=1)
    share = check_number("sampled_share", sampled_share, least=0, most=1)
    seed = check_int("seed", seed, least=0, most=2**32 - 1)
    if width > config.max_length:
        raise ValueError(f"width={width}: exceeds the model's context of {config.max_length} tokens")
    longest = max((len(prompt) for prompt in prompts), default=0)
    if not 0 < longest < width:
        raise ValueError(f"prompts of up to {longest} tokens: must have 1 to {width - 1} tokens (width={width})")
    sampling = choose_sampled(len(prompts), share, seed, Sampling())
    options = GenerateOptions(
        drafter=None,
        max_new_tokens=[width - len(prompt) for prompt in prompts],
        sampling=sampling if any(sampling) else None,
        ignore_eos=True,
        seed=seed,
    )
    # Write the texts, `batch` at a time.
    model, sequences = Model("", config, Params(params), None, ()), []
    total = -(-len(prompts) // batch)
    for part in tqdm(in_batches(model, prompts, options, batch), total=total, mininterval=5, disable=None):
        sequences += [[*item.prompt, *item.tokens] for item in part]
    return np.array(sequences, batches.id_dtype(config.vocab_size))


def choose_sampled(count: int, share: float, seed: int, sampling: Sampling | None) -> list[Sampling | None]:
    """`sampling` for a share of the texts, in a random choice by the seed; None for the others, which are greedy."""
    order = np.random.default_rng(seed).permutation(count)
    return [sampling if place < round(share * count) else None for place in order]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled(Options):
    """How many texts are sampled: a file of JSON beside the token file, which model cards quote."""

    sampled_share: float = option(
        0.0, "fraction of the texts that are sampled at temperature 1; the others are greedy", least=0, most=1
    )
    seed: int = option(0, "seed of the sampled texts, and of which ones are sampled", least=0, most=2**32 - 1)

    def write(self, tokens: Path) -> None:
        """Writes it beside the token file `tokens`."""
        values = {"sampled_share": self.sampled_share, "seed": self.seed}
        atomic.write_text(tokens.with_suffix(".json"), json.dumps(values) + "\n")

    @staticmethod
    def read(tokens: Path) -> "Sampled | None":
        """What is written beside the token file `tokens`; None: there is nothing."""
        path = tokens.with_suffix(".json")
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return Sampled(sampled_share=values["sampled_share"], seed=values["seed"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not what `jspec train text` writes beside its texts ({error})") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions(Sampled):
    """Options of `jspec train text`."""

    model: str = option(help="the target: bundled:NAME or a directory")
    prompts: Path = option(help="JSON list of {prompt}: train_prompts.json", metavar="FILE")
    out: Path = option(help="token file to write", metavar="FILE")
    rows: int = option(32768, "most texts to write", least=1)
    width: int = option(512, "tokens of a text; prompts over 3/4 of it are skipped", least=2)
    batch: int = option(1024, "texts at a time", least=1, most=2**20)


def main(command: TextOptions) -> int:
    """Runs `jspec train text`; returns its exit status."""
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
    command.write(out)
    print(f"{out}: {sequences.shape[0]} texts of {sequences.shape[1]} tokens")
    return 0


def _read_prompts(command: TextOptions, directory: Path) -> list[list[int]]:
    """The prompts short enough for the width, as tokens, at most --rows of them."""
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
