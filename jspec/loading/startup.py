"""JAX's compilation cache, a count of compilations, a notice if one takes long, and no pauses after the start."""

import contextlib
import functools
import gc
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as entries
from jax.experimental.compilation_cache import compilation_cache
from platformdirs import user_cache_path

NOTICE_DELAY = 2.0
"""Seconds before `notify_if_slow` prints its message."""


def cache_programs(path: str | Path | None = None) -> Path | None:
    """Keeps compiled programs in a directory, for later processes to load instead of compiling.

    The command line does so by itself. In a program of your own, call this once, before the first generation.
    Cached programs are executed, so other users must not be able to write to the directory.

    Args:
      path: the directory; created, readable by its owner only, if there is none. None: the one of the command
        line, in the user's cache directory, unless JAX's configuration names one (JAX_COMPILATION_CACHE_DIR).

    Returns:
      The directory; None if `path` is None and JAX's configuration disables its compilation cache.

    Raises:
      TypeError: `path` is not a path.
      ValueError: the directory cannot be made or written, or other users can write to it.
    """
    _replace_damaged_entries()
    if path is None:
        configured = jax.config.values["jax_compilation_cache_dir"]
        if not jax.config.values["jax_enable_compilation_cache"]:
            return None
        if configured is not None:
            return Path(configured)
    elif not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path={path!r}: must be a str or a Path")
    elif not os.fspath(path):
        raise ValueError("path='': must name a directory")
    directory = user_cache_path("jspec") / "compiled" if path is None else Path(path).absolute()
    # Without a home directory there is no cache directory.
    _check_private(directory, writable_by_others=0o077 if path is None else 0o002)
    jax.config.update("jax_enable_compilation_cache", True)
    if jax.config.values["jax_compilation_cache_dir"] != str(directory):
        jax.config.update("jax_compilation_cache_dir", str(directory))
        compilation_cache.reset_cache()  # Otherwise, a process keeps the setting of its first compilation.
    return directory


def programs_directory() -> Path | None:
    """The directory of compiled programs; None if they are not kept, or not in a directory of this machine."""
    configured = jax.config.values["jax_compilation_cache_dir"]
    if not jax.config.values["jax_enable_compilation_cache"] or not configured or "://" in configured:
        return None
    return Path(configured)


def enable_compilation_cache() -> None:
    """`cache_programs` for commands: without a directory they continue without a cache."""
    try:
        cache_programs()
    except ValueError as error:
        print(f"jspec: compiled programs are not kept: {error}", file=sys.stderr)


@functools.cache
def _replace_damaged_entries() -> None:
    """Lets an entry that cannot be read or written be deleted and named in one line.

    Otherwise JAX warns at each start, and never replaces the entry of a full disk or of a killed process.
    """

    def guard(function: Callable[..., Any], instead: object, note: str) -> Callable[..., Any]:
        said = functools.cache(lambda: print(f"jspec: {note}", file=sys.stderr, flush=True))

        @functools.wraps(function)
        def guarded(key: str, *arguments: Any, **keywords: Any) -> Any:
            try:
                return function(key, *arguments, **keywords)
            except Exception:  # XLA raises errors of many classes
                directory = Path(str(jax.config.values["jax_compilation_cache_dir"]))
                if not directory.is_dir():  # of another file system, which JAX reads
                    raise
                (directory / f"{key}-cache").unlink(missing_ok=True)
                said()
                return instead

        return guarded

    # JAX calls both by these names, in all supported versions.
    entries.get_executable_and_time = guard(
        entries.get_executable_and_time,
        (None, None),
        "a program in the compilation cache is damaged; it is compiled again and replaced",
    )
    entries.put_executable_and_time = guard(
        entries.put_executable_and_time, None, "a compiled program cannot be kept: is the disk full?"
    )


def freeze_objects() -> None:
    """Exempts all present objects from garbage collection, once a process has loaded and compiled what it needs.

    Those of JAX alone are hundreds of thousands, and no thread runs while a full collection looks at them, for 0.1 s
    and more.
    """
    gc.collect()
    gc.freeze()


def compilations(thread: int | None = None) -> int:
    """How often programs have been traced, lowered or compiled since the first call of this function.

    thread: the identity of the thread to count; None: of all.
    """
    counts = _compile_events()
    return sum(counts.values()) if thread is None else counts[thread]


@functools.cache
def _compile_events() -> Counter[int]:
    """The number of JAX's events by thread, from a listener."""
    counts: Counter[int] = Counter()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            counts[threading.get_ident()] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def _check_private(directory: Path, writable_by_others: int) -> None:
    """Makes a directory, and checks that it can be written and has this owner, or ValueError.

    writable_by_others: forbidden permissions.
    """
    if not directory.is_absolute():
        raise ValueError(f"{directory}: there is no home directory")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{directory}: cannot be made ({reason})") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: cannot be written")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & writable_by_others:
        raise ValueError(f"{directory}: other users can read or write it, and cached programs are executed")


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
