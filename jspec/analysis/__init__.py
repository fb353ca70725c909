"""Tools that look at generations: one round in detail, checks of drafters and targets, evaluation, plots.

The modules are imported on first use.
"""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("evaluate", "plots", "verify_endpoint"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
