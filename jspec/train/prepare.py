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

from jspec.loading.hub import locate
from jspec.text.tokenizer import Tokenizer
from jspec.train import chat_data, data, options, text_data, tokenizer
from jspec.train.data import Counts, public_name
from jspec.train.records import DataOptions, Dropped


def main(command: DataOptions) -> int:
    """Runs `jspec train data`; prints the counts and returns its exit status."""
    options.check_writable("--out", command.out)
    dropped, source = Dropped(command.skip_bad), locate(command.tokenizer)
    bpe, template = tokenizer.load(source), {}
    # A tokenizer that does not fit is refused before the files are read.
    if command.kind == "chats":
        chat = Tokenizer.load(source)
        if chat is None or not chat.templates:
            raise ValueError(
                f"--tokenizer={command.tokenizer}: has no chat template; name a model that has one, or add the file"
            )
        halves = chat_data.read(command, chat, chat_data.read_ends(source, chat), dropped)
        template = {"special": chat.special_roles, "templates": chat.templates}
    else:
        tokenizer.check(bpe, command.tokenizer)
        halves = text_data.tokenize(text_data.read(command, dropped), command, bpe)
    manifest = {
        "skipped": dict(dropped.counts),
        "kind": command.kind,
        "files": [path.name for path in command.paths],
        "card": _card_texts(command, halves[0].counts, dropped),
    }
    manifest = data.write(command.out, halves, manifest, bpe, **template)
    print(json.dumps({key: value for key, value in manifest.items() if key != "card"}, indent=1))
    return 0


def _card_texts(command: DataOptions, train: Counts, dropped: Dropped) -> data.CardTexts:
    what = "chats" if command.kind == "chats" else "texts"
    names = tuple(Path(path.name) for path in command.paths)
    typed = options.describe(dataclasses.replace(command, **{command.kind: names}), "out", "tokenizer")
    return {
        # Neither license nor language of the user's files is known.
        "front": "",
        "tags": "",
        "summary": f"own {what}, {train['tokens']:,} tokens of {train['files']:,} {what}, of which "
        f"{train.get('learned', 0):,} count for the loss",
        "command": f"jspec train data --out data --tokenizer {public_name(command.tokenizer)}{typed}",
        "section": "## Files\n\n"
        + "\n".join(f"- {name}" for name in names)
        + data.list_skipped(dropped.counts, "Dropped"),
    }
