"""What fields say of their arrays: the options along a path, and the axis that devices share."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jaxtyping import Array

from jspec.core.struct import WHOLE, Leaf, flatten_leaves, leaf, leaf_of, struct


@struct
class Part:
    values: Array
    scale: Array = leaf(if_many=True)


@struct
class Layer:
    columns: Part | Array = leaf(split=-1, linear=True)
    plain: Array


@struct
class Model:
    layers: tuple[Layer, ...]
    draft: Layer = leaf(draft=True)


def test_arrays_have_the_options_of_all_fields_on_the_way_to_them():
    x = jnp.zeros(())
    columns = Leaf("columns", split=-1, linear=True)
    model = Model((Layer(Part(x, x), x),), Layer(x, x))
    options = [found for found, _ in flatten_leaves([{"model": model}, x])[0]]
    drafted = Leaf("columns", split=-1, linear=True, draft=True)
    many = Leaf("columns", split=-1, linear=True, if_many=True)
    assert options == [columns, many, WHOLE, drafted, Leaf(draft=True), WHOLE]
    assert leaf_of(Layer, "columns") == columns and leaf_of(Layer, "plain") == WHOLE


@pytest.mark.parametrize(
    ("options", "shape", "axis"),
    [
        (Leaf(), (4, 4), None),
        (Leaf(split=-1), (4, 8), 1),
        (Leaf(split=-3), (4, 1, 1, 2), 1),
        (Leaf(split=-2, if_even=True), (6, 3), None),
        (Leaf(split=-2, if_even=True), (8, 3), 0),
        (Leaf(split=-2), (1, 3), 0),
        (Leaf(split=-2, if_many=True), (1, 3), None),
        (Leaf(split=-2, ndim=3), (4, 3), None),
        (Leaf(split=-2, ndim=3), (4, 4, 3), 1),
    ],
)
def test_the_axis_that_four_devices_share(options, shape, axis):
    assert options.axis(shape, 4) == axis


def test_arrays_below_another_kind_of_pytree_have_no_options():
    """Such as the errors of `checkify`, whose arrays are in dictionaries below a node without names."""
    error, _ = checkify.checkify(lambda x: checkify.check(x > 0, "negative"), errors=checkify.user_checks)(1.0)
    leaves, _ = flatten_leaves((error, [np.zeros(2)]))
    assert leaves and all(options == WHOLE for options, _ in leaves)
