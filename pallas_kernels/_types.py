"""Types without a public counterpart in JAX."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Ref(Protocol):
    """A reference to an array in memory or to a part of it, an argument of a kernel's body."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        ...

    @property
    def at(self) -> Any:
        """Indexing it gives a reference to a part."""
        ...

    def __getitem__(self, index: object, /) -> Any:
        """Read."""
        ...

    def __setitem__(self, index: object, value: object, /) -> None:
        """Write."""
        ...
