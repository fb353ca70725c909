"""Checkpoints with packed weights of 4 or 8 bits, several in a word of 32 bits, and scales per group of inputs.

A linear layer X with weights [out, in] has one of three layouts, all with the lowest bits of a word first:

- compressed-tensors' `pack-quantized`: `X.weight_packed` [out, in / 8], `X.weight_scale` [out, groups] and, unless the
  values are symmetric, `X.weight_zero_point` [out / 8, groups], packed along its first axis
  (github.com/vllm-project/compressed-tensors).
- GPTQ (Frantar et al., arXiv 2210.17323): `X.qweight` [in / 8, out], `X.scales` [groups, out] and `X.qzeros`
  [groups, out / 8], stored minus one in its first format; `X.g_idx` [in], the group of each input.
- AWQ (Lin et al., arXiv 2306.00978), the layout of its matrix products: `X.qweight` [in, out / 8], `X.scales` and
  `X.qzeros` as in GPTQ. A word has eight columns in the order 0, 2, 4, 6, 1, 3, 5, 7.

`PackedFiles` unpacks them to int8, minus zero points; `scaled.py` packs 4 bits again, in the layout of the kernels.
"""

import dataclasses
from typing import Literal, NoReturn

import numpy as np

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.tensors import DerivedFiles, TensorFiles

