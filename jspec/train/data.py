"""The data of a training: one directory with token files, a tokenizer and prompts, and how it is made of packages.

The files of the directory:
  tokenizer.json, tokenizer_config.json   the byte-level BPE
  train.npy, heldout.npy                  UInt[tokens], each source file followed by the end-of-text token; ids have
                                          16 bits, or 32 if the vocabulary needs them
                                          of chats, UInt[sequences, T], each from the beginning of its chat
  train_mask.npy, heldout_mask.npy        of chats, UInt8[sequences, T]: 1 for tokens that count for the loss
  data.json                               the packages, their licenses, what was skipped, and the counts
  heldout_prompts.json                    prompts from held-out packages, a list of {package, license, file, prompt}
  train_prompts.json                      prompts from the other packages, in the same format; chats have none
"""

import dataclasses
import multiprocessing
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from jspec.analysis.records import read_prompts
from jspec.checkpoints import atomic
from jspec.checkpoints.files import CheckpointError, read_json
from jspec.core.checks import check_int
from jspec.engine.hub import locate
from jspec.train import prompts, tokenizer
from jspec.train.corpus import Corpus, Document

HELDOUT = (
    "click einops h11 humanize jinja2 lineax markdown networkx patsy simplejson sortedcontainers wadler-lindig".split()
)
"""The packages that are held out by default, as far as they are installed."""

MAX_PROCESSES = 1024

MASKS = ("train_mask.npy", "heldout_mask.npy")
"""Files that only chats have."""

KINDS = ("text", "jsonl", "chats")
"""Kinds of the user's own files."""

TOKENIZER_BYTES = 100_000_000
"""Source to train the tokenizer on, in bytes; more takes longer and changes it little."""


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """How many prompts to write, and their lengths in tokens.

    Raises:
      TypeError, ValueError: a value that is not an int or below 1, or a minimum above the maximum.
    """

    heldout: int = 128
    train: int = 65536
    min_tokens: int = 40
    max_tokens: int = 400

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_int(field.name, getattr(self, field.name), least=1, owner="PromptLimits")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: must be at most {self.max_tokens}, max_tokens")


class Side(TypedDict):
    """Counts of the training data or of the held-out data.

    Of the user's own files: packages are the files, and files the texts or chats in them.
    """

    packages: int
    files: int
    bytes: int
    tokens: int
    learned: NotRequired[int]
    """Tokens that count for the loss."""


class PackageRecord(TypedDict):
    """A package of the data."""

    name: str
    version: str
    license: str
    heldout: bool
    files: int
    bytes: int


