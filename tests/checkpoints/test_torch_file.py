"""Files written by torch are read as torch reads them, and no file runs code."""

import collections
import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from jspec.checkpoints import torch_file
from jspec.checkpoints.language_model import CheckpointError


@pytest.fixture
def torch(needs):
    return needs("torch")


def write(path, value, *, storages=None, protocol=2, **entries):
    """An archive like torch's, with a given pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", value if isinstance(value, bytes) else pickle.dumps(value, protocol))
        for key, data in (storages or {}).items():
            archive.writestr(f"x/data/{key}", data)
        for name, data in entries.items():
            archive.writestr(f"x/{name}", data)
    return path


def tensor_pickle(*, offset=0, shape=(2, 3), strides=(3, 1), kind="FloatStorage", count=6, metadata=()):
    """A handwritten pickle of a tensor whose bytes have the key "0"."""

    class Named:
        def __init__(self, module, name):
            self.module, self.name = module, name

    class Storage:
        pass

    class Tensor:
        pass

    class Pickler(pickle._Pickler):  # the one in Python, whose parts can be called
        def persistent_id(self, obj):
            return ("storage", Named("torch", kind), "0", "cpu", count) if isinstance(obj, Storage) else None

        def save(self, obj, *args, **kwargs):
            if isinstance(obj, Named):
                self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())
            elif isinstance(obj, Tensor):
                self.save(Named("torch._utils", "_rebuild_tensor_v2"))
                self.save((Storage(), offset, shape, strides, False, collections.OrderedDict(), *metadata))
                self.write(pickle.REDUCE)
            else:
                super().save(obj, *args, **kwargs)

    stream = io.BytesIO()
    Pickler(stream, 2).dump({"w": Tensor()})
    return stream.getvalue()


SIX = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    "dtype", "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool".split(), ids=lambda name: name
)
def test_every_dtype(torch, tmp_path, dtype):
    saved = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    torch.save(saved, tmp_path / "x.pt")
    read = torch_file.read(tmp_path / "x.pt")
    assert isinstance(read, np.ndarray) and read.dtype.name == dtype
    np.testing.assert_array_equal(read.astype(np.float64), saved.to(torch.float64).numpy())


def test_views_parameters_and_shared_storages(torch, tmp_path):
    base = torch.randn(4, 6)
    saved = {
        "rows": base[1:3],
        "transposed": base.t(),
        "steps": base[::2, 1::3],
        "one": base[2, 3],
        "broadcast": base[:1].expand(5, 6),
        "parameter": torch.nn.Parameter(base),
        "empty": torch.zeros(0, 3),
        "nested": [1, (2.5, None, "a", True), {"deep": base[0]}],
    }
    torch.save(saved, tmp_path / "x.bin")
    read = torch_file.read(tmp_path / "x.bin")
    assert list(read) == list(saved)
    for name in ("rows", "transposed", "steps", "one", "broadcast", "parameter", "empty"):
        np.testing.assert_array_equal(read[name], saved[name].detach().numpy(), err_msg=name)
    number, inner, deep = read["nested"]
    assert (number, inner) == (1, (2.5, None, "a", True))
    np.testing.assert_array_equal(deep["deep"], base[0].numpy())


def test_a_state_dict_and_bare_values(torch, tmp_path):
    module = torch.nn.Linear(3, 2)
    torch.save(module.state_dict(), tmp_path / "x.bin")
    read = torch_file.read(tmp_path / "x.bin")
    np.testing.assert_array_equal(read["weight"], module.weight.detach().numpy())
    torch.save([5, 2, 9], tmp_path / "x.pt")
    assert torch_file.read(str(tmp_path / "x.pt")) == [5, 2, 9]


def test_tensors_by_hand(tmp_path):
    """The tests of damaged files below start from this."""
    path = write(tmp_path / "x.bin", tensor_pickle(shape=(3, 2), strides=(1, 3)), storages={"0": SIX.tobytes()})
    np.testing.assert_array_equal(torch_file.read(path)["w"], SIX.reshape(2, 3).T)


class Call:
    """Its pickle calls `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, getattr, np.zeros, collections.Counter, bytearray])
def test_nothing_is_executed(tmp_path, function):
    marker = tmp_path / "ran"
    argument = f"touch {marker}" if function is os.system else "1"
    path = write(tmp_path / "x.bin", Call(function, argument))
    with pytest.raises(CheckpointError, match=r"x.bin: refers to .*, which is not part of a tensor"):
        torch_file.read(path)
    assert not marker.exists()


def test_a_pickle_cannot_change_what_it_names(tmp_path):
    """BUILD sets attributes, and the objects that names resolve to accept none."""
    for target in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"ctorch\nFloatStorage\n"):
        change = b"\x80\x02" + target + b"(N}X\x04\x00\x00\x00evilK\x01stb."
        with pytest.raises(CheckpointError, match="damaged"):
            torch_file.read(write(tmp_path / "x.bin", change))


def test_a_whole_module_is_refused(torch, tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="refers to torch.nn.modules.linear.Linear"):
        torch_file.read(tmp_path / "x.bin")


def test_the_format_before_torch_1_6(torch, tmp_path):
    torch.save(torch.zeros(2), tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"format of torch before 1.6.*save it as model.safetensors"):
        torch_file.read(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"offset": 1}, "reads element 6 of a storage of 6"),
        ({"strides": (300, 1)}, "reads element 302"),
        ({"strides": (-1, 1)}, "strides"),
        ({"offset": -1}, "offset -1"),
        ({"shape": (2,)}, "shape"),
        ({"count": 7}, "24 bytes for 7 elements"),
        ({"count": 5}, "24 bytes for 5 elements"),
        ({"kind": "HalfStorage"}, "24 bytes for 6 elements of float16"),
        ({"kind": "QUInt8Storage"}, "refers to torch.QUInt8Storage"),
        ({"metadata": ({"conj": True},)}, "metadata"),
    ],
)
def test_a_tensor_outside_of_its_storage(tmp_path, changes, message):
    path = write(tmp_path / "x.bin", tensor_pickle(**changes), storages={"0": SIX.tobytes()})
    with pytest.raises(CheckpointError, match=message):
        torch_file.read(path)


def test_other_archives(tmp_path):
    data = {"0": SIX.tobytes()}
    with pytest.raises(CheckpointError, match="damaged"):
        torch_file.read(write(tmp_path / "x.bin", tensor_pickle()))  # no storage
    with pytest.raises(CheckpointError, match="big-endian"):
        torch_file.read(write(tmp_path / "x.bin", tensor_pickle(), storages=data, byteorder=b"big"))
    assert torch_file.read(write(tmp_path / "x.bin", tensor_pickle(), storages=data, byteorder=b"little"))
    with pytest.raises(CheckpointError, match="holds a value of type set"):
        torch_file.read(write(tmp_path / "x.bin", b"\x80\x04\x8f."))
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(CheckpointError, match="torch.save did not write"):
        torch_file.read(tmp_path / "x.bin")


@pytest.mark.parametrize("keep", [0, 3, 200, -100, -1])
def test_a_truncated_file(tmp_path, keep):
    path = write(tmp_path / "x.bin", tensor_pickle(), storages={"0": SIX.tobytes()})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="x.bin: damaged"):
        torch_file.read(path)


def test_a_damaged_pickle_and_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="x.bin: damaged"):
        torch_file.read(write(tmp_path / "x.bin", tensor_pickle()[:40]))
    with pytest.raises(CheckpointError, match="y.bin: no such file"):
        torch_file.read(tmp_path / "y.bin")
