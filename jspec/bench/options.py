"""Options of `jspec bench`: what is measured, and how."""

import dataclasses
import math
from pathlib import Path

from jspec.bench.presets import DRAFTS, PRESETS
from jspec.cache.narrow import KV_FORMATS
from jspec.cache.pages import DEFAULT_PAGE_SIZE
from jspec.checkpoints.files import DTYPES
from jspec.core.accept import Imposed
from jspec.core.options import check_options, option, set_checked, typed
from jspec.core.types import Drafter
from jspec.drafters import DRAFTERS, Adaptive
from jspec.models.quantized import BLOCKS, FORMATS, WIDE

MODES = ("plain", "chain", "tree")
SHAPE = ("depth", "width", "num_nodes", "tokens_per_round")
WINDOW = ("window", "keep_first")
_OF_DRAFTS = {
    "drafter": None,
    "window": None,
    "keep_first": None,
    "depth": 5,
    "tokens_per_round": 3.0,
    "width": 8,
    "num_nodes": 32,
}
"""Option of drafts -> its default."""
_OF_TREES = ("width", "num_nodes")
"""Options of trees alone."""
BATCH, COUNT = {"least": 1, "most": 2**20}, {"least": 1, "most": 2**31 - 1}
"""Bounds against overflow; memory allows less."""


