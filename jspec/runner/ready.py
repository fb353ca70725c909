"""Which programs are compiled, and a thread that compiles others: requests run by those that exist. No JAX.

A program for some options runs requests with fewer options as well. So a request waits only if no compiled program
has all of its options; if none has those of all running requests, they take turns.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jspec.runner.request import Needs, Request


class Program(NamedTuple):
    """A program of `rows` sequences: a read of `columns` for each, or a burst if `columns` is 0."""

    needs: Needs
    rows: int
    columns: int = 0


class Ready:
    """The compiled programs of a device.

    buckets: rows of bursts, ascending; the last are all slots.

    Attributes:
      busy: whether a program is compiled or waits for it.
    """

    def __init__(self, buckets: Sequence[int]):
        self._buckets = buckets
        self._compiled: set[Program] = set()
        self._best: dict[Program, Program | None] = {}
        self._urgent: list[Program] = []
        self._queue: list[Program] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._turns: dict[Needs, int] = {}

    def start(self, compile: Callable[[Program], object], notify: Callable[[], object]) -> None:
        """Compiles in a thread from here on; without it, whoever first runs a program compiles it.

        compile: called in the thread. After an error the program counts as compiled: whoever runs it meets the error.
        notify: called in the thread after each program.
        """

        def run() -> None:
            while (program := self._next()) is not None:
                with contextlib.suppress(Exception):
                    compile(program)
                self.add(program)
                notify()

        self._thread = threading.Thread(target=run, name="jspec compiler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for the program in work."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def add(self, program: Program) -> None:
        """Counts a program as compiled."""
        with self._changed:
            if program not in self._compiled:
                self._compiled.add(program)
                self._best.clear()
            for queue in (self._urgent, self._queue):
                with contextlib.suppress(ValueError):
                    queue.remove(program)

    def clear(self) -> None:
        """Counts no program as compiled, after a change of shapes."""
        with self._changed:
            self._compiled.clear()
            self._best.clear()

    @property
    def busy(self) -> bool:
        """Whether a program is compiled or waits for it."""
        return bool(self._urgent or self._queue)

    def choose(self, needs: Needs, rows: int, columns: int = 0) -> Program:
        """The program to run: the smallest compiled one; the best one is compiled meanwhile.

        rows: of a burst, at least; of a read, exactly.
        """
        best = self._exact(needs, rows, columns)
        program = self._find(best)
        if self._thread is None or program is None:
            return best
        self._want(best)
        return program

    # For the scheduler

    def admits(self, request: Request, shape: tuple[int, int]) -> bool:
        """Whether a request can be prefilled and run; otherwise, its programs are compiled next.

        shape: rows and columns of a read that is always allowed.
        """
        if self._thread is None:
            return True
        smallest = Program(request.needs, self._buckets[-1]), Program(request.needs, *shape)
        missing = [program for program in smallest if self._find(program) is None]
        for program in missing:
            self._want(program, urgent=True)
        return not missing

    def together(self, requests: Sequence[Request]) -> list[Request]:
        """Those of some running requests that the next burst runs: all, if a program has all of their options."""
        kinds: dict[Needs, list[Request]] = {}
        for request in requests:
            kinds.setdefault(request.needs, []).append(request)
        if self._thread is None or len(kinds) < 2:
            return list(requests)
        # Kinds that have waited longest come first, with all others that fit to them.
        joined, members = Needs(), list[Needs]()
        for needs in sorted(kinds, key=lambda needs: self._turns.get(needs, -1)):
            count = len(kinds[needs]) + sum(len(kinds[member]) for member in members)
            if not members or self._find(self._exact(joined | needs, count)) is not None:
                joined, members = joined | needs, [*members, needs]
        turn = max(self._turns.values(), default=0) + 1
        self._turns = {needs: self._turns.get(needs, -1) for needs in kinds} | dict.fromkeys(members, turn)
        if len(members) < len(kinds):
            self._want(self._exact(joined_needs(requests), len(requests)))
        return [request for request in requests if request.needs in members]

    def shapes(self, requests: Sequence[Request], shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of some shapes of reads that have a program for all of these requests."""
        if self._thread is None:
            return list(shapes)
        needs = joined_needs(requests)
        return [shape for shape in shapes if self._find(Program(needs, *shape)) is not None]

    def readable(self, requests: Sequence[Request], shapes: Sequence[tuple[int, int]]) -> list[Request]:
        """The first of some requests, and others that have a common program of one of the shapes."""
        if self._thread is None or len({request.needs for request in requests}) < 2:
            return list(requests)
        common: list[Request] = []
        for request in requests:
            if not common or self.shapes([*common, request], shapes):
                common.append(request)
        return common

    def want_read(self, requests: Sequence[Request], shape: tuple[int, int]) -> None:
        """Compiles a read, unless it is compiled."""
        if self._thread is not None:
            self._want(Program(joined_needs(requests), *shape))

    def _exact(self, needs: Needs, rows: int, columns: int = 0) -> Program:
        """The best program for a number of rows."""
        return Program(needs, rows if columns else next(size for size in self._buckets if size >= rows), columns)

    def _find(self, best: Program) -> Program | None:
        """The smallest compiled program that can take the place of the best one; None: there is none."""
        with self._changed:
            if best not in self._best:
                fitting = [one for one in self._compiled if _replaces(one, best)]
                self._best[best] = min(fitting, default=None)
            return self._best[best]

    def _want(self, program: Program, *, urgent: bool = False) -> None:
        """Queues a program. urgent: before those that would only be faster."""
        queue = self._urgent if urgent else self._queue
        with self._changed:
            if program not in self._compiled and program not in queue:
                queue.append(program)
                self._changed.notify()

    def _next(self) -> Program | None:
        """Waits for a program to compile; None: the thread ends. It stays in its queue until it is compiled."""
        with self._changed:
            while not self.busy and not self._closing:
                self._changed.wait()
            return None if self._closing else [*self._urgent, *self._queue][0]


def joined_needs(requests: Sequence[Request]) -> Needs:
    """What a program of all these requests must have."""
    needs = Needs()
    for request in requests:
        needs |= request.needs
    return needs


def _replaces(program: Program, best: Program) -> bool:
    rows = program.rows == best.rows if best.columns else program.rows >= best.rows
    return rows and program.columns == best.columns and program.needs | best.needs == program.needs
