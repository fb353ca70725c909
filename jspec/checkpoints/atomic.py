"""Atomic writes: write to another name, flush to the disk, then rename.

A full disk or a killed process leaves the previous file. A killed process may also leave `.NAME.partial`; the next
write to the same place replaces it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Names of files with weights, for `replaced` of `staged`."""


def write_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace one file by the output of `write`, which is called with an open file.

    Follows symbolic links; writes directly to a device or a pipe.

    Raises:
      OSError: it cannot be written; an existing file is as before.
    """
    path = Path(os.path.realpath(path))
    # Never replace a device or a pipe.
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            write(file)
        return
    # Write beside the file, and flush before the rename.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write one file of text, as `write_file`."""
    write_file(path, lambda file: file.write(text.encode()))


def write_json(path: str | Path, value: object, indent: int = 2) -> None:
    """Write one file of JSON, as `write_file`."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


@contextmanager
def staged(directory: str | Path, *, key: str, replaced: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a directory for new files; they move to `directory` when the block ends. `directory` is created if needed.

    If the block raises, `directory` stays as it was. `key` is moved away first and its successor comes last: a process
    killed between two files leaves a directory without `key`, never a readable mixture.

    Args:
      key: a file without which nothing reads the directory.
      replaced: patterns of file names; old files of these names are removed unless the block wrote them.

    Raises:
      OSError: a file cannot be written, or `directory` is a file.
    """
    directory = require_directory(directory)
    existed = directory.exists()
    # Collect the files in a subfolder, and flush them before any of them takes its place.
    stage = directory / ".partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        yield stage
        flush_tree(stage)
        for path in stage.iterdir():
            if (directory / path.name).is_dir():
                raise IsADirectoryError(f"{directory / path.name}: is a directory, but a file of this name is written")
    except BaseException:
        # Leave no trace, not even a new directory.
        shutil.rmtree(stage, ignore_errors=True)
        if not existed and directory.exists() and not any(directory.iterdir()):
            directory.rmdir()
        raise
    _move_in(stage, directory, key, replaced)


def _move_in(stage: Path, directory: Path, key: str, replaced: tuple[str, ...]) -> None:
    """Move the files of `stage` to `directory`, in the order of `staged`."""
    names = sorted(path.name for path in stage.iterdir())
    stale = {path.name for path in directory.iterdir() if any(fnmatch(path.name, pattern) for pattern in replaced)}
    # Without its key the directory is unreadable until all files are there.
    if (directory / key).exists():
        os.replace(directory / key, stage / ".previous")
    # Remove what the new files replace; move the key in last.
    for name in stale - set(names) - {key}:
        (directory / name).unlink()
    for name in sorted(names, key=lambda name: name == key):
        os.replace(stage / name, directory / name)
    flush_directory(directory)
    shutil.rmtree(stage)


def require_directory(directory: str | Path) -> Path:
    """Check that a directory exists or can be created; NotADirectoryError if it, or a parent, is a file."""
    directory = Path(directory)
    for path in (directory, *directory.parents):
        if path.exists():
            if not path.is_dir():
                raise NotADirectoryError(f"{path}: must be a directory, but is a file")
            break
    return directory


def flush_tree(directory: Path) -> None:
    """Flush all files below a directory to the disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            _flush(Path(folder) / name)
        flush_directory(Path(folder))


def flush_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, if the system supports it."""
    if os.name == "posix":
        _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
