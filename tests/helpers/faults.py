"""Faults of the loop, a draft and servers for `verify` to find: each with its check and words of its sentence."""

import contextlib
import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.analysis import verify, verify_endpoint
from jspec.analysis.contract import Case
from jspec.cache import pages
from jspec.core import accept, logprobs, round, sampling, stopping, tree
from jspec.drafters import Standalone
from jspec.engine.pages import Pages
from jspec.runner.automaton_pool import GrammarPool, StopPool
from jspec.runner.device import Device
from jspec.text.stream import TextStream

# Ways to be wrong


def change(module, name, wrap):
    """A fault: `wrap(right)` in place of a function."""
    return lambda patch: patch.setattr(module, name, wrap(getattr(module, name)))


def result(**fields):
    """A wrap: fields of the result are functions of it and of the arguments."""

    def wrap(right):
        def run(*args, **options):
            out = right(*args, **options)
            return dataclasses.replace(out, **{name: new(out, *args) for name, new in fields.items()})

        return run

    return wrap


def argument(index, new):
    """A wrap: one of the arguments is a function of itself."""
    return lambda right: lambda *args, **options: right(*args[:index], new(args[index]), *args[index + 1 :], **options)


def at_last(out, new):
    """The tokens that a rule appends, with new ones after the accepted drafts."""
    return jnp.where(jnp.arange(out.tokens.shape[1])[None] == out.length[:, None] - 1, new, out.tokens)


def all_see_all(right):
    def mask(draft_tree):
        if draft_tree.parents is not None or draft_tree.tokens.shape[1] > 8:
            return right(draft_tree)
        nodes = draft_tree.tokens.shape[1]
        return jnp.ones((draft_tree.tokens.shape[0], nodes, nodes), bool)

    return mask


def at_siblings(draft_tree):
    """Nodes below the first generation hang at the sibling of their parent."""
    parents = draft_tree.parents
    new = None if parents is None else jnp.where(parents > 1, parents - 1, parents)
    return dataclasses.replace(draft_tree, parents=new)


def forgetful(stop):
    return dataclasses.replace(stop, state=None if stop.state is None else jnp.minimum(stop.state, 0))


def all_read(right):
    def run(stop, tokens, length):
        after, _, finish = right(stop, tokens, length)
        return after, length, finish

    return run


def shares_pages(right):
    def table(batch, pages):
        out = right(batch, pages)
        return out.at[:, 1].set(out[0, 1]) if pages > 4 else out

    return table


@dataclasses.dataclass(frozen=True)
class Faulty(Standalone):
    """A draft with a fault of its own."""

    fault: str = ""

    def draft(self, params, s):
        drafted, state = super().draft(params, s)
        shift = jnp.full(s.length.shape, int(self.fault == "batch" and s.length.shape[0] > 1), jnp.int32)
        if self.fault == "free rows":
            shift = shift + jnp.isnan(s.cache.pool).any().astype(jnp.int32)
        tokens = drafted.tokens.at[:, 1:].set((drafted.tokens[:, 1:] + shift[:, None]) % self.target.vocab_size)
        return dataclasses.replace(drafted, tokens=tokens), state

    def extend(self, params, s, committed):
        if self.fault == "chunks" and committed.tokens.shape[1] == 2:
            committed = dataclasses.replace(committed, length=jnp.minimum(committed.length, 1))
        return super().extend(params, s, committed)


def custom(fault):
    return lambda patch: Faulty(depth=4, fault=fault)


def without_path(path):
    return jnp.full_like(path, -1)


def too_long(out, draft_tree, _):
    return jnp.minimum(out.length + 1, draft_tree.tokens.shape[1])


def another_position(right):
    return lambda key, name, position, count, size: right(key, name, position + int(count > 1), count, size)


def too_early(right):
    return lambda draft_tree: jnp.maximum(right(draft_tree) - 1, 0)


def dropped_twice(out, *_):
    return dataclasses.replace(out.stats, dropped=out.stats.dropped + 1)


def not_dropped_at_eos(out, before, decision, *_):
    ended = decision.finish_code == stopping.EOS
    return dataclasses.replace(out.stats, dropped=jnp.where(ended, before.stats.dropped, out.stats.dropped))


def deeper(out, *_):
    return jnp.where(out.origin > 0, out.origin + 1, 0)


def twice(right):
    def count(s, path, *rest):
        return right(s, path, *rest) + right(s, path, *rest) - right(s, without_path(path), *rest)

    return count


def at_first_node(right):
    def ends(stop, path):
        return right(stop, path) & (jnp.arange(path.shape[1]) == 0)[None, :, None]

    return ends


def without_bias_at_last(right):
    def adjust(s, logits, path):
        options = s.sampling
        if options is None or options.logit_bias is None or logits.shape[1] == 1:
            return right(s, logits, path)
        bare = dataclasses.replace(s, sampling=dataclasses.replace(options, logit_bias=None))
        return right(s, logits, path).at[:, -1].set(right(bare, logits, path)[:, -1])

    return adjust


def processed(right):
    return lambda s, logits, after, accepted: right(s, after, after, accepted)