class Manifest(TypedDict):
    """The contents of data.json; `tokenizer` is the model whose tokenizer was used, if any.

    Data of the user's own files has their `kind`, one of `KINDS`, and their names.
    """

    train: Side
    heldout: Side
    vocab_size: int
    skipped: dict[str, int]
    packages: list[PackageRecord]
    tokenizer: NotRequired[str]
    heldout_prompts: NotRequired[int]
    kind: NotRequired[str]
    files: NotRequired[list[str]]
    options: NotRequired[str]
    """Options of the command beyond the files and the tokenizer, each after a space."""


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

    Files from an earlier call are replaced when all new ones are written, or not at all.

    given: a model, as for `jspec.load`, whose tokenizer is used regardless of `vocab_size`; None: one is trained.

    Raises:
      ValueError: an empty side of the split, a vocabulary that is too small, a number out of bounds, or a given
        tokenizer without a token that ends a text.
      FileNotFoundError: the given model has no tokenizer.json.
      OSError: the files cannot be written.
    """
    check_int("max_length", max_length, least=1)
    check_int("processes", processes, least=1, most=MAX_PROCESSES)
    for side in ("train", "heldout"):
        if not getattr(collected, side):
            raise ValueError(f"{side}: has no file of a permissive package; are its packages installed?")
    atomic.require_directory(directory)
    if given is None:
        bpe = tokenizer.train(_sample(collected.train, TOKENIZER_BYTES), vocab_size)
    else:
        bpe = tokenizer.load(locate(given))
        tokenizer.check(bpe, given)
    with atomic.staged(directory, key="data.json", replaced=MASKS) as stage:
        return _write(stage, collected, bpe, max_length=max_length, limits=limits, processes=processes, given=given)


def _write(
    directory: Path,
    collected: Corpus,
    bpe: Tokenizer,
    *,
    max_length: int,
    limits: PromptLimits,
    processes: int,
    given: str | Path | None,
) -> Manifest:
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
    # A function may be in both sides, in files that differ elsewhere.
    apart = {record["prompt"] for record in heldout}
    trained = extract_prompts(collected.train, bpe, limits.train, limits, processes, without=apart)
    _write_json(directory / "train_prompts.json", trained)
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


def read_manifest(directory: Path) -> Manifest:
    """The manifest in a directory of data.

    Raises:
      FileNotFoundError: no such file.
      CheckpointError: it is not what `build` writes; the message names the key.
    """
    path = Path(directory) / "data.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; `jspec train data` writes it, and the model card describes the data by it"
        )
    manifest = read_json(path)
    for side in ("train", "heldout"):
        _check_keys(path, side, manifest.get(side), dict.fromkeys(("packages", "files", "bytes", "tokens"), int))
    _check_keys(path, "", manifest, {"vocab_size": int, "skipped": dict, "packages": list})
    _check_keys(path, "skipped", manifest["skipped"], dict.fromkeys(manifest["skipped"], int))
    for index, package in enumerate(manifest["packages"]):
        _check_keys(path, f"packages[{index}]", package, PackageRecord.__annotations__)
    if not isinstance(manifest.get("tokenizer", ""), str):
        raise CheckpointError(f"{path}: tokenizer={manifest['tokenizer']!r} must be a str")
    if "kind" in manifest:
        if manifest["kind"] not in KINDS:
            raise CheckpointError(f"{path}: kind={manifest['kind']!r:.60} must be one of {', '.join(KINDS)}")
        names = manifest.get("files")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{path}: files must be a list of names, but is {names!r:.60}")
        if not isinstance(manifest.get("options", ""), str):
            raise CheckpointError(f"{path}: options={manifest['options']!r:.60} must be a str")
    return cast(Manifest, manifest)


def _check_keys(path: Path, name: str, value: object, kinds: Mapping[str, type]) -> None:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {name} must be an object, but is {value!r:.60}")
    for key, kind in kinds.items():
        found = value.get(key)
        if type(found) is not kind:
            full = f"{name}.{key}" if name else key
            raise CheckpointError(f"{path}: {full} must be of type {kind.__name__}, but is {found!r:.60}")


def read_heldout_prompts(directory: Path, count: int | None, default: int) -> list[str]:
    """The first prompts of heldout_prompts.json, none of which may be in train_prompts.json, if that exists.

    count: how many; None: `default`, or all if there are fewer.

    Raises:
      ValueError: fewer prompts than `count`, a prompt twice, or one that is trained on.
      OSError: no such file.
    """
    path, trained = directory / "heldout_prompts.json", directory / "train_prompts.json"
    found = read_prompts(path)
    twice = [prompt for prompt, times in Counter(found).items() if times > 1]
    both = sorted({*found} & {*read_prompts(trained)}) if trained.exists() else []
    for prompts_, where in ((twice, "twice in this file"), (both, f"also in {trained}")):
        if prompts_:
            raise ValueError(f"{path}: {len(prompts_)} prompts are {where}, such as {prompts_[0]!r:.60}; remove them")
    if count is not None and count > len(found):
        raise ValueError(f"--prompts={count}: {path} has only {len(found)}")
    return found[: default if count is None else count]


def public_name(source: str | Path) -> str:
    """A model's name without the path of its directory."""
    return Path(source).name if Path(source).is_dir() else str(source)


def extract_prompts(
    documents: tuple[Document, ...],
    bpe: Tokenizer,
    count: int,
    limits: PromptLimits,
    processes: int = 1,
    without: Collection[str] = (),
) -> list[dict[str, str]]:
    """Up to `count` prompts within the length limits, in a fixed random order that alternates between packages.

    without: prompts to leave out.
    """
    # The prompts of all files, in random order.
    shuffled = list(documents)
    random.Random(0).shuffle(shuffled)
    shuffled = [document for document in shuffled if not _is_test(document.path)]
    if processes > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            parsed = pool.map(prompts.from_source, [document.text for document in shuffled], chunksize=64)
            found = list(_shown(parsed, len(shuffled)))
    else:
        found = list(_shown((prompts.from_source(document.text) for document in shuffled), len(shuffled)))
    pairs = [(document, prompt) for document, list_ in zip(shuffled, found, strict=True) for prompt in list_]
    lengths = [len(encoding.ids) for encoding in bpe.encode_batch_fast([prompt for _, prompt in pairs])]
    # Without duplicates, by package.
    by_package: dict[str, list[dict[str, str]]] = defaultdict(list)
    seen = Counter(without)
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


def _shown(parsed: Iterable[list[str]], total: int) -> Iterable[list[str]]:
    return tqdm(parsed, total=total, desc="finding prompts", disable=None, mininterval=1)


def _sample(documents: tuple[Document, ...], most_bytes: int) -> list[str]:
    texts = [document.text for document in documents]
    random.Random(0).shuffle(texts)
    total = np.cumsum([len(text) for text in texts])
    return texts[: max(1, int(np.searchsorted(total, most_bytes)))]


def _is_test(path: str) -> bool:
    return any(part in ("test", "tests", "testing") or part.startswith("test_") for part in Path(path).parts)


def _write_json(path: Path, value: object) -> None:
    atomic.write_json(path, value, indent=1)
