"""`python -m tools.pretrain`: collect data from installed packages, train a tokenizer or a language model."""

import argparse
import sys
from collections.abc import Sequence

from jspec.cli.arguments import Parser, add_options, read_options
from tools.pretrain import data, lm, tokenizer

COMMANDS = {"data": data, "tokenizer": tokenizer, "lm": lm}
"""Modules by command; `OPTIONS` are dataclasses of which `main` takes one each, and the docstring is the help."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="python -m tools.pretrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        description = module.__doc__ or ""
        subparser = commands.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for kind in module.OPTIONS:
            add_options(subparser, kind)
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Raises:
      ValueError, TypeError, OSError: bad input; the message names it.
    """
    parsed = build_parser().parse_args(args)
    module = COMMANDS[parsed.command]
    return module.main(*(read_options(parsed, kind) for kind in module.OPTIONS))


if __name__ == "__main__":
    sys.exit(main())
