"""The products of a traced program."""

from collections.abc import Iterator


def products(jaxpr) -> Iterator[tuple[int, ...]]:
    """The shapes of all products, in order; layers may share the functions that compute them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)
