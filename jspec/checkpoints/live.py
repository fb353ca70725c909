"""JAX arrays with NumPy's interface, so that the readers of checkpoints run on them unchanged."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array


class ArrayView:
    """NumPy's indexing, transposing and reshaping, by one method: `moved`."""

    def moved(self, function: Callable[[Any], Any]) -> Self:
        """Applies a function that selects or moves items to the arrays of this one."""
        raise NotImplementedError

    @property
    def T(self) -> Self:
        """The transpose."""
        return self.moved(lambda array: array.T)

    def __getitem__(self, index: Any) -> Self:
        return self.moved(lambda array: array[index])

    def reshape(self, *shape: Any) -> Self:
        """As `numpy.reshape`."""
        return self.moved(lambda array: array.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> Self:
        """As `numpy.swapaxes`."""
        return self.moved(lambda array: array.swapaxes(first, second))


class LiveArray(ArrayView):
    """A JAX array, possibly traced, with NumPy's interface: operations run on its devices, or are traced.

    NumPy's functions dispatch to those of jax.numpy (NumPy Enhancement Proposal 18). Assignments replace the array.
    """

    def __init__(self, array: Array):
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return np.dtype(self.array.dtype)

    def moved(self, function: Callable[[Any], Any]) -> "LiveArray":
        """As in `ArrayView`."""
        return LiveArray(function(self.array))

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Called by a function of NumPy."""
        if function is np.array_equal:
            return _same(*map(_array, args))
        out = getattr(jnp, function.__name__)(*map(_array, args), **options)
        return [LiveArray(part) for part in out] if isinstance(out, list | tuple) else LiveArray(out)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("an array that may be traced has no values")

    def __len__(self) -> int:
        return self.array.shape[0]

    def __setitem__(self, index: Any, values: "LiveArray | ArrayLike") -> None:
        self.array = self.array.at[index].set(jnp.asarray(_array(values), self.array.dtype))

    def __radd__(self, other: float) -> "LiveArray":
        return LiveArray(other + self.array)

    def astype(self, dtype: DTypeLike, copy: bool = True) -> "LiveArray":
        """In another dtype. Never copies without need, whatever `copy`, because JAX arrays are immutable."""
        return self if self.dtype == np.dtype(dtype) else LiveArray(self.array.astype(dtype))


def _array(x: Any) -> Any:
    """An argument of a NumPy function, for JAX: arrays instead of `LiveArray`, also within lists."""
    if isinstance(x, LiveArray):
        return x.array
    return [_array(item) for item in x] if isinstance(x, list | tuple) else x


def _same(a: Array, b: Array) -> bool:
    """Whether two arrays are known to be equal; traced ones only if they are the same object."""
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    return a.shape == b.shape and bool((a == b).all())
