"""The tensors of a checkpoint: checked against config.json and converted as they are read, one at a time."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jspec.checkpoints.deferred import Assembled, Deferred, Part, as_slice
from jspec.checkpoints.files import CheckpointError, on_device
from jspec.checkpoints.threads import each_block
from jspec.core.sharding import Placement, side_by_side
from jspec.core.struct import Leaf, map_leaves
from jspec.models.quantized import FORMATS, PACKED, check_whole_groups, largest_matrix, quantize, quantize_shapes
from pallas_kernels.packed_matmul import BLOCK

FLOATS = {np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)}
"""What weights may be stored as."""
HEAD = "lm_head.weight"
"""The LM head."""
_DERIVED = "rotary_emb.inv_freq"
"""End of the names of redundant tables in some checkpoints; configurations imply them."""
_CHUNK = 2**20
"""Elements to check at once, so that they stay in the processor's cache."""
_BLOCK_BYTES = 2**23
"""Bytes of a stored tensor that a thread reads, checks and copies at once, few enough for the cache."""


_quantize = partial(jax.jit, static_argnames="weights")(quantize)


class TensorFiles:
    """The tensors in the files of a checkpoint, by name; by default those of other files, `stored`.

    All methods raise CheckpointError if a tensor or a file is missing or damaged.
    """

    directory: Path
    stored: "TensorFiles"

    def names(self) -> set[str]:
        """The names of all tensors."""
        return self.stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        return self.stored.shape(name)

    def dtype(self, name: str) -> np.dtype:
        """The type of one tensor, without reading it."""
        return self.stored.dtype(name)

    def get(self, name: str) -> np.ndarray:
        """A copy of one tensor as stored."""
        return self.stored.get(name)

    def has_parts(self, name: str) -> bool:
        """Whether parts of this tensor can be read."""
        return False

    def part(self, name: str, part: Part) -> np.ndarray:
        """A copy of a part of one tensor as stored, if it has parts."""
        return self.stored.part(name, part)


class DerivedFiles(TensorFiles):
    """The tensors of a checkpoint, some of which are made of others as they are read.

    derived: the names of these.
    sources: the tensors they are made of, which have no name here.
    """

    def __init__(self, files: TensorFiles, derived: Iterable[str], sources: Iterable[str]):
        self.directory, self.stored, self.derived = files.directory, files, {*derived}
        self._names = files.names() - {*sources} | self.derived

    def names(self) -> set[str]:
        """As in `TensorFiles`."""
        return self._names

    def has_parts(self, name: str) -> bool:
        """As in `TensorFiles`."""
        return name not in self.derived and self.stored.has_parts(name)


