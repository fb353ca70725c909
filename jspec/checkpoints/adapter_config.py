"""The adapter_config.json of the library peft: the modules changed by a LoRA adapter, and the factors of the changes.

Every key is read, known to have no effect on a trained adapter, or refused. Patterns are regular expressions of a hub's
files: many repetitions, or those of groups, can take exponential time and are refused.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from jspec.checkpoints.fields import MOST_LAYERS, MOST_NUMBER, Fields, read_fields, refuse

V = TypeVar("V", int, float)
ALL = "all-linear"
"""In place of names: all linear layers."""
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Starting points of training; others change the weights of the base."""
_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias"),
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "init_lora_weights", "ensure_weight_tying"),
}
_WITHOUT_EFFECT = {
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    *("megatron_core", "qalora_group_size"),
}
"""Keys about training, the origin, or details of refused options."""
_MOST_PATTERN, _MOST_REPEATS, _MOST_KEY_REPEATS = 2000, 5, 1
"""Bounds of regular expressions: characters, and repetitions in one for modules, or for a rank or an alpha."""
_REPEAT = re.compile(r"[*+?]|\{\d")


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The options of an adapter.

    r, alpha: rank and numerator of the scale of modules without a pattern.
    ranks, alphas: pattern of a module's path -> its rank, or alpha.
    modules: ends of the paths of modules, or a pattern, or `ALL`.
    excluded: of these, the modules left out: ends of paths, or a pattern.
    parameters: ends of the paths of parameters, such as stacks of experts.
    layers: the layers with changes; None: all.
    layers_pattern: names of the lists of layers; empty: any.
    saved: names of replaced modules.
    ties: whether embedding and LM head stay one weight.
    """

    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    modules: tuple[str, ...] | re.Pattern[str] | str
    excluded: tuple[str, ...] | re.Pattern[str]
    parameters: tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    saved: tuple[str, ...]
    ties: bool

    def targets(self, module: str) -> bool:
        """Whether the adapter changes a module, by its path."""
        if _is_match(self.excluded, module):
            return False
        return self.modules == ALL or _is_match(self.modules, module) and self._has_layer(module)

    def _has_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        lists = "|".join(map(re.escape, self.layers_pattern)) or r"[^.]*"
        index = re.match(rf"(?:.*?\.)?(?:{lists})\.(\d+)\.", module)
        return index is not None and int(index[1]) in self.layers

    def targets_parameter(self, path: str) -> bool:
        """Whether the adapter changes a parameter, such as a stack of experts."""
        return _is_match(self.parameters, path)

    def is_saved(self, module: str, name: str) -> bool:
        """Whether a tensor is of a replaced module, or of one stored beside its change."""
        return ".base_layer." in name or any(f".{saved}." in f".{module}." for saved in self.saved)

    def rank(self, path: str) -> int:
        """The rank of a module's factors."""
        return next((rank for pattern, rank in self.ranks.items() if pattern.match(path)), self.r)

    def scale(self, path: str) -> float:
        """The factor on the product of a module's factors."""
        alpha, rank = next((a for key, a in self.alphas.items() if key.match(path)), self.alpha), self.rank(path)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def described_targets(self) -> str:
        """The modules, for errors."""
        layers = "" if self.layers is None else f" in layers {list(self.layers)}"
        return f"target_modules={_shown(self.modules)}{layers}"

    def described_parameters(self) -> str:
        """The parameters, for errors."""
        return f"target_parameters={_shown(self.parameters)}"


