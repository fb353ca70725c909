"""The checks of `verify` that compare distributions."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jspec.analysis import check_rule
from jspec.analysis.contract import Case, Cases, Outcome
from jspec.analysis.verify_subject import Subject
from jspec.core.accept import FOR_SAMPLES
from jspec.core.sampling import Sampling
from jspec.generation.score import score

BRANCHES, ALPHA, POWER = 3, 1e-5, 0.99
"""Choices per token without ties; false alarm rate of a test; power at which differences are stated."""
MOST_BRANCHES, BATCH = 32, 9
"""Choices per token, ties included; texts of a forward."""
TOTALS = (0, 256, 512, 1024, 2048, 4096, 8192)
"""Samples before each case: the first ones find gross faults soon."""


def samples(subject: Subject) -> Cases:
    """Texts sampled by each rule. Cases add up their samples, and each tests all so far."""
    for rule in FOR_SAMPLES if subject.accept is None else (subject.accept,):
        counts: dict[tuple[int, ...], int] = {}
        for before, total in itertools.pairwise(TOTALS):
            run = partial(_sampled, subject, rule, range(before, total), counts)
            yield Case(f"{rule}, {total:,} samples", run)


def _sampled(subject: Subject, rule: Any, indices: range, counts: dict[tuple[int, ...], int]) -> Outcome:
    """Test texts of three tokens, each among the three most probable ones, against the target's probabilities."""
    prompt = next(ids for ids in subject.prompts if len(ids) > 2)[:6]
    texts, probabilities = _three_tokens(subject, prompt)
    sampling, batch = Sampling(temperature=1.0, top_k=BRANCHES), 128
    for first in indices[::batch]:
        seeds = [(subject.seed, first + i) for i in range(batch)]
        options = {"sampling": sampling, "accept": rule, "max_new_tokens": 3, "ignore_eos": True, "seed": seeds}
        for tokens in subject.run(subject.precise, [prompt] * batch, **options).tokens:
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    from scipy import stats  # takes as long to import as all of jspec

    total, observed = sum(counts.values()), np.array([counts.get(text, 0) for text in texts], float)
    if total != observed.sum():
        others = total - int(observed.sum())
        return Outcome("failed", total, f"{others} of {total} texts have a token that top_k excludes")
    # Pool rare texts, as a chi-squared test needs.
    order = np.argsort(probabilities)
    rare = order[np.cumsum(probabilities[order]) * total < 5]
    frequent = np.setdiff1d(order, rare)
    seen, expected = observed[frequent], probabilities[frequent] * total
    if len(rare):
        seen, expected = np.append(seen, observed[rare].sum()), np.append(expected, probabilities[rare].sum() * total)
    statistic, freedom = float((np.square(seen - expected) / np.maximum(expected, 1e-9)).sum()), len(seen) - 1
    p = float(stats.chi2.sf(statistic, freedom))
    if p < ALPHA:
        worst = texts[frequent[int(np.abs(seen - expected)[: len(frequent)].argmax())]]
        often = probabilities[texts.index(worst)] * total
        where = f"{list(worst)} came {counts.get(worst, 0)} times instead of {often:.0f}"
        return Outcome("failed", total, f"the distribution of {total} texts is not the target's (p = {p:.1g}): {where}")
    power = f"a total variation of {detectable(total, freedom):.3f} would be found with a probability of {POWER}"
    return Outcome("passed", len(indices), f"p = {p:.2g}; {power}")


def detectable(total: int, freedom: int) -> float:
    """The least total variation that a test of `total` texts finds with a probability of `POWER`.

    For a total variation of d, the noncentrality of the statistic is at least 4 total d^2 (Cauchy-Schwarz).
    """
    from scipy import stats

    limit, low, high = stats.chi2.isf(ALPHA, freedom), 0.0, 4.0 * total
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if stats.ncx2.sf(limit, freedom, middle) > POWER else (middle, high)
    return float(np.sqrt(high / (4 * total)))


def _three_tokens(subject: Subject, prompt: list[int]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """All texts of three tokens that `top_k` allows, with their probabilities; ValueError if too many are equal."""
    texts, most = {(): 0.0}, min(MOST_BRANCHES, subject.model.target.vocab_size)
    for size in range(3):
        longer, shorter = {}, list(texts)
        for first in range(0, len(shorter), BATCH):
            part = shorter[first : first + BATCH]
            # Zeros and copies pad the batch to one shape. The next token's candidates are those at its position.
            padded = [[*prompt, *text, *[0] * (3 - size)] for text in [*part, *part[:1] * (BATCH - len(part))]]
            for text, scores in zip(part, score(subject.precise, padded, top_k=most), strict=False):
                # In half precision, logits are often equal, and `top_k` keeps all of them.
                top = scores.top[len(prompt) + size]
                allowed = [(token, value) for token, value in top if value >= top[BRANCHES - 1][1]]
                if len(allowed) == len(top) < subject.model.target.vocab_size:
                    raise ValueError(f"more than {len(top)} tokens have the probability of the best {BRANCHES}")
                mass = np.logaddexp.reduce([value for _, value in allowed])
                longer |= {(*text, token): texts[text] + value - mass for token, value in allowed}
        texts = longer
    return list(texts), np.exp([*texts.values()])


def rules(subject: Subject) -> Cases:
    """Each rule without a model, over a small vocabulary."""
    for rule in FOR_SAMPLES:
        if subject.accept in (None, rule):
            for case, run in check_rule.cases(rule):
                yield Case(f"{rule}, {case.title}", partial(_enumerated, run), quick=case.kind != "any")


def _enumerated(run: Callable[[], float]) -> Outcome:
    return Outcome("passed", check_rule.ROWS, f"{run():.2f} tokens per round")