def before_sampling(right):
    return lambda s, logits, after, accepted: right(s, logits, logits if after.shape[1] > 1 else after, accepted)


def of_next_rank(right):
    def record(*arguments):
        out = right(*arguments)
        if out is None or out.top is None:
            return out
        return dataclasses.replace(out, top=dataclasses.replace(out.top, ids=jnp.roll(out.top.ids, 1, -1)))

    return record


def other_seed_later(out, _, requests, count):
    resumed = [i < len(requests) and bool(requests[i].tokens) for i in range(count)]
    return out.seed + np.array(resumed, np.uint32)[:, None] * np.uint32(7)


DIFFERS = "differs from plain decoding at new token"
_FAULTS = (
    ("a draft too many is accepted", change(accept, "follow", result(length=too_long)), "chains", DIFFERS),
    (
        "the bonus token of another node",
        change(accept, "follow", result(tokens=lambda out, *_: at_last(out, jnp.roll(out.tokens, 1, 1)))),
        "chains",
        DIFFERS,
    ),
    (
        "rows are committed one place late",
        change(round, "commit_rows", argument(2, lambda start: start + 1)),
        "chains",
        DIFFERS,
    ),
    ("drafts at positions one too early", change(tree, "depths", too_early), "chains", DIFFERS),
    ("nodes see later nodes", change(tree, "ancestor_mask", all_see_all), "chains", DIFFERS),
    (
        "rounds are counted as longer",
        change(round, "count_round", result(stats=dropped_twice)),
        "chains",
        r"counts 1 \+",
    ),
    (
        "origins are a generation too deep",
        change(round, "append", result(origin=deeper)),
        "chains",
        "origins that no rounds have",
    ),
    (
        "dropped tokens are not counted at EOS",
        change(round, "count_round", result(stats=not_dropped_at_eos)),
        "ends of texts",
        r"counts 1 \+",
    ),
    (
        "rows of other nodes than the accepted ones",
        change(round, "commit_rows", argument(3, lambda path: None)),
        "trees",
        DIFFERS,
    ),
    ("keys of other ancestors", change(tree, "ancestor_mask", argument(0, at_siblings)), "trees", DIFFERS),
    ("tokens after the end of the text", change(stopping, "run", all_read), "ends of texts", "tokens instead of"),
    (
        "a limit one too large",
        change(round, "truncate_at_stop", argument(0, lambda s: dataclasses.replace(s, limit=s.limit + 1))),
        "ends of texts",
        "tokens instead of",
    ),
    (
        "stop strings within a round only",
        change(stopping, "run", argument(0, forgetful)),
        "stop strings",
        "after a stop string",
    ),
    (
        "a possible beginning of a stop string is lost",
        change(TextStream, "finish", lambda right: lambda self: self._emit(b"", last=True)),
        "stop strings",
        "has another text",
    ),
    ("sequences share a page", change(pages, "contiguous_table", shares_pages), "pages", DIFFERS),
    (
        "penalties leave out drafted tokens",
        change(sampling, "_count", argument(1, without_path)),
        "sampling",
        "_penalty",
    ),
    ("noise of another position", change(sampling, "gumbel", another_position), "sampling", "with Sampling"),
    ("penalties count drafted tokens twice", change(sampling, "_count", twice), "sampling", "with Sampling"),
    ("log-probabilities before sampling", change(round, "record", before_sampling), "sampling", "with Sampling"),
    (
        "min_new_tokens at the first node only",
        change(stopping, "ends_text", at_first_node),
        "sampling",
        "min_new_tokens=",
    ),
    ("no bias at the last node", change(sampling, "adjust", without_bias_at_last), "sampling", "logit_bias="),
    (
        "a grammar without drafts",
        change(sampling.grammars, "forbid", argument(2, without_path)),
        "grammars",
        "with a grammar",
    ),
    (
        "another node's log-probability",
        change(logprobs, "of_tokens", argument(0, lambda x: jnp.roll(x, 1, 1))),
        "log-probabilities",
        "at new token",
    ),
    ("log-probabilities of processed logits", change(round, "record", processed), "log-probabilities", "at new token"),
    (
        "ids of the next rank",
        change(round, "record", of_next_rank),
        "log-probabilities",
        "the highest log-probabilities at new token",
    ),
    (
        "pages named without the ones before",
        change(Pages, "_key", argument(1, lambda parent: "")),
        "engine",
        "of an engine (differs|has another log-probability)",
    ),
    (
        "pages named without tokens",
        change(Pages, "_key", argument(2, lambda tokens: [0] * len(tokens))),
        "engine",
        "of an engine (differs|has another log-probability)",
    ),
    (
        "grammars begin anew after a preemption",
        change(GrammarPool, "state_after", argument(2, lambda tokens: [])),
        "engine",
        "of an engine differs",
    ),
    (
        "another seed after a preemption",
        change(Device, "_admitted", result(seed=other_seed_later)),
        "engine",
        "of an engine differs",
    ),
    (
        "stop strings begin anew after a preemption",
        change(StopPool, "state_after", argument(2, lambda tokens: [])),
        "engine",
        "after a stop string|another text",
    ),
    (
        "counters begin anew after a preemption",
        change(Device, "_admitted", result(rounds=lambda out, *_: np.zeros_like(out.rounds))),
        "engine",
        r"counts 1 \+",
    ),
    (
        "q of another token",
        change(accept, "_chain_probs", lambda right: lambda *arguments: jnp.roll(right(*arguments), 1, -1)),
        "distributions",
        "the distribution of",
    ),
    (
        "no residual distribution",
        change(accept, "_normalize", lambda right: lambda distribution, otherwise: otherwise),
        "rules",
        "have the probability",
    ),
    ("a draft that depends on the batch", custom("batch"), "batches", "other rounds alone than in a batch"),
    ("a draft that reads free rows", custom("free rows"), "rounds", "other rounds with NaN"),
    ("a draft that depends on chunks", custom("chunks"), "chunks", "other rounds if prompts are read in chunks"),
)
FAULTS = {name: (plant, check, words) for name, plant, check, words in _FAULTS}
"""Name -> what plants it, the check that finds it, and words of the sentence."""


