"""Types of arguments that JAX has no public type for."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Ref(Protocol):
    """A reference to an array in memory, or to a part of one, as the body of a kernel receives it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it refers to."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of the array that it refers to."""
        ...

    @property
    def at(self) -> Any:
        """Indexed, it gives a reference to a part."""
        ...

    def __getitem__(self, index: object, /) -> Any:
        """Reads."""
        ...

    def __setitem__(self, index: object, value: object, /) -> None:
        """Writes."""
        ...
