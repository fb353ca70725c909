"""An engine without a model: its tokens are those of a text, with delays, ends, errors and cancels as tests ask."""

import asyncio
import codecs
import dataclasses
import functools
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tokenizers

import jspec
from jspec.engine.metrics import SECONDS, TOKENS, Histogram
from jspec.generation.result import GenerationStats, Piece
from jspec.generation.score import Scores
from jspec.runner.request import EngineError, QueueFull
from jspec.text.tokenizer import Tokenizer

TEXT = "def f(x):\n    return 'héllo ☃' + x\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no such content') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if thinking %}<think>{% endif %}<assistant>"
)
ASSETS = Path(jspec.__file__).parent / "assets" / "python-tiny"


@functools.cache
def make_tokenizer(template=TEMPLATE):
    backend = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    return Tokenizer(backend, {"default": template} if template else {}, {"eos_token": "<|endoftext|>"})


@dataclasses.dataclass(eq=False)
class FakeHandle:
    """Yields the tokens of `text` in pieces of `step` tokens, `delay` seconds apart, over and over until the limit."""

    engine: "FakeEngine"
    prompt: list
    options: dict
    cancelled: bool = False
    ended: bool = False
    sent: int = 0
    cached_tokens: int = 3

    async def __aiter__(self):
        engine, limit = self.engine, self.options["max_new_tokens"]
        tokens = list(itertools.islice(itertools.cycle(engine.ids), limit))
        if not engine.endless:
            tokens = tokens[: len(engine.ids)]
        names = engine.model.tokenizer.token_bytes()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for at in range(0, len(tokens), engine.step):
            if engine.delay:
                await asyncio.sleep(engine.delay)
            if engine.broken_after is not None and at >= engine.broken_after:
                raise EngineError("the device is gone")
            part = tokens[at : at + engine.step]
            last = at + engine.step >= len(tokens)
            reason = ("length" if len(tokens) == limit else "eos") if last else None
            if self.cancelled:
                return
            text = decoder.decode(b"".join(names[i] for i in part), last)
            self.sent += len(part)
            if last:
                self.ended = True
                engine.left(self)
            origin = [(at + i) % 3 for i in range(len(part))]
            yield Piece(0, text, part, **self._logprobs(part), finish_reason=reason, origin=origin)

    def _logprobs(self, part):
        requested = self.options["logprobs"]
        if requested is False:
            return {}
        top = 0 if requested is True else requested
        return {
            "logprobs": [-0.5 for _ in part],
            "top_logprobs": [[((token + j) % 100, -0.5 - j) for j in range(top)] for token in part],
        }

    def result(self, timeout=None):
        assert self.ended
        # Each round accepts two drafts; the end drops up to two of its tokens.
        rounds = -(-max(self.sent - 1, 0) // 3)
        dropped = 1 + 3 * rounds - max(self.sent, 1)
        stats = GenerationStats(np.array([rounds]), np.array([[0, 0, rounds]]), 0.0, np.array([dropped]))
        return SimpleNamespace(stats=stats)

    def cancel(self):
        self.cancelled |= not self.ended
        self.engine.left(self)


class FakeEngine:
    """See `FakeHandle`. Attributes are for tests to set and to read.

    text: that of each sequence; several texts are for one request after the other.
    endless: whether sequences go on to their limits, or end after the text.
    broken_after: tokens after which sequences fail.
    room: sequences that may run at once, and prompts that may wait to be scored; None: any number.
    """

    def __init__(
        self,
        text=TEXT,
        *,
        template=TEMPLATE,
        context=256,
        step=3,
        delay=0.0,
        endless=False,
        broken_after=None,
        room=None,
    ):
        tokenizer = make_tokenizer(template)
        self.model = SimpleNamespace(
            name="fake", tokenizer=tokenizer, target=SimpleNamespace(vocab_size=tokenizer.vocab_size)
        )
        self.ids, *self.turns = map(tokenizer.encode, (text,) if isinstance(text, str) else (text[0], *text))
        self.context, self.step, self.delay = context, step, delay
        self.endless, self.broken_after, self.room = endless, broken_after, room
        self.handles, self.running, self.lock = [], set(), threading.Lock()
        self.max_queue, self.scored, self.may_score = room, [], threading.Event()
        self.may_score.set()
        self.adapters = SimpleNamespace(names=())

    def make(self, prompts, options, priority=0, salt="", adapter=None):
        self.ids, *self.turns = self.turns or [self.ids]
        requests = []
        for prompt, limit, seed in zip(prompts, options.limits(len(prompts)), options.seeds(len(prompts)), strict=True):
            assert prompt and all(type(i) is int and 0 <= i < self.model.target.vocab_size for i in prompt)
            assert len(prompt) + limit <= self.context
            values = {"max_new_tokens": limit, "seed": [seed], "priority": priority, "salt": salt, "adapter": adapter}
            requests.append(FakeHandle(self, list(prompt), {**vars(options), **values}))
        return requests

    def enqueue(self, requests, most=None):
        with self.lock:
            if most is not None and len(self.running) + len(requests) > most:
                raise QueueFull(f"{most} sequences wait")
            self.handles += requests
            self.running.update(requests)
        return requests

    def score(self, prompt, top_k=0):
        """Token i has the log-probability -i, and the next ids as the most probable ones."""
        assert self.may_score.wait(20)
        if self.broken_after is not None:
            raise EngineError("the device is gone")
        self.scored.append(prompt)
        values = [None, *(-float(i) for i in range(1, len(prompt)))]
        top = [[(token + 1 + j, -0.25 - j) for j in range(top_k)] for token in prompt]
        return Scores(prompt, values, [[], *top[1:]], None)

    def left(self, handle):
        with self.lock:
            self.running.discard(handle)

    @property
    def alive(self):
        return self.broken_after != 0

    def metrics(self):
        histogram = Histogram((1, 2, 3, *[0] * (len(SECONDS) - 2)), 4.5)
        return SimpleNamespace(
            **dict.fromkeys(("running", "waiting", "held", "prefix_queries", "prefix_hits", "preemptions"), 1),
            **dict.fromkeys(("prompt_tokens", "new_tokens", "rounds", "drafting_rounds", "drafted", "accepted"), 2),
            **dict.fromkeys(("time_to_first_token", "inter_token", "queue_time", "end_to_end"), histogram),
            accept_length=Histogram((1, 2, 3, *[0] * (len(TOKENS) - 2)), 4.5, TOKENS),
            slots=4,
            pages=10,
            pages_used=5,
            accepted_by_position=(3, 1),
            requests_finished={"eos": 2, "length": 1},
        )

    def close(self):
        pass
