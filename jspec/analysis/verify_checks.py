"""The checks of `verify`: cases, the most telling ones first, each with a function to run it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jspec.analysis import poison, verify_requests, verify_statistics
from jspec.analysis.contract import Case, Cases, Outcome
from jspec.analysis.verify_subject import Subject, check_counters, reshaped, stop_problem
from jspec.core.optional import as_branching
from jspec.generation.result import Generation, Generations
from jspec.generation.run import Run
from jspec.loading.model import probe_draft

DEPTHS = (1, 2, 3, 5, 8, 16, 33, *(depth for depth in range(1, 34) if depth not in (1, 2, 3, 5, 8, 16, 33)))
TREES = ((3, 2, 6), (4, 3, 16), (5, 4, 32), (2, 8, 12), (8, 2, 24), (7, 8, 64))
"""Depth, width and nodes."""


# Greedy tokens


def same_output(subject: Subject, **changes: Any) -> Outcome:
    """Greedy tokens equal those of plain decoding, and the counters fit them."""
    out = subject.run(**changes) if changes else subject.drafted()
    outcome, counters = subject.compare(out.tokens, subject.plain().tokens), check_counters(out)
    return counters if outcome.verdict == "passed" and counters.verdict == "failed" else outcome


def _chains(subject: Subject) -> Cases:
    yield Case("as given", partial(same_output, subject))
    for depth in DEPTHS:
        drafter = reshaped(subject.drafter, depth)
        if drafter is not None:
            yield Case(f"depth {depth}", partial(same_output, subject, drafter=drafter))


def _trees(subject: Subject) -> Cases:
    for depth, width, nodes in TREES:
        drafter = reshaped(subject.drafter, depth, width, nodes)
        if drafter is not None:
            yield Case(f"depth {depth}, width {width}, {nodes} nodes", partial(same_output, subject, drafter=drafter))


def _pages(subject: Subject) -> Cases:
    for size in (5, 1, 16, 64, 128):
        yield Case(f"{size} rows", partial(same_output, subject, page_size=size))


# Ends of texts


def _limits(subject: Subject) -> Outcome:
    limits = [1 + index % (subject.new // 2) for index in range(len(subject.prompts))]
    whole = subject.plain(subject.precise).tokens
    cut = [ids[:limit] for ids, limit in zip(whole, limits, strict=True)]
    # The longest one keeps the program of other checks.
    limits[subject.longest], cut[subject.longest] = subject.new, whole[subject.longest]
    out = subject.run(subject.precise, max_new_tokens=limits)
    outcome = subject.compare(out.tokens, cut, subject.precise)
    return outcome if outcome.verdict == "failed" else check_counters(out)


def _ends_at(subject: Subject, kind: str) -> Outcome:
    """Texts end with the first of some of their own tokens."""
    whole = subject.plain(subject.precise).tokens
    ends = tuple(dict.fromkeys(ids[(3 + 2 * index) % len(ids)] for index, ids in enumerate(whole)))[:6]
    if kind == "stop":
        out = subject.run(subject.precise, stop=ends)
    else:
        out = subject.run(dataclasses.replace(subject.precise, eos=(*subject.precise.eos, *ends)))
    cut = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))] for ids in whole]
    outcome = subject.compare(out.tokens, cut, subject.precise)
    return outcome if outcome.verdict == "failed" else check_counters(out)


def _stop_text(subject: Subject) -> Outcome:
    """Texts end before the first of a string from the middle of each."""
    if subject.model.tokenizer is None:
        raise ValueError("the model has no tokenizer")
    plain = subject.plain(subject.precise)
    # Every other text stops in its middle. The last characters of the others may begin a stop string.
    texts = [text for item in plain if len(text := item.text or "") > 24]
    middles, beginnings = (text[len(text) // 2 :][:12] for text in texts[::2]), (f"{text[-2:]}~~" for text in texts)
    stops = tuple(dict.fromkeys([*middles, *beginnings]))
    out = subject.run(subject.precise, stop=stops)
    for index, (item, whole) in enumerate(zip(out, plain, strict=True)):
        problem = stop_problem(item, whole, stops)
        if problem:
            return Outcome("failed", 0, f"sequence {index} {problem}")
    return check_counters(out)


def _ends(subject: Subject) -> Cases:
    yield Case("limits of 1, 2, 3, ... tokens", partial(_limits, subject))
    for kind in ("eos", "stop"):
        yield Case(f"ids as {kind}", partial(_ends_at, subject, kind), quick=True)


# Rounds


def same_rounds(
    subject: Subject,
    run: Callable[[], Sequence[Generation]],
    where: str,
    indices: Sequence[int] | None = None,
    *,
    only: bool = False,
) -> Outcome:
    """The rounds of a run are those of one call for all prompts.

    where: the difference of the run, for messages.
    indices: prompts of the run; None: all.
    only: whether just tokens are compared, as a batch shares the choice of a drafter.
    """
    indices = range(len(subject.prompts)) if indices is None else indices
    compared = 0
    for index, item in zip(indices, run(), strict=True):
        right = subject.drafted(subject.precise)[index]
        same, compared = item.tokens == right.tokens, compared + len(right.tokens)
        if not (same and (only or item.tokens_per_round == right.tokens_per_round)):
            return Outcome("failed", 0, f"sequence {index} has other {'rounds' if same else 'tokens'} {where}")
    return Outcome("passed", compared)


def poisoned(
    subject: Subject,
    *,
    chunk: int | None = None,
    spare: int = 0,
    before: Callable[[Run], None] = lambda run: None,
    **options: Any,
) -> Generations:
    """As `in_pieces`, with NaN in all rows without a committed token before each round.

    spare: pages of NaN to add, with all pages shuffled.
    """
    defaults = {"window": None, "keep_first": 0}
    window = {name: getattr(subject.drafter, name, default) for name, default in defaults.items()}

    def spoil(run: Run) -> None:
        nonlocal spare
        s = run.state
        rows = np.where(s.done, 0, s.length - 1)
        changes: dict[str, Any] = {"cache": poison.spoil(s.cache, rows, spare=spare)}
        if hasattr(s.draft, "cache"):
            drafted = np.where(s.done, 0, getattr(s.draft, "length", rows))
            cache = poison.spoil(s.draft.cache, drafted, spare=spare, **window)
            changes["draft"] = dataclasses.replace(s.draft, cache=cache)
        run.state, spare = dataclasses.replace(s, **changes), 0
        before(run)

    return in_pieces(subject, chunk, spoil, **options)


def in_pieces(
    subject: Subject,
    chunk: int | None = None,
    before: Callable[[Run], None] = lambda run: None,
    *,
    only: int | None = None,
    **options: Any,
) -> Generations:
    """A generation of one call per round, with `before` each; prompts are read in chunks of this width.

    only: the index of one prompt, alone in its batch; None: all prompts.
    """
    prompts = subject.prompts
    if only is not None:
        prompts, options = [prompts[only]], _options_of(subject, only) | options
    run = Run(subject.precise, prompts, subject.options(**options), chunk=chunk)
    finished = run.advance(0)
    while not finished:
        before(run)
        finished = run.advance(1)
    return run.result()


def _options_of(subject: Subject, index: int) -> dict[str, Any]:
    """The seed and the sampling of one prompt."""
    sampling = None if subject.sampling is None else [subject.sampling[index]]
    return {"seed": [(subject.seed, index)], "sampling": sampling}


def each_alone(subject: Subject, indices: Sequence[int]) -> list[Generation]:
    """Generations of some of the prompts, each in a batch of its own."""
    items = []
    for i in indices:
        items += subject.run(subject.precise, [subject.prompts[i]], **_options_of(subject, i))
    return items


def alone(subject: Subject, indices: Sequence[int]) -> Outcome:
    """Some of the sequences take the same rounds alone as in the batch."""
    branches = as_branching(subject.drafter.bind(subject.model.target, subject.model.draft)) is not None
    return same_rounds(subject, partial(each_alone, subject, indices), "alone than in a batch", indices, only=branches)


def _batches(subject: Subject) -> Cases:
    # The shortest prompts share a program.
    order = sorted(range(len(subject.prompts)), key=lambda index: len(subject.prompts[index]))
    half = len(order) // 2
    for name, indices in {"each short prompt alone": order[:half], "each long prompt alone": order[half:]}.items():
        if indices:
            yield Case(name, partial(alone, subject, indices))


def _pieces(subject: Subject) -> Cases:
    run = partial(same_rounds, subject)
    yield Case("round by round", partial(run, partial(in_pieces, subject), "if the host calls each round"))
    spoiled = partial(poisoned, subject)
    yield Case("NaN in free rows", partial(run, spoiled, "with NaN in rows without committed tokens"), quick=True)


def _chunks(subject: Subject) -> Cases:
    for size in (2, 5, 16):
        where = f"if prompts are read in chunks of {size}"
        yield Case(f"chunks of {size}", partial(same_rounds, subject, partial(in_pieces, subject, size), where))


# The draft


def _fit(subject: Subject) -> Outcome:
    fit = probe_draft(subject.model)
    warning = fit.warning(subject.model.name)
    verdict = "passed" if warning is None else "failed" if fit.better is not None else "warning"
    return Outcome(verdict, fit.total, warning or "")


def _accepted(subject: Subject) -> Outcome:
    """Some drafts are accepted and some are not: otherwise the other checks show little."""
    stats = subject.drafted(subject.precise).stats
    text = f"accept length {stats.accept_length:.2f}, {stats.accept_rate:.0%} of drafts accepted"
    if not 0.02 < stats.accept_rate < 0.98:
        return Outcome("warning", stats.drafted, f"{text}: too few of either kind for the other checks")
    return Outcome("passed", stats.drafted, text)


def _draft(subject: Subject) -> Cases:
    yield Case("acceptance", partial(_accepted, subject))
    if subject.model.draft is not None:
        yield Case("readings", partial(_fit, subject))


CHECKS: Mapping[str, Callable[[Subject], Cases]] = {
    "chains": _chains,
    "ends of texts": _ends,
    "rounds": _pieces,
    "rules": verify_statistics.rules,
    "trees": _trees,
    "batches": _batches,
    "chunks": _chunks,
    "pages": _pages,
    "stop strings": lambda subject: iter([Case("from the middle of each text", partial(_stop_text, subject))]),
    "sampling": partial(verify_requests.requests, grammars=False),
    "grammars": partial(verify_requests.requests, grammars=True),
    "log-probabilities": verify_requests.records,
    "engine": verify_requests.engine,
    "distributions": verify_statistics.samples,
    "draft": _draft,
}
"""What finds most faults in the least time comes first; each check adds few programs to those of the checks above."""
