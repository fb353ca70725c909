"""The command line: `jspec generate`, `jspec evaluate`, `jspec serve`, `jspec doctor`, `jspec bench`, `jspec train`."""

from jspec.cli.app import build_parser, main

__all__ = ["build_parser", "main"]
