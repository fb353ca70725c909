"""`jspec train data`: writes token files, a tokenizer and prompts from the installed Python packages.

Writes into one directory:
  tokenizer.json, tokenizer_config.json   the byte-level BPE
  train.npy, heldout.npy                  UInt[tokens], each source file followed by the end-of-text token; ids have
                                          16 bits, or 32 if the vocabulary needs them
  data.json                               the packages, their licenses, what was skipped, and the counts
  heldout_prompts.json                    prompts from held-out packages, a list of {package, license, file, prompt}
  train_prompts.json                      prompts from the other packages, in the same format
"""

import argparse
import dataclasses
import json
import multiprocessing
import random
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from tokenizers import Tokenizer

from jspec.engine.model import locate
from jspec.train import corpus, prompts, tokenizer
from jspec.train.corpus import Corpus, Document

HELDOUT = (
    "click einops h11 humanize jinja2 lineax markdown networkx patsy simplejson sortedcontainers wadler-lindig".split()
)
"""The packages that are held out by default."""

TOKENIZER_BYTES = 100_000_000
"""Source to train the tokenizer on, in bytes; more takes longer and changes it little."""


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """How many prompts to write, and their lengths in tokens."""

    heldout: int = 128
    train: int = 65536
    min_tokens: int = 40
    max_tokens: int = 400


class Side(TypedDict):
    """Counts of the training data or of the held-out data."""

    packages: int
    files: int
    bytes: int
    tokens: int


class PackageRecord(TypedDict):
    """A package of the data."""

    name: str
    version: str
    license: str
    heldout: bool
    files: int
    bytes: int


class Manifest(TypedDict):
    """The contents of data.json; `tokenizer` is the model whose tokenizer was used, if any."""

    train: Side
    heldout: Side
    vocab_size: int
    skipped: dict[str, int]
    packages: list[PackageRecord]
    tokenizer: NotRequired[str]
    heldout_prompts: NotRequired[int]


def build(
    directory: Path,
    collected: Corpus,
    *,
    vocab_size: int,
    max_length: int,
    limits: PromptLimits,
    processes: int = 1,
    given: str | Path | None = None,
) -> Manifest:
    """Writes all files into `directory`, which is created if needed; returns the manifest (data.json).

    given: a model, as for `jspec.load`, whose tokenizer is used regardless of `vocab_size`; None: one is trained.

    Raises:
      ValueError: an empty side of the split, a vocabulary that is too small, or a given tokenizer without a token that
        ends a text.
      FileNotFoundError: the given model has no tokenizer.json.
    """
    for side in ("train", "heldout"):
        if not getattr(collected, side):
            raise ValueError(f"{side}: has no file of a permissive package; are its packages installed?")
    directory.mkdir(parents=True, exist_ok=True)
    if given is None:
        bpe = tokenizer.train(_sample(collected.train, TOKENIZER_BYTES), vocab_size)
    else:
        bpe = tokenizer.load(locate(given))
        tokenizer.check(bpe, given)
    tokenizer.save(bpe, directory, max_length)
    # Token files and the manifest.
    tokens = {}
    for side, documents in (("train", collected.train), ("heldout", collected.heldout)):
        encoded = tokenizer.encode_documents(bpe, [document.text for document in documents])
        np.save(directory / f"{side}.npy", encoded)
        tokens[side] = len(encoded)
    manifest = describe(collected, tokens, bpe.get_vocab_size())
    if given is not None:
        manifest["tokenizer"] = public_name(given)
    _write_json(directory / "data.json", manifest)
    # Prompts.
    heldout = extract_prompts(collected.heldout, bpe, limits.heldout, limits, processes)
    _write_json(directory / "heldout_prompts.json", heldout)
    _write_json(
        directory / "train_prompts.json", extract_prompts(collected.train, bpe, limits.train, limits, processes)
    )
    return {**manifest, "heldout_prompts": len(heldout)}


