"""The compilation cache is private, and slow compilation prints a notice."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jspec
from jspec.engine import startup

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
