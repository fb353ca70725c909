"""The distribution: its name, which is not that of the import, its version, and its data files."""

from pathlib import Path

NAME = "jspec-decoding"
"""Name on the package index; `jspec` is another project there."""
VERSION = "0.1.0"
ASSETS = Path(__file__).resolve().parents[1] / "assets"
"""The bundled models and prompts."""


def install(extra: str) -> str:
    """The command that installs the packages of an extra."""
    return f'pip install "{NAME}[{extra}]"'
