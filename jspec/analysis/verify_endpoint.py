"""`verify_endpoint`: compares a server with its draft to one without, over the completions of OpenAI's API."""

import collections
import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jspec.analysis.contract import Case, Cases, Outcome, difference
from jspec.analysis.evaluate import heldout_prompts
from jspec.analysis.verify import Certificate, certify
from jspec.analysis.verify_statistics import ALPHA
from jspec.analysis.verify_subject import NEAR_TIE_ELSEWHERE
from jspec.core.sampling import Sampling
from jspec.engine.generate import generate
from jspec.generation.result import Generation
from jspec.loading.model import Model

SECONDS = 300.0
"""How long an answer may take."""
TOP = 5
"""Most probable tokens to ask for, as completions have them."""
_DRAWS, _PER_REQUEST = 512, 16
"""Samples of each side in a case, and in one request."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A server with OpenAI's API.

    url: its address, with or without /v1.
    model: name of the model in requests; None: the first in its list.
    key: of the API.
    fields: further ones of all requests, such as a `repeat_penalty` of 1 where the server has another default.
    """

    url: str
    model: str | None = None
    key: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its address."""
        return self.url

    def request(self, path: str, fields: Mapping[str, Any] | None = None) -> bytes:
        """The body of an answer; ValueError if the server cannot be reached, or, with its sentence, if it refuses."""
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {self.key}"} if self.key else {})}
        body = None if fields is None else json.dumps(fields).encode()
        try:
            request = urllib.request.Request(f"{base}/v1/{path}", body, headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read()[:200].decode(errors="replace")
            raise ValueError(f"{self.url}: status {error.code}: {text}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url}: cannot be reached ({error})") from None

    def named(self) -> "Server":
        """The server with the name of its model."""
        if self.model is not None:
            return self
        try:
            return dataclasses.replace(self, model=json.loads(self.request("models"))["data"][0]["id"])
        except (json.JSONDecodeError, LookupError, TypeError):
            raise ValueError(f"{self.url}: must list a model at /v1/models, as OpenAI's API does") from None

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer to a request."""
        return json.loads(self.request("completions", {"model": self.model, **fields, **self.fields}))

    def stream(self, **fields: Any) -> list[Any]:
        """The events of a streamed answer; the last one is None if it ends with [DONE]."""
        text = self.request("completions", {"model": self.model, **fields, **self.fields, "stream": True}).decode()
        events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
        return [event if event == "[DONE]" else json.loads(event) for event in events]