@dataclasses.dataclass
class Stub:
    """A server that answers by plain decoding; `fault` changes its answers."""

    plain: verify_endpoint.Plain
    fault: str = ""
    url = name = model = "stub"

    def named(self):
        return self

    def complete(self, *, stop=(), **fields):
        if self.fault == "hot" and fields["temperature"]:
            fields["temperature"] = 2.0
        out = self.plain.complete(**fields)
        for choice in out["choices"]:
            if self.fault == "lossy" and not fields["temperature"]:
                choice["text"] = choice["text"][0] + "~" + choice["text"][2:]
            for word in stop if self.fault != "stop" else ():
                if word in choice["text"]:
                    choice.update(text=choice["text"].split(word)[0], finish_reason="stop")
        if self.fault == "penalty":
            choice = out["choices"][0]
            for top in choice["logprobs"]["top_logprobs"]:
                top[choice["text"][0] + "~"] = 0.0
        if self.fault == "reason":
            out["choices"] = [{**choice, "finish_reason": "stop"} for choice in out["choices"]]
        if self.fault == "top" and out["choices"][0]["logprobs"]:
            record = out["choices"][0]["logprobs"]
            record["top_logprobs"] = [*record["top_logprobs"][1:], *record["top_logprobs"][:1]]
        if self.fault == "usage":
            out["usage"]["completion_tokens"] += 1
        if self.fault == "no log-probabilities":
            out["choices"] = [{**choice, "logprobs": None} for choice in out["choices"]]
        if self.fault == "one choice":
            out["choices"] = out["choices"][:1]
        if self.fault == "no usage":
            del out["usage"]
        return out

    def stream(self, **fields):
        answer = self.complete(**fields)
        choice, usage = answer["choices"][0], dict(answer.get("usage", {}))
        if self.fault == "usage of streams":
            usage["completion_tokens"] //= 2
        text = choice["text"][:-1] if self.fault == "truncated" else choice["text"]
        parts = [{"text": part, "finish_reason": None} for part in (text[:5], text[5:])]
        last = {"text": "", "finish_reason": choice["finish_reason"]}
        events = [{"choices": [part]} for part in [*parts, last]]
        if self.fault == "no end":
            return events[:-1]
        events = [*events, {"choices": [], "usage": usage}]
        return events if self.fault == "no [DONE]" else [*events, "[DONE]"]


SERVER_FAULTS = {
    "lossy": ("greedy", "the text differs at character 1: '~"),
    "truncated": ("streams", "the text of a stream is"),
    "no end": ("streams", "finish_reason of a stream is \\[\\] instead"),
    "stop": ("stop strings", "the text with stop="),
    "usage": ("usage", "completion_tokens of n=1 is"),
    "reason": ("greedy", "finish_reason is 'stop' instead of 'length'"),
    "top": ("greedy", "the most probable tokens differ by"),
    "usage of streams": ("streams", "completion_tokens of a stream is"),
    "hot": ("distributions", "samples have another distribution"),
}

# How they are found


@contextlib.contextmanager
def planted(plant):
    """Programs are traced again, with the fault, and without it afterwards; yields a faulty draft, or None."""
    with pytest.MonkeyPatch.context() as patch:
        jax.clear_caches()
        try:
            yield plant(patch)
        finally:
            patch.undo()
            jax.clear_caches()


def until_failed(checks, minutes=30.0, workers=1, words=".", then=lambda finding: None):
    """Runs cases until one has failed with these words; returns its finding, or None. then: called with it at once."""
    failures = []

    def watched(name, cases):
        for case in itertools.takewhile(lambda _: not failures, cases):

            def run(case=case):
                finding = verify._run(name, case)
                if finding.verdict == "failed" and re.search(words, finding.message):
                    failures.append(finding)
                    then(finding)

            yield Case(case.name, run, case.quick)

    checks = {name: watched(name, cases) for name, cases in checks.items()}
    verify.certify({}, checks, minutes=minutes, workers=workers, progress=False)
    return failures[0] if failures else None
