"""Arrays that are read part by part hold what NumPy's would, and read no more than is asked for."""

import numpy as np
import pytest

from jspec.checkpoints.deferred import Assembled, Deferred

VALUES = np.arange(6 * 4 * 10, dtype=np.float32).reshape(6, 4, 10)


def stored(values, read=None):
    """An array that counts the elements that are read."""

    def write(part, out):
        out[...] = values[np.ix_(*part)]
        if read is not None:
            read.append(out.size)

    return Deferred(values.shape, values.dtype, write)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[2:5, ..., 1::3],
        lambda x: x.T[3:, 1:3],
        lambda x: x.swapaxes(1, 2)[:, 2:8:2][1:, 1:],
        lambda x: x[..., ::2].T.swapaxes(0, 2)[-2:],
        lambda x: x[4:2],
    ],
)
def test_slices_and_transposes_read_their_own_elements(change):
    read = []
    got, expected = change(stored(VALUES, read)), change(VALUES)
    assert got.shape == expected.shape and len(got) == len(expected) and not read
    np.testing.assert_array_equal(got, expected)
    into = np.empty_like(got, shape=got.shape)
    np.copyto(into, got)
    np.testing.assert_array_equal(into, expected)
    assert read == [expected.size] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[2],
        lambda x: x[:, [1, 0]],
        lambda x: x[None, ::-1],
        lambda x: x.reshape(24, -1).T,
        lambda x: np.concatenate([x, x[:, 1:]], axis=1),
        lambda x: np.repeat(x, 2, axis=0),
    ],
)
def test_everything_else_is_read_whole(change):
    got = change(stored(VALUES))
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, change(VALUES))


@pytest.mark.parametrize("index", [np.s_[...], np.s_[1:3, ::3], np.s_[3:, 1:, 5:7], np.s_[:2, 2:3, 1::4]], ids=str)
def test_assembled_arrays_read_the_pieces_that_an_index_meets(index):
    """The later one of two at one place counts; a number fills, and arrays of NumPy are kept."""
    first, second, read = VALUES[:, :, 0], VALUES[0].T, []
    expected, made = np.zeros((5, 4, 10), np.float32), Assembled((5, 4, 10), np.float32)
    for target, (one, two) in ((expected, (first, second)), (made, (stored(first, read), stored(second, read)))):
        target[3:] = 0
        target[0, :, :6] = one.T
        target[0, :, 6:] = one.T[:, 2:]
        target[1:3] = VALUES[:2, :, :]
        target[4, 1:3] = two.T[:2]
    np.testing.assert_array_equal(made[index], expected[index])
    assert sum(read) <= expected[index].size
