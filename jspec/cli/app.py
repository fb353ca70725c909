"""The parser of all commands, and `main`: it turns invalid input into one line and a status."""

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jspec.bench.options import SHAPE_GROUP, BenchOptions
from jspec.cli import bench, bench_load, common, doctor, evaluate, generate, serve, verify
from jspec.cli.arguments import Parser, in_options, printable, set_options
from jspec.core import interrupt, package
from jspec.loading.startup import enable_compilation_cache

LOAD = "--load"
"""Makes another command of `jspec bench`."""
_COMMANDS: Mapping[str, tuple[Any, type, Mapping[str, Sequence[str]], str]] = {
    "generate": (generate, generate.Options, generate.GROUPS, "continue a prompt, or the prompts of a file"),
    "evaluate": (
        evaluate,
        evaluate.Options,
        {**common.SHAPE_GROUP, **common.SAMPLING_GROUP},
        "measure accept length and speed of drafters on a set of prompts",
    ),
    "serve": (serve, serve.Options, serve.GROUPS, "serve a model over HTTP, with the API of OpenAI"),
    "verify": (
        verify,
        verify.Options,
        common.SHAPE_GROUP,
        "verify that drafts change nothing but the speed, of a model or of a server",
    ),
    "doctor": (
        doctor,
        doctor.Options,
        {},
        "look at devices, versions and kernels, test and measure them, and write a file to send",
    ),
    "bench": (bench, BenchOptions, SHAPE_GROUP, "measure rounds and their phases at real model shapes"),
}
"""Name -> the module, its options and their groups, and its line in the overview, in the order of the help."""
_NOT_OPTIONS = ("arguments", "program", "run")
"""Attributes of the parsed arguments, typed by no user."""


def main(arguments: Sequence[str] | None = None, parser: Parser | None = None) -> int:
    """Runs a command; returns its exit status. Invalid input exits with status 2 and one line on standard error.

    parser: of another program, see `jspec.cli.arguments.set_options`; None: `jspec`.
    arguments: None: those of the process, which also enables the compilation cache. A program with arguments
      keeps its own JAX configuration.
    """
    as_process = arguments is None
    if arguments is None:
        interrupt.end_at_interrupt()
        arguments = [_as_text(argument) for argument in sys.argv[1:]]
        _escape_what_the_terminal_cannot_show()
        enable_compilation_cache()
    # Errors of users end here, each with one line.
    options = argparse.Namespace()
    try:
        status = _run(list(arguments), options, parser)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # The reader, such as `head`, has seen enough.
        if as_process:
            _drop_output()
        return 0
    except (ValueError, TypeError) as error:
        return _refuse(str(error), options)
    except ModuleNotFoundError as error:  # Of an extra, unless it is our own fault.
        if package.NAME not in str(error):
            raise
        return _refuse(str(error), options)
    except OSError as error:  # One of the system without the name of a file is of a standard stream.
        stream = error.strerror and not error.filename
        return _refuse(f"output cannot be written ({error.strerror})" if stream else str(error), options)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refuse(f"out of memory: {str(error) or 'an allocation failed'}", options)
    except KeyboardInterrupt:
        return interrupt.STATUS


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="jspec", description="Speculative decoding for JAX.")
    version = f"jspec {package.VERSION}, jax {jax.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the versions of jspec and JAX")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, (module, kind, groups, summary) in _COMMANDS.items():
        set_options(commands.add_parser(name, help=summary, description=module.__doc__), kind, module.run, groups)
    commands.add_parser("train", help="prepare data, and train a language model or a draft model")
    return parser


def _run(arguments: list[str], options: argparse.Namespace, parser: Parser | None) -> int:
    """Parses into `options` and runs the command."""
    if parser is None and arguments[:1] == ["train"]:
        from jspec.cli import train  # not needed by the other commands

        return train.main(arguments[1:])
    if parser is None and arguments[:1] == ["bench"] and LOAD in arguments:
        parser, arguments = bench_load.parser(), [argument for argument in arguments[1:] if argument != LOAD]
    program = parser or build_parser()
    program.parse_args(arguments, options)
    options.arguments, options.program = arguments, program.prog
    return options.run(options)


def _refuse(message: str, options: argparse.Namespace) -> int:
    """Prints an error on one line, with the names of options as they are typed; returns the status."""
    named = in_options(message, [name for name in vars(options) if name not in _NOT_OPTIONS])
    print(f"jspec: {printable(' '.join(named.split()))}", file=sys.stderr)
    return 2


def _as_text(argument: str) -> str:
    """An argument whose bytes are not text in the encoding of the locale, if they are UTF-8."""
    try:
        return os.fsencode(argument).decode() if not argument.isascii() else argument
    except UnicodeError:
        return argument


def _escape_what_the_terminal_cannot_show() -> None:
    """Text outside of the encoding of the locale is written as escapes, where it would be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Python flushes its streams when it ends; this must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
