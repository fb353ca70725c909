"""Large arrays that are read, checked and joined block by block, with blocks small enough for small arrays."""

import io

import ml_dtypes
import numpy as np
import pytest

from jspec.checkpoints import safetensors_file, tensors
from jspec.checkpoints.deferred import Deferred
from jspec.checkpoints.files import write_tensors
from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.checkpoints.tensors import Tensors, is_finite
from jspec.checkpoints.threads import each_block
from jspec.core.sharding import side_by_side
from jspec.core.struct import WHOLE


@pytest.mark.parametrize("size", [0, 1, 4, 5, 8, 23])
def test_blocks_cover_everything_once_and_in_order(size):
    blocks = each_block(size, 4, lambda start, end: list(range(start, end)))
    assert sum(blocks, []) == list(range(size))
    assert all(0 < len(block) <= 4 for block in blocks)


def test_an_error_of_any_block_is_raised():
    with pytest.raises(ZeroDivisionError):
        each_block(100, 10, lambda start, end: 1 // (start - 70))


@pytest.mark.parametrize("block", [1, 7, 64, 10**6])
def test_a_tensor_is_read_in_blocks(tmp_path, monkeypatch, block):
    rng = np.random.default_rng(0)
    stored = {"a": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16), "b": rng.normal(size=17).astype(np.float32)}
    write_tensors(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors_file, "_BLOCK", block)
    files = SafetensorFiles(tmp_path)
    for name, values in stored.items():
        np.testing.assert_array_equal(files.get(name), values)


@pytest.mark.parametrize("block", [7, 10**6])
def test_a_file_that_ends_too_early_is_noticed(tmp_path, monkeypatch, block):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(40)))
    monkeypatch.setattr(safetensors_file, "_BLOCK", block)
    assert safetensors_file._read(path, 10, 30).tolist() == list(range(10, 40))
    with pytest.raises(EOFError):
        safetensors_file._read(path, 10, 31)


def test_a_file_that_is_read_a_few_bytes_at_a_time(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:3])

    path = tmp_path / "file"
    path.write_bytes(bytes(range(40)))
    monkeypatch.setattr(type(path), "open", lambda self, mode, buffering: Slow(self, mode))
    assert safetensors_file._read(path, 10, 20).tolist() == list(range(10, 30))


@pytest.mark.parametrize("at", [0, 6, 7, 15 * 7, 16 * 7, 16 * 7 + 1, 299])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_found_in_every_block(monkeypatch, at, value):
    monkeypatch.setattr(tensors, "_CHUNK", 7)
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    assert is_finite(values)
    values[at] = value
    assert not is_finite(values)


@pytest.mark.parametrize("block", [1, 50, 2**23])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_read_and_joined_in_blocks(tmp_path, monkeypatch, block, transposed):
    """Into one array in the layout of the files, without an array for each of them."""
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", block)
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 4), "b": (1, 4), "c": (9, 4)} if transposed else {"a": (4, 6), "b": (4, 1), "c": (4, 9)}
    stored = {name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    write_tensors(stored, tmp_path / "model.safetensors")
    read = Tensors(SafetensorFiles(tmp_path), np.float32)
    parts = [read.read(name, *shape, transpose=transposed) for name, shape in shapes.items()]
    assert all(isinstance(part, Deferred) for part in parts)
    joined = side_by_side(parts)
    assert joined.flags.f_contiguous == transposed and joined.dtype == np.float32
    expected = [values.T if transposed else values for values in stored.values()]
    np.testing.assert_array_equal(joined, np.concatenate(expected, axis=-1).astype(np.float32))
    np.testing.assert_array_equal(read.put(WHOLE, parts), joined)


@pytest.mark.parametrize("block", [2, 24, 60, 2**23])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_of_matrices_is_read_in_blocks(tmp_path, monkeypatch, block, transposed):
    """A block is never more than one matrix where matrices are larger than blocks."""
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", block)
    stored = np.arange(3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
    write_tensors({"a": stored}, tmp_path / "model.safetensors")
    files, sizes = SafetensorFiles(tmp_path), []
    real = files.part
    monkeypatch.setattr(files, "part", lambda name, part: sizes.append(np.prod([*map(len, part)])) or real(name, part))
    matrices = Tensors(files, np.float32).read("a", 3, 5, 4)
    for index in [(), (slice(1, 3),), (slice(None), slice(1, 4), slice(0, 4, 2))]:
        part = matrices[index] if index else matrices
        expected = stored[index]
        if transposed:
            part, expected = part.swapaxes(1, 2), expected.swapaxes(1, 2)
        np.testing.assert_array_equal(part, expected)
    assert max(sizes) <= max(block // 2, 4)
