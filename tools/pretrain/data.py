"""Collects the Python source of the installed packages with permissive licenses.

Writes the files of `jspec train data`. Some packages are held out. Packages and licenses are in data.json and in
the files of prompts.
"""

import dataclasses
import json
import multiprocessing
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from jspec.checkpoints import atomic
from jspec.core.checks import check_int
from jspec.core.options import check_options, option
from jspec.loading.hub import locate
from jspec.train import data, options
from jspec.train import tokenizer as files
from jspec.train.data import Half, public_name
from tools.pretrain import corpus, prompts, tokenizer
from tools.pretrain.corpus import Corpus, Document
from tools.pretrain.prompts import PromptLimits

HELDOUT = (
    "click einops h11 humanize jinja2 lineax markdown networkx patsy simplejson sortedcontainers wadler-lindig".split()
)
"""Packages held out by default, as far as they are installed."""

MAX_PROCESSES = 1024
LIMITS = PromptLimits(min_tokens=40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the command.

    Raises:
      TypeError, ValueError: a value of another type or out of bounds.
    """

    out: Path = option(help="directory to write")
    heldout: tuple[str, ...] | None = option(
        None,
        f"packages to hold out (default: those of these that are installed: {' '.join(HELDOUT)})",
        metavar="PACKAGE",
    )
    tokenizer: str | None = option(
        None, "a model whose tokenizer to use: bundled:NAME or a directory (default: train one)"
    )
    heldout_prompts: int = option(LIMITS.heldout, "held-out prompts to write", least=1)
    processes: int = option(1, "processes that parse source", least=1, most=MAX_PROCESSES)

    def __post_init__(self):
        check_options(self)


OPTIONS = (DataOptions, tokenizer.Size)


def main(command: DataOptions, size: tokenizer.Size) -> int:
    """Runs the command; prints the counts and returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    options.check_writable("--out", command.out)
    if command.tokenizer is not None:  # before the packages: those take minutes to read
        files.check(files.load(locate(command.tokenizer)), command.tokenizer)
    packages = [*corpus.installed(), corpus.standard_library()]
    heldout = corpus.choose_heldout(packages, HELDOUT) if command.heldout is None else command.heldout
    print(f"holding out {' '.join(heldout)}; reading {len(packages)} packages", file=sys.stderr, flush=True)
    collected = corpus.collect(packages, heldout)
    count = len(collected.train) + len(collected.heldout)
    print(f"tokenizing {count:,} files, which takes minutes if they are many", file=sys.stderr, flush=True)
    manifest = build(
        command.out,
        collected,
        vocab_size=size.vocab_size,
        max_length=size.max_length,
        limits=PromptLimits(heldout=command.heldout_prompts, min_tokens=LIMITS.min_tokens),
        processes=command.processes,
        model=command.tokenizer,
    )
    print(json.dumps({key: value for key, value in manifest.items() if key not in ("packages", "card")}, indent=1))
    return 0


def build(
    directory: Path,
    collected: Corpus,
    *,
    vocab_size: int,
    max_length: int,
    limits: PromptLimits,
    processes: int = 1,
    model: str | Path | None = None,
) -> dict[str, Any]:
    """Writes all files of `jspec.train.data` into `directory`; returns the contents of data.json.

    model: as for `jspec.load`; its tokenizer is used regardless of `vocab_size`. None: one is trained.

    Raises:
      ValueError: an empty side of the split, too small a vocabulary, a number out of bounds, or a tokenizer
        without an end-of-text token.
      FileNotFoundError: the model has no tokenizer.json.
      OSError: the files cannot be written; those of an earlier call are as before.
    """
    check_int("max_length", max_length, least=1)
    check_int("processes", processes, least=1, most=MAX_PROCESSES)
    for side in ("train", "heldout"):
        if not getattr(collected, side):
            raise ValueError(f"{side}: has no file of a permissive package; are its packages installed?")
    atomic.require_directory(directory)
    # The tokenizer.
    if model is None:
        bpe = tokenizer.train(tokenizer.sample([document.text for document in collected.train]), vocab_size)
    else:
        bpe = files.load(locate(model))
        files.check(bpe, model)
    # Prompts; a function may be in both sides, in otherwise different files.
    heldout = extract_prompts(collected.heldout, bpe, limits.heldout, limits, processes)
    without = {record["prompt"] for record in heldout}
    trained = extract_prompts(collected.train, bpe, limits.train, limits, processes, without)
    halves = _encode(collected.train, trained, bpe), _encode(collected.heldout, heldout, bpe)
    # What cards quote.
    packages = list_packages(collected)
    source = f"--vocab-size {bpe.get_vocab_size()}" if model is None else f"--tokenizer {public_name(model)}"
    manifest = {
        "skipped": dict(collected.skipped),
        "kind": "packages",
        "packages": packages,
        "card": describe(packages, collected, halves[0], source),
        **({} if model is None else {"tokenizer": public_name(model)}),
    }
    return data.write(directory, halves, manifest, bpe, max_length=max_length)


def _encode(documents: tuple[Document, ...], records: list[dict[str, Any]], bpe: Tokenizer) -> Half:
    texts = [document.text for document in documents]
    tokens = files.encode_documents(bpe, texts)
    size = sum(len(text.encode()) for text in texts)
    return Half(tokens, None, records, {"files": len(texts), "bytes": size, "tokens": len(tokens)})


def list_packages(collected: Corpus) -> list[dict[str, Any]]:
    """The packages of the data, with their licenses and sizes."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for document in chain(collected.train, collected.heldout):
        sizes[document.package].append(len(document.text.encode()))
    heldout = {document.package for document in collected.heldout}
    return [
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


def describe(packages: list[dict[str, Any]], collected: Corpus, train: Half, source: str) -> data.CardTexts:
    """What model cards quote about data of packages.

    source: the options of the tokenizer.
    """
    apart = [package["name"] for package in packages if package["heldout"]]
    rows = [
        f"| {package['name']} | {package['version']} | {package['license']} | {package['files']:,} | "
        f"{package['bytes']:,} | {'held out' if package['heldout'] else 'train'} |"
        for package in packages
    ]
    table = "\n".join(["| package | version | license | files | bytes | use |", "|---|---|---|---|---|---|", *rows])
    skipped = data.list_skipped(collected.skipped, "Excluded")
    return {
        "front": "license: apache-2.0\nlanguage: [code]\n",
        "tags": "python",
        "summary": f"Python source, {train.counts['tokens']:,} tokens of {len(packages) - len(apart)} packages under "
        "permissive licenses, without duplicates and generated files",
        "command": f"python -m tools.pretrain data --out data {source} --heldout {' '.join(apart)}",
        "section": f"## Packages\n\nLicenses as stated in the packages' metadata.\n\n{table}{skipped}",
    }


def extract_prompts(
    documents: tuple[Document, ...],
    bpe: Tokenizer,
    count: int,
    limits: PromptLimits,
    processes: int = 1,
    without: Collection[str] = (),
) -> list[dict[str, str]]:
    """Up to `count` prompts within the length limits, in a fixed random order, alternating between packages.

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
            of_files = list(_shown(parsed, len(shuffled)))
    else:
        of_files = list(_shown((prompts.from_source(document.text) for document in shuffled), len(shuffled)))
    pairs = [(document, prompt) for document, of_file in zip(shuffled, of_files, strict=True) for prompt in of_file]
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


def _is_test(path: str) -> bool:
    return any(part in ("test", "tests", "testing") or part.startswith("test_") for part in Path(path).parts)