SHAPE_GROUP = {
    "shape of the draft:\nDefaults: a chain of 5 drafts, or a tree of 32 nodes with 8 children per node.": (
        *SHAPE,
        *WINDOW,
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options of commands with a model: its precision, and the shape and window of the draft."""

    dtype: str | None = option(
        None, "dtype of the weights (default: float32 on a CPU, otherwise bfloat16)", choices=tuple(DTYPES)
    )
    kv: str | None = option(
        None,
        "keep the target's keys and values in 8 bits (default: in the precision of the weights)",
        choices=tuple(KV_FORMATS),
    )
    depth: int | None = option(None, "length of the longest drafted chain", bounds=COUNT)
    width: int | None = option(None, "maximum number of children per node; 1 drafts a chain", bounds=COUNT)
    num_nodes: int | None = option(None, "nodes of the drafted tree, root included", bounds=COUNT)
    window: int | None = option(
        None,
        "positions of the context that an EAGLE head, a block draft or a small model sees (default: all)",
        bounds=COUNT,
    )
    keep_first: int | None = option(
        None,
        "positions at the beginning that it sees in addition to --draft-window (default: 0)",
        least=0,
        most=2**31 - 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubjectOptions(DraftOptions):
    """The subject of a measurement and its modes. An option of drafts that is None gets its default.

    Raises:
      ValueError, TypeError: a value out of bounds, or contradictory values.
    """

    preset: str | None = option(None, "the shapes of this model, with random weights", choices=tuple(PRESETS))
    drafter: str | None = option(
        None, "default: that of --draft, or the first of these with a draft in the preset", choices=tuple(DRAFTS)
    )
    mode: tuple[str, ...] = option(MODES, "how rounds run (default: plain chain tree)", choices=MODES)
    tokens_per_round: float | None = option(None, "imposed accept length, bonus token included (default: 3)")
    weights: str | None = option(
        None,
        "matrices of 8 or 4 bits of linear layers in target and draft, see jspec.load (default: as stored, or those of "
        f"--dtype); {BLOCKS}, for presets: as in checkpoints with one scale for 128 x 128 values",
        choices=(*FORMATS, BLOCKS, WIDE),
    )
    exact: bool | None = option(
        None,
        "measure the exact forward of the target, see jspec.load (default: that of jspec.load for --checkpoint, "
        "otherwise not)",
    )
    page_size: int = option(DEFAULT_PAGE_SIZE, "rows per page", bounds=COUNT)
    json: Path | None = option(
        None, "write each measurement to FILE as a line of JSON, after each case", metavar="FILE"
    )
    command: str | None = None

    def __post_init__(self):
        check_options(self)
        self._check_modes()
        self._check_shape()
        # Options without an exact forward.
        if self.exact:
            for name in ("weights", "kv"):
                value = getattr(self, name, None)
                if value not in (None, WIDE):
                    raise ValueError(f"--exact: no exact forward with --{name} {value} yet; omit one of them")

    @property
    def is_tiny(self) -> bool:
        """Whether the preset runs on any CPU."""
        return (self.preset or "").startswith("tiny")

    def _check_modes(self) -> None:
        """Fills in defaults of draft options; raises ValueError for an option that no mode uses."""
        for name, default in _OF_DRAFTS.items():
            value, trees = getattr(self, name), name in _OF_TREES
            if value is not None and not any(mode == "tree" if trees else mode != "plain" for mode in self.mode):
                users = "tree" if trees else "chain or tree"
                raise ValueError(f"{typed(self, name)}: requires --mode {users}, but --mode is {' '.join(self.mode)}")
            set_checked(self, **{name: default if value is None else value})

    def _check_shape(self) -> None:
        assert self.tokens_per_round is not None and self.depth is not None
        Imposed(self.tokens_per_round)
        if set(self.mode) != {"plain"} and math.ceil(self.tokens_per_round) > self.depth + 1:
            most = f"must be at most {self.depth + 1} with --depth {self.depth}"
            raise ValueError(f"{typed(self, 'tokens_per_round')}: {most}")
        if "tree" in self.mode and self.width == 1:
            raise ValueError("--width 1: a tree must have a width of at least 2; for a chain use --mode chain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOptions(SubjectOptions):
    """The rounds of a measurement. Empty batches and contexts get the defaults of the preset."""

    batch: tuple[int, ...] = option(
        (), "sequences (default: 1 8 32, or 1 for tiny presets, times --data)", bounds=BATCH
    )
    context: tuple[int, ...] = option(
        (), "tokens of the prompt (default: 512 4096 32768; tiny presets: 64)", bounds=COUNT
    )
    rounds: int = option(85, "rounds per timed call", bounds=COUNT)

    def __post_init__(self):
        super().__post_init__()
        # Every group of devices has the same number of sequences.
        groups = getattr(self, "data", 1)
        set_checked(
            self,
            batch=self.batch or tuple(groups * batch for batch in ((1,) if self.is_tiny else (1, 8, 32))),
            context=self.context or ((64,) if self.is_tiny else (512, 4096, 32_768)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(SubjectOptions):
    """The source of the weights, their devices, and a plot of the results."""

    checkpoint: str | None = option(
        None, "real weights, given like --model of jspec generate, in place of --preset", metavar="MODEL"
    )
    draft: str | None = option(None, "draft model for --checkpoint (default: a random EAGLE-3 head)", metavar="MODEL")
    adapter: str | None = option(None, "LoRA adapter for --checkpoint, a directory or a hub id", metavar="ADAPTER")
    tensor: int = option(1, "split the model over N devices, see jspec.load; phases are then not timed", bounds=COUNT)
    data: int = option(
        1,
        "divide the sequences over N devices with all weights each, or N groups of --tensor devices, see jspec.load; "
        "phases are then not timed",
        bounds=COUNT,
    )
    plot: Path | None = option(None, "draw the results; requires matplotlib", metavar="FILE.png")

    def __post_init__(self):
        # One source of weights.
        if (self.preset is None) == (self.checkpoint is None):
            count = "none is given" if self.preset is None else "both are given"
            raise ValueError(f"--preset NAME or --checkpoint MODEL: {count}; must be one of them")
        for name in ("draft", "adapter"):
            if (value := getattr(self, name)) and not self.checkpoint:
                raise ValueError(f"--{name} {value}: requires --checkpoint; the weights of a preset are random")
        if self.weights == BLOCKS and self.checkpoint:
            raise ValueError(f"--weights {BLOCKS}: requires --preset; a checkpoint that is stored so keeps its weights")
        super().__post_init__()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(RunOptions, CaseOptions):
    """The options of `jspec bench`."""

    repeats: int = option(5, "repetitions of each measurement", least=1, most=10_000)
    no_split: bool = option(False, "do not time the phases, which takes half of the time")

    def __post_init__(self):
        super().__post_init__()
        for batch in self.batch:
            if batch % self.data:
                raise ValueError(f"--batch {batch}: must be a multiple of --data {self.data}")


def devices_of(options: SubjectOptions) -> dict[str, int]:
    """The arguments of `jspec.load` for several devices; empty for one."""
    return {name: size for name in ("tensor", "data") if (size := getattr(options, name, 1)) > 1}


def drafter_of(mode: str, name: str, options: SubjectOptions) -> Drafter | None:
    """The drafter of a mode in the requested shape, not bound yet; None: plain decoding. name: in `DRAFTS`."""
    if mode in ("plain", "adaptive"):
        return None if mode == "plain" else Adaptive()
    tree = {"width": options.width, "num_nodes": options.num_nodes} if mode == "tree" else {}
    return DRAFTERS[name](depth=options.depth, **tree, **window_of(name, options))


def window_of(drafter: str, options: SubjectOptions) -> dict[str, int]:
    """The options of the draft's window that are not None, by name; ValueError if the drafter has no window."""
    values = {name: value for name in WINDOW if (value := getattr(options, name)) is not None}
    fields = {field.name for field in dataclasses.fields(DRAFTERS[drafter])}  # pyright: ignore[reportArgumentType]
    for name in values:
        if "window" not in fields:
            raise ValueError(f"{typed(options, name)}: the drafter {drafter} has no window")
    return values
