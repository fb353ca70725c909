"""`jspec train`: prepare data, train a draft, write a target's own text."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from jspec.cli.arguments import Parser, add_options, read_options
from jspec.train import data, prepare, records, replies, text
from jspec.train.kinds import KINDS
from jspec.train.options import DraftRun

SUMMARIES = {
    "data": "write token files and prompts from your own files",
    "replies": "write a target's own replies to prompts or chats, for its draft to learn from",
    "text": "write a target's greedy text, for its draft to learn from",
}
"""Lines in the overview, of the commands that train nothing."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="jspec train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, summary: str, description: str | None, kinds: Sequence[type], run: Callable[..., int]) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, description=description, formatter_class=formatter)
        for kind in kinds:
            add_options(command, kind)
        command.set_defaults(run=lambda arguments: run(*(read_options(arguments, kind) for kind in kinds)))

    add("data", SUMMARIES["data"], f"{prepare.__doc__}\n{data.__doc__}", [records.DataOptions], prepare.main)
    for name, kind in KINDS.items():
        options = [DraftRun, kind.recipe, kind.shape, *kind.output]
        add(name, kind.first.partition(":")[0], kind.help, options, lambda *values, kind=kind: _train(kind, *values))
    add("replies", SUMMARIES["replies"], replies.__doc__, [replies.ReplyOptions], replies.main)
    add("text", SUMMARIES["text"], text.__doc__, [text.TextOptions], text.main)
    return parser


def _train(*arguments: Any) -> int:
    try:
        draft = importlib.import_module("jspec.train.draft")  # only here, because it needs the extra `train`
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    return draft.main(*arguments)


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command of `jspec train`; returns its exit status."""
    arguments = build_parser().parse_args(args)
    return arguments.run(arguments)
