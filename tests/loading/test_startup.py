"""The compilation cache is private, damaged entries are replaced, and slow compilation prints a notice."""

import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jspec
from jspec.loading import startup

COMMAND = [sys.executable, "-m", "jspec.cli", "generate", "x = 1", "--model", "bundled:python-tiny"]
COMMAND += ["--max-new-tokens", "4"]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """An empty cache directory; restores the JAX configuration afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "jspec" / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def configured_directory():
    startup.enable_compilation_cache()
    return jax.config.jax_compilation_cache_dir


@pytest.mark.slow
def test_a_second_command_runs_cached_programs(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    directory = tmp_path / "jspec" / "compiled"

    def programs():
        subprocess.run(COMMAND, env=environment, check=True, capture_output=True)
        return sorted(path.name for path in directory.iterdir() if path.name.endswith("-cache"))

    first = programs()
    assert any("decode" in name for name in first) and any("prefill" in name for name in first)
    assert programs() == first, "the second run compiled a program that the first one did not cache"
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def guarded(caches, monkeypatch):
    """The cache directory, where each entry counts as the first one that this process cannot read or write."""
    for name in ("get_executable_and_time", "put_executable_and_time"):
        monkeypatch.setattr(startup.entries, name, inspect.unwrap(getattr(startup.entries, name)))
    monkeypatch.setattr(startup, "_replace_damaged_entries", startup._replace_damaged_entries.__wrapped__)
    return caches


@pytest.mark.parametrize("damage", ["empty", "cut", "other bytes"])
def test_a_damaged_entry_is_replaced_with_one_line(guarded, capsys, damage):
    configured_directory()

    def run():
        # A function that JAX has not compiled before.
        assert float(jax.jit(lambda x: jax.numpy.sin(x) + 1)(np.float32(0))) == 1
        assert float(jax.jit(lambda x: jax.numpy.sin(x) + 2)(np.float32(0))) == 2

    run()
    paths = list(guarded.glob("*-cache"))
    assert len(paths) == 2 and capsys.readouterr().err == ""
    for path in paths:
        path.write_bytes({"empty": b"", "cut": path.read_bytes()[:-40], "other bytes": b"x" * 5000}[damage])
    damaged = [path.read_bytes() for path in paths]
    run()
    line = "jspec: a program in the compilation cache is damaged; it is compiled again and replaced\n"
    assert capsys.readouterr().err == line
    assert all(path.read_bytes() != content for path, content in zip(paths, damaged, strict=True))
    run()
    assert capsys.readouterr().err == ""


def test_a_program_that_cannot_be_written_leaves_no_entry(guarded, monkeypatch, capsys):
    def write(key, *_):
        (guarded / f"{key}-cache").write_bytes(b"cut")
        raise OSError("No space left on device")

    monkeypatch.setattr(startup.entries, "put_executable_and_time", write)
    configured_directory()
    assert jax.jit(lambda x: x * 3)(np.float32(2)) == 6
    assert not list(guarded.glob("*-cache"))
    assert capsys.readouterr().err == "jspec: a compiled program cannot be kept: is the disk full?\n"


def test_a_directory_configured_by_the_user_is_kept(caches, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert configured_directory() == str(tmp_path / "mine")
    assert not caches.exists()


def test_a_disabled_cache_stays_disabled(caches):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert configured_directory() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not caches.exists()


def test_a_directory_that_other_users_can_write_is_not_used(caches, capsys):
    caches.mkdir(parents=True)
    caches.chmod(0o770)
    assert configured_directory() is None
    assert f"{caches}: other users can read or write it" in capsys.readouterr().err


def test_the_cache_is_disabled_if_its_directory_cannot_be_created(caches, capsys):
    caches.parent.parent.mkdir(exist_ok=True)
    caches.parent.write_text("a file")
    assert configured_directory() is None
    assert f"compiled programs are not kept: {caches}: cannot be made" in capsys.readouterr().err


def test_there_may_be_no_home_directory(caches, capsys, monkeypatch):
    monkeypatch.setattr(startup, "user_cache_path", lambda name: Path("~/.cache") / name)
    assert configured_directory() is None
    assert "there is no home directory" in capsys.readouterr().err


def test_programs_are_kept_in_a_given_directory(caches, tmp_path):
    jax.jit(lambda x: x * 3)(1.0)  # without a directory
    directory = tmp_path / "of" / "mine"
    assert jspec.cache_programs(directory) == directory
    assert directory.stat().st_mode & 0o777 == 0o700 and not caches.exists()
    jax.jit(lambda x: x * 5 + 1)(1.0)
    assert any(path.name.endswith("-cache") for path in directory.iterdir())
    assert jspec.cache_programs() == directory, "what is configured is kept"
    assert jspec.cache_programs(str(tmp_path / "other")) == tmp_path / "other"


def test_the_default_directory_is_that_of_the_commands(caches):
    assert jspec.cache_programs() == caches and caches.is_dir()


@pytest.mark.parametrize(
    "path, error, message",
    [
        (5, TypeError, "path=5: must be a str or a Path"),
        (b"x", TypeError, "path=b'x': must be a str or a Path"),
        ("", ValueError, "path='': must name a directory"),
        ("a\0b", ValueError, "cannot be made"),
        ("file", ValueError, "file: cannot be made (File exists)"),
        ("file/below", ValueError, "file/below: cannot be made (Not a directory)"),
        ("open", ValueError, "open: other users can read or write it"),
    ],
)
def test_a_directory_that_cannot_hold_programs_is_an_error(caches, tmp_path, monkeypatch, path, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(error, match=re.escape(message)):
        jspec.cache_programs(path)
    assert jax.config.jax_compilation_cache_dir is None


def test_a_notice_is_printed_only_if_the_block_is_slow(capsys, monkeypatch):
    monkeypatch.setattr(startup, "NOTICE_DELAY", 0.05)
    with startup.notify_if_slow("compiling"):
        pass
    assert capsys.readouterr().err == ""
    with startup.notify_if_slow("compiling"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "compiling\n"
