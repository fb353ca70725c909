"""`jspec train data`: writes token files, a tokenizer and prompts, from your own files or from the installed packages.

Your own files are plain texts, a field of JSON, or chats. JSON is one value per line, or one list. Chats have the
layout of OpenAI's API, {"messages": [{"role": ..., "content": ...}]}, or that of ShareGPT, {"conversations": [{"from":
..., "value": ...}]}. The chat template of --tokenizer renders them, and only what the assistant writes counts for the
loss; a reply with "weight": 0 is context only. What is dropped is counted, and nothing is cut in the middle.

  jspec train data --out data --text book.txt notes.md
  jspec train data --out data --tokenizer TARGET --jsonl articles.jsonl --field text
  jspec train data --out data --tokenizer TARGET --chats chats.jsonl
  jspec train data --out data --tokenizer TARGET --processes 16

The last command collects the Python source of the installed packages.

Writes into one directory:
  tokenizer.json, tokenizer_config.json   the byte-level BPE
  train.npy, heldout.npy                  UInt[tokens], each source file followed by the end-of-text token; ids have
                                          16 bits, or 32 if the vocabulary needs them
                                          of chats, UInt[sequences, T], each from the beginning of its chat
  train_mask.npy, heldout_mask.npy        of chats, UInt8[sequences, T]: 1 for tokens that count for the loss
  data.json                               the packages, their licenses, what was skipped, and the counts
  heldout_prompts.json                    prompts from held-out packages, a list of {package, license, file, prompt}
  train_prompts.json                      prompts from the other packages, in the same format; chats have none
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tokenizers

from jspec.checkpoints import atomic
from jspec.engine.hub import locate
from jspec.text.tokenizer import Tokenizer
from jspec.train import corpus, data, options, own, own_chats, own_texts, tokenizer
from jspec.train.data import KINDS, MASKS, MAX_PROCESSES, Manifest, PromptLimits, public_name
from jspec.train.own import OwnText
from jspec.train.records import Dropped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jspec train data`."""
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    files = parser.add_mutually_exclusive_group()
    for kind, meaning in (
        ("text", "files of plain text, in UTF-8; each is a document"),
        ("jsonl", "files of JSON, whose values are texts, or have one under the key --field"),
        ("chats", "files of JSON, whose values are chats"),
    ):
        files.add_argument(f"--{kind}", type=Path, nargs="+", metavar="FILE", help=meaning)
    parser.add_argument("--field", metavar="NAME", help="with --jsonl: the key of the text")
    share = f"with your own files: about how much to hold out (default: {own.HELDOUT_SHARE})"
    options.add_number(parser, "--heldout-share", float, bounds={"above": 0, "most": 0.5}, help=share)
    width = f"with --chats: the most tokens of a sequence; replies beyond it are dropped (default: {own.WIDTH})"
    options.add_number(parser, "--width", bounds={"least": 4, "most": 2**24}, help=width)
    skip = "with your own files: drop lines that are not valid, instead of ending with an error"
    parser.add_argument("--skip-bad", action="store_true", help=skip)
    parser.add_argument(
        "--heldout",
        nargs="+",
        metavar="PACKAGE",
        help=f"packages to hold out (default: those of these that are installed: {' '.join(data.HELDOUT)})",
    )
    parser.add_argument(
        "--tokenizer", help="a model whose tokenizer to use: bundled:NAME or a directory (default: train one)"
    )
    for option, default, least, most, meaning in (
        ("--vocab-size", 4096, tokenizer.MIN_VOCABULARY, tokenizer.MAX_VOCABULARY, "size of the vocabulary"),
        ("--max-length", 1024, 1, None, "context written to the tokenizer"),
        ("--heldout-prompts", 128, 1, None, "held-out prompts to write"),
        ("--processes", 1, 1, MAX_PROCESSES, "processes that parse source"),
    ):
        options.add_number(parser, option, bounds={"least": least, "most": most}, default=default, help=meaning)


