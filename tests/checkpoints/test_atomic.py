"""Files are written whole or not at all: a full disk and a killed process leave what was there before."""

import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jspec.checkpoints import atomic

WRITERS = {
    "file": lambda path: atomic.write_file(path, lambda file: file.write(b"new")),
    "text": lambda path: atomic.write_text(path, "new"),
    "json": lambda path: atomic.write_json(path, {"new": 1}),
    "array": lambda path: atomic.write_file(path, lambda file: np.save(file, np.arange(9))),
}


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_failed_write_leaves_the_old_file(kind, existed, failing, tmp_path, monkeypatch):
    path = tmp_path / "file"
    if existed:
        path.write_text("old")
    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        WRITERS[kind](path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")] * existed
    monkeypatch.undo()
    WRITERS[kind](path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and path.read_bytes() != b"old"


def test_links_and_devices_keep_their_place(tmp_path):
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    atomic.write_text(tmp_path / "link", "new")
    assert target.read_text() == "new" and (tmp_path / "link").is_symlink()
    atomic.write_text("/dev/null", "new")
    assert not pathlib.Path("/dev/null").is_file()


FILES = ("a", "config.json", "z")


def write_all(directory, text, names=FILES):
    with atomic.staged(directory, key="config.json", replaced=("old*",)) as stage:
        for name in names:
            (stage / name).write_text(text)


def read_all(directory):
    return {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}


def test_a_directory_gets_all_files_or_none(tmp_path):
    directory = tmp_path / "deep" / "out"
    with pytest.raises(ZeroDivisionError), atomic.staged(directory, key="config.json") as stage:
        (stage / "a").write_text("half")
        _ = 1 / 0
    assert not directory.exists()
    write_all(directory, "old")
    (directory / "old-3").write_text("an older shard")
    (directory / "mine").write_text("the user's")
    before = read_all(directory)
    with pytest.raises(ZeroDivisionError), atomic.staged(directory, key="config.json") as stage:
        (stage / "a").write_text("half")
        _ = 1 / 0
    assert read_all(directory) == before and not (directory / ".partial").exists()
    write_all(directory, "new")
    assert read_all(directory) == dict.fromkeys(FILES, "new") | {"mine": "the user's"}


@pytest.mark.parametrize("point", range(5))
def test_a_directory_killed_between_two_files_is_never_a_mixture(point, tmp_path, monkeypatch):
    """Before the first file moves all is old; then config.json is missing until all is new."""
    write_all(tmp_path, "old")
    count, replace = 0, os.replace

    def killed(*paths):
        nonlocal count
        if count == point:
            raise Killed
        count += 1
        replace(*paths)

    monkeypatch.setattr(os, "replace", killed)
    if point < 4:
        with pytest.raises(Killed):
            write_all(tmp_path, "new")
    else:
        write_all(tmp_path, "new")
    monkeypatch.undo()
    contents = read_all(tmp_path)
    assert "config.json" not in contents or len(set(contents.values())) == 1
    assert ("config.json" in contents) == (point in (0, 4))
    write_all(tmp_path, "newer")
    assert read_all(tmp_path) == dict.fromkeys(FILES, "newer") and not (tmp_path / ".partial").exists()


def test_a_directory_where_a_file_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=r"file: must be a directory, but is a file"):
            write_all(directory, "new")
    (tmp_path / "out" / "z").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"z: is a directory, but a file of this name is written"):
        write_all(tmp_path / "out", "new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["z"]


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path):
    """As on a full disk, but from the system itself: the last bytes of a file are refused."""
    path = tmp_path / "array.npy"
    atomic.write_file(path, lambda file: np.save(file, np.arange(10)))
    program = f"""
import resource, numpy as np
from jspec.checkpoints import atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    atomic.write_file({str(path)!r}, lambda file: np.save(file, np.arange(10_000)))
except OSError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip()
    assert np.array_equal(np.load(path), np.arange(10)) and [entry.name for entry in tmp_path.iterdir()] == [path.name]
