"""The command line: `jspec generate`, `jspec evaluate`, `jspec serve`, `jspec doctor`, `jspec bench`, `jspec train`.

Bad input raises `ValueError`, `TypeError` or `OSError` with the option, before any work; `app.main` prints one line.
"""

from jspec.cli.app import build_parser, main

__all__ = ["build_parser", "main"]
