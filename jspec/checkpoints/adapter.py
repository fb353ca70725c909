"""LoRA adapters (Hu et al., arXiv 2106.09685) in the directories of the library peft, for the weights of a checkpoint.

An adapter has a pair of factors A, [r, in], and B, [out, r], for some matrices W, [out, in], and stands for
W + scale * B A, with scale = alpha / r, or alpha / sqrt(r) (rank-stabilized, arXiv 2312.03732). With magnitudes m each
row of the sum has the norm m (DoRA, arXiv 2402.09353). Factors of a stack of experts are beside each other.
"""

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.adapter_config import AdapterConfig, read_adapter_config
from jspec.checkpoints.deferred import Part, as_slice
from jspec.checkpoints.files import CheckpointError, find_file
from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.checkpoints.source import ArrayFiles, TorchFile
from jspec.checkpoints.tensors import FLOATS, HEAD, DerivedFiles, TensorFiles, Tensors

WEIGHTS, TORCH_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
"""Beginning of all names."""
_ROOTS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""What names of modules of a text model begin with, alone and within multimodal models."""
_TAIL = re.compile(r"(?:layers\.\d+|embed_tokens|lm_head|norm)(?:\..*)?")
"""The rest of them."""
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?")


@dataclasses.dataclass(frozen=True)
class Update:
    """The change of a tensor W [..., out, in] to W + up @ down.

    up, down: [..., out, r], scaled, and [..., r, in], in float32.
    magnitude: the norms of the rows of the result, [out]; None: as they are.
    """

    up: np.ndarray
    down: np.ndarray
    magnitude: np.ndarray | None = None

    def apply(self, weight: np.ndarray, part: Part) -> np.ndarray:
        """The changed tensor, or a part of it, in float32. part: of `weight`; all of it if there are magnitudes."""
        *stack, rows, columns = map(as_slice, part)
        total = self.up[(*stack, rows)] @ self.down[(*stack, slice(None), columns)]
        total += weight.astype(np.float32, copy=False)
        if self.magnitude is None:
            return total
        return total * (self.magnitude / np.linalg.norm(total, axis=1))[:, None]


class _Factors(NamedTuple):
    """The names of the tensors of a module, as stored."""

    a: str
    b: str
    magnitude: str | None
    embedding: bool


class Adapter:
    """An open directory, whose names and options are checked; `over` checks and reads it for a checkpoint.

    Raises:
      CheckpointError: a file is missing or damaged, an option is not supported, a tensor is of an unknown kind or a
        factor is missing.
    """

    def __init__(self, directory: str | Path, name: str | None = None):
        self.directory, self.name = Path(directory), name or str(directory)
        self.config: AdapterConfig = read_adapter_config(self.directory / "adapter_config.json")
        self._take(_open_files(self.directory))

    def with_tensors(self, arrays: Mapping[str, Any]) -> "Adapter":
        """The adapter with other tensors, such as those of a running trainer, under the names in its file."""
        adapter = copy.copy(self)
        adapter._take(ArrayFiles(self.directory, {name: np.asarray(array) for name, array in arrays.items()}))
        return adapter

    def _take(self, files: TensorFiles) -> None:
        self.tensors = Tensors(files, np.float32)
        self._factors = self._read_names()

    def _read_names(self) -> dict[str, _Factors]:
        """Sort the tensors: module -> its factors. The others are replacements, `_replaced`."""
        parts: dict[str, dict[str, str]] = {}
        self._replaced: dict[str, str] = {}
        for stored in sorted(self.tensors.names()):
            if not stored.startswith(_PREFIX):
                raise self.wrong(stored, f"must begin with {_PREFIX}")
            name = stored.removeprefix(_PREFIX)
            if match := _FACTOR.fullmatch(name):
                module, embedding, factor = match.groups()
                part = {factor: stored} | ({"embedding": stored} if embedding else {})
            elif match := _MAGNITUDE.fullmatch(name):
                module, part = match[1], {"magnitude": stored}
            elif (module := name.rpartition(".")[0].removesuffix(".base_layer")) and self.config.is_saved(module, name):
                self._replaced[name.replace(".base_layer.", ".")] = stored
                continue
            else:
                raise self.wrong(stored, "must be a factor of a module, or belong to a module of modules_to_save")
            parts.setdefault(module, {}).update(part)
        # Factors come in pairs, with magnitudes in DoRA.
        for part in parts.values():
            self._check_parts(part)
        return {
            module: _Factors(part["A"], part["B"], part.get("magnitude"), "embedding" in part)
            for module, part in parts.items()
        }

    def _check_parts(self, part: Mapping[str, str]) -> None:
        first = next(iter(part.values()))
        for factor in "AB":
            if factor not in part:
                raise self.wrong(first, f"has no factor {factor} beside it: must have both A and B")
        if ("magnitude" in part) != self.config.use_dora:
            expected = "must have a lora_magnitude_vector" if self.config.use_dora else "must have none"
            raise self.wrong(part.get("magnitude", first), f"{expected} with use_dora={self.config.use_dora}")

    def wrong(self, stored: str, problem: str) -> CheckpointError:
        """The error about a tensor, by its stored name."""
        return CheckpointError(f"{self.directory}: {stored} {problem}")

    def over(self, files: TensorFiles, modalities: Collection[str] = ()) -> "AdaptedFiles":
        """The tensors of a checkpoint with this adapter in them.

        modalities: beginnings of the names of tensors of other modalities.

        Raises:
          CheckpointError: a tensor of the adapter has no place in the checkpoint or another shape or rank than its
            place and the configuration imply, values that are not finite, or is for a quantized tensor.
        """
        # Tensors in the place of the checkpoint's.
        names = _Names(files, modalities)
        replaced: dict[str, str] = {}
        for name, stored in self._replaced.items():
            place = names.find(name)
            if place is None:
                raise self.wrong(stored, "belongs to no tensor of the checkpoint")
            replaced[place] = stored
        # Changes of the checkpoint's.
        updates: dict[str, Update] = {}
        for module, factors in self._factors.items():
            updates |= self._updates(module, factors, names)
        for name, stored in replaced.items():
            if self.tensors.files.shape(stored) != files.shape(names.stored(name)):
                shape = files.shape(names.stored(name))
                raise self.wrong(stored, f"has shape {self.tensors.files.shape(stored)}: must be {shape}")
        return AdaptedFiles(files, self, updates, replaced)

    def _updates(self, module: str, factors: _Factors, names: "_Names") -> Iterator[tuple[str, Update]]:
        """The changes of the tensors of a module."""
        if (name := names.find(f"{module}.weight")) is not None:
            names.check_floats(name, self, factors.a)
            if not self.config.targets(module):
                raise self.wrong(factors.a, f"is for no module of {self.config.described_targets()}")
            yield name, self._update(module, factors, names.shape(name))
            return
        # A stack of experts is one parameter in peft, or two with one around the other.
        stack = names.experts(re.sub(r"(\.base_layer)+$", "", module))
        if stack is None:
            raise self.wrong(factors.a, "belongs to no tensor of the checkpoint")
        yield from self._expert_updates(module, factors, stack, names)

    def _update(self, module: str, factors: _Factors, shape: tuple[int, ...]) -> Update:
        """The change of a matrix of this shape."""
        if len(shape) != 2:
            raise self.wrong(factors.a, f"is for a tensor of shape {shape}: must be a matrix")
        rank, scale = self.config.rank(module), self.config.scale(module)
        # The table of an embedding is a matrix [in, out].
        out, width = shape[::-1] if factors.embedding else shape
        a, b = self._read(factors.a, rank, width), self._read(factors.b, out, rank)
        if factors.embedding:
            if factors.magnitude is not None:
                raise self.wrong(factors.magnitude, "is for an embedding: must be for linear layers")
            return Update(a.T * scale, b.T)
        magnitude = None if factors.magnitude is None else self._read(factors.magnitude, out)
        return Update(b * scale, a, magnitude)

    def _expert_updates(
        self, module: str, factors: _Factors, experts: "_Experts", names: "_Names"
    ) -> Iterator[tuple[str, Update]]:
        """The changes of the matrices of experts, in stacks or not."""
        width, out = self.tensors.files.shape(factors.a)[-1:], self.tensors.files.shape(factors.b)[:1]
        for parameter, (sizes, tensors) in experts.parameters.items():
            if (*out, *width) != sizes:
                continue
            path = f"{experts.module}.{parameter}"
            if not self.config.targets_parameter(path):
                raise self.wrong(factors.a, f"is for no parameter of {self.config.described_parameters()}")
            rank, scale, count = self.config.rank(path), self.config.scale(path), experts.size
            a = self._read(factors.a, count * rank, *width).reshape(count, rank, *width)
            b = self._read(factors.b, *out, count * rank).reshape(*out, rank, count).transpose(2, 0, 1) * scale
            for index, parts in enumerate(tensors):
                for name, rows in parts:
                    names.check_floats(name, self, factors.a)
                    if experts.stacked:
                        yield name, Update(b, a)
                    else:
                        yield name, Update(b[index, rows], a[index])
            return
        shapes = ", ".join(f"{name} {sizes}" for name, (sizes, _) in experts.parameters.items())
        raise self.wrong(factors.b, f"and factor A have sizes {(*out, *width)}: must be those of experts: {shapes}")

    def _read(self, stored: str, *shape: int) -> np.ndarray:
        """One tensor in float32."""
        if (size := self.tensors.files.shape(stored)) != shape:
            raise self.wrong(stored, f"has shape {size}: must be {shape} by the checkpoint and adapter_config.json")
        return self.tensors.stored(stored, *shape).astype(np.float32)


def _open_files(directory: Path) -> TensorFiles:
    """The tensors of a directory."""
    files = SafetensorFiles(directory, WEIGHTS)
    if files.exists():
        return files
    path = find_file(directory, TORCH_WEIGHTS)
    if path is None:
        raise CheckpointError(f"{directory}: contains neither {WEIGHTS} nor {TORCH_WEIGHTS}")
    return TorchFile(path)


class _Experts(NamedTuple):
    """The matrices of the experts of a layer.

    module: its path.
    size: the number of experts.
    parameters: name of a stack of matrices -> [out, in] of one, and for each expert, or the stack, its tensors and the
      rows of each.
    """

    module: str
    size: int
    stacked: bool
    parameters: dict[str, tuple[tuple[int, ...], list[list[tuple[str, slice]]]]]


class _Names:
    """The tensors of a checkpoint, by the paths of modules."""

    def __init__(self, files: TensorFiles, modalities: Collection[str]):
        self.files = files
        self._all = {name for name in files.names() if not name.startswith(tuple(modalities))}
        self._by_tail = {tail: name for name in sorted(self._all) if (tail := _tail(name)) is not None}

    def find(self, name: str) -> str | None:
        """The tensor of a name, with the root of any version of the model; None: there is none."""
        if name in self._all:
            return name
        tail = _tail(name)
        if tail == HEAD and HEAD not in self._all and "embed_tokens.weight" in self._by_tail:
            return HEAD
        return None if tail is None else self._by_tail.get(tail)

    def stored(self, name: str) -> str:
        """The tensor in the files: of a tied LM head that of the embedding."""
        return name if name in self._all else self._by_tail["embed_tokens.weight"]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.files.shape(self.stored(name))

    def check_floats(self, name: str, adapter: Adapter, stored: str) -> None:
        """Refuse a change of a quantized tensor."""
        kind = self.files.dtype(self.stored(name))
        if kind not in FLOATS:
            problem = f"is for {name}, which is quantized, of dtype {kind}: adapters are merged into 16 or 32 bits"
            raise adapter.wrong(stored, problem)

    def experts(self, module: str) -> _Experts | None:
        """The experts at a path; None: there are none."""
        first = self.find(f"{module}.0.gate_proj.weight")
        if first is None:
            stack = self.find(f"{module}.gate_up_proj")
            return None if stack is None else self._stacked(module, stack.removesuffix("gate_up_proj"))
        root, count = first.removesuffix("0.gate_proj.weight"), 0
        while f"{root}{count}.gate_proj.weight" in self._all:
            count += 1
        inner, width = self.files.shape(first)
        halves = [("gate", slice(inner)), ("up", slice(inner, None))]
        gate_up = [[(f"{root}{index}.{part}_proj.weight", rows) for part, rows in halves] for index in range(count)]
        down = [[(f"{root}{index}.down_proj.weight", slice(None))] for index in range(count)]
        parameters = {"gate_up_proj": ((2 * inner, width), gate_up), "down_proj": ((width, inner), down)}
        return _Experts(module, count, False, parameters)

    def _stacked(self, module: str, root: str) -> _Experts | None:
        """Experts in stacks [X, out, in]; None: in others."""
        shapes = {name: self.files.shape(root + name) for name in ("gate_up_proj", "down_proj")}
        (count, double, width), *_ = shapes.values()
        if shapes["down_proj"] != (count, width, double // 2) or double // 2 == width:
            return None
        whole = slice(None)
        parameters = {name: (shape[1:], [[(root + name, whole)]]) for name, shape in shapes.items()}
        return _Experts(module, count, True, parameters)


def _tail(name: str) -> str | None:
    """A name without its root; None: it has another root than those of text models."""
    for root in _ROOTS:
        rest = name.removeprefix(root)
        if name.startswith(root) and _TAIL.fullmatch(rest):
            return rest
    return None


class AdaptedFiles(DerivedFiles):
    """The tensors of a checkpoint with an adapter in them.

    updates: tensor -> its change.
    replaced: tensor -> the name of the tensor of the adapter in its place.
    """

    def __init__(
        self, files: TensorFiles, adapter: Adapter, updates: Mapping[str, Update], replaced: Mapping[str, str]
    ):
        super().__init__(files, {*updates, *replaced}, ())
        self.adapter, self.updates, self.replaced = adapter, updates, replaced
        self.embedding = next((name for name in files.names() if _tail(name) == "embed_tokens.weight"), None)

    def unties(self) -> str | None:
        """Give a tied LM head its own tensor if it or the embedding is changed; returns the changed one or None."""
        changed = next((name for name in (self.embedding, HEAD) if name is not None and name in self.derived), None)
        if changed is not None and self.adapter.config.ties:
            raise CheckpointError(
                f"{self.adapter.directory}: ensure_weight_tying=True with {changed}: must be False, or both weights be "
                "left as they are"
            )
        if changed is not None:
            self._names.add(HEAD)
            self.derived.add(HEAD)
        return changed

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `TensorFiles`."""
        return self.stored.shape(self._place(name))

    def dtype(self, name: str) -> np.dtype:
        """As in `TensorFiles`."""
        return np.dtype(np.float32) if name in self.derived else self.stored.dtype(name)

    def get(self, name: str) -> np.ndarray:
        """As in `TensorFiles`."""
        if name in self.replaced:
            weight = self.adapter.tensors.stored(self.replaced[name], *self.shape(name))
        else:
            weight = self.stored.get(self._place(name))
        whole = tuple(map(range, weight.shape))
        return self.updates[name].apply(weight, whole) if name in self.updates else weight

    def has_parts(self, name: str) -> bool:
        """As in `TensorFiles`; norms need all of a row."""
        update = self.updates.get(name)
        is_whole = name in self.replaced or (update is not None and update.magnitude is not None)
        return not is_whole and self.stored.has_parts(self._place(name))

    def part(self, name: str, part: Part) -> np.ndarray:
        """As in `TensorFiles`."""
        weight = self.stored.part(self._place(name), part)
        return self.updates[name].apply(weight, part) if name in self.updates else weight

    def _place(self, name: str) -> str:
        """The tensor in the files of the checkpoint."""
        is_tied = name == HEAD and HEAD not in self.stored.names() and self.embedding is not None
        return self.embedding if is_tied and self.embedding is not None else name
