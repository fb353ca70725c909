"""The checks of `verify`: cases, the most telling ones first, each with a function to run it."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jspec.analysis import poison, verify_statistics
from jspec.analysis.contract import Case, Cases, Outcome, difference
from jspec.analysis.verify_subject import Subject, reshaped
from jspec.core.optional import as_branching
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.engine import Engine
from jspec.generation.result import Generation, Generations
from jspec.generation.run import Run
from jspec.generation.score import score
from jspec.loading.model import probe_draft
from jspec.text.grammar import Grammar

DEPTHS = (1, 2, 3, 5, 8, 16, 33, *(depth for depth in range(1, 34) if depth not in (1, 2, 3, 5, 8, 16, 33)))
TREES = ((3, 2, 6), (4, 3, 16), (5, 4, 32), (2, 8, 12), (8, 2, 24), (7, 8, 64))
"""Depth, width and nodes."""
SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.2, top_k=20),
    Sampling(temperature=1.1, min_p=0.05),
    Sampling(temperature=0.0, repetition_penalty=1.8),
    Sampling(temperature=0.5, presence_penalty=1.5, frequency_penalty=1.0),
    Sampling(temperature=0.9, logit_bias={1: 3.0, 2: -3.0}, min_new_tokens=8),
    Sampling(temperature=0.0),
)
TOP, TOLERANCE = 3, 5e-3
"""Most probable tokens to record; largest difference of log-probabilities from those of a single forward."""
PATTERN = r"[a-z]{2,8}( [a-z]{2,8}){1,4}"
GRAMMARS = tuple(Sampling(temperature=t, grammar=Grammar.regex(PATTERN)) for t in (0.0, 1.0, 0.7, 1.3))


# Greedy tokens


def same_output(subject: Subject, **changes: Any) -> Outcome:
    """Greedy tokens equal those of plain decoding, and the counters fit them."""
    out = subject.run(**changes) if changes else subject.drafted()
    outcome, counted = subject.compare(out.tokens, subject.plain().tokens), _counted(out)
    return counted if outcome.verdict == "passed" and counted.verdict == "failed" else outcome


def _counted(out: Generations) -> Outcome:
    """Counters of rounds and accepted drafts fit the tokens of each sequence."""
    for index, item in enumerate(out):
        counts, size = item.stats, len(item.tokens)
        rounds, dropped = int(counts.rounds.sum()), int(counts.dropped.sum())
        total = 1 + counts.accepted + rounds - dropped
        problem = ""
        if size != total or counts.new_tokens != total:
            problem = f"1 + {counts.accepted} accepted + {rounds} rounds - {dropped} dropped = {total}"
        elif len(item.tokens_per_round) != rounds or sum(depth > 0 for depth in item.origin) > counts.accepted:
            problem = f"{rounds} rounds and {counts.accepted} accepted drafts, but was made in others"
        if problem:
            return Outcome("failed", 0, f"sequence {index} has {size} new tokens, and counts {problem}")
    return Outcome("passed", sum(map(len, out)))


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
    return outcome if outcome.verdict == "failed" else _counted(out)


def _ends_at(subject: Subject, kind: str) -> Outcome:
    """Texts end with the first of some of their own tokens."""
    whole = subject.plain(subject.precise).tokens
    ends = tuple(dict.fromkeys(ids[(3 + 2 * index) % len(ids)] for index, ids in enumerate(whole)))[:6]
    if kind == "stop":
        out = subject.run(subject.precise, stop=ends)
    else:
        out = subject.run(dataclasses.replace(subject.precise, eos=(*subject.precise.eos, *ends)))
    cut = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))] for ids in whole]
    return subject.compare(out.tokens, cut, subject.precise)


def _stop_text(subject: Subject) -> Outcome:
    """Texts end before the first of a string from the middle of each."""
    if subject.model.tokenizer is None:
        raise ValueError("the model has no tokenizer")
    plain = subject.plain(subject.precise)
    stops = tuple(dict.fromkeys(text[len(text) // 2 :][:12] for text in plain.text or [] if len(text) > 24))
    out = subject.run(subject.precise, stop=stops)
    for index, (item, whole) in enumerate(zip(out, plain, strict=True)):
        text = whole.text or ""
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        right, reason = text[: min(ends, default=len(text))], "stop" if ends else whole.finish_reason
        if item.text != right:
            what = f"the text ends with {(item.text or '')[-20:]!r} instead of {right[-20:]!r}"
            return Outcome("failed", 0, f"sequence {index}: {what}")
        # The device stops, too, with the token completing the string.
        beyond = subject.model.tokenizer.decode(item.tokens[:-1])
        if item.finish_reason != reason or any(stop in beyond for stop in stops):
            return Outcome("failed", 0, f"sequence {index} goes on after a stop string, to {item.finish_reason!r}")
    return Outcome("passed", sum(map(len, out)))


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


def poisoned(subject: Subject, *, chunk: int | None = None, spare: int = 0, **options: Any) -> Generations:
    """A generation in which all rows without a committed token are NaN before each round.

    chunk: columns of each prefill. spare: pages of NaN to add, with all pages shuffled.
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

    return in_pieces(subject, chunk, spoil, **options)


