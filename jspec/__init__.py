"""Speculative decoding for JAX: pure functions, and one XLA program that runs the whole loop on the device.

    model = jspec.load("bundled:python-small")
    print(jspec.generate(model, "def quicksort(items):").text)

The public names are those of `__all__` and of the modules on the API pages of the documentation; anything else may
change in any release.
"""

import importlib
from typing import Any

from jspec.core import interrupt as _interrupt  # first, as commands can be interrupted from there on  # noqa: F401

# isort: split

from jspec.analysis.check_drafter import DrafterReport, check_drafter
from jspec.analysis.check_rule import RuleReport, check_rule
from jspec.analysis.check_target import TargetReport, check_target
from jspec.analysis.inspect_round import Round, inspect_round
from jspec.analysis.measure_costs import measure_costs
from jspec.analysis.verify import Certificate, verify
from jspec.core.package import VERSION
from jspec.core.sampling import Sampling
from jspec.core.xla_options import loop_options
from jspec.drafters import Adaptive, Block, Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Pruned, Standalone, Suffix
from jspec.engine.engine import Engine
from jspec.engine.generate import generate, stream
from jspec.engine.handle import Handle
from jspec.engine.metrics import Metrics
from jspec.generation.corpus import with_corpus
from jspec.generation.embeds import PromptEmbeds
from jspec.generation.ids import GeneratedIds, generate_ids
from jspec.generation.options import GenerateOptions
from jspec.generation.result import GeneratedToken, Generation, Generations, GenerationStats, Piece
from jspec.generation.score import Scores, score
from jspec.generation.speculation import Speculation
from jspec.generation.support import TokenSupport, masked_logits, support_array
from jspec.loading.model import Model, load
from jspec.loading.own import from_function, from_module, from_named, from_target
from jspec.loading.startup import cache_programs
from jspec.runner.request import EngineError, QueueFull
from jspec.text.grammar import Grammar

__version__ = VERSION

__all__ = [
    "Adaptive",
    "Block",
    "Certificate",
    "DrafterReport",
    "Eagle",
    "Engine",
    "EngineError",
    "FrozenKvMtp",
    "GenerateOptions",
    "GeneratedIds",
    "GeneratedToken",
    "Generation",
    "GenerationStats",
    "Generations",
    "Grammar",
    "Handle",
    "Metrics",
    "Model",
    "Mtp",
    "Ngram",
    "Piece",
    "Plain",
    "Pruned",
    "PromptEmbeds",
    "QueueFull",
    "Round",
    "RuleReport",
    "Sampling",
    "Scores",
    "Speculation",
    "Standalone",
    "Suffix",
    "TargetReport",
    "TokenSupport",
    "cache_programs",
    "check_drafter",
    "check_rule",
    "check_target",
    "from_function",
    "from_module",
    "from_named",
    "from_target",
    "generate",
    "generate_ids",
    "inspect_round",
    "load",
    "loop_options",
    "masked_logits",
    "measure_costs",
    "score",
    "stream",
    "support_array",
    "verify",
    "with_corpus",
]

_ON_FIRST_USE = {"plots": "jspec.analysis.plots"} | {name: f"jspec.{name}" for name in ("bench", "cli", "train")}
"""Modules that `import jspec` does not import."""


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return importlib.import_module(_ON_FIRST_USE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
