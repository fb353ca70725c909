"""Compiled programs are kept in a private place, and long silences are explained."""

import os
import subprocess
import sys
import time

import jax
import pytest

from jspec.engine import startup

COMMAND = [sys.executable, "-m", "jspec.cli", "generate", "x = 1", "--model", "bundled:python-tiny"]
COMMAND += ["--max-new-tokens", "4"]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A user's cache directory that is empty, and JAX's settings as they were, afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "jspec" / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def chosen():
    startup.enable_compilation_cache()
    return jax.config.jax_compilation_cache_dir


def test_a_command_keeps_its_programs_for_the_next(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    directory = tmp_path / "jspec" / "compiled"

    def programs():
        subprocess.run(COMMAND, env=environment, check=True, capture_output=True)
        return sorted(path.name for path in directory.iterdir() if path.name.endswith("-cache"))

    first = programs()
    assert any("decode" in name for name in first) and any("prefill" in name for name in first)
    assert programs() == first, "the second run compiled something that the first had not kept"
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_place_that_the_user_chose_stays(caches, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert chosen() == str(tmp_path / "mine")
    assert not caches.exists()


def test_a_cache_that_is_switched_off_stays_off(caches):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert chosen() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not caches.exists()


def test_a_directory_that_others_may_write_is_not_used(caches, capsys):
    caches.mkdir(parents=True)
    caches.chmod(0o770)
    assert chosen() is None
    assert f"other users can read or write {caches}" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_done_without(caches, capsys):
    caches.parent.parent.mkdir(exist_ok=True)
    caches.parent.write_text("a file")
    assert chosen() is None
    assert "compilation cache disabled" in capsys.readouterr().err


def test_a_long_silence_is_explained_and_a_short_one_is_not(capsys, monkeypatch):
    monkeypatch.setattr(startup, "NOTICE_DELAY", 0.05)
    with startup.notify_if_slow("compiling"):
        pass
    assert capsys.readouterr().err == ""
    with startup.notify_if_slow("compiling"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "compiling\n"
