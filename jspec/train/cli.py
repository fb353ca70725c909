"""`jspec train`: prepare data, train a language model or a draft, write a target's own text."""

import argparse
import sys
from collections.abc import Sequence

from jspec.train import data, eagle3, frozen_kv_mtp, lm, text

_COMMANDS = {
    "data": (data, "token files, a tokenizer and prompts from the installed packages"),
    "lm": (lm, "train a language model from scratch, or a draft from a teacher"),
    "eagle3": (eagle3, "train an EAGLE-3 head for a target"),
    "frozen-kv-mtp": (frozen_kv_mtp, "train an assistant for a target, which reads its keys and values"),
    "text": (text, "text that a target writes greedily, for its draft to learn from"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of `jspec train`; returns its exit status.

    Raises:
      ValueError, OSError: bad input; the message names it.
    """
    parser = argparse.ArgumentParser(prog="jspec train", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in _COMMANDS.items():
        as_written = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=as_written)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
