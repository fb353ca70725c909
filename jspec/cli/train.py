"""`jspec train`: prepare data, train a draft, write a target's own text."""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence

from jspec.cli.arguments import Parser
from jspec.train import arguments, data, options, prepare, replies, text


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `jspec train`.

    summary: its line in the overview.
    description: its help.
    add_arguments: adds its options.
    module: whose `main` runs it; imported only then, because it may need the extra `train`.
    """

    summary: str
    description: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str


COMMANDS = {
    "data": Command(
        "write token files and prompts from your own files",
        f"{prepare.__doc__}\n{data.__doc__}",
        prepare.add_arguments,
        "prepare",
    ),
    "eagle3": Command("train an EAGLE-3 head for a target", arguments.EAGLE3, arguments.add_eagle3, "eagle3"),
    "dspark": Command(
        "train a block draft for a target: DSpark or DFlash", arguments.DSPARK, arguments.add_dspark, "dspark"
    ),
    "frozen-kv-mtp": Command(
        "train an assistant for a target, which reads the target's keys and values",
        arguments.FROZEN_KV_MTP,
        arguments.add_frozen_kv_mtp,
        "frozen_kv_mtp",
    ),
    "replies": Command(
        "write a target's own replies to prompts or chats, for its draft to learn from",
        replies.__doc__,
        replies.add_arguments,
        "replies",
    ),
    "text": Command(
        "write a target's greedy text, for its draft to learn from",
        text.__doc__,
        text.add_arguments,
        "text",
    ),
}
"""The commands by name."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="jspec train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command of `jspec train`; returns its exit status.

    Raises:
      ValueError, TypeError, OSError: bad input, or a missing package; the message names it.
    """
    arguments = build_parser().parse_args(args)
    options.check(arguments)
    try:
        module = importlib.import_module(f"jspec.train.{COMMANDS[arguments.command].module}")
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    return module.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