def in_pieces(
    subject: Subject, chunk: int | None = None, before: Callable[[Run], None] = lambda run: None, **options: Any
) -> Generations:
    """A generation of one call per round, with `before` each; prompts are read in chunks of this width."""
    run = Run(subject.precise, subject.prompts, subject.options(**options), chunk=chunk)
    finished = run.advance(0)
    while not finished:
        before(run)
        finished = run.advance(1)
    return run.result()


def each_alone(subject: Subject, indices: Sequence[int]) -> list[Generation]:
    """Generations of some of the prompts, each in a batch of its own."""
    items = []
    for i in indices:
        sampling = None if subject.sampling is None else [subject.sampling[i]]
        options: dict[str, Any] = {"seed": [(subject.seed, i)], "sampling": sampling}
        items += subject.run(subject.precise, [subject.prompts[i]], **options)
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


# Options of requests


def _sampled(subject: Subject, samplings: Sequence[Sampling], drafter: Drafter | None) -> Generations:
    """A generation of every prompt with every kind of sampling; recorded, one program serves several checks."""
    count = max(len(subject.prompts), len(samplings))
    prompts = [subject.prompts[i % len(subject.prompts)] for i in range(count)]
    cycled = [samplings[i % len(samplings)] for i in range(count)]
    options = {"drafter": drafter, "sampling": cycled, "logprobs": TOP, **({} if drafter else {"accept": None})}
    return subject.once((repr(samplings), drafter), partial(subject.run, subject.precise, prompts, **options))


def _options(
    subject: Subject, samplings: Sequence[Sampling], drafter: Drafter | None = None, *, grammars: bool = False
) -> Outcome:
    """Tokens equal those of plain decoding with the same options and seed, each sequence with its own.

    grammars: whether the sequences with a grammar, or the others, are compared.
    """
    if not subject.repeats_plain:
        raise ValueError(f"accept={subject.accept}: samples differ from those of plain decoding")
    if grammars and subject.model.tokenizer is None:
        raise ValueError("the model has no tokenizer")
    # Grammars and samplings run side by side, and begin with different ones.
    drafter, compared = drafter or subject.drafter, 0
    first, second = (_sampled(subject, samplings, one) for one in ((drafter, None) if grammars else (None, drafter)))
    drafted, expected = (first, second) if grammars else (second, first)
    for index, item in enumerate(drafted):
        sampling = samplings[index % len(samplings)]
        if grammars != (sampling.grammar is not None):
            continue
        at, compared = difference(item.tokens, expected[index].tokens), compared + len(item.tokens)
        if at is not None:
            what = f"a grammar at temperature {sampling.temperature}" if grammars else str(sampling)
            return Outcome("failed", 0, f"sequence {index} differs from plain decoding at new token {at} with {what}")
        if grammars and item.finish_reason == "eos" and not re.fullmatch(PATTERN, item.text or ""):
            return Outcome("failed", 0, f"sequence {index}: {item.text!r} is not in the language of the grammar")
    return Outcome("passed", compared)


def _mixed(subject: Subject) -> tuple[Sampling, ...]:
    """All kinds of sampling in one batch, with grammars if there is a tokenizer."""
    return SAMPLINGS if subject.model.tokenizer is None else (*SAMPLINGS, *GRAMMARS)


def _requests(subject: Subject, *, grammars: bool) -> Cases:
    run, mixed, tree = partial(_options, grammars=grammars), _mixed(subject), reshaped(subject.drafter, 4, 3, 16)
    yield Case("all kinds in a batch", partial(run, subject, mixed))
    if tree is not None:
        yield Case("the same in trees", partial(run, subject, mixed, tree))
    yield Case("one kind", partial(run, subject, (GRAMMARS if grammars else SAMPLINGS)[:1]))


