"""Dispatched programs, and what their reports say of each request."""

import dataclasses
from concurrent.futures import Future

import jax

from jspec.core.types import TopTokens
from jspec.generation.costs import Trial
from jspec.generation.result import top_pairs
from jspec.generation.support import token_supports
from jspec.runner.plan import Burst, Output, Read
from jspec.runner.programs import Report
from jspec.runner.request import Request


@dataclasses.dataclass(eq=False)
class InFlight:
    """A dispatched program, whose report is being copied to the host.

    places: the row of each request in the report.
    timed: the costs to measure by its rounds, and their branch.
    dispatched_at: when, on a clock of the caller.
    """

    plan: Read | Burst
    report: Report | Future[Report]
    places: dict[Request, int]
    vocab_size: int
    timed: tuple[Trial, int] | None = None
    dispatched_at: float = 0.0

    def wait(self) -> "dict[Request, Output]":
        """Waits for the report; returns the output of each request."""
        report = self.report.result() if isinstance(self.report, Future) else jax.device_get(self.report)
        return {request: _output(request, report, row, self.vocab_size) for request, row in self.places.items()}


def _output(request: Request, report: Report, row: int, vocab_size: int) -> Output:
    count, recorded = int(report.length[row]) - len(request.all_tokens), report.recorded
    tokens = report.tokens[row, :count].tolist()
    logprobs = top = sampled = support = None
    if recorded is not None:
        logprobs, sampled = recorded.logprobs[row, :count].tolist(), [0.0] * count
        if recorded.sampled_logprobs is not None:
            sampled = recorded.sampled_logprobs[row, :count].tolist()
        if request.support:
            rows = jax.tree.map(lambda x: x[row, :count], recorded.support)
            support = token_supports(rows, tokens, request.support, vocab_size)
        if recorded.top is not None and request.top_logprobs:
            columns = TopTokens(recorded.top.ids[row, :count], recorded.top.logprobs[row, :count])
            top = top_pairs(columns, request.top_logprobs)
    stats = report.stats
    return Output(
        length=int(report.length[row]),
        tokens=tokens,
        finish_code=int(report.finish_code[row]),
        rounds=int(stats.rounds[row]),
        accept_counts=stats.accept_counts[row].tolist(),
        branch_counts=None if stats.branch_counts is None else stats.branch_counts[row].tolist(),
        origin=report.origin[row, :count].tolist(),
        logprobs=logprobs,
        top_logprobs=top,
        sampled_logprobs=sampled,
        support=support,
        dropped=int(stats.dropped[row]),
    )
