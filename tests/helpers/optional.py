"""Packages of extras: who brings them, and modules that are imported when a test first uses them.

Together torch, transformers and peft take a third of the time in which tests are collected.
"""

import importlib
from importlib.util import find_spec

import pytest

EXTRAS = {
    **dict.fromkeys(("peft", "torch", "transformers"), "parity"),
    **dict.fromkeys(("ipykernel", "matplotlib", "nbclient"), "notebooks"),
    **dict.fromkeys(("flax", "optax", "orbax.checkpoint"), "train"),
    **dict.fromkeys(("httpx", "jsonschema", "openai", "pydantic"), "test"),
    **dict.fromkeys(("msgspec", "starlette", "uvicorn"), "serve"),
    **{"mkdocs": "docs", "libtpu": "tpu"},
}


def reason(package):
    return f'needs {package}: pip install -e ".[{EXTRAS[package]}]"'


class Lazy:
    """A module that is imported when an attribute is first read."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(importlib.import_module(self._name), name)


def lazy(*packages):
    """The modules of these packages, or one; skips the module of tests where a package is not installed."""
    for package in packages:
        if find_spec(package.partition(".")[0]) is None:
            pytest.skip(reason(package), allow_module_level=True)
    modules = tuple(map(Lazy, packages))
    return modules if len(modules) > 1 else modules[0]


def needed(package):
    """The module of a package; skips the test where it is not installed."""
    return pytest.importorskip(package, reason=reason(package))
