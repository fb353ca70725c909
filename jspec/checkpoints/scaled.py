"""Quantized checkpoints: matrices of 8 bits, scaled by block, output channel or tensor, or of 4 bits, scaled by group.

8 bits have two formats. DeepSeek-V3 (arXiv 2412.19437, section 3.3) and Qwen3 store fp8 in `X.weight`, and the scale of
each block in `X.weight_scale_inv`. compressed-tensors (github.com/vllm-project/compressed-tensors) stores fp8 or int8,
and scales in `X.weight_scale`. `packed.py` reads formats of 4 bits. Linear layers keep the stored values and scales,
unless `Tensors.weights` asks for others; everything else is widened.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jspec.checkpoints.deferred import Deferred, Part
from jspec.checkpoints.fields import Fields, refuse
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_model import GROUP
from jspec.checkpoints.kv_scales import is_known
from jspec.checkpoints.live import ArrayView
from jspec.checkpoints.packed import PackedFiles, Packing, parse_awq, parse_gptq, parse_group
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import HEAD, TensorFiles, Tensors
from jspec.core.struct import Leaf
from jspec.models.quantized import ZERO, Quantized
from pallas_kernels.packed_matmul import BLOCK, STRIDE, pack, word_rows

FP8, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
"""Dtypes of 8-bit matrices."""
_COMPRESSED = {"float-quantized": ("float", FP8), "int-quantized": ("int", INT8)}
"""Format of compressed-tensors -> `type` in config.json, and dtype."""
_NAN = 0x7F
"""NaN in fp8, without the sign bit."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How matrices are quantized.

    kind: dtype of the values.
    suffix: appended to the name of a matrix, gives the name of its scales.
    block: rows and columns per scale, [out, in]; None: all.
    spare: suffix of tensors to ignore: scales of activations, not quantized here.
    packing: how words hold several values; None: one value per element.
    """

    kind: np.dtype
    suffix: str
    block: tuple[int | None, int | None]
    spare: str | None = None
    packing: Packing | None = None

    def group(self, width: int) -> int | None:
        """Rows per scale of a matrix [in, out]; None: all."""
        size = self.block[1]
        return None if size is None or size >= width else size

    def stays_packed(self, shape: Sequence[int]) -> bool:
        """Whether a weight [..., in, out] stays in 4 bits; unsupported group sizes are widened to 8."""
        return self.packing is not None and self.packing.bits == 4 and not (self.group(shape[-2]) or 0) % STRIDE


def parse_scheme(config: Fields) -> Scheme | None:
    """Parse the quantization of a config.json; None: the matrices are not quantized."""
    method = config.section("quantization_config")
    if not method.keys():
        return None
    has_producer = isinstance(method.value("producer"), dict)
    producer = method.section("producer").read_text("name", "") if has_producer else ""
    if method.has("quantization"):
        # ModelOpt nests the options of drafts, as in the hf_quant_config.json of targets.
        method = method.replaced(quantization=None).joined(method.section("quantization"))
    parse = _METHODS.get(method.read_text("quant_method", producer))
    scheme = None if parse is None else parse(method)
    if scheme is None:
        raise CheckpointError(
            f"{config.where}: {config.describe('quantization_config')} is not supported; must have quant_method='fp8', "
            "fmt='e4m3' and a weight_block_size of two integers; or quant_method='compressed-tensors' with symmetric "
            "weights of 8 bits, of type float or int, by channel or by tensor, or packed integers of 4 or 8 bits by "
            "group or by channel, and a kv_cache_scheme of 8 bits, type float, by tensor, or none; or "
            "quant_method='gptq' or 'awq' with 4 bits; or quant_method='modelopt' with quant_algo='FP8' or "
            "'FP8_PER_CHANNEL_PER_TOKEN'"
        )
    # Refuse unknown options, except those that are empty, off, or a sparsity of "dense".
    dense = ["sparsity_config"] * (method.section("sparsity_config").read_text("format", None) == "dense")
    others = [key for key in method.keys() if key not in (*_KEYS, *dense)]
    refuse(config.where, [method.describe(key) for key in others if not (method.is_empty(key) or method.is_off(key))])
    return scheme


def _parse_blocks(method: Fields) -> Scheme | None:
    block = method.read_ints("weight_block_size", None, least=1, count=2)
    if method.read_text("fmt", "e4m3") != "e4m3" or block is None or len(block) != 2:
        return None
    out, width = block
    return Scheme(FP8, "_scale_inv", (out, width))


def _parse_compressed(method: Fields) -> Scheme | None:
    form, groups = method.read_text("format"), method.section("config_groups")
    sections = [groups.section(name).section("weights") for name in groups.keys()]
    named, kind = _COMPRESSED.get(form, (None, FP8))
    if not is_known(method.section("kv_cache_scheme")):
        return None
    if not sections and method.section("kv_cache_scheme").keys():
        return Scheme(kind, "_scale", (None, None))
    if form == "pack-quantized":
        packings = set(map(parse_group, sections))
        return _packed(packings.pop()) if len(packings) == 1 else None
    for weights in sections:
        known = weights.read_text("type", None) == named and weights.read_int("num_bits") == 8
        if not known or weights.read_text("strategy", None) not in ("channel", "tensor"):
            return None
        if not weights.read_flag("symmetric", True) or weights.read_flag("dynamic", False):
            return None
    return Scheme(kind, "_scale", (None, None), spare=".input_scale") if named and sections else None


def _parse_modelopt(method: Fields) -> Scheme | None:
    known = method.read_text("quant_algo", None) in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    known = known and method.read_text("kv_cache_quant_algo", None) in (None, "FP8")
    return Scheme(FP8, "_scale", (None, None), spare=".input_scale") if known else None


def _packed(packing: Packing | None) -> Scheme | None:
    return None if packing is None else Scheme(INT8, "_scale", (1, packing.group), packing=packing)


def _parse_gguf(method: Fields) -> Scheme:
    """Read the options as written by `gguf_model`."""
    packing = Packing("gguf", 4, GROUP, zeros=False) if method.read_int("bits") == 4 else None
    return Scheme(INT8, "_scale", (1, GROUP), packing=packing)


_METHODS: dict[str, Callable[[Fields], Scheme | None]] = {
    "fp8": _parse_blocks,
    "compressed-tensors": _parse_compressed,
    "gptq": lambda method: _packed(parse_gptq(method)),
    "awq": lambda method: _packed(parse_awq(method)),
    "gguf": _parse_gguf,
    "modelopt": _parse_modelopt,
}
"""`quant_method` -> reader of its options; the reader returns None if they are not supported."""


_KEYS = {
    *("quant_method", "fmt", "format", "checkpoint_format", "version", "backend", "producer", "quantizer", "meta"),
    *("bits", "group_size", "weight_block_size", "zero_point", "sym", "config_groups", "quant_algo"),
    *("kv_cache_scheme", "kv_cache_quant_algo", "activation_scheme", "scale_fmt", "desc_act", "lm_head"),
    *("ignore", "ignored_layers", "exclude_modules", "modules_to_not_convert", "model_file_base_name"),
    *("quantization_status", "global_compression_ratio", "damp_percent", "damp_auto_increment", "static_groups"),
    *("true_sequential", "model_name_or_path", "is_checkpoint_fp8_serialized", "quant_library"),
}
"""Keys read here, or with an effect in the tensors alone. Any other, such as a rotation, may change the forward."""


def open_tensors(source: Source, dtype: DTypeLike) -> Tensors:
    """Open the tensors of a checkpoint, quantized or not."""
    scheme = parse_scheme(source.config)
    if scheme is None:
        return Tensors(source.safetensors, dtype)
    files: TensorFiles = source.safetensors
    if scheme.packing is not None and scheme.packing.layout != "gguf":
        files = PackedFiles(files, scheme.packing)
    return ScaledTensors(files, dtype, scheme)


_CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _CHANNELS}},
}
"""The `quantization_config` of a checkpoint from `to_int8`."""


def to_int8(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Quantize the matrices of a checkpoint, [out, in], to int8 with a scale per row. Others stay as they are."""
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        stored[name] = array
        if array.ndim == 2 and name.endswith(".weight") and array.dtype.kind not in "iub":
            wide = array.astype(np.float32)
            scale = np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / 127
            stored |= {name: np.rint(wide / scale).astype(np.int8), name + "_scale": scale}
    return stored


