"""What a command sets up: JAX's compilation cache, and a notice if compilation takes long."""

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Generator

import jax
from platformdirs import user_cache_path

NOTICE_DELAY = 2.0
"""Seconds after which `notify_if_slow` prints its message."""


def enable_compilation_cache() -> None:
    """Stores JAX's compiled programs in the user's cache directory, unless the user has configured or disabled the
    compilation cache.

    Cached programs are executed, so the directory must be private to the user; otherwise it is not used.
    """
    configured = jax.config.values
    if configured["jax_compilation_cache_dir"] is not None or not configured["jax_enable_compilation_cache"]:
        return
    directory = user_cache_path("jspec") / "compiled"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        print(f"jspec: compilation cache disabled: {error}", file=sys.stderr)
        return
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        print(f"jspec: compilation cache disabled: other users can read or write {directory}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))


@contextlib.contextmanager
def notify_if_slow(message: str) -> Generator[None, None, None]:
    """Prints `message` to standard error if the `with` block takes longer than `NOTICE_DELAY` seconds."""
    timer = threading.Timer(NOTICE_DELAY, print, args=(message,), kwargs={"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