def _is_match(names: tuple[str, ...] | re.Pattern[str] | str, path: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(path) is not None
    return any(f".{path}".endswith(f".{name}") for name in names)


def _shown(names: tuple[str, ...] | re.Pattern[str] | str) -> str:
    text = repr(names.pattern if isinstance(names, re.Pattern) else names)
    return text if len(text) <= 200 else text[:200] + "..."


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read the options of an adapter; CheckpointError if the file is missing or damaged, or one is not supported."""
    fields = read_fields(path)
    _refuse_options(fields)
    text = isinstance(fields.value("target_modules"), str)
    layers = _ints(fields, "layers_to_transform")
    if text and layers is not None:
        raise fields.wrong("layers_to_transform", list(layers), "must be null if target_modules is a string")
    return AdapterConfig(
        r=fields.read_int("r", 8),
        alpha=_number(fields, "lora_alpha", 8),
        use_rslora=fields.read_flag("use_rslora", False),
        use_dora=fields.read_flag("use_dora", False),
        ranks=_patterns(fields, "rank_pattern", lambda section, key: section.read_int(key)),
        alphas=_patterns(fields, "alpha_pattern", _number),
        modules=ALL if text and fields.read_text("target_modules").lower() == ALL else _names(fields, "target_modules"),
        excluded=_names(fields, "exclude_modules"),
        parameters=fields.read_texts("target_parameters", ()),
        layers=layers or None,
        layers_pattern=_texts(fields, "layers_pattern"),
        saved=fields.read_texts("modules_to_save", ()),
        ties=fields.read_flag("ensure_weight_tying", False),
    )


def _refuse_options(fields: Fields) -> None:
    """Refuse options of other methods, and of forwards with other operations."""
    wrong = fields.unsupported({"peft_type": ("LORA",), "bias": ("none",)})
    initial = fields.value("init_lora_weights")
    if initial is not None and initial not in _INITIAL:
        wrong.append(
            f"{fields.describe('init_lora_weights')} (must be one of {', '.join(map(repr, _INITIAL))}: others change "
            "the base; peft writes the change with save_pretrained(path_initial_model_for_weight_conversion=...))"
        )
    others = [key for key in fields.keys() if key not in _READ | _WITHOUT_EFFECT]
    set_others = [key for key in others if not (fields.is_empty(key) or fields.is_off(key))]
    refuse(fields.where, [*wrong, *(f"{fields.describe(key)} (must be absent or null)" for key in set_others)])


def _number(fields: Fields, key: str, *default: float) -> float:
    return fields.read_number(key, *default, least=-MOST_NUMBER, most=MOST_NUMBER)


def _ints(fields: Fields, key: str) -> tuple[int, ...] | None:
    """A list of layers, or one."""
    if isinstance(fields.value(key), list):
        return fields.read_ints(key, least=0, most=MOST_LAYERS, count=MOST_LAYERS)
    layer = fields.read_int(key, None, least=0, most=MOST_LAYERS)
    return None if layer is None else (layer,)


def _texts(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names, or one."""
    if isinstance(fields.value(key), str):
        return tuple(filter(None, [fields.read_text(key)]))
    return fields.read_texts(key, ())


def _names(fields: Fields, key: str) -> tuple[str, ...] | re.Pattern[str]:
    """A list of names, or a pattern."""
    if not isinstance(fields.value(key), str):
        return fields.read_texts(key, ())
    return _compiled(fields, key, fields.read_text(key), _MOST_REPEATS)


def _patterns(fields: Fields, key: str, read: Callable[[Fields, str], V]) -> dict[re.Pattern[str], V]:
    section = fields.section(key)
    keys = {name: _compiled(section, name, name, _MOST_KEY_REPEATS) for name in section.keys()}
    return {re.compile(rf"(.*\.)?({pattern.pattern})$"): read(section, name) for name, pattern in keys.items()}


def _compiled(fields: Fields, key: str, pattern: str, most: int) -> re.Pattern[str]:
    plain = pattern.replace("(?:", "(").replace("*?", "*").replace("+?", "+").replace("}?", "}")
    repeats = _REPEAT.findall(plain)
    simple = len(pattern) <= _MOST_PATTERN and len(repeats) <= most and not re.search(r"\)[*+?{]|\(\?|\{\d{4}", plain)
    try:
        if simple:
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.wrong(key, repr(pattern[:200]), f"must be a regular expression ({error})") from None
    raise fields.wrong(
        key,
        repr(pattern[:200]),
        f"must be a regular expression of at most {_MOST_PATTERN} characters and {most} repetitions, none of a group, "
        "or a list of names",
    )