def describe(collected: Corpus, tokens: dict[str, int], vocab_size: int) -> Manifest:
    """The manifest."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for document in chain(collected.train, collected.heldout):
        sizes[document.package].append(len(document.text.encode()))
    heldout = {document.package for document in collected.heldout}
    packages: list[PackageRecord] = [
        {
            "name": package.name,
            "version": package.version,
            "license": package.license,
            "heldout": package.name in heldout,
            "files": len(sizes[package.name]),
            "bytes": sum(sizes[package.name]),
        }
        for package in collected.packages
        if package.name in sizes
    ]
    totals: dict[str, Side] = {
        side: {
            "packages": sum(package["heldout"] == (side == "heldout") for package in packages),
            "files": len(getattr(collected, side)),
            "bytes": sum(len(document.text.encode()) for document in getattr(collected, side)),
            "tokens": tokens[side],
        }
        for side in ("train", "heldout")
    }
    return {
        "train": totals["train"],
        "heldout": totals["heldout"],
        "vocab_size": vocab_size,
        "skipped": dict(collected.skipped),
        "packages": packages,
    }


def public_name(source: str | Path) -> str:
    """A model's name without the path of its directory."""
    return Path(source).name if Path(source).is_dir() else str(source)


def extract_prompts(
    documents: tuple[Document, ...], bpe: Tokenizer, count: int, limits: PromptLimits, processes: int = 1
) -> list[dict[str, str]]:
    """Up to `count` prompts within the length limits, in a fixed random order that alternates between packages."""
    # The prompts of all files, in random order.
    shuffled = list(documents)
    random.Random(0).shuffle(shuffled)
    shuffled = [document for document in shuffled if not _is_test(document.path)]
    if processes > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            found = list(pool.map(prompts.from_source, [document.text for document in shuffled], chunksize=64))
    else:
        found = [prompts.from_source(document.text) for document in shuffled]
    pairs = [(document, prompt) for document, list_ in zip(shuffled, found, strict=True) for prompt in list_]
    lengths = [len(encoding.ids) for encoding in bpe.encode_batch_fast([prompt for _, prompt in pairs])]
    # Without duplicates, by package.
    by_package: dict[str, list[dict[str, str]]] = defaultdict(list)
    seen: Counter = Counter()
    for (document, prompt), length in zip(pairs, lengths, strict=True):
        seen[prompt] += 1
        if seen[prompt] == 1 and limits.min_tokens <= length <= limits.max_tokens:
            record = {
                "package": document.package,
                "license": document.license,
                "file": document.path,
                "prompt": prompt,
            }
            by_package[document.package].append(record)
    for records in by_package.values():
        random.Random(0).shuffle(records)
    # One prompt of each package in turn.
    rounds = zip_longest(*(by_package[name] for name in sorted(by_package)))
    return [record for record in chain.from_iterable(rounds) if record is not None][:count]


def _sample(documents: tuple[Document, ...], most_bytes: int) -> list[str]:
    texts = [document.text for document in documents]
    random.Random(0).shuffle(texts)
    total = np.cumsum([len(text) for text in texts])
    return texts[: max(1, int(np.searchsorted(total, most_bytes)))]


def _is_test(path: str) -> bool:
    return any(part in ("test", "tests", "testing") or part.startswith("test_") for part in Path(path).parts)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train data`."""
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--heldout", nargs="+", default=HELDOUT, metavar="PACKAGE", help="packages to hold out")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the vocabulary (default: 4096)")
    parser.add_argument(
        "--tokenizer", help="a model whose tokenizer to use: bundled:NAME or a directory (default: train one)"
    )
    parser.add_argument("--max-length", type=int, default=1024, help="context written to the tokenizer (default: 1024)")
    parser.add_argument("--heldout-prompts", type=int, default=128, help="held-out prompts to write (default: 128)")
    parser.add_argument("--processes", type=int, default=1, help="processes that parse source (default: 1)")


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train data`; prints the counts and returns its exit status."""
    collected = corpus.collect([*corpus.installed(), corpus.standard_library()], args.heldout)
    manifest = build(
        args.out,
        collected,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
        limits=PromptLimits(heldout=args.heldout_prompts),
        processes=args.processes,
        given=args.tokenizer,
    )
    print(json.dumps({key: value for key, value in manifest.items() if key != "packages"}, indent=1))
    return 0