def _logprobs(subject: Subject, samplings: Sequence[Sampling] | None) -> Outcome:
    """Log-probabilities of new tokens, and the highest three, are those of one forward over the whole text."""
    if samplings is None:
        items = subject.run(subject.precise, logprobs=TOP).items
    else:
        items = _sampled(subject, samplings, subject.drafter)[: len(SAMPLINGS)]
    # Texts of one length share a program.
    texts = [[*item.prompt, *item.tokens] for item in items]
    longest = max(map(len, texts))
    forwards = score(subject.precise, [[*text, *text[:1] * (longest - len(text))] for text in texts], top_k=TOP)
    for index, (item, forward) in enumerate(zip(items, forwards, strict=True)):
        new = slice(len(item.prompt), len(texts[index]))
        tops = item.top_logprobs or [], forward.top[new]
        pairs = [(item.logprobs or [], forward.logprobs[new])]
        pairs += [([top[rank][1] for top in tops[0]], [top[rank][1] for top in tops[1]]) for rank in range(TOP)]
        for rank, (ours, theirs) in enumerate(pairs):
            recorded, right = np.array(ours, float), np.array(theirs, float)
            error = np.abs(recorded - right)
            if not error.max() < TOLERANCE:
                at, name = int(error.argmax()), f"{rank}. highest log-probability" if rank else "log-probability"
                where = f"sequence {index}: the {name} at new token {at} is {recorded[at]:.4f}"
                return Outcome("failed", 0, f"{where}, but {right[at]:.4f} in one forward over the whole text")
    return Outcome("passed", sum(map(len, items)))


def _records(subject: Subject) -> Cases:
    yield Case("all kinds of sampling", partial(_logprobs, subject, _mixed(subject)))
    yield Case("greedy", partial(_logprobs, subject, None))


# The engine


def _served(subject: Subject, preempts: bool, sampling: Sampling | None) -> Outcome:
    """Requests with shared beginnings, in turns and perhaps with preemption, get the tokens of plain decoding."""
    new, shared = subject.new, subject.prompts[subject.longest]
    # The same tokens but for the last one, the first one, and none.
    others = [[*shared[:-1], 1], [1, *shared[1:]], shared[:-1] or shared, shared]
    prompts = [*subject.prompts, *others]
    # Two batches of one program, compiled by other checks.
    batch = [*others, *subject.prompts[len(others) :]]
    options: dict[str, Any] = {"drafter": None, "accept": None, "sampling": sampling}
    plain = [*(subject.plain(subject.precise) if sampling is None else subject.run(subject.precise, **options))]
    seeds = [(subject.seed, len(plain) + index) for index in range(len(batch))]
    plain += subject.run(subject.precise, batch, seed=seeds, **options)[: len(others)]
    context, size = max(map(len, prompts)) + new, 8
    sizes: dict[str, Any] = {"slots": 3, "context": context, "page_size": size, "prefill_tokens": 4}
    if preempts:
        # One and a half of the longest sequence, and what drafts write beyond it.
        sizes["pages"] = 2 + -(-3 * (context + 40) // (2 * size))
    with Engine(subject.precise, drafter=subject.drafter, accept=subject.accept, **sizes) as engine:
        options = {"max_new_tokens": new, "sampling": sampling}
        handles = [engine.submit(ids, seed=[(subject.seed, i)], **options) for i, ids in enumerate(prompts)]
        results = [handle.result() for handle in handles]
        metrics = engine.metrics()
    for index, (item, right) in enumerate(zip(results, plain, strict=True)):
        at = difference(item.tokens, right.tokens)
        if at is not None:
            where = f"request {index} of an engine differs from plain decoding at new token {at}"
            seen = f"{metrics.prefix_hits} tokens came from shared pages, {metrics.preemptions} requests were preempted"
            return Outcome("failed", 0, f"{where}; {seen}")
    return Outcome("passed", sum(len(item.tokens) for item in results))


def _engine(subject: Subject) -> Cases:
    sampling = None if subject.sampling is None else subject.sampling[0]
    yield Case("shared beginnings", partial(_served, subject, False, sampling))
    yield Case("preemption", partial(_served, subject, True, sampling))
    if subject.repeats_plain:
        yield Case("preemption, sampled", partial(_served, subject, True, Sampling(temperature=1.0)))


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
    "sampling": partial(_requests, grammars=False),
    "grammars": partial(_requests, grammars=True),
    "log-probabilities": _records,
    "distributions": verify_statistics.samples,
    "engine": _engine,
    "draft": _draft,
}
"""What finds most faults in the least time comes first; each check adds few programs to those of the checks above."""