class Tensors:
    """The tensors of a checkpoint, converted to one dtype and checked against the shapes of config.json.

    It records the tensors it has read, so unused ones can be reported. What reads one raises CheckpointError if it is
    missing, has another shape or type, or values that are not finite or too large for the dtype.
    """

    placement: Placement | None = None
    """The devices over which the weights are split; None: all are on the default device."""
    fits: Callable[[int], bool] = staticmethod(lambda devices: True)
    """Whether the model can be split over a number of devices, for messages."""
    weights: str | None = None
    """The format of the matrices of linear layers, a key of `quantized.FORMATS`; "wide": `dtype`; None: 8 or 4 bits if
    they are stored so, and otherwise `dtype`."""

    checks_values: bool = True
    """Whether NaN and infinity are errors."""
    quantized: bool = False
    """Whether the files have matrices of few bits."""

    def __init__(self, files: TensorFiles, dtype: DTypeLike):
        self.files, self.directory, self.dtype = files, files.directory, dtype
        self.asked: set[str] = set()
        """Names of tensors read or deliberately left out."""

    def names(self) -> set[str]:
        """The names of all tensors."""
        return self.files.names()

    def get(self, name: str) -> np.ndarray:
        """One tensor as stored, of any shape and type; all other methods read through this one."""
        self.asked.add(name)
        return self.files.get(name)

    def expect(self, name: str, *shape: int) -> None:
        """Check the shape of a tensor without reading it."""
        stored = self.files.shape(name)
        if stored != shape:
            raise CheckpointError(f"{self.directory}: {name} has shape {stored}, but config.json implies {shape}")

    def stored(self, name: str, *shape: int) -> np.ndarray:
        """Weights as stored."""
        self.expect(name, *shape)
        return self._checked(name, self.get(name))

    def _checked(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Weights as stored, or a part of them, after a look at their values."""
        if tensor.dtype not in FLOATS:
            names = ", ".join(sorted(map(str, FLOATS)))
            # Older files of ModelOpt state their quantization elsewhere.
            narrow = tensor.dtype.itemsize == 1 and "; config.json has no quantization_config that describes it"
            raise CheckpointError(
                f"{self.directory}: {name} has dtype {tensor.dtype}; must be one of {names}{narrow or ''}"
            )
        if self.checks_values and not is_finite(tensor):
            raise CheckpointError(f"{self.directory}: {name} has values that are NaN or infinite; all must be finite")
        return tensor

    def integers(self, name: str, *shape: int) -> np.ndarray:
        """Read a tensor of integers, such as token ids, in int64."""
        self.expect(name, *shape)
        tensor = self.get(name)
        if tensor.dtype.kind not in "iu" or (tensor.dtype == np.uint64 and (tensor >> np.uint64(63)).any()):
            raise CheckpointError(f"{self.directory}: {name} has dtype {tensor.dtype}; must hold 64-bit integers")
        return tensor.astype(np.int64)

    def marks(self, name: str, *shape: int) -> np.ndarray:
        """Read a tensor of bools; they may be stored as integers 0 and 1."""
        self.expect(name, *shape)
        tensor = self.get(name)
        if tensor.dtype.kind not in "biu" or (tensor.dtype.kind != "b" and ((tensor < 0) | (tensor > 1)).any()):
            raise CheckpointError(f"{self.directory}: {name} has dtype {tensor.dtype}; must hold bools")
        return tensor.astype(bool)

    def read(self, name: str, *shape: int, transpose: bool = False) -> Any:
        """One tensor in the chosen dtype; `Deferred` if its parts can be read, whose values are then checked.

        shape: its shape as stored.
        """
        if not self.defers(name):
            tensor = self._converted(name, self.stored(name, *shape))
        else:
            self.expect(name, *shape)
            read = self.reader(name)
            tensor = self.deferred(
                name, self.dtype, lambda part: self._converted(name, self._checked(name, read(part)))
            )
        return tensor.T if transpose else tensor

    def defers(self, name: str) -> bool:
        """Whether `read` leaves a tensor in its file until it is put on devices, maybe in parts."""
        return self.files.has_parts(name) and self.files.shape(name) != ()

    def reader(self, name: str) -> Callable[[Part], np.ndarray]:
        """A function that reads a part of what `get` reads, in these files."""
        self.asked.add(name)
        if self.files.has_parts(name):
            return partial(self.files.part, name)
        whole = self.files.get(name)
        return lambda part: whole[tuple(map(as_slice, part))]

    def deferred(self, name: str, dtype: DTypeLike, read: Callable[[Part], np.ndarray]) -> Deferred:
        """Read a tensor later, part by part, in blocks of rows. read: reads a part in this dtype."""
        self.asked.add(name)
        shape = self.files.shape(name)
        # A block is rows of the first axis or, in a stack of large matrices, rows of one matrix.
        most = _BLOCK_BYTES // 2
        axis = int(len(shape) > 2 and math.prod(shape[1:]) > most)
        rows = max(1, most // (math.prod(shape[axis + 1 :]) or 1))

        def write(part: Part, out: np.ndarray) -> None:
            # Blocks of rows in threads, each read, checked and converted while it is in the cache.
            leads = [(slice(i, i + 1),) for i in range(len(part[0]))] if axis else [()]
            starts = range(0, len(part[axis]), rows)
            blocks = [(*lead, slice(start, start + rows)) for lead in leads for start in starts]

            def write_block(number: int, _: int) -> None:
                block = blocks[number]
                leading = (indices[at] for indices, at in zip(part, block, strict=False))
                out[block] = read((*leading, *part[len(block) :]))

            each_block(len(blocks), 1, write_block)

        return Deferred(shape, dtype, write)

    def _converted(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Checked weights, or a part of them, in the chosen dtype."""
        with np.errstate(over="ignore"):
            converted = tensor.astype(self.dtype, copy=False)
        narrower = ml_dtypes.finfo(self.dtype).max < ml_dtypes.finfo(tensor.dtype).max
        if narrower and self.checks_values and not is_finite(converted):
            raise CheckpointError(
                f"{self.directory}: {name} has dtype {tensor.dtype} and values that are infinite in "
                f"{np.dtype(self.dtype)}: choose another dtype"
            )
        return converted

    def put(self, options: Leaf, parts: Sequence[Any]) -> Any:
        """Arrays side by side on their last axis, on the device, or as `Placement.put` splits them.

        The result is an array, or a `Quantized` for the matrix of a linear layer.

        options: of its field.
        """
        # Place.
        if self.placement is not None:
            array = self.placement.put(options, parts)
        else:
            array = on_device(side_by_side(parts))
        if self.weights not in FORMATS or not options.linear:
            return array
        # Quantize, one matrix at a time.
        self.check_devices(options, array.shape)
        matrix = _quantize(array, self.weights)
        return matrix if self.placement is None else self.placement.place(options, matrix)

    def check_devices(self, options: Leaf, shape: tuple[int, ...]) -> None:
        """Raises ValueError if a matrix is to be packed and devices would have parts of its groups."""
        if self.weights == PACKED and options.linear:
            self.check_groups(options, shape[-2], BLOCK, packed=True)

    def check_groups(self, options: Leaf, rows: int, group: int | None, *, packed: bool) -> None:
        """Raises ValueError if a matrix has groups of rows, or packed ones, and devices would have parts of them."""
        if self.placement is not None and options.split == -2:
            check_whole_groups(options.name, rows, group, self.placement.size, packed, self.fits)

    def shapes(self, shapes: PyTree) -> PyTree:
        """`jax.ShapeDtypeStruct`s of weights in `dtype`, with quantized matrices where these tensors become such.

        Raises:
          ValueError: devices would have parts of groups.
        """
        if self.keeps_stored:
            return map_leaves(self.stored_shape, shapes)
        map_leaves(lambda options, shape: self.check_devices(options, shape.shape), shapes)
        return quantize_shapes(shapes, self.weights)

    @property
    def keeps_stored(self) -> bool:
        """Whether quantized matrices are placed as they are stored, and none is quantized as it is read."""
        return self.quantized and self.weights is None

    def stored_shape(self, options: Leaf, shape: jax.ShapeDtypeStruct) -> Any:
        """The shape of a weight in the format of the files; ValueError if devices would have parts of groups."""
        return shape

    def held(self, shapes: PyTree) -> PyTree:
        """The weights on one device, as shapes. shapes: as those of `shapes`."""
        stored = self.shapes(shapes)
        return stored if self.placement is None else self.placement.local(stored)

    def memory(self, shapes: PyTree) -> PyTree:
        """Needs of one device while weights are read: them, and a matrix to quantize. shapes: as those of `shapes`."""
        held = self.held(shapes)
        return held if self.keeps_stored else (held, largest_matrix(held))

    def empty(self, *shape: int, like: str | None = None) -> Any:
        """An array to be filled with what has been read, in the chosen dtype. like: one of the tensors to be read."""
        return self.blank(shape, self.dtype, like)

    def blank(self, shape: tuple[int, ...], dtype: DTypeLike, like: str | None) -> Any:
        """An array of NumPy to be filled; or one without memory, if `read` gives such arrays of tensor `like`."""
        return np.empty(shape, dtype) if like is None or not self.defers(like) else Assembled(shape, dtype)

    def leave(self, *prefixes: str) -> None:
        """Mark tensors with one of these prefixes as deliberately unread."""
        self.asked |= {name for name in self.names() if name.startswith(prefixes)}

    def compare_head(self, embedding: str, *shape: int) -> None:
        """Compare the LM head of a tied checkpoint, if it has one, with the embedding, of this shape."""
        if HEAD not in self.names():
            return
        if not np.array_equal(self.stored(HEAD, *shape), self.stored(embedding, *shape)):
            raise CheckpointError(
                f"{self.directory}: config.json implies that {embedding} is the LM head (tie_word_embeddings), but "
                f"{HEAD} differs from it: {HEAD} must be left out, or be equal"
            )

    def refuse_unread(self, owner: str, spare: Callable[[str], bool] = lambda name: False) -> None:
        """Raises CheckpointError with the names of tensors that nothing has read.

        owner: the kind of model, for the error.
        spare: whether a tensor may remain unread, by its name; tables of rotary positions always may.
        """
        unread = sorted(name for name in self.names() - self.asked if not name.endswith(_DERIVED) and not spare(name))
        if unread:
            names = ", ".join(unread[:4])
            raise CheckpointError(
                f"{self.directory}: {len(unread)} unused tensor(s) in the checkpoint; this {owner} does not read them: "
                f"{names}"
            )


def is_finite(tensor: np.ndarray) -> bool:
    """Whether no element is NaN or infinite. In those all bits of the exponent are set.

    Integer operations on a few elements at a time take less time than reading them from a file.
    """
    bits = tensor.dtype.itemsize * 8
    word = np.dtype(f"u{tensor.dtype.itemsize}").type
    magnitude = word(2 ** (bits - 1) - 1)
    # Wrapped in an array, as the bits of infinity are those of a number of this type.
    infinity = np.array(np.inf, tensor.dtype).view(word)
    flat = tensor.reshape(-1).view(word)

    def all_finite(start: int, end: int) -> bool:
        chunks = (flat[at : min(at + _CHUNK, end)] for at in range(start, end, _CHUNK))
        return all((chunk & magnitude).max() < infinity for chunk in chunks)

    return all(each_block(flat.size, 16 * _CHUNK, all_finite))
