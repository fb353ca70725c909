"""The compiled programs of a device, and a thread to compile others while requests run in these. No JAX.

A program for some options runs requests with fewer options as well, and one of many sequences runs fewer. A request
waits in the queue until some program can run it together with the requests in slots; they go on meanwhile.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from jspec.runner.request import CompilationError, Needs, Phase, Request

PATIENCE = 16
"""How often a larger program runs in place of the best one, before the best one is compiled."""
MOST_FASTER = 48
"""Programs to compile only because larger ones in their place are slower. Each takes memory as long as the process
lives; about a hundred on a CPU take all memory mappings that Linux allows a process, and end it."""


class Program(NamedTuple):
    """The name of a program.

    kind: "slots" are the small ones: release a slot; save and restore a snapshot.
    rows, columns: sequences, and columns of a read for each.
    """

    kind: Literal["burst", "read", "admit", "slots"]
    needs: Needs = Needs()
    rows: int = 0
    columns: int = 0

    def replaces(self, best: "Program") -> bool:
        """Whether it does all of another program."""
        rows = self.rows == best.rows if best.kind == "read" else self.rows >= best.rows
        same = (self.kind, self.columns) == (best.kind, best.columns)
        return same and rows and Needs.joined((self.needs, best.needs)) == self.needs


class Ready:
    """The compiled programs of a device.

    buckets: rows of bursts, ascending; the last are all slots.
    admissions: the same for admissions; None: those of bursts.

    Attributes:
      refused: requests whose programs do not compile, until the caller takes and ends them.
    """

    def __init__(self, buckets: Sequence[int], admissions: Sequence[int] | None = None):
        self._buckets, self._admissions = buckets, admissions or buckets
        self.refused: list[tuple[Request, CompilationError]] = []
        self._compiled: set[Program] = set()
        self._failed: dict[Program, Exception] = {}
        self._urgent: list[Program] = []
        self._later: list[Program] = []
        """Programs to compile, in order: for a waiting request, and faster ones. The one in work is among them."""
        self._missed: Counter[Program] = Counter()
        self._faster = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, compile: Callable[[Program], object], notify: Callable[[], object]) -> None:
        """Starts the thread. Without it all programs count as compiled: their first call compiles them.

        compile, notify: are called in the thread for a program, and after it.
        """

        def run() -> None:
            while (program := self._next()) is not None:
                error = None
                try:
                    compile(program)
                except Exception as raised:
                    error = raised
                self.add(program, error)
                notify()

        self._thread = threading.Thread(target=run, name="jspec compiler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the program in work."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self) -> None:
        """Waits for the end of the thread."""
        if self._thread is not None:
            self._thread.join()

    @property
    def busy(self) -> bool:
        """Whether a program is being compiled, or waits for it."""
        return bool(self._urgent or self._later)

    @property
    def count(self) -> int:
        """Number of compiled programs."""
        return len(self._compiled)

    def add(self, program: Program, error: Exception | None = None) -> None:
        """Counts a program as compiled, or as impossible after an error."""
        with self._changed:
            if error is None:
                self._compiled.add(program)
            else:
                self._failed[program] = error
            for programs in (self._urgent, self._later):
                with contextlib.suppress(ValueError):
                    programs.remove(program)

    def choose(self, program: Program) -> Program:
        """The compiled program to run in place of this one, with more rows or more options.

        After `PATIENCE` such calls this one is compiled, too, unless `MOST_FASTER` have been. A program of admissions
        may have fewer rows.
        """
        # Some program for admissions is always there, for other kinds one with enough rows.
        program = self._padded(program)
        replacement = self._find(program)
        if replacement is None and program.kind == "admit":
            with self._changed:
                replacement = max((other for other in self._compiled if other.kind == "admit"), default=None)
        if self._thread is None or replacement is None:
            return program
        if replacement != program:
            self._miss(program)
        return replacement

    # For the scheduler

    def admits(
        self,
        request: Request,
        admitted: Sequence[Request],
        waiting: int,
        shapes: Sequence[tuple[int, int]],
        best: tuple[int, int],
    ) -> bool:
        """Whether a request can run beside those with slots. Otherwise, the programs for it are compiled next.

        If they cannot be, the request is added to `refused`; for later requests they are tried again.

        admitted: the requests with slots.
        waiting: number of requests without slots; new programs of bursts have room for them.
        shapes, best: rows and columns of reads, any of which will do, and of the best one.
        """
        if self._thread is None:
            return True
        # Programs without options, then a burst with all requests, and a read with all of those in prefill.
        missing = [program for program in (Program("slots"), self._padded(Program("admit"))) if not self._find(program)]
        burst = Program("burst", joined_needs([request, *admitted], "burst"), len(admitted) + 1)
        if not self._find(self._padded(burst)):
            missing.append(self._padded(burst._replace(rows=min(len(admitted) + waiting, self._buckets[-1]))))
        reading = [other for other in admitted if other.phase is Phase.READING]
        read = Program("read", joined_needs([request, *reading]))
        if not any(self._find(read._replace(rows=rows, columns=columns)) for rows, columns in shapes):
            missing.append(read._replace(rows=best[0], columns=best[1]))
        for program in missing:
            error = self._failed.get(program)
            if error is not None and program in request.awaited:
                self.refused.append(
                    (request, CompilationError(f"a program for this request does not compile: {error}"))
                )
                break
            # An error of an earlier request does not count.
            self._failed.pop(program, None)
            request.awaited.add(program)
            self._want(program, self._urgent)
        return not missing

    def shapes(
        self, requests: Sequence[Request], shapes: Sequence[tuple[int, int]], best: tuple[int, int]
    ) -> Sequence[tuple[int, int]]:
        """The shapes of reads with a compiled program for all of these requests; counts a use of the best one."""
        reads = {shape: Program("read", joined_needs(requests), *shape) for shape in shapes}
        compiled = [shape for shape, read in reads.items() if self._find(read)]
        if self._thread is None or not compiled:
            return shapes
        if best not in compiled:
            self._miss(reads[best])
        return compiled

    def _padded(self, program: Program) -> Program:
        """The program with its rows rounded up to a bucket."""
        if program.kind not in ("burst", "admit"):
            return program
        sizes = self._buckets if program.kind == "burst" else self._admissions
        return program._replace(rows=next(size for size in sizes if size >= program.rows))

    def _find(self, program: Program) -> Program | None:
        """The smallest compiled program to take the place of another one."""
        with self._changed:
            if program in self._compiled:
                return program
            return min((other for other in self._compiled if other.replaces(program)), default=None)

    def _miss(self, program: Program) -> None:
        """Counts a use of a missing program."""
        self._missed[program] += 1
        if self._missed[program] == PATIENCE and self._faster < MOST_FASTER:
            self._faster += 1
            self._want(program, self._later)

    def _want(self, program: Program, programs: list[Program]) -> None:
        """Adds a program to those to compile, urgent or later."""
        with self._changed:
            if program not in self._compiled and program not in self._failed and program not in programs:
                programs.append(program)
                self._changed.notify()

    def _next(self) -> Program | None:
        """Waits for a program to compile; None: the thread ends."""
        with self._changed:
            while self._changed.wait_for(lambda: self.busy or self._closing) and not self._closing:
                # Many requests wait at once: the program for one of them may run others, too.
                if not self._urgent or not self._find(self._urgent[0]):
                    # It stays in its list, so nobody adds it again.
                    return [*self._urgent, *self._later][0]
                self._urgent.pop(0)
            return None


def joined_needs(requests: Iterable[Request], kind: str = "read") -> Needs:
    """The needs of a program of this kind for all these requests."""
    needs = Needs.joined(request.needs for request in requests)
    return needs if kind == "read" else needs._replace(embeds=False)
