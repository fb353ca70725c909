"""What the command line does before the first token: keep compiled programs, and say so where compiling takes long."""

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from platformdirs import user_cache_path

SLOW = 2.0
"""Seconds of silence after which `saying_if_slow` speaks."""


def keep_compiled_programs() -> None:
    """Has JAX keep what it compiles in the user's cache directory, unless the user chose a place or switched it off.

    What lies there is run: the directory belongs to the user alone, or it is not used.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return
    directory = user_cache_path("jspec") / "compiled"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        print(f"jspec: compiled programs are not kept: {error}", file=sys.stderr)
        return
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        print(f"jspec: compiled programs are not kept: others may write or read {directory}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))


@contextlib.contextmanager
def saying_if_slow(message: str) -> Iterator[None]:
    """Prints a line on standard error if what stands in the `with` block takes longer than `SLOW` seconds."""
    timer = threading.Timer(SLOW, print, args=(message,), kwargs={"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
