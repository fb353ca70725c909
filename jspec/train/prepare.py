"""`jspec train data`: writes token files and prompts from your own files, in the tokens of a target.

The files are plain texts, a field of JSON, or chats. JSON is one value per line, or one list. Chats have the layout of
OpenAI's API, {"messages": [{"role": ..., "content": ...}]}, or that of ShareGPT, {"conversations": [{"from": ...,
"value": ...}]}. The chat template of --tokenizer renders them, and only what the assistant writes counts for the loss;
a reply with "weight": 0 is context only. What is dropped is counted, and nothing is cut in the middle.

  jspec train data --out data --tokenizer TARGET --text book.txt notes.md
  jspec train data --out data --tokenizer TARGET --jsonl articles.jsonl --field text
  jspec train data --out data --tokenizer TARGET --chats chats.jsonl
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jspec.checkpoints import atomic
from jspec.core.options import check_options, option
from jspec.loading.hub import locate
from jspec.text.tokenizer import Tokenizer
from jspec.train import chat_data, data, options, records, text_data, tokenizer
from jspec.train.data import Counts, PromptLimits, public_name
from jspec.train.records import KINDS, Dropped, Files


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Files of one kind.

    Raises:
      TypeError, ValueError: a value of another type or out of bounds, no files or several kinds of them, or an option
        that has no effect on them.
    """

    text: tuple[Path, ...] | None = option(None, "files of plain text, in UTF-8; each is a document", metavar="FILE")
    jsonl: tuple[Path, ...] | None = option(
        None, "files of JSON, whose values are texts, or have one under the key --field", metavar="FILE"
    )
    chats: tuple[Path, ...] | None = option(None, "files of JSON, whose values are chats", metavar="FILE")
    field: str | None = option(None, "with --jsonl: the key of the text", metavar="NAME")
    skip_bad: bool = option(False, "drop lines that are not valid, instead of ending with an error")

    def __post_init__(self):
        check_options(self)
        kind = options.check_one(self, *KINDS)
        for name, only in (("field", "jsonl"), ("width", "chats")):
            value = getattr(self, name, None)
            if value is not None and kind != only:
                raise ValueError(f"--{name}={value}: has an effect only with --{only}")

    def files(self) -> Files:
        """The files.

        Raises:
          ValueError: one that is not a regular file.
        """
        kind = options.check_one(self, *KINDS)
        fields = {name: getattr(self, name, None) for name in ("field", "width", "heldout_share")}
        changed = {name: value for name, value in fields.items() if value is not None}
        return Files(kind, getattr(self, kind), skip_bad=self.skip_bad, **changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(FileOptions):
    """Options of `jspec train data`.

    Raises:
      TypeError, ValueError: as `FileOptions`.
    """

    out: Path = option(help="directory to write")
    tokenizer: str = option(help="the target: bundled:NAME, a directory or a hub id")
    heldout_share: float | None = option(
        None, f"about how much to hold out (default: {records.HELDOUT_SHARE})", above=0, most=0.5
    )
    width: int | None = option(
        None,
        f"with --chats: the most tokens of a sequence; replies beyond it are dropped (default: {records.WIDTH})",
        least=4,
        most=2**24,
    )
    heldout_prompts: int = option(PromptLimits.heldout, "held-out prompts to write", least=1)


def main(command: DataOptions) -> int:
    """Runs `jspec train data`; prints the counts and returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    options.check_writable("--out", command.out)
    manifest = build(command.out, command.files(), command.tokenizer, PromptLimits(heldout=command.heldout_prompts))
    print(json.dumps({key: value for key, value in manifest.items() if key != "card"}, indent=1))
    return 0


def build(directory: Path, files: Files, model: str | Path, limits: PromptLimits) -> dict[str, Any]:
    """Writes all files of `data` into `directory`; returns the contents of data.json.

    model: as for `jspec.load`; its tokenizer is used, and of chats its chat template.

    Raises:
      ValueError: a file or a line that is not valid, nothing left to train on, or a tokenizer that does not fit.
      OSError: the files cannot be written.
    """
    atomic.require_directory(directory)
    dropped, source = Dropped(files.skip_bad), locate(model)
    bpe, template = tokenizer.load(source), {}
    # A tokenizer that does not fit is refused before the files are read.
    if files.kind == "chats":
        chat = Tokenizer.load(source)
        if chat is None or not chat.templates:
            raise ValueError(f"--tokenizer={model}: has no chat template; name a model that has one, or add the file")
        halves = chat_data.read(files, chat, chat_data.read_ends(source, chat), limits, dropped)
        template = {"special": chat.special_roles, "templates": chat.templates}
    else:
        tokenizer.check(bpe, str(model))
        halves = text_data.tokenize(text_data.read(files, dropped), files, bpe, limits)
    manifest = {
        "skipped": dict(dropped.counts),
        "kind": files.kind,
        "files": [path.name for path in files.paths],
        "card": _card_texts(files, halves[0].counts, dropped, public_name(model)),
    }
    return data.write(directory, halves, manifest, bpe, **template)


def _card_texts(files: Files, train: Counts, dropped: Dropped, model: str) -> data.CardTexts:
    what = "chats" if files.kind == "chats" else "texts"
    names = "\n".join(f"- {path.name}" for path in files.paths)
    return {
        # Neither license nor language of the user's files is known.
        "front": "",
        "tags": "",
        "summary": f"own {what}, {train['tokens']:,} tokens of {train['files']:,} {what}, of which "
        f"{train.get('learned', 0):,} count for the loss",
        "command": f"jspec train data --out data --tokenizer {model} {files.describe()}",
        "section": f"## Files\n\n{names}{data.list_skipped(dropped.counts, 'Dropped')}",
    }