@dataclasses.dataclass(frozen=True)
class Plain:
    """Plain decoding of a model, with the answers of a server."""

    model: Model

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name

    def complete(self, *, prompt: str, max_tokens: int, temperature: float, n: int = 1, seed: int = 0, **_: Any) -> Any:
        """The answer to a request; logprobs are those of `TOP` tokens."""
        options = {"max_new_tokens": max_tokens, "seed": [(seed, i) for i in range(n)], "logprobs": TOP}
        out = generate(self.model, [prompt] * n, drafter=None, sampling=Sampling(temperature=temperature), **options)
        choices = [{"index": i, "text": item.text, **self._described(item)} for i, item in enumerate(out)]
        usage = {"prompt_tokens": len(out[0].prompt), "completion_tokens": sum(len(item.tokens) for item in out)}
        return {"choices": choices, "usage": usage}

    def _described(self, item: Generation) -> dict[str, Any]:
        assert self.model.tokenizer is not None
        names = self.model.tokenizer.decode
        tops = [{names([token]): value for token, value in top} for top in item.top_logprobs or []]
        tokens = [names([token]) for token in item.tokens]
        record = {"tokens": tokens, "token_logprobs": item.logprobs, "top_logprobs": tops}
        return {"logprobs": record, "finish_reason": "length" if item.finish_reason == "length" else "stop"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A server beside what it must equal."""

    server: Server
    reference: Server | Plain
    prompts: Sequence[str]
    new: int


def _part(answer: Mapping[str, Any], name: str) -> Any:
    """A part of an answer, which some servers leave out; ValueError if it is not there."""
    if not answer.get(name):
        raise ValueError(f"not checked: the server does not return {name}")
    return answer[name]


def _greedy(pair: Pair, prompt: str) -> Outcome:
    """Greedy texts are equal; where they differ, both tokens are near-ties under the reference."""
    fields = {"prompt": prompt, "max_tokens": pair.new, "temperature": 0.0, "logprobs": TOP}
    ours, theirs = (side.complete(**fields)["choices"][0] for side in (pair.server, pair.reference))
    text, right, record = ours["text"], theirs["text"], theirs.get("logprobs") or {}
    at = difference(text, right)
    if at is None:
        reason = _equal(ours["finish_reason"], theirs["finish_reason"], "finish_reason")
        return reason if reason.verdict == "failed" else _same_logprobs(ours, theirs)
    where = f"the text differs at character {at}: {text[at:][:12]!r} instead of {right[at:][:12]!r}"
    if not record.get("top_logprobs"):
        unknown = "whether this is a near-tie is not checked, as the reference returns no log-probabilities"
        return Outcome("warning", at, f"{where}; {unknown}")
    # The first token of the reference that the text does not have.
    begin = 0
    for token, value, top in zip(record["tokens"], record["token_logprobs"], record["top_logprobs"], strict=True):
        if not text.startswith(token, begin):
            gaps = [value - other for name, other in top.items() if name and text.startswith(name, begin)]
            if not gaps or begin == len(text):
                break
            if min(gaps) < -NEAR_TIE_ELSEWHERE:
                other = "the reference has a more probable token there: its own options, such as penalties, decide"
                return Outcome("warning", at, f"{where}; not judged, as {other}")
            verdict = "near-tie" if min(gaps) < NEAR_TIE_ELSEWHERE else "failed"
            likely = f"log-probabilities of both tokens under the reference differ by {min(gaps):.2g}"
            return Outcome(verdict, at, f"{where}; {likely}")
        begin += len(token)
    if at == len(text):
        return Outcome(
            "failed", at, f"the text ends after {at} characters, and the reference goes on with {right[at:][:12]!r}"
        )
    return Outcome("failed", at, f"{where}, and not one of the {TOP} most probable tokens of the reference")


def _same_logprobs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Outcome:
    """Log-probabilities of equal tokens, and of the most probable ones in their places, are nearly equal."""
    records = [choice.get("logprobs") or {} for choice in (ours, theirs)]
    values: Any = [record.get("token_logprobs") for record in records]
    if not all(values) or len(values[0]) != len(values[1]):
        return Outcome("passed", 1, "the text only: log-probabilities are not checked, as a server returns none")
    best: Any = [[max(top.values(), default=0.0) for top in record.get("top_logprobs") or []] for record in records]
    pairs = {"equal tokens": values, **({"the most probable tokens": best} if len(best[0]) == len(best[1]) else {})}
    for name, pair in pairs.items():
        gap = np.abs(np.subtract(*pair)).max(initial=0)
        if gap > NEAR_TIE_ELSEWHERE:
            return Outcome("failed", len(values[1]), f"log-probabilities of {name} differ by {gap:.2g}")
    return Outcome("passed", len(values[1]))


def _equal(value: object, right: object, what: str) -> Outcome:
    """Passes if both are equal; of long texts, the part at the first difference is shown."""
    begin = 0
    if isinstance(value, str) and isinstance(right, str):
        begin = max((difference(value, right) or 0) - 10, 0)
    shown = [repr(one[begin:][:30] if isinstance(one, str) else one) for one in (value, right)]
    return (
        Outcome("passed", 1) if value == right else Outcome("failed", 1, f"{what} is {shown[0]} instead of {shown[1]}")
    )


def _first_failed(*outcomes: Outcome) -> Outcome:
    return next((outcome for outcome in outcomes if outcome.verdict == "failed"), outcomes[-1])


def _streamed(pair: Pair, prompt: str) -> Outcome:
    """The pieces of a stream make the whole answer."""
    fields = {"prompt": prompt, "max_tokens": pair.new, "temperature": 0.0}
    events = pair.server.stream(**fields, stream_options={"include_usage": True})
    usages = [event["usage"] for event in events if event != "[DONE]" and event.get("usage")]
    choices = [event["choices"][0] for event in events if event != "[DONE]" and event.get("choices")]
    answer = pair.server.complete(**fields)
    whole, usage = answer["choices"][0], answer.get("usage") or {}
    text = "".join(choice.get("text") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    end = Outcome("passed", 1)
    if "[DONE]" not in events[-1:]:
        end = Outcome("warning" if reasons else "failed", 1, "a stream ends without [DONE]")
    return _first_failed(
        _equal(text, whole["text"], "the text of a stream"),
        _equal(reasons, [whole["finish_reason"]], "finish_reason of a stream"),
        *(
            _equal(usages[-1][name], usage[name], f"{name} of a stream")
            for name in ("prompt_tokens", "completion_tokens")
            if usages and name in usage
        ),
        end,
    )


def _stopped(pair: Pair, prompt: str) -> Outcome:
    """A text ends before a stop string from its middle."""
    fields = {"prompt": prompt, "max_tokens": pair.new, "temperature": 0.0}
    text = pair.server.complete(**fields)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    if not stop:
        raise ValueError("the text is empty")
    choice = pair.server.complete(**fields, stop=[stop])["choices"][0]
    return _first_failed(
        _equal(choice["text"], text[: text.index(stop)], f"the text with stop={stop!r}"),
        _equal(choice["finish_reason"], "stop", "finish_reason"),
    )


def _counted(pair: Pair, prompt: str, n: int) -> Outcome:
    """Usage counts the tokens of the answer, of all choices."""
    fields = {"prompt": prompt, "max_tokens": pair.new, "temperature": 0.0, "logprobs": 0}
    right = _part(pair.reference.complete(**{**fields, "max_tokens": 1}), "usage")["prompt_tokens"]
    answer = pair.server.complete(**fields, n=n)
    choices, usage = answer["choices"], _part(answer, "usage")
    if len(choices) == 1 < n:
        raise ValueError(f"not checked: the server does not return n={n} choices")
    outcomes = [_equal(sorted(choice["index"] for choice in choices), list(range(n)), f"the choices of n={n}")]
    outcomes.append(_equal(usage["prompt_tokens"], right, "prompt_tokens"))
    records: Any = [(choice.get("logprobs") or {}).get("tokens") for choice in choices]
    if all(records):
        outcomes.append(_equal(usage["completion_tokens"], sum(map(len, records)), f"completion_tokens of n={n}"))
    return _first_failed(*outcomes)


def _seeded(pair: Pair, prompt: str) -> Outcome:
    """A seed repeats a sample."""
    fields = {"prompt": prompt, "max_tokens": pair.new, "temperature": 1.0, "seed": 7}
    one, other = (pair.server.complete(**fields)["choices"][0]["text"] for _ in range(2))
    return Outcome("passed", 1) if one == other else Outcome("warning", 1, "a seed does not repeat a sample")


def _sampled(pair: Pair, prompt: str, part: int, counts: dict[bool, collections.Counter[str]]) -> Outcome:
    """Samples of three tokens have the same distribution on both sides: chi-squared of two samples."""
    fields = {"prompt": prompt, "max_tokens": 3, "temperature": 1.0, "n": _PER_REQUEST, "logprobs": 0}
    for index in range(_DRAWS // _PER_REQUEST):
        seed = part * _DRAWS + index
        for is_server, side in ((True, pair.server), (False, pair.reference)):
            # Different seeds make the samples of both independent.
            answer = side.complete(**fields, seed=seed if is_server else 10**6 + seed)
            counts[is_server].update(choice["text"] for choice in answer["choices"])
    totals = np.array([counts[side].total() for side in (True, False)], float)
    texts = [text for text, count in (counts[True] + counts[False]).items() if count >= 10]
    table = np.array([[counts[side][text] for text in texts] for side in (True, False)], float).reshape(2, -1)
    table = np.append(table, totals[:, None] - table.sum(1, keepdims=True), axis=1)
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        raise ValueError("not checked: the samples are all equal, or all different")
    from scipy import stats  # takes as long to import as all of jspec

    p, total = float(stats.chi2_contingency(table)[1]), int(totals[0])  # pyright: ignore[reportArgumentType]
    if p < ALPHA:
        worst = int(np.abs(table[0] / totals[0] - table[1] / totals[1])[: len(texts)].argmax())
        where = f"{texts[worst]!r} came {table[0, worst]:.0f} times, from the reference {table[1, worst]:.0f} times"
        return Outcome("failed", total, f"{total} samples have another distribution (p = {p:.1g}): {where}")
    return Outcome("passed", total, f"p = {p:.2g}, {table.shape[1]} kinds of texts")


def _each(run: Callable[[Pair, str], Outcome], pair: Pair) -> Cases:
    for index, prompt in enumerate(pair.prompts):
        yield Case(f"prompt {index}", partial(run, pair, prompt))


def _draws(pair: Pair) -> Cases:
    counts = {side: collections.Counter[str]() for side in (True, False)}
    for part in range(8):
        yield Case(f"part {part + 1}", partial(_sampled, pair, pair.prompts[0], part, counts))


CHECKS: Mapping[str, Callable[[Pair], Cases]] = {
    "greedy": partial(_each, _greedy),
    "streams": partial(_each, _streamed),
    "stop strings": partial(_each, _stopped),
    "usage": partial(_each, partial(_counted, n=1)),
    "n": partial(_each, partial(_counted, n=2)),
    "seeds": partial(_each, _seeded),
    "distributions": _draws,
}


def verify_endpoint(
    server: Server,
    reference: Server | Model,
    prompts: Sequence[str] | None = None,
    *,
    max_new_tokens: int = 48,
    minutes: float = 2.0,
    progress: bool | None = None,
) -> Certificate:
    """Verify that a server answers as another server, or as plain decoding of a model.

    Greedy tokens, their log-probabilities, streams, stop strings, usage, seeds, and the distribution of samples are
    compared over `/v1/completions` of OpenAI's API. Where greedy tokens differ, the reference's
    log-probabilities tell a near-tie from a fault.

    Args:
      server: with its draft.
      reference: the same without a draft, or the model.
      prompts: None: eight held-out texts.
      max_new_tokens, minutes, progress: as in `verify`.

    Raises:
      ValueError: no server answers there.
    """
    side = Plain(reference) if isinstance(reference, Model) else reference.named()
    texts = [text[-400:] for text in heldout_prompts()[::10]][:8] if prompts is None else list(prompts)
    pair = Pair(server.named(), side, texts, max_new_tokens)
    subject = {"model": f"{server.url} ({pair.server.model})", "drafter": "its draft", "reference": side.name}
    checks = {name: check(pair) for name, check in CHECKS.items()}
    return certify(subject, checks, minutes=minutes, progress=progress)
