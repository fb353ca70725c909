"""Checks of weights that replace a model's: of the same shapes, dtypes and devices, so nothing compiles anew."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jspec.core.types import Params


def check_same_shapes(old: Any, new: Any) -> None:
    """Raises ValueError, with the path of the leaf, unless weights have the structure, shapes and dtypes of others."""
    if isinstance(old, Params) and not isinstance(new, Params):
        kind = type(new).__name__
        raise ValueError(
            f"params: is of type {kind}; must be jspec.core.types.Params, such as Params(nnx.state(module)) of the "
            "weights of a target, or from_module(module).params"
        )
    # Structure first, then each leaf.
    olds, structure = jax.tree_util.tree_flatten_with_path(old)
    news, other = jax.tree_util.tree_flatten_with_path(new)
    if structure != other:
        raise ValueError(f"params: their structure is not that of the model: {_difference(olds, news)}")
    for (path, x), (_, y) in zip(olds, news, strict=True):
        if not isinstance(y, jax.Array | np.ndarray) or x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)}: is {_described(y)}; must be {x.dtype}{list(x.shape)}"
            )
    check_alive(new)


def _difference(olds: list[tuple[Any, Any]], news: list[tuple[Any, Any]]) -> str:
    """Name the first leaves in only one of two pytrees."""
    old_names, new_names = ([f"params{jax.tree_util.keystr(path)}" for path, _ in leaves] for leaves in (olds, news))
    missing = [name for name in old_names if name not in new_names]
    unknown = [name for name in new_names if name not in old_names]
    problems = [f"{name} is missing" for name in missing[:2]]
    problems += [f"{name} is not one of its weights" for name in unknown[:2]]
    return "; ".join(problems) or "its containers are of other types"


def _described(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return f"of type {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"


def check_alive(params: Any, where: str = "params") -> None:
    """Raises ValueError, with the path of the leaf, if weights have been deleted by a donation to a user's program.

    where: what they are, for the message.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{where}{jax.tree_util.keystr(path)}: has been deleted, as donate_argnums of jax.jit does; give the "
                "model its new weights with model.with_params, or copies"
            )


def check_same_devices(old: Params, new: Params) -> None:
    """Raises ValueError, with the path, if weights are split in another way: the order of columns would differ."""
    # Each leaf must lie where the program expects it.
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if isinstance(x, Tracer) or isinstance(y, Tracer):
            continue
        where = f"params{jax.tree_util.keystr(path)}"
        if not isinstance(x, jax.Array):
            raise ValueError(f"{where}: is of type {type(x).__name__}; must be a jax.Array")
        if not x.sharding.is_equivalent_to(y.sharding, x.ndim):
            raise ValueError(
                f"{where}: has the sharding {x.sharding}; must have that of the model, {y.sharding}, as "
                "jspec.from_named(..., tensor=...) makes it"
            )
