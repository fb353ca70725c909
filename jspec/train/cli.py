"""`jspec train`: prepare data, train a language model or a draft, write a target's own text."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial

from jspec.train import data, draft, eagle3, frozen_kv_mtp, lm, text


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `jspec train`: its line in the overview, its help, its options, and the function that runs it."""

    summary: str
    description: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def _draft(kind: draft.DraftKind, summary: str, description: str | None) -> Command:
    return Command(summary, description, partial(draft.add_arguments, kind), partial(draft.main, kind))


COMMANDS = {
    "data": Command(
        "write token files, a tokenizer and prompts from the installed packages",
        data.__doc__,
        data.add_arguments,
        data.main,
    ),
    "lm": Command(
        "train a language model from scratch, or distill a small one from a teacher",
        lm.__doc__,
        lm.add_arguments,
        lm.main,
    ),
    "eagle3": _draft(eagle3.KIND, "train an EAGLE-3 head for a target", eagle3.__doc__),
    "frozen-kv-mtp": _draft(
        frozen_kv_mtp.KIND,
        "train an assistant for a target, which reads the target's keys and values",
        frozen_kv_mtp.__doc__,
    ),
    "text": Command(
        "write a target's greedy text, for its draft to learn from",
        text.__doc__,
        text.add_arguments,
        text.main,
    ),
}
"""The commands by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of `jspec train`; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    parser = argparse.ArgumentParser(prog="jspec train", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.main)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