def main(args: argparse.Namespace) -> int:
    """Runs `jspec train data`; prints the counts and returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    kind = next((kind for kind in KINDS if getattr(args, kind) is not None), None)
    _check_together(args, kind)
    options.check_writable("--out", args.out)
    if kind is not None:
        manifest = build_own(
            args.out,
            OwnText(
                kind,
                tuple(getattr(args, kind)),
                field=args.field,
                heldout_share=own.HELDOUT_SHARE if args.heldout_share is None else args.heldout_share,
                width=own.WIDTH if args.width is None else args.width,
                skip_bad=args.skip_bad,
            ),
            vocab_size=args.vocab_size,
            max_length=args.max_length,
            limits=PromptLimits(heldout=args.heldout_prompts),
            model=args.tokenizer,
        )
    else:
        manifest = _build_of_packages(args)
    print(json.dumps({key: value for key, value in manifest.items() if key != "packages"}, indent=1))
    return 0


def _check_together(args: argparse.Namespace, kind: str | None) -> None:
    """Raises ValueError for options that have no effect on this kind of files."""
    for option, value, kinds in (
        ("--field", args.field, ("jsonl",)),
        ("--width", args.width, ("chats",)),
        ("--heldout-share", args.heldout_share, KINDS),
        ("--skip-bad", args.skip_bad or None, KINDS),
        ("--heldout", args.heldout, (None,)),
    ):
        if value is not None and kind not in kinds:
            named = " or ".join(f"--{name}" for name in kinds if name)
            wanted = f"with {named}" if named else f"without --{kind}"
            raise ValueError(f"{option}={value}: has an effect only {wanted}")


def _build_of_packages(args: argparse.Namespace) -> Manifest:
    if args.tokenizer is not None:  # before the packages, which take minutes to read
        tokenizer.check(tokenizer.load(locate(args.tokenizer)), args.tokenizer)
    packages = [*corpus.installed(), corpus.standard_library()]
    heldout = corpus.choose_heldout(packages, data.HELDOUT) if args.heldout is None else args.heldout
    print(f"jspec: holding out {' '.join(heldout)}; reading {len(packages)} packages", file=sys.stderr, flush=True)
    collected = corpus.collect(packages, heldout)
    count = len(collected.train) + len(collected.heldout)
    print(f"jspec: tokenizing {count:,} files, which takes minutes if they are many", file=sys.stderr, flush=True)
    return data.build(
        args.out,
        collected,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
        limits=PromptLimits(heldout=args.heldout_prompts),
        processes=args.processes,
        given=args.tokenizer,
    )


def build_own(
    directory: Path,
    given: OwnText,
    *,
    vocab_size: int,
    max_length: int,
    limits: PromptLimits,
    model: str | Path | None = None,
) -> Manifest:
    """Writes all files into `directory`, which is created if needed; returns the manifest (data.json).

    given: the files to read.
    model: as for `jspec.load`; its tokenizer is used. None: one is trained, which chats cannot do.

    Raises:
      ValueError: a file or a line that is not valid, nothing left to train on, or a tokenizer that does not fit.
      OSError: the files cannot be written.
    """
    atomic.require_directory(directory)
    dropped = Dropped(given.skip_bad)
    chat = None
    if given.kind == "chats":
        bpe, chat = _load_chat_model(model)
        sides = own_chats.read(given, chat, own_chats.read_ends(locate(model or ""), chat), limits, dropped)
    else:
        # A tokenizer that does not fit is refused before the texts are read.
        bpe = None if model is None else tokenizer.load(locate(model))
        if bpe is not None:
            tokenizer.check(bpe, str(model))
        documents = own_texts.read(given, dropped)
        bpe = tokenizer.train(own_texts.sample(documents), vocab_size) if bpe is None else bpe
        sides = own_texts.tokenize(documents, given, bpe, limits)
    manifest: Manifest = {
        "train": sides[0].counts,
        "heldout": sides[1].counts,
        "vocab_size": bpe.get_vocab_size(),
        "skipped": dict(dropped.counts),
        "packages": [],
        "kind": given.kind,
        "files": [path.name for path in given.paths],
        "options": given.describe(),
    }
    if model is not None:
        manifest["tokenizer"] = public_name(model)
    with atomic.staged(directory, key="data.json", replaced=(*MASKS, "train_prompts.json")) as stage:
        roles = (None, None) if chat is None else (chat.special_roles, chat.templates)
        tokenizer.save(bpe, stage, max_length, *roles)
        for name, side in zip(("train", "heldout"), sides, strict=True):
            np.save(stage / f"{name}.npy", side.tokens)
            if side.mask is not None:
                np.save(stage / f"{name}_mask.npy", side.mask)
            if side.prompts:
                atomic.write_json(stage / f"{name}_prompts.json", side.prompts, indent=1)
        atomic.write_json(stage / "data.json", manifest, indent=1)
    return {**manifest, "heldout_prompts": len(sides[1].prompts)}


def _load_chat_model(model: str | Path | None) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """The tokenizer of a model with a chat template.

    Raises:
      ValueError: there is no model, or no template.
    """
    if model is None:
        raise ValueError("--chats: needs --tokenizer, a model with a chat template, which renders the chats")
    directory = locate(model)
    found = Tokenizer.load(directory)
    if found is None or not found.templates:
        raise ValueError(f"--tokenizer={model}: has no chat template; name a model that has one, or add the file")
    return tokenizer.load(directory), found