class ScaledArray(ArrayView):
    """8-bit values and the scale of each, in arrays of one shape; NumPy's functions apply to both.

    narrow, scale: the arrays, possibly `Deferred`.
    group: rows per scale of a matrix [in, out]; None: all.
    """

    def __init__(self, narrow: Any, scale: Any, group: int | None):
        self.narrow, self.scale, self.group = narrow, scale, group

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.narrow.shape

    def moved(self, function: Callable[[Any], Any]) -> "ScaledArray":
        """As in `ArrayView`."""
        return ScaledArray(function(self.narrow), function(self.scale), self.group)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("narrow values without their scales")

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Applies a function of NumPy to the values, and to the scales."""
        if function is np.array_equal:
            return all(np.array_equal(*(_part(arg, half) for arg in args)) for half in (0, 1))
        narrow, scale = (function(*(_part(arg, half) for arg in args), **options) for half in (0, 1))
        if isinstance(narrow, list | tuple):
            return [ScaledArray(*pair, self.group) for pair in zip(narrow, scale, strict=True)]
        return ScaledArray(narrow, scale, self.group)

    def __len__(self) -> int:
        return len(self.narrow)

    def __setitem__(self, index: Any, values: "ScaledArray | int") -> None:
        self.narrow[index], self.scale[index] = _part(values, 0), _part(values, 1)

    def wide(self, dtype: DTypeLike) -> np.ndarray:
        """The weights: values times scales."""
        return (np.asarray(self.narrow).astype(np.float32) * np.asarray(self.scale)).astype(dtype)

    def scales(self) -> np.ndarray:
        """The scales [..., groups, out] of a matrix [..., in, out]."""
        return self.scale[..., :: self.group or self.shape[-2], :]

    def is_grouped(self) -> bool:
        """Whether groups of rows share a scale; not if a piece of a shared expert begins within a group."""
        size = self.group or self.shape[-2]
        return all(
            np.array_equal(rows, np.broadcast_to(rows[..., :1, :], rows.shape))
            for rows in (
                np.asarray(self.scale[..., first : first + size, :]) for first in range(0, self.shape[-2], size)
            )
        )


def _part(argument: Any, half: int) -> Any:
    """The values (0) or the scales (1) of an argument of a NumPy function."""
    if isinstance(argument, ScaledArray):
        return (argument.narrow, argument.scale)[half]
    if isinstance(argument, np.ndarray | Deferred) and argument.dtype.kind not in "iub":
        raise CheckpointError("matrices that form one weight must all have 8 bits, or none of them")
    return [_part(item, half) for item in argument] if isinstance(argument, list | tuple) else argument


class ScaledTensors(Tensors):
    """The tensors of a quantized checkpoint; if `weights` is None, linear layers keep their values and scales."""

    quantized = True

    def __init__(self, files: TensorFiles, dtype: DTypeLike, scheme: Scheme):
        super().__init__(files, dtype)
        self.scheme = scheme
        if scheme.spare is not None:
            self.asked |= {name for name in files.names() if name.endswith(scheme.spare)}

    def get(self, name: str) -> np.ndarray:
        """One tensor; widens 8-bit matrices to float32."""
        return self.reader(name)(_whole(self.files.shape(name))) if self.is_narrow(name) else super().get(name)

    def reader(self, name: str) -> Callable[[Part], np.ndarray]:
        """As in `Tensors`; scales are read once."""
        if not self.is_narrow(name):
            return super().reader(name)
        narrow, scale = self._narrow_reader(name)
        return lambda part: _widened(narrow(part), scale(part))

    def is_narrow(self, name: str) -> bool:
        """Whether a tensor is an 8-bit matrix."""
        return self.files.dtype(name) == self.scheme.kind

    def read(self, name: str, *shape: int, transpose: bool = False) -> Any:
        """One tensor: an 8-bit matrix with its scales, or in the chosen dtype."""
        if self.weights is not None or not self.is_narrow(name):
            return super().read(name, *shape, transpose=transpose)
        self.expect(name, *shape)
        values, scales = self._narrow_reader(name)
        if self.defers(name):
            narrow, scale = self.deferred(name, self.scheme.kind, values), self.deferred(name, np.float32, scales)
        else:
            narrow, scale = values(_whole(shape)), scales(_whole(shape))
        array = ScaledArray(narrow, scale, self.scheme.group(shape[-1]))
        return array.T if transpose else array

    def empty(self, *shape: int, like: str | None = None) -> Any:
        """An array to be filled. like: a tensor of the same kind, 8-bit or not."""
        if like is None or self.weights is not None or not self.is_narrow(like):
            return super().empty(*shape, like=like)
        narrow, scale = (self.blank(shape, kind, like) for kind in (self.scheme.kind, np.float32))
        return ScaledArray(narrow, scale, self.scheme.group(shape[-2]))

    def put(self, options: Leaf, parts: Sequence[Any]) -> Any:
        """As in `Tensors`; a linear layer stays quantized if all parts are, in whole groups."""
        if not options.linear or not all(isinstance(part, ScaledArray) and part.is_grouped() for part in parts):
            return super().put(
                options, [part.wide(self.dtype) if isinstance(part, ScaledArray) else part for part in parts]
            )
        packing, shape = self.scheme.packing, parts[0].shape
        if packing is None or not self.scheme.stays_packed(shape):
            narrow, scale = self._put_each(options, ((part.narrow, part.scales()) for part in parts))
            return Quantized(narrow, scale, np.dtype(self.dtype), parts[0].group)
        narrow, scale, *zeros = self._put_each(options, (_packed_parts(part, packing.zeros) for part in parts))
        weight = Quantized(narrow, scale, np.dtype(self.dtype), parts[0].group, filling=-shape[-2] % BLOCK)
        return dataclasses.replace(weight, zero=zeros[0]) if zeros else weight

    def _put_each(self, options: Leaf, parts: Iterable[Sequence[np.ndarray]]) -> list[Any]:
        """Puts the values of all parts, then their scales, then any zero points."""
        return [super(ScaledTensors, self).put(options, arrays) for arrays in zip(*parts, strict=True)]

    def stored_shape(self, options: Leaf, shape: jax.ShapeDtypeStruct) -> Any:
        """As in `Tensors`. Takes all linear layers for quantized, except an LM head stored wide."""
        wide_head = options.name == "lm_head" and not (HEAD in self.names() and self.is_narrow(HEAD))
        if not options.linear or wide_head:
            return shape
        *stack, width, columns = shape.shape
        group, packed = self.scheme.group(width), self.scheme.stays_packed(shape.shape)
        if packed or group is not None:
            self.check_groups(options, width, group, packed=packed)
        groups = (*stack, -(-width // (group or width)), columns)
        scale: Any = jax.ShapeDtypeStruct(groups, np.float32)
        narrow: Any = jax.ShapeDtypeStruct(shape.shape, self.scheme.kind)
        weight = Quantized(narrow, scale, np.dtype(shape.dtype), group)
        if not packed:
            return weight
        assert self.scheme.packing is not None
        words: Any = jax.ShapeDtypeStruct((*stack, word_rows(width), columns), np.int32)
        zero: Any = jax.ShapeDtypeStruct(groups, np.int8) if self.scheme.packing.zeros else None
        return dataclasses.replace(weight, narrow=words, zero=zero, filling=-width % BLOCK)

    def _narrow_reader(self, name: str) -> tuple[Callable[[Part], np.ndarray], Callable[[Part], np.ndarray]]:
        """Readers of a part of an 8-bit matrix [out, in]: one for the values, one for the scale of each value.

        Raises:
          CheckpointError: not a matrix, or its scales are missing or have another shape. The reader of values raises it
            for NaN.
        """
        if len(shape := self.files.shape(name)) != 2:
            problem = f"{name} has dtype {self.scheme.kind} and shape {shape}; must be a matrix"
            raise CheckpointError(f"{self.directory}: {problem}")
        read = super().reader(name)
        return lambda part: self._check_nan(name, read(part)), self._scale_reader(name)

    def _check_nan(self, name: str, narrow: np.ndarray) -> np.ndarray:
        """Return the values, or raise CheckpointError if one is NaN."""
        if narrow.dtype == FP8 and ((narrow.view(np.uint8) & _NAN) == _NAN).any():
            raise CheckpointError(f"{self.directory}: {name} has values that are NaN or infinite; all must be finite")
        return narrow

    def _scale_reader(self, name: str) -> Callable[[Part], np.ndarray]:
        """The reader of the scale of each value in a part of a matrix, in float32."""
        shape, name = self.files.shape(name), name + self.scheme.suffix
        # Scales per tensor or row, as a scalar, a vector or a column; or per block.
        if self.scheme.block == (None, None):
            stored = self.files.shape(name)
            counts = stored if stored in ((), (1,), (shape[0],)) else (shape[0], 1)
            blocks = [1 if math.prod(counts) > 1 else shape[0], shape[1]]
        else:
            blocks = [size if block is None else block for size, block in zip(shape, self.scheme.block, strict=True)]
            counts = [-(-size // block) for size, block in zip(shape, blocks, strict=True)]
        scale = super().stored(name, *counts).astype(np.float32)
        return partial(_spread, scale.reshape(-1, 1) if self.scheme.block == (None, None) else scale, blocks)


def _spread(scale: np.ndarray, blocks: Sequence[int], part: Part) -> np.ndarray:
    """The scale of each value of a part of a matrix. blocks: rows and columns per scale."""
    rows, columns = (np.asarray(index) // size for index, size in zip(part, blocks, strict=True))
    if scale.shape[1] == 1:  # Use no memory for the columns.
        return np.broadcast_to(scale[rows], (len(rows), len(columns)))
    return scale[rows[:, None], columns]


def _whole(shape: Sequence[int]) -> Part:
    return tuple(map(range, shape))


def _widened(narrow: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # `Tensors` checks for finite values
        return narrow.astype(np.float32) * scale


def _packed_parts(part: ScaledArray, zeros: bool) -> tuple[Any, ...]:
    """Packed words, scales and, if the values are not symmetric, zero points.

    The values are integers minus their zero points, at most 16 different ones in a group. The zero point of the
    file is not needed: any one describes the same weights, if the values then fit 4 bits.
    """
    values, scale = part.narrow, part.scales()
    if not zeros:
        return pack(values + np.int8(ZERO)), scale
    rows = values.shape[-2]
    size = part.group or rows
    least = np.minimum.reduceat(values, np.arange(0, rows, size), axis=-2)
    zero = np.maximum(-least, 0)
    return pack(values + np.repeat(zero, size, axis=-2)[..., :rows, :]), scale, zero
