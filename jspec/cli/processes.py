"""Commands that run in several processes, such as one per host: how these meet, and who speaks."""

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Generator

import jax

from jspec.core import interrupt
from jspec.core.options import option

AUTOMATIC = "auto"
_CLUSTERS = "Slurm, Open MPI, Kubernetes or Cloud TPU"
_HEARTBEAT_SECONDS = 30
_SHUTDOWN_SECONDS = 60
_MOST_PROCESSES = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Where several processes meet."""

    coordinator: str | None = option(
        None,
        f"where process 0 listens for the others; {AUTOMATIC}: JAX finds all processes by {_CLUSTERS} (default: a "
        "single process)",
        metavar="HOST:PORT",
    )
    processes: int | None = option(None, "number of processes, with HOST:PORT", least=1, most=_MOST_PROCESSES)
    process_id: int | None = option(
        None, "this process, from 0 on, with HOST:PORT", metavar="I", least=0, most=_MOST_PROCESSES
    )


PROCESS_GROUP = {
    "several processes:\nEach process, such as one per host, runs the same command; --tensor and --data count the "
    "devices of all.": ("coordinator", "processes", "process_id")
}


def start_processes(options: ProcessOptions, *, split: bool) -> None:
    """Lets the processes meet, if there are several. Comes before everything that uses a device.

    split: whether the model is split over devices, or copied to groups of them.
    """
    address, count, index = options.coordinator, options.processes, options.process_id
    others = {"--processes": count, "--process-id": index}
    typed = [f"{name} {value}" for name, value in others.items() if value is not None]
    # A single process needs no address.
    if address is None:
        if typed:
            raise ValueError(f"{typed[0]}: requires --coordinator")
        return
    if not split:
        raise ValueError(
            f"--coordinator {address}: requires --tensor or --data, which use the devices of all processes"
        )
    # JAX finds the others, or the options name them.
    if address == AUTOMATIC:
        if typed:
            raise ValueError(f"{typed[0]}: requires --coordinator HOST:PORT, not {AUTOMATIC}")
    else:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--coordinator {address!r}: must be HOST:PORT or {AUTOMATIC}")
        if len(typed) < len(others):
            raise ValueError(f"--coordinator {address}: requires --processes and --process-id")
        if count is not None and index is not None and index >= count:
            raise ValueError(f"--process-id {index}: must be less than --processes, {count}")
    jax.config.update("jax_enable_preemption_service", False)  # which would swallow SIGTERM
    # Wait for all processes.
    try:
        jax.distributed.initialize(
            None if address == AUTOMATIC else address,
            count,
            index,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error)
        if address == AUTOMATIC and isinstance(error, ValueError):
            reason = f"JAX finds no {_CLUSTERS} that describes the processes ({reason}); give HOST:PORT"
        raise ValueError(f"--coordinator {address}: {reason}") from None


def is_first(options: ProcessOptions) -> bool:
    """Whether this is process 0, or the only one."""
    return options.coordinator is None or jax.process_index() == 0


@contextlib.contextmanager
def quiet_unless_first(options: ProcessOptions) -> Generator[None, None, None]:
    """A context in which only process 0 prints. Errors that leave it are printed by all."""
    if is_first(options):
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def patient() -> Generator[None, None, None]:
    """A context in which a first SIGTERM or SIGINT does nothing: process 0 usually gets it, too, and ends this one."""

    def once(number: int, _: object) -> None:
        name = signal.Signals(number).name
        print(f"jspec: {name}: ends with process 0; a second signal ends this process now", file=sys.stderr, flush=True)
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with interrupt.first_to(once):
        signal.signal(signal.SIGTERM, once)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before[signal.SIGTERM])
