"""Ctrl-C in a command of jspec: the process ends at once, with status 130.

Python calls the handler of a signal in the main thread, which may compile for seconds meanwhile; and a process that
ends normally crashes while XLA compiles in another thread. So a thread waits for SIGINT and ends the process. No
file is damaged by this, because all of them are written atomically.

The import itself prepares the process, before JAX is imported. A program that imports jspec keeps KeyboardInterrupt.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

STATUS = 130
"""The exit status of an interrupted command."""
_FLUSH_SECONDS = 0.3
_left_to_others = 0


def end_at_interrupt() -> None:
    """Prepares the process of a command, unless SIGINT has a handler or is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or os.name != "posix":
        return
    if threading.current_thread() is not threading.main_thread():
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # Python writes to the pipe for signals with a handler.
    threading.Thread(target=_watch, args=(read,), name="jspec interrupt", daemon=True).start()


@contextlib.contextmanager
def first_to(handler: Callable[[int, FrameType | None], object]) -> Generator[None, None, None]:
    """A context in which the first SIGINT is left to a handler. In a command, a second one ends the process at once."""
    global _left_to_others
    before = signal.signal(signal.SIGINT, handler)
    _left_to_others = 1
    try:
        yield
    finally:
        _left_to_others = 0
        signal.signal(signal.SIGINT, before)


def _watch(read: int) -> None:
    global _left_to_others
    while True:
        for number in os.read(read, 64):
            if number == signal.SIGINT and not _left_to_others:
                _end()
            elif number == signal.SIGINT:
                _left_to_others -= 1


def _end() -> None:
    try:
        # Nobody may be reading the output.
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(_FLUSH_SECONDS)
    finally:
        os._exit(STATUS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _is_command() -> bool:
    """Whether the process is `jspec` or `python -m jspec`."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program == "-m":  # Python looks for the module, whose name comes before the arguments.
        program = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0]
    return program == "jspec"


if _is_command():
    end_at_interrupt()
