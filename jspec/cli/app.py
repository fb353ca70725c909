"""The `jspec` program: parses a command line, runs the command, and reports invalid input on one line."""

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
"""Option of `jspec bench` with options of its own, in `bench_load`."""
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
"""Name -> module, class of its options, their groups, and summary; in the order of the help."""
_NOT_OPTIONS = ("arguments", "program", "run")
"""Attributes of the parsed arguments that are no options."""


def main(arguments: Sequence[str] | None = None, parser: Parser | None = None) -> int:
    """Runs a command; returns its exit status. Invalid input exits with status 2 and one line on standard error.

    arguments: of the command line; None: those of the process. Only then is the compilation cache enabled: a program
      that passes arguments keeps its own JAX configuration.
    parser: of another program, see `jspec.cli.arguments.set_options`; None: `jspec`.
    """
    as_process = arguments is None
    if arguments is None:
        interrupt.end_at_interrupt()
        arguments = [_as_text(argument) for argument in sys.argv[1:]]
        _escape_unencodable()
        enable_compilation_cache()
    # Run; report an error of the user on one line.
    options = argparse.Namespace()
    try:
        status = _run(list(arguments), options, parser)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # The reader, such as `head`, has closed the pipe.
        if as_process:
            _drop_output()
        return 0
    except (ValueError, TypeError) as error:
        return _refuse(str(error), options)
    except ModuleNotFoundError as error:  # A missing extra; any other missing module is a bug.
        if package.NAME not in str(error):
            raise
        return _refuse(str(error), options)
    except OSError as error:  # An error of the system without a file name is of a standard stream.
        is_stream = error.strerror and not error.filename
        return _refuse(f"output cannot be written ({error.strerror})" if is_stream else str(error), options)
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
    text = in_options(message, [name for name in vars(options) if name not in _NOT_OPTIONS])
    print(f"jspec: {printable(' '.join(text.split()))}", file=sys.stderr)
    return 2


def _as_text(argument: str) -> str:
    """Decodes an argument as UTF-8 whatever the locale; returns it as it is if it is not UTF-8."""
    try:
        return os.fsencode(argument).decode() if not argument.isascii() else argument
    except UnicodeError:
        return argument


def _escape_unencodable() -> None:
    """Writes characters outside the locale's encoding as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Redirects the standard streams to the null device, so that Python's flush at exit does not fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            os.dup2(null, stream.fileno())
