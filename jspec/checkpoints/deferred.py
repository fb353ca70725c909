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
        found = _ranges(index, self.shape)
        if found is None or any(isinstance(each, int) or each.step < 1 for each in found):
            return np.asarray(self)[index]
        ranges = [each for each in found if isinstance(each, range)]

        def write(part: Part, out: np.ndarray) -> None:
            self.write(tuple(own[_slice(each)] for own, each in zip(ranges, part, strict=True)), out)

        return Deferred(tuple(map(len, ranges)), self.dtype, write, self.layout)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        made = self._empty(self.shape)
        self.write(tuple(map(range, self.shape)), made)
        return made if dtype is None else made.astype(dtype, copy=False)

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
        back = np.argsort(axes).tolist()

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
        found = _ranges(index, self.shape)
        assert found is not None and all(isinstance(each, int) or each.step == 1 for each in found), index
        kept = [axis for axis, each in enumerate(found) if isinstance(each, range)]
        if isinstance(values, Deferred):
            single = [axis for axis in range(len(found)) if axis not in kept]
            self.layout = [*single, *(kept[axis] for axis in values.layout)]
        else:
            values = np.broadcast_to(values, [len(found[axis]) for axis in kept])  # pyright: ignore[reportArgumentType]
        self._pieces.append((found, values))

    def _write(self, part: Part, out: np.ndarray) -> None:
        for place, values in self._pieces:  # Of two at one place the later one counts.
            meets = [_meet(each, wanted) for each, wanted in zip(place, part, strict=True)]
            if all(len(own) for _, own in meets):
                # An axis that the index of a piece takes one element of is none of its values'.
                single = [isinstance(each, int) for each in place]
                to = out[tuple(at[0] if one else _slice(at) for (at, _), one in zip(meets, single, strict=True))]
                source = tuple(_slice(own) for (_, own), one in zip(meets, single, strict=True) if not one)
                np.copyto(to, values[source])


def _meet(place: int | range, wanted: range) -> tuple[range, range]:
    """Which of the wanted indices an interval has: their places among those wanted, and within the interval."""
    interval = range(place, place + 1) if isinstance(place, int) else place
    first, last = (-((wanted.start - end) // wanted.step) for end in (interval.start, interval.stop))
    met = range(max(first, 0), min(last, len(wanted)))
    begin = wanted.start - interval.start + met.start * wanted.step
    return met, range(begin, begin + len(met) * wanted.step, wanted.step)


def _ranges(index: Any, shape: tuple[int, ...]) -> list[int | range] | None:
    """An index, as an int or a range for each axis; None: it is of another kind."""
    given: list[_Index] = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(each, int | slice | EllipsisType) for each in given):
        return None
    missing = len(shape) - sum(each is not ... for each in given)
    at = given.index(...) if ... in given else len(given)
    given[at : at + 1] = [slice(None)] * missing
    return [range(size)[each] for size, each in zip(shape, given, strict=True)]  # pyright: ignore[reportReturnType, reportArgumentType, reportCallIssue]


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)


def _read(argument: Any) -> Any:
    """An argument of a function of NumPy, read."""
    if isinstance(argument, list | tuple):
        return [_read(each) for each in argument]
    return np.asarray(argument) if isinstance(argument, Deferred) else argument
