"""The checks of `verify` with options of requests: sampling, grammars, log-probabilities, and the engine."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jspec.analysis.contract import Case, Cases, Outcome, difference
from jspec.analysis.verify_subject import Subject, check_counters, reshaped, stop_problem
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.engine import Engine
from jspec.generation.result import Generation
from jspec.generation.score import score
from jspec.runner.device import OneShape
from jspec.text.grammar import Grammar

SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.6, top_p=0.8),
    Sampling(temperature=1.6, top_k=3),
    Sampling(temperature=1.6, min_p=0.2),
    Sampling(temperature=0.0, repetition_penalty=1.8),
    Sampling(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.4),
    Sampling(temperature=0.0),
)
"""Far from plain sampling, so that an option left out anywhere shows within a text."""
PAGE, SHORT = 8, 16
"""Rows of a page of the engine; tokens of prompts that are preempted as samples."""
TOP, TOLERANCE = 3, 5e-3
"""Most probable tokens to record; largest difference of log-probabilities from those of a single forward."""
PATTERN, BEGINNING = r"[a-z]{2,8}( [a-z]{2,8}){16,40}", r"([a-z]{2,8} ){0,40}[a-z]{0,8}"
"""A grammar, and the beginnings of its texts."""
GRAMMARS = tuple(
    Sampling(temperature=t, presence_penalty=1.0, grammar=Grammar.regex(PATTERN)) for t in (0.0, 1.0, 0.7, 1.3)
)


def _texts(subject: Subject) -> list[list[int]]:
    """The longest prompt with another first page, another token at the end of a page, and cut; then all prompts."""
    shared = subject.prompts[subject.longest]
    at = (len(shared) - 1) // PAGE * PAGE - 1
    changed = [*shared[:at], 1, *shared[at + 1 :]] if at > 0 else shared
    return [[*shared[:PAGE][::-1], *shared[PAGE:]], changed, shared[:-1] or shared, shared, *subject.prompts]


def _cycled(subject: Subject, samplings: Sequence[Sampling]) -> tuple[list[list[int]], list[Sampling]]:
    """Prompts with options: each kind of sampling comes twice, with different prompts."""
    texts, count = _texts(subject), len(samplings)
    shift = min(len(GRAMMARS), count - 1)
    cycled = [samplings[(i - first) % count] for first in (shift, 2 * shift) for i in range(len(texts))]
    return (texts * 2, cycled) if count > 1 else (texts, cycled[: len(texts)])


def _sampled(subject: Subject, samplings: Sequence[Sampling], drafter: Drafter | None) -> list[Generation]:
    """A generation of each prompt with several kinds of sampling; recorded, one program serves several checks."""
    prompts, cycled = _cycled(subject, samplings)
    options = {"drafter": drafter, "logprobs": TOP, **({} if drafter else {"accept": None})}
    size = len(_texts(subject))

    def run() -> list[Generation]:
        items: list[Generation] = []
        for first in range(0, len(prompts), size):
            part = slice(first, first + size)
            seeds = [(subject.seed, i) for i in range(first, first + size)]
            items += subject.run(subject.precise, prompts[part], sampling=cycled[part], seed=seeds, **options)
        return items

    return subject.once((repr(samplings), drafter), run)


def _options(
    subject: Subject, drafter: Drafter | None = None, *, grammars: bool = False, mixed: bool = True
) -> Outcome:
    """Tokens equal those of plain decoding with the same options and seed, each sequence with its own.

    grammars: whether the sequences with a grammar, or the others, are compared.
    mixed: whether the batch has all kinds of sampling, or one.
    """
    if not subject.repeats_plain:
        raise ValueError(f"accept={subject.accept}: samples differ from those of plain decoding")
    if grammars and subject.model.tokenizer is None:
        raise ValueError("the model has no tokenizer")
    # Grammars and samplings run side by side, and begin with different ones.
    drafter, compared = drafter or subject.drafter, 0
    samplings = _mixed(subject) if mixed else (GRAMMARS if grammars else SAMPLINGS)[:1]
    first, second = (_sampled(subject, samplings, one) for one in ((drafter, None) if grammars else (None, drafter)))
    drafted, expected = (first, second) if grammars else (second, first)
    for index, (item, right) in enumerate(zip(drafted, expected, strict=True)):
        sampling = _cycled(subject, samplings)[1][index]
        if grammars != (sampling.grammar is not None):
            continue
        at, compared = difference(item.tokens, right.tokens), compared + len(item.tokens)
        what = _shown(sampling)
        if at is not None:
            return Outcome("failed", 0, f"sequence {index} differs from plain decoding at new token {at} with {what}")
        if grammars and not re.fullmatch(PATTERN if item.finish_reason == "eos" else BEGINNING, item.text or ""):
            return Outcome("failed", 0, f"sequence {index}: {item.text!r} is not in the language of the grammar")
        at = _apart(item.sampled_logprobs, right.sampled_logprobs)
        if at is not None:
            where = f"sequence {index}: sampled_logprobs differ from those of plain decoding"
            return Outcome("failed", 0, f"{where} at new token {at} with {what}")
    return Outcome("passed", compared)


def _apart(ours: Sequence[float] | None, right: Sequence[float] | None) -> int | None:
    """The first token whose log-probabilities differ; None: there is none among those of both."""
    pairs = zip(ours or [], right or [], strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if not abs(x - y) < TOLERANCE), None)


def _shown(sampling: Sampling) -> str:
    """The options that are not the defaults, for messages."""
    values = {field.name: (getattr(sampling, field.name), field.default) for field in dataclasses.fields(sampling)}
    options = [f"{name}={value}" for name, (value, usual) in values.items() if value != usual and name != "grammar"]
    shown = f"Sampling({', '.join(options)})"
    return shown if sampling.grammar is None else f"a grammar and {shown}"


def _mixed(subject: Subject) -> tuple[Sampling, ...]:
    """All kinds of sampling in one batch, with grammars if there is a tokenizer."""
    # Tokens that would often come are rare here; the texts end as soon as they may.
    often = collections.Counter(itertools.chain.from_iterable(subject.plain(subject.precise).tokens)).most_common(4)
    biases = dict.fromkeys([token for token, _ in often], -4.0), dict.fromkeys(subject.model.eos, 100.0)
    ends = Sampling(temperature=0.9, logit_bias=biases[1], min_new_tokens=subject.new // 2)
    kinds = (*SAMPLINGS, Sampling(temperature=0.9, logit_bias=biases[0]), *([ends] if subject.model.eos else []))
    return kinds if subject.model.tokenizer is None else (*GRAMMARS, *kinds)


def requests(subject: Subject, *, grammars: bool) -> Cases:
    """Sequences with options of their own; see `_options`."""
    run, tree = partial(_options, subject, grammars=grammars), reshaped(subject.drafter, 4, 3, 16)
    yield Case("all kinds in a batch", run)
    if tree is not None:
        yield Case("the same in trees", partial(run, tree))
    yield Case("one kind", partial(run, mixed=False))


def _logprobs(subject: Subject, sampled: bool) -> Outcome:
    """Log-probabilities of new tokens, and the highest three, are those of one forward over the whole text."""
    if sampled:
        items = _sampled(subject, _mixed(subject), subject.drafter)[: len(_texts(subject))]
    else:
        items = subject.run(subject.precise, logprobs=TOP).items
    # Texts of one length share a program.
    texts = [[*item.prompt, *item.tokens] for item in items]
    longest = max(map(len, texts))
    forwards = score(subject.precise, [[*text, *text[:1] * (longest - len(text))] for text in texts], top_k=TOP)
    for index, (item, forward) in enumerate(zip(items, forwards, strict=True)):
        new = slice(len(item.prompt), len(texts[index]))
        recorded, right = np.array(item.logprobs or [], float), np.array(forward.logprobs[new], float)
        error = np.abs(recorded - right)
        if not error.max() < TOLERANCE:
            at = int(error.argmax())
            where = f"sequence {index}: the log-probability at new token {at} is {recorded[at]:.4f}"
            return Outcome("failed", 0, f"{where}, but {right[at]:.4f} in one forward over the whole text")
        for at, tops in enumerate(zip(item.top_logprobs or [], forward.top[new], strict=True)):
            ours, theirs = map(dict, tops)
            # Of nearly equal tokens, others may be the highest ones.
            gaps = [abs(value - theirs.get(token, min(theirs.values()))) for token, value in ours.items()]
            if len(ours) != TOP or not max(gaps) < TOLERANCE:
                shown = [{token: round(value, 4) for token, value in top.items()} for top in (ours, theirs)]
                where = f"sequence {index}: the highest log-probabilities at new token {at} are {shown[0]}"
                return Outcome("failed", 0, f"{where}, but {shown[1]} in one forward over the whole text")
    return Outcome("passed", sum(map(len, items)))


def records(subject: Subject) -> Cases:
    """Log-probabilities."""
    yield Case("all kinds of sampling", partial(_logprobs, subject, True))
    yield Case("greedy", partial(_logprobs, subject, False))


# The engine


def _served(subject: Subject, greedy: bool) -> Outcome:
    """Requests with shared beginnings, in turns and with preemption, get the texts of plain decoding.

    greedy: whether all are; otherwise some are sampled with a grammar, or with what needs no tokenizer.
    """
    samplings = (Sampling(temperature=0.0),) if greedy else _mixed(subject)
    prompts, cycled = _cycled(subject, samplings)
    plain = _sampled(subject, samplings, None)
    # Requests with equal needs share the programs of an engine.
    kinds = samplings if greedy else SAMPLINGS if subject.model.tokenizer is None else GRAMMARS
    indices = [i for i, one in enumerate(cycled) if one in kinds]
    # Short prompts come first: they fit together, and their texts do not. The youngest ones are preempted.
    indices.sort(key=lambda i: (len(prompts[i]) > SHORT, cycled[i].temperature > 0))
    if not greedy:
        indices = [i for i in indices if len(prompts[i]) <= SHORT] or indices
    new, context = subject.new, max(len(prompts[i]) for i in indices) + subject.new
    # The pages of the longest sequence, and of what drafts write beyond it, are too few for several ones.
    sizes: dict[str, Any] = {"slots": 4, "context": context, "page_size": PAGE, "prefill_tokens": 4, "burst_ms": 0.01}
    with Engine(
        subject.precise,
        drafter=subject.drafter,
        accept=subject.accept,
        pages=1 + -(-(context + 8) // PAGE),
        shape=None if greedy else OneShape((4, 32), 2),
        **sizes,
    ) as served:
        # Preemptions divide long stop strings, the same for all, as other ones would need other programs.
        texts = [text for i in indices if not greedy and len(text := plain[i].text or "") > 24]
        stops = tuple(dict.fromkeys(text[len(text) // 8 :][: 3 * len(text) // 4] for text in texts))
        options: dict[str, Any] = {"max_new_tokens": new, "logprobs": True, "stop": stops}
        handles = [served.submit(prompts[i], sampling=cycled[i], seed=[(subject.seed, i)], **options) for i in indices]
        results = [handle.result() for handle in handles]
        metrics = served.metrics()
    seen = f"{metrics.prefix_hits} tokens came from shared pages, {metrics.preemptions} requests were preempted"
    for i, item in zip(indices, results, strict=True):
        at, problem = difference(item.tokens, plain[i].tokens), ""
        if at is not None and not (stops and at == len(item.tokens)):
            problem = f"differs from plain decoding at new token {at} with {_shown(cycled[i])}"
        elif subject.model.tokenizer is not None:
            problem = stop_problem(item, plain[i], stops)
        if not problem and (error := _apart(item.logprobs, plain[i].logprobs)) is not None:
            problem = f"has another log-probability at new token {error}"
        if problem:
            return Outcome("failed", 0, f"request {i} of an engine {problem}; {seen}")
    counters = check_counters(results)
    return counters if counters.verdict == "failed" else Outcome("passed", counters.compared, seen)


def engine(subject: Subject) -> Cases:
    """Requests of an engine."""
    yield Case("greedy", partial(_served, subject, True))
    if subject.repeats_plain:
        yield Case("grammars, stop strings and samples", partial(_served, subject, False), quick=True)
