"""Arrays in files, of which devices get parts: they have NumPy's interface, and only what is needed is read."""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
from jax.typing import DTypeLike

Part: TypeAlias = tuple[range, ...]
"""The indices of each axis, ascending."""
_Index: TypeAlias = int | slice | EllipsisType


class Deferred:
    """An array whose values are read when they are needed.

    Slices and transposes are such arrays, too, and read nothing. Everything else, such as other indices, `reshape` and
    NumPy's functions, reads the whole array, and gives an array of NumPy; `np.copyto` reads into an array, and
    `np.empty_like` makes one with the layout of the file, into which reading is fast.

    write: writes the values of a part into an array of its shape.
    layout: the axes in the order of the file; None: theirs.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        write: Callable[[Part, np.ndarray], None],
        layout: Sequence[int] | None = None,
    ):
        self.shape, self.dtype, self.write = shape, np.dtype(dtype), write
        self.layout = range(len(shape)) if layout is None else layout

    @property
    def T(self) -> "Deferred":
        """With the axes reversed."""
        return self._transposed(range(len(self.shape))[::-1])

    def swapaxes(self, first: int, second: int) -> "Deferred":
        """With two axes in each other's place."""
        axes = list(range(len(self.shape)))
        axes[first], axes[second] = axes[second], axes[first]
        return self._transposed(axes)

    def reshape(self, *shape: Any) -> np.ndarray:
        """With other axes."""
        return np.asarray(self).reshape(*shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        # Only ranges with positive steps can be deferred.
        indices = _ranges(index, self.shape)
        if indices is None or any(isinstance(at, int) or at.step < 1 for at in indices):
            return np.asarray(self)[index]
        ranges = [at for at in indices if isinstance(at, range)]

        # The part of a part.
        def write(part: Part, out: np.ndarray) -> None:
            self.write(tuple(whole[as_slice(at)] for whole, at in zip(ranges, part, strict=True)), out)

        return Deferred(tuple(map(len, ranges)), self.dtype, write, self.layout)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        values = self._empty(self.shape)
        self.write(tuple(map(range, self.shape)), values)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """A function of NumPy."""
        if function is np.copyto and isinstance(args[1], Deferred):
            return args[1].write(tuple(map(range, args[1].shape)), args[0])
        if function is np.empty_like and "shape" in options:
            return self._empty(options["shape"])
        return function(*map(_read, args), **options)

    def _empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.empty([shape[axis] for axis in self.layout], self.dtype).transpose(np.argsort(self.layout))

    def _transposed(self, axes: Sequence[int]) -> "Deferred":
        back = np.argsort(axes).tolist()  # From the new axes to the old ones.

        def write(part: Part, out: np.ndarray) -> None:
            self.write(tuple(part[axis] for axis in back), out.transpose(back))

        layout = [back[axis] for axis in self.layout]
        return Deferred(tuple(self.shape[axis] for axis in axes), self.dtype, write, layout)


class Assembled(Deferred):
    """An array to be filled by assignments, whose values may be `Deferred` and are then read when they are needed."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike):
        super().__init__(shape, dtype, self._write)
        self._pieces: list[tuple[list[int | range], Any]] = []

    def __setitem__(self, index: Any, values: Any) -> None:
        place = _ranges(index, self.shape)
        assert place is not None and all(isinstance(at, int) or at.step == 1 for at in place), index
        # An integer in the index drops its axis.
        axes = [axis for axis, at in enumerate(place) if isinstance(at, range)]
        if isinstance(values, Deferred):
            single = [axis for axis in range(len(place)) if axis not in axes]
            self.layout = [*single, *(axes[axis] for axis in values.layout)]
        else:
            values = np.broadcast_to(values, [len(place[axis]) for axis in axes])  # pyright: ignore[reportArgumentType]
        self._pieces.append((place, values))

    def _write(self, part: Part, out: np.ndarray) -> None:
        for place, values in self._pieces:  # Of two at one place the later one counts.
            # The part of this piece, by axis.
            meets = [_meet(interval, indices) for interval, indices in zip(place, part, strict=True)]
            if all(len(within) for _, within in meets):
                # An axis that the index of a piece takes one element of is none of its values'.
                single = [isinstance(interval, int) for interval in place]
                to = out[tuple(at[0] if one else as_slice(at) for (at, _), one in zip(meets, single, strict=True))]
                source = tuple(as_slice(within) for (_, within), one in zip(meets, single, strict=True) if not one)
                np.copyto(to, values[source])


def _meet(place: int | range, indices: range) -> tuple[range, range]:
    """The indices in an interval: their places among all of them, and within the interval."""
    interval = range(place, place + 1) if isinstance(place, int) else place
    first, last = (-((indices.start - end) // indices.step) for end in (interval.start, interval.stop))
    met = range(max(first, 0), min(last, len(indices)))
    begin = indices.start - interval.start + met.start * indices.step
    return met, range(begin, begin + len(met) * indices.step, indices.step)


def _ranges(index: Any, shape: tuple[int, ...]) -> list[int | range] | None:
    """An index, as an int or a range for each axis; None: it is of another kind."""
    items: list[_Index] = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(item, int | slice | EllipsisType) for item in items):
        return None
    # An ellipsis stands for whole axes.
    missing = len(shape) - sum(item is not ... for item in items)
    at = items.index(...) if ... in items else len(items)
    items[at : at + 1] = [slice(None)] * missing
    return [range(size)[item] for size, item in zip(shape, items, strict=True)]  # pyright: ignore[reportReturnType, reportArgumentType, reportCallIssue]


def as_slice(indices: range) -> slice:
    """The slice with these indices."""
    return slice(indices.start, indices.stop, indices.step)


def _read(argument: Any) -> Any:
    """An argument of a function of NumPy, read."""
    if isinstance(argument, list | tuple):
        return [_read(item) for item in argument]
    return np.asarray(argument) if isinstance(argument, Deferred) else argument
