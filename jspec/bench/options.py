"""Options of `jspec bench`: what is measured, and how."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.bench.measure import FROM_HOST
from jspec.bench.presets import PRESETS
from jspec.cache.narrow import KV_FORMATS
from jspec.cache.pages import DEFAULT_PAGE_SIZE
from jspec.checkpoints.files import DTYPES
from jspec.core.accept import Imposed
from jspec.core.options import check_options, option, typed
from jspec.core.types import Drafter
from jspec.drafters import Block, Eagle, FrozenKvMtp, Mtp, Standalone
from jspec.models.quantized import BLOCKS, FORMATS, WIDE

MODES = ("plain", "chain", "tree")
_CHAINS = (*MODES[1:], *FROM_HOST)
DRAFTERS: Mapping[str, type[Any]] = {
    "eagle": Eagle,
    "block": Block,
    "standalone": Standalone,
    "frozen-kv-mtp": FrozenKvMtp,
    "mtp": Mtp,
}
SHAPE = ("depth", "width", "num_nodes", "tokens_per_round")
WINDOW = ("window", "keep_first")
_OF_MODES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "drafter": (None, _CHAINS),
    "window": (None, _CHAINS),
    "keep_first": (None, _CHAINS),
    "depth": (5, _CHAINS),
    "tokens_per_round": (3.0, _CHAINS),
    "width": (8, ("tree",)),
    "num_nodes": (32, ("tree",)),
}
"""Options of drafts -> their default, and the modes that use them."""
_NOT_OF_LOADS = ("batch", "context", "rounds", "no_split")
_OF_LOADS = ("slots", "requests")
_MOST_PANELS = 24
_BATCH, _COUNT = {"least": 1, "most": 2**20}, {"least": 1, "most": 2**31 - 1}
"""Bounds. What fits into the memory is less."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """The model and the rounds that are measured. What is None or empty gets its default when the value is made.

    Raises:
      ValueError, TypeError: a value out of bounds, or values that contradict each other.
    """

    preset: str | None = option(None, "the shapes of this model, with random weights", choices=tuple(PRESETS))
    drafter: str | None = option(
        None,
        "default: the one that --draft is for, or the first of these that the preset has a draft for",
        choices=tuple(DRAFTERS),
    )
    mode: tuple[str, ...] = option(MODES, "how rounds run (default: plain chain tree)", choices=MODES)
    batch: tuple[int, ...] = option(
        (), "sequences (default: 1 8 32, or 1 for tiny presets, times --data)", bounds=_BATCH
    )
    context: tuple[int, ...] = option(
        (), "tokens of the prompt (default: 512 4096 32768; tiny presets: 64)", bounds=_COUNT
    )
    depth: int | None = option(None, "length of the longest chain (default: 5)", bounds=_COUNT)
    width: int | None = option(None, "children per node of a tree (default: 8)", bounds=_COUNT)
    num_nodes: int | None = option(None, "nodes of a tree, root included (default: 32)", bounds=_COUNT)
    window: int | None = option(
        None,
        "positions of the context that an EAGLE head, a block draft or a small model sees (default: all)",
        bounds=_COUNT,
    )
    keep_first: int | None = option(
        None,
        "positions at the beginning that it sees in addition to --draft-window (default: 0)",
        least=0,
        most=2**31 - 1,
    )
    tokens_per_round: float | None = option(None, "imposed accept length, bonus token included (default: 3)")
    rounds: int | None = option(None, "rounds per timed call (default: 85)", bounds=_COUNT)
    dtype: str | None = option(
        None, "dtype of the weights (default: float32 on a CPU, otherwise bfloat16)", choices=tuple(DTYPES)
    )
    weights: str | None = option(
        None,
        "matrices of 8 or 4 bits of linear layers in target and draft, see jspec.load (default: as stored, or those of "
        f"--dtype); {BLOCKS}, for presets: as in checkpoints with one scale for 128 x 128 values",
        choices=(*FORMATS, BLOCKS, WIDE),
    )
    kv: str | None = option(
        None,
        "keep the target's keys and values in 8 bits (default: in the precision of the weights)",
        choices=tuple(KV_FORMATS),
    )
    exact: bool = option(False, "measure the exact forward of the target, see jspec.load")
    page_size: int = option(DEFAULT_PAGE_SIZE, "rows per page", bounds=_COUNT)
    json: Path | None = option(
        None, "write each measurement to FILE as a line of JSON, after each case", metavar="FILE"
    )
    command: str | None = None

    def __post_init__(self):
        check_options(self)
        self._check_modes()
        self._fill(rounds=self.rounds or 85)
        self._check_shape()
        # What has no exact forward.
        if self.exact:
            for name in ("weights", "kv", "tensor"):
                value = getattr(self, name, None)
                if value not in (None, WIDE, 1):
                    raise ValueError(f"--exact: no exact forward with --{name} {value} yet; omit one of them")
        # Defaults of batch and context depend on the preset.
        groups = getattr(self, "data", 1)
        self._fill(
            batch=self.batch or tuple(groups * batch for batch in ((1,) if self.is_tiny else (1, 8, 32))),
            context=self.context or ((64,) if self.is_tiny else (512, 4096, 32_768)),
        )

    @property
    def is_tiny(self) -> bool:
        """Whether the preset runs on any CPU."""
        return (self.preset or "").startswith("tiny")

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_modes(self) -> None:
        """Fills in defaults of options of drafts, which must be of use to one of the modes."""
        for name, (default, users) in _OF_MODES.items():
            value = getattr(self, name)
            if value is not None and not set(users) & set(self.mode):
                raise ValueError(
                    f"{typed(self, name)}: requires --mode {' or '.join(users)}, but --mode is {' '.join(self.mode)}"
                )
            self._fill(**{name: default if value is None else value})

    def _check_shape(self) -> None:
        assert self.tokens_per_round is not None and self.depth is not None
        Imposed(self.tokens_per_round)
        if set(self.mode) != {"plain"} and math.ceil(self.tokens_per_round) > self.depth + 1:
            most = f"must be at most {self.depth + 1} with --depth {self.depth}"
            raise ValueError(f"{typed(self, 'tokens_per_round')}: {most}")
        if "tree" in self.mode and self.width == 1:
            raise ValueError("--width 1: a tree must have a width of at least 2; for a chain use --mode chain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(CaseOptions):
    """The options of `jspec bench`.

    Raises:
      ValueError, TypeError: as `CaseOptions`.
    """

    checkpoint: str | None = option(
        None, "real weights, given like --model of jspec generate, in place of --preset", metavar="MODEL"
    )
    draft: str | None = option(None, "draft model for --checkpoint (default: a random EAGLE-3 head)", metavar="MODEL")
    mode: tuple[str, ...] = option(
        MODES,
        "how rounds run (default: plain chain tree). stepped is a chain in which the host calls each round; unfolded, "
        "for frozen-kv-mtp, is one in which it also calls the seed before each round",
        choices=(*MODES, *FROM_HOST),
    )
    repeats: int | None = option(
        None, "repetitions of each measurement (default: 5; with --load: 3)", least=1, most=10_000
    )
    no_split: bool = option(False, "do not time the phases, which takes half of the time")
    tensor: int = option(
        1, "split the model over N devices, see jspec.load; phases are then not timed (default: 1)", bounds=_COUNT
    )
    data: int = option(
        1,
        "divide the sequences, or the requests of --load, over N devices with all weights each, or N groups of "
        "--tensor devices, see jspec.load; phases are then not timed (default: 1)",
        bounds=_COUNT,
    )
    plot: Path | None = option(None, "draw the results; requires matplotlib", metavar="FILE.png")
    load: bool = option(
        False, "measure jspec.Engine instead of rounds: requests of ordinary lengths that all arrive at once"
    )
    slots: tuple[int, ...] = option(
        (), "sequences that are generated at the same time (default: 32 64; tiny presets: 4)", bounds=_BATCH
    )
    requests: int | None = option(None, "number of requests (default: 256)", bounds=_BATCH)

    def __post_init__(self):
        # One source of weights.
        if (self.preset is None) == (self.checkpoint is None):
            count = "none is given" if self.preset is None else "both are given"
            raise ValueError(f"--preset NAME or --checkpoint MODEL: {count}; must be one of them")
        if self.draft and not self.checkpoint:
            raise ValueError(f"--draft {self.draft}: requires --checkpoint; the weights of a preset are random")
        if self.weights == BLOCKS and self.checkpoint:
            raise ValueError(f"--weights {BLOCKS}: requires --preset; a checkpoint that is stored so keeps its weights")
        self._check_load()
        super().__post_init__()
        # Several devices.
        for name, devices in devices_of(self).items():
            if "unfolded" in self.mode:
                raise ValueError(f"--mode unfolded: runs on one device; leave it out with --{name} {devices}")
        for batch in () if self.load else self.batch:
            if batch % self.data:
                raise ValueError(f"--batch {batch}: must be a multiple of --data {self.data}")

    def _check_load(self) -> None:
        """Fills in defaults, and checks that all options apply to what is measured: rounds, or requests."""
        # Options of the other kind of measurement.
        for name in _NOT_OF_LOADS if self.load else _OF_LOADS:
            if getattr(self, name):
                problem = "has no effect with --load; leave it out" if self.load else "requires --load"
                raise ValueError(f"{typed(self, name)}: {problem}")
        self._fill(repeats=self.repeats or (3 if self.load else 5))
        if not self.load:
            return
        # Defaults and limits of loads.
        for mode in self.mode:
            if mode not in MODES:
                raise ValueError(f"--mode {mode}: must be {', '.join(MODES[:-1])} or {MODES[-1]} with --load")
        self._fill(requests=self.requests or 256, slots=self.slots or ((4,) if self.is_tiny else (32, 64)))
        # A plot has a panel per load.
        panels = len(self.slots) * len(self.mode)
        if self.plot and panels > _MOST_PANELS:
            raise ValueError(f"--plot {self.plot}: draws at most {_MOST_PANELS} loads, but there are {panels}")


def devices_of(options: CaseOptions) -> dict[str, int]:
    """The arguments of `jspec.load` for more than one device."""
    return {name: size for name in ("tensor", "data") if (size := getattr(options, name, 1)) > 1}


def drafter_of(mode: str, name: str, options: CaseOptions) -> Drafter | None:
    """The drafter of a mode in the shape that is asked for, not bound yet; None: plain decoding.

    name: in `DRAFTERS`.
    """
    if mode == "plain":
        return None
    tree = {"width": options.width, "num_nodes": options.num_nodes} if mode == "tree" else {}
    return DRAFTERS[name](depth=options.depth, **tree, **window_of(name, options))


def window_of(drafter: str, options: CaseOptions) -> dict[str, int]:
    """The options of the draft's window that are set.

    Raises:
      ValueError: the drafter has no window.
    """
    values = {name: value for name in WINDOW if (value := getattr(options, name)) is not None}
    for name in values:
        if "window" not in (field.name for field in dataclasses.fields(DRAFTERS[drafter])):
            raise ValueError(f"{typed(options, name)}: the drafter {drafter} has no window")
    return values