_NAMES = {
    "compressed": (".weight_packed", ".weight_scale", ".weight_zero_point"),
    "gptq": (".qweight", ".scales", ".qzeros"),
    "awq": (".qweight", ".scales", ".qzeros"),
}
"""Layout -> suffixes of the names of values, scales and zero points."""
_SHAPE, _GROUP_OF = ".weight_shape", ".g_idx"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of the values in a word, lowest bits first."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """How values are packed.

    bits: bits per value, 4 or 8.
    group: inputs per scale; None: all.
    zeros: whether there are zero points; otherwise all are half of the range.
    zero_offset: added to stored zero points.
    """

    layout: Literal["compressed", "gptq", "awq", "gguf"]
    bits: int
    group: int | None
    zeros: bool
    zero_offset: int = 0


def parse_group(weights: Fields) -> Packing | None:
    """The packing of the weights of a group of compressed-tensors; None: it is not supported."""
    bits, strategy = weights.read_int("num_bits"), weights.read_text("strategy", None)
    symmetric = weights.read_flag("symmetric", True)
    if weights.read_text("type", None) != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        return None
    if weights.read_flag("dynamic", False) or (
        weights.is_set("actorder") and weights.text_or_flag("actorder") != "weight"
    ):
        return None
    return Packing("compressed", bits, weights.read_int("group_size") if strategy == "group" else None, not symmetric)


def parse_gptq(method: Fields) -> Packing | None:
    """The packing of a `quantization_config` of GPTQ; None: it is not supported."""
    forms = {method.read_text(key, None) for key in ("checkpoint_format", "format")} - {None} or {"gptq"}
    bits = method.read_int("bits")
    if bits not in (4, 8) or len(forms) > 1 or not forms <= {"gptq", "gptq_v2"}:
        return None
    return Packing("gptq", bits, _group_size(method), True, zero_offset=int("gptq" in forms))


def parse_awq(method: Fields) -> Packing | None:
    """The packing of a `quantization_config` of AWQ; None: it is not supported."""
    version = method.read_text("version", None) or "gemm"
    if method.read_int("bits") != 4 or version.lower() != "gemm":
        return None
    return Packing("awq", 4, _group_size(method), method.read_flag("zero_point", True))


def _group_size(method: Fields) -> int | None:
    size = method.read_int("group_size", least=-1)
    return None if size in (-1, 0) else size


class PackedFiles(DerivedFiles):
    """The tensors of a checkpoint, with packed layers unpacked.

    A layer X has `X.weight` [out, in], values minus zero points in int8, and `X.weight_scale` [out, groups].
    """

    def __init__(self, files: TensorFiles, packing: Packing):
        self._packing = packing
        self._values, self._scales, self._zeros = _NAMES[packing.layout]
        layers = {name.removesuffix(self._values) for name in files.names() if name.endswith(self._values)}
        ends = (self._values, self._scales, self._zeros, _SHAPE, _GROUP_OF)
        self._layers = {f"{layer}.weight": layer for layer in layers}
        self._scale_of = {f"{layer}.weight_scale": layer for layer in layers}
        sources = (layer + end for layer in layers for end in ends)
        super().__init__(files, {*self._layers, *self._scale_of}, sources)

    def dtype(self, name: str) -> np.dtype:
        """As in `TensorFiles`."""
        return np.dtype(np.int8) if name in self._layers else super().dtype(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """As in `TensorFiles`; a packed layer must be a matrix."""
        if name not in self._layers:
            stored = super().shape(self._stored(name))
            return stored[::-1] if name in self._scale_of and self._packing.layout != "compressed" else stored
        # A matrix is [out, in] and has one word for several values.
        layer, per_word = self._layers[name], 32 // self._packing.bits
        packed = self.stored.shape(layer + self._values)
        if len(packed) != 2:
            self._refuse(layer + self._values, f"has shape {packed}; must be a matrix")
        if self._packing.layout == "compressed":
            stated = self.stored.get(layer + _SHAPE).reshape(-1) if layer + _SHAPE in self.stored.names() else ()
            out, width = map(int, stated) if len(stated) == 2 else (packed[0], packed[1] * per_word)
            if (out, -(-width // per_word)) != packed:
                self._refuse(layer + self._values, f"has shape {packed} for a matrix of shape {(out, width)}")
            return out, width
        return (
            (packed[1], packed[0] * per_word) if self._packing.layout == "gptq" else (packed[1] * per_word, packed[0])
        )

    def get(self, name: str) -> np.ndarray:
        """As in `TensorFiles`; groups must consist of consecutive inputs."""
        # Scales, in the orientation of the format.
        if name in self._scale_of:
            scale = self.stored.get(self._stored(name))
            return scale if self._packing.layout == "compressed" else np.ascontiguousarray(scale.T)
        if name not in self._layers:
            return super().get(name)
        # Unpack the words, [out, in].
        layer, (out, width) = self._layers[name], self.shape(name)
        self._check_groups(layer, width)
        words = self._words(layer + self._values)
        if self._packing.layout == "compressed":
            values = self._unpack(words)[:, :width]
        elif self._packing.layout == "gptq":
            values = self._unpack(words.T)
        else:
            values = self._unpack(words, _AWQ_ORDER).T
        centered = values.astype(np.int16) - self._zero_points(layer, out, width)
        if centered.min(initial=0) < -128 or centered.max(initial=0) > 127:
            self._refuse(layer + self._zeros, "has zero points whose distance to the values exceeds 8 bits")
        return centered.astype(np.int8)

    def _zero_points(self, layer: str, out: int, width: int) -> np.ndarray:
        """The zero point of each value, [out, in], or of all of them."""
        half = np.int16(2 ** (self._packing.bits - 1))
        if not self._packing.zeros:
            return np.full((1, 1), half)
        words = self._words(layer + self._zeros)
        if self._packing.layout == "compressed":
            zeros = self._unpack(words.T).T[:out]
        else:
            zeros = self._unpack(words, _AWQ_ORDER if self._packing.layout == "awq" else None).T
        size = self._packing.group or width
        if zeros.shape != (out, -(-width // size)):
            self._refuse(layer + self._zeros, f"has shape {words.shape}, which is not that of {out} x {width} values")
        if self._packing.zero_offset and (zeros == 2 * half - 1).any():
            # Plus one, this exceeds the range: some implementations wrap it to 0, others do not.
            self._refuse(layer + self._zeros, "has zero points that this format does not define; its second one does")
        wide = zeros.astype(np.int16) + np.int16(self._packing.zero_offset)
        return np.repeat(wide, size, axis=1)[:, :width]

    def _unpack(self, words: np.ndarray, order: tuple[int, ...] | None = None) -> np.ndarray:
        """Unpacks words along the last axis. order: the column of each value in a word; None: ascending."""
        bits = self._packing.bits
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        if order is not None:
            shifts = shifts[np.argsort(order)]
        values = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
        return values.astype(np.uint8).reshape(*words.shape[:-1], -1)

    def _words(self, name: str) -> np.ndarray:
        words = self.stored.get(name)
        if words.ndim != 2 or words.dtype not in (np.int32, np.uint32):
            self._refuse(name, f"has dtype {words.dtype} and shape {words.shape}; must be a matrix of 32-bit integers")
        return words.view(np.uint32)

    def _check_groups(self, layer: str, width: int) -> None:
        """Raises if groups do not consist of consecutive inputs, as with an order by activations."""
        name = layer + _GROUP_OF
        if name not in self.stored.names():
            return
        size = self._packing.group or width
        if not np.array_equal(self.stored.get(name), np.arange(width) // size):
            self._refuse(name, "groups inputs that are not successive (desc_act, actorder), which is not supported")

    def _stored(self, name: str) -> str:
        return self._scale_of[name] + self._scales if name in self._scale_of else name

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.directory}: {name} {problem}")
