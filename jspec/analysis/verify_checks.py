"""The checks of `verify`: cases, the most telling ones first, each with a function to run it."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jspec.analysis import poison, verify_statistics
from jspec.analysis.contract import difference, same_rounds
from jspec.analysis.verify_subject import Cases, Outcome, Subject, reshaped
from jspec.core.optional import as_branching
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.engine import Engine
from jspec.generation.result import Generations
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
TOLERANCE = 5e-3
"""Largest difference of log-probabilities from those of a single forward."""
PATTERN = r"[a-z]{2,8}( [a-z]{2,8}){1,4}"


# Greedy tokens


def _same(subject: Subject, **changes: Any) -> Outcome:
    """Greedy tokens equal those of plain decoding, and the counters fit them."""
    out = subject.run(**changes)
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
    yield "as given", partial(_same, subject)
    for depth in DEPTHS:
        drafter = reshaped(subject.drafter, depth)
        if drafter is not None:
            yield f"depth {depth}", partial(_same, subject, drafter=drafter)


def _trees(subject: Subject) -> Cases:
    for depth, width, nodes in TREES:
        drafter = reshaped(subject.drafter, depth, width, nodes)
        if drafter is not None:
            yield f"depth {depth}, width {width}, {nodes} nodes", partial(_same, subject, drafter=drafter)


def _pages(subject: Subject) -> Cases:
    for size in (5, 1, 16, 64, 128):
        yield f"{size} rows", partial(_same, subject, page_size=size)


# Ends of texts


def _limits(subject: Subject) -> Outcome:
    limits = [1 + index % (subject.new // 2) for index in range(len(subject.prompts))]
    whole = subject.plain(subject.precise, ignore_eos=True).tokens
    cut = [ids[:limit] for ids, limit in zip(whole, limits, strict=True)]
    out = subject.run(subject.precise, max_new_tokens=limits, ignore_eos=True)
    outcome = subject.compare(out.tokens, cut, subject.precise)
    return outcome if outcome.verdict == "failed" else _counted(out)


def _ends_at(subject: Subject, kind: str) -> Outcome:
    """Texts end with the first of some of their own tokens."""
    whole = subject.plain(subject.precise, ignore_eos=True).tokens
    ends = tuple(dict.fromkeys(ids[(3 + 2 * index) % len(ids)] for index, ids in enumerate(whole)))[:6]
    if kind == "stop":
        out = subject.run(subject.precise, stop=ends, ignore_eos=True)
    else:
        out = subject.run(dataclasses.replace(subject.precise, eos=ends))
    cut = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))] for ids in whole]
    return subject.compare(out.tokens, cut, subject.precise)


def _stop_text(subject: Subject) -> Outcome:
    """Texts end before the first of a string from the middle of each."""
    if subject.model.tokenizer is None:
        raise ValueError("the model has no tokenizer")
    whole = subject.plain(subject.precise, ignore_eos=True).text or []
    stops = tuple(dict.fromkeys(text[len(text) // 2 :][:12] for text in whole if len(text) > 24))
    out = subject.run(subject.precise, stop=stops, ignore_eos=True)
    for index, (item, text) in enumerate(zip(out, whole, strict=True)):
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        right, reason = text[: min(ends, default=len(text))], "stop" if ends else "length"
        if item.text != right:
            what = f"the text ends with {(item.text or '')[-20:]!r} instead of {right[-20:]!r}"
            return Outcome("failed", 0, f"sequence {index}: {what}")
        # The device stops, too, with the token that completes the string.
        beyond = subject.model.tokenizer.decode(item.tokens[:-1])
        if item.finish_reason != reason or any(stop in beyond for stop in stops):
            return Outcome("failed", 0, f"sequence {index} goes on after a stop string, to {item.finish_reason!r}")
    return Outcome("passed", sum(map(len, out)))


def _ends(subject: Subject) -> Cases:
    yield "limits of 1, 2, 3, ... tokens", partial(_limits, subject)
    yield "ids of the end of the text", partial(_ends_at, subject, "eos")
    yield "stop tokens", partial(_ends_at, subject, "stop")
    yield "stop strings", partial(_stop_text, subject)


# Rounds


def _rounds(subject: Subject, run: Callable[[], Generations], where: str) -> Outcome:
    """The rounds are those of one call for all prompts."""
    for index, (item, right) in enumerate(zip(run(), subject.drafted, strict=True)):
        if not same_rounds(item, right):
            what = "rounds" if item.tokens == right.tokens else "tokens"
            return Outcome("failed", 0, f"sequence {index} has other {what} {where}")
    return Outcome("passed", sum(map(len, subject.drafted)))


def _poisoned(subject: Subject) -> Generations:
    """A generation in which all rows without a committed token are NaN before each round."""
    run = Run(subject.precise, subject.prompts, subject.options())
    defaults = {"window": None, "keep_first": 0}
    window = {name: getattr(subject.drafter, name, default) for name, default in defaults.items()}
    finished = run.advance(0)
    while not finished:
        s = run.state
        rows = np.where(s.done, 0, s.length - 1)
        changes: dict[str, Any] = {"cache": poison.spoil(s.cache, rows)}
        if hasattr(s.draft, "cache"):
            drafted = np.where(s.done, 0, getattr(s.draft, "length", rows))
            changes["draft"] = dataclasses.replace(s.draft, cache=poison.spoil(s.draft.cache, drafted, **window))
        run.state = dataclasses.replace(s, **changes)
        finished = run.advance(1)
    return run.result()


def _in_pieces(subject: Subject, chunk: int | None) -> Generations:
    run = Run(subject.precise, subject.prompts, subject.options(), chunk=chunk)
    while not run.advance(1):
        pass
    return run.result()


def _each_alone(subject: Subject) -> Generations:
    items = [subject.run(subject.precise, [ids], seed=[(subject.seed, i)]) for i, ids in enumerate(subject.prompts)]
    return Generations([item[0] for item in items], items[0].stats)


def _alone(subject: Subject) -> Outcome:
    if as_branching(subject.drafter.bind(subject.model.target, subject.model.draft)) is None:
        return _rounds(subject, partial(_each_alone, subject), "alone than in a batch")
    # The sequences of a batch share the choice of a drafter.
    return subject.compare(_each_alone(subject).tokens, subject.plain(subject.precise).tokens, subject.precise)


def _pieces(subject: Subject) -> Cases:
    yield "each prompt alone", partial(_alone, subject)
    runs = partial(_rounds, subject)
    yield "NaN in free rows", partial(runs, partial(_poisoned, subject), "with NaN in rows without committed tokens")
    yield "prompts in chunks of 2", partial(runs, partial(_in_pieces, subject, 2), "if prompts are read in chunks of 2")
    yield "round by round", partial(runs, partial(_in_pieces, subject, None), "if the host calls each round")


# Options of requests


def _options(subject: Subject, drafter: Drafter | None, sampling: Sequence[Sampling], what: str) -> Outcome:
    """Tokens equal those of plain decoding with the same options and seed, each sequence with its own."""
    if not subject.repeats_plain:
        raise ValueError(f"accept={subject.accept}: samples differ from those of plain decoding")
    # Every prompt, and every kind of sampling.
    count = max(len(subject.prompts), len(sampling))
    samplings = [sampling[i % len(sampling)] for i in range(count)]
    prompts = [subject.prompts[i % len(subject.prompts)] for i in range(count)]
    expected = subject.run(subject.precise, prompts, sampling=samplings, drafter=None, accept=None)
    out = subject.run(subject.precise, prompts, sampling=samplings, drafter=drafter or subject.drafter)
    for index, (item, right) in enumerate(zip(out, expected, strict=True)):
        at = difference(item.tokens, right.tokens)
        if at is not None:
            what = what.format(samplings[index])
            return Outcome("failed", 0, f"sequence {index} differs from plain decoding at new token {at} {what}")
        text = item.text or ""
        if sampling[0].grammar is not None and item.finish_reason == "eos" and not re.fullmatch(PATTERN, text):
            return Outcome("failed", 0, f"sequence {index}: {text!r} is not in the language of the grammar")
    return Outcome("passed", sum(map(len, out)))


def _samplings(subject: Subject) -> Cases:
    tree = reshaped(subject.drafter, 4, 3, 16)
    yield "eight kinds of sampling", partial(_options, subject, None, SAMPLINGS, "with {}")
    if tree is not None:
        yield "the same in trees", partial(_options, subject, tree, SAMPLINGS, "with {} in a tree")
    yield "temperature 1", partial(_options, subject, None, SAMPLINGS[:1], "with {}")


def _grammars(subject: Subject) -> Cases:
    tree = reshaped(subject.drafter, 4, 3, 16)
    for name, drafter, temperature in (("greedy", None, 0.0), ("sampled", None, 1.0), ("sampled in trees", tree, 1.0)):
        if drafter is not None or "trees" not in name:
            sampling = [Sampling(temperature=temperature, grammar=Grammar.regex(PATTERN))]
            yield name, partial(_options, subject, drafter, sampling, "with a grammar")


def _logprobs(subject: Subject, sampling: Sampling | None) -> Outcome:
    """Log-probabilities of new tokens, and the highest three, are those of one forward over the whole text."""
    out = subject.run(subject.precise, logprobs=3, sampling=sampling)
    forwards = score(subject.precise, [[*item.prompt, *item.tokens] for item in out], top_k=3)
    for index, (item, forward) in enumerate(zip(out, forwards, strict=True)):
        first = len(item.prompt)
        tops = item.top_logprobs or [], forward.top[first:]
        pairs = [(item.logprobs or [], forward.logprobs[first:])]
        pairs += [([top[rank][1] for top in tops[0]], [top[rank][1] for top in tops[1]]) for rank in range(3)]
        for rank, (ours, theirs) in enumerate(pairs):
            recorded, right = np.array(ours, float), np.array(theirs, float)
            error = np.abs(recorded - right)
            if not error.max() < TOLERANCE:
                at, name = int(error.argmax()), f"{rank}. highest log-probability" if rank else "log-probability"
                where = f"sequence {index}: the {name} at new token {at} is {recorded[at]:.4f}"
                return Outcome("failed", 0, f"{where}, but {right[at]:.4f} in one forward over the whole text")
    return Outcome("passed", sum(map(len, out)))


def _records(subject: Subject) -> Cases:
    yield "greedy", partial(_logprobs, subject, None)
    yield "sampled", partial(_logprobs, subject, Sampling(temperature=1.0))


# The engine


def _served(subject: Subject, preempts: bool, sampling: Sampling | None) -> Outcome:
    """Requests with shared beginnings, in turns and perhaps with preemption, get the tokens of plain decoding."""
    new, shared = min(subject.new, 32), max(subject.prompts, key=len)
    prompts = [*subject.prompts, [*shared, 1], [*shared, 2], shared[:-1] or shared, shared]
    plain = subject.run(subject.precise, prompts, drafter=None, accept=None, max_new_tokens=new, sampling=sampling)
    context, size = max(map(len, prompts)) + new, 8
    sizes: dict[str, Any] = {"slots": 3, "context": context, "page_size": size, "prefill_tokens": 16}
    if preempts:
        # One and a half of the longest sequence, and what drafts write beyond it.
        sizes["pages"] = 2 + -(-3 * (context + 40) // (2 * size))
    with Engine(subject.precise, drafter=subject.drafter, accept=subject.accept, **sizes) as engine:
        seeds = [[(subject.seed, index)] for index in range(len(prompts))]
        options: dict[str, Any] = {"max_new_tokens": new, "sampling": sampling}
        handles = [engine.submit(ids, seed=seed, **options) for ids, seed in zip(prompts, seeds, strict=True)]
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
    yield "shared beginnings", partial(_served, subject, False, None)
    yield "preemption", partial(_served, subject, True, None)
    if subject.repeats_plain:
        yield "preemption, sampled", partial(_served, subject, True, Sampling(temperature=1.0))


# The draft


def _fit(subject: Subject) -> Outcome:
    fit = probe_draft(subject.model)
    warning = fit.warning(subject.model.name)
    verdict = "passed" if warning is None else "failed" if fit.better is not None else "warning"
    return Outcome(verdict, fit.total, warning or "")


def _accepted(subject: Subject) -> Outcome:
    """Some drafts are accepted and some are not: otherwise the other checks show little."""
    stats = subject.drafted.stats
    text = f"accept length {stats.accept_length:.2f}, {stats.accept_rate:.0%} of drafts accepted"
    if not 0.02 < stats.accept_rate < 0.98:
        return Outcome("warning", stats.drafted, f"{text}: too few of either kind for the other checks")
    return Outcome("passed", stats.drafted, text)


def _draft(subject: Subject) -> Cases:
    yield "acceptance", partial(_accepted, subject)
    if subject.model.draft is not None:
        yield "readings", partial(_fit, subject)


CHECKS: Mapping[str, Callable[[Subject], Cases]] = {
    "chains": _chains,
    "trees": _trees,
    "ends of texts": _ends,
    "rounds": _pieces,
    "pages": _pages,
    "sampling": _samplings,
    "grammars": _grammars,
    "log-probabilities": _records,
    "engine": _engine,
    "distributions": verify_statistics.samples,
    "rules": verify_statistics.rules,
    "draft": _draft,
}
