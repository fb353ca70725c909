"""`Run`: one generation as the host drives it, and the preparation of its inputs."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.core import decode, stopping
from jspec.core.sampling import per_row
from jspec.core.types import DecodeState
from jspec.engine import memory
from jspec.engine.model import Model
from jspec.engine.options import check_fits, check_int, check_seeds, choose, choose_rule
from jspec.engine.result import Generation, GenerationStats, Piece
from jspec.text.stream import TextStream, compile_stops
from pallas_kernels import platform

FINISH_REASONS = {stopping.RUNNING: None, stopping.EOS: "eos", stopping.STOP: "stop", stopping.LENGTH: "length"}
PREFILL_TOKENS = {"cpu": 1024}
"""Tokens of all prompts that are read at once, by platform, and else 4096: enough to keep the matrix products busy, and
few enough that their activations are small beside the weights."""


class Run:
    """One generation as the host sees it: a decode state that it advances, and the text that came out.

    Arguments and errors are those of `generate`; chunk: columns of the prompts that are read at once.

    model: the model, whose weights every round takes.
    parts: target, bound drafter and rule of acceptance, as `decode.decode` takes them.
    state: the decode state.
    """

    def __init__(
        self,
        model,
        prompts,
        drafter,
        max_new_tokens,
        sampling,
        accept,
        stop,
        seed,
        logprobs,
        page_size,
        debug,
        chunk=None,
    ):
        self.single, self.prompts = encode_prompts(model, prompts)
        self.model, self.tokenizer = model, model.tokenizer
        check_int("max_new_tokens", max_new_tokens, 1, "at least 1 token is generated")
        check_int("page_size", page_size, 1, "a page holds at least 1 row")
        seeds = check_seeds(seed, len(self.prompts))
        longest = max(len(prompt) for prompt in self.prompts)
        check_fits(model.target, longest, max_new_tokens)
        rows = per_row(sampling, len(self.prompts), model.target.vocab_size)
        rule, chosen = choose_rule(accept, rows, choose(drafter, model))
        bound = chosen.bind(model.target, model.draft)
        table = compile_stops(self.tokenizer, model.target.vocab_size, model.eos, stop)
        self.streams = [TextStream(self.tokenizer, p, stop) for p in self.prompts] if self.tokenizer else None
        self.texts = [""] * len(self.prompts)
        self.parts = {"target": model.target, "drafter": bound, "accept": rule}
        self.debug, self.seconds = debug, 0.0
        ids, lengths = _pad(self.prompts)
        self.most_tokens = len(self.prompts) * max_new_tokens
        places = model.params, model.target, bound, len(self.prompts)
        least = max(ids.shape[1], longest + max_new_tokens)
        capacity = memory.fit(*places, page_size, bucket(longest + max_new_tokens), least)
        try:
            self.state: DecodeState = decode.jitted_prefill(
                model.params,
                ids,
                lengths,
                lengths + np.int32(max_new_tokens),
                _keys(seeds),
                stopping.init(_bucket_states(table), len(self.prompts)),
                rows,
                **self.parts,
                capacity=capacity,
                page_size=page_size,
                logprobs=logprobs,
                chunk=prefill_chunk(len(self.prompts)) if chunk is None else chunk,
            )
            self._decode = self._choose_decode()
            self._advance_to(0)  # compiles, and runs no round
        except jax.errors.JaxRuntimeError as error:
            memory.explain(error, memory.need(*places, capacity, page_size))
            raise
        self.seconds = 0.0
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.finish = [0] * len(self.prompts)
        self._new: list[Piece] = []

    @property
    def new_tokens(self) -> int:
        """Tokens that came out so far, of all rows."""
        return sum(len(row) for row in self.tokens)

    def advance(self, rounds: int | None) -> bool:
        """Runs at most `rounds` rounds (None: all that are left) and takes what came out; True when all rows ended."""
        self._advance_to(np.iinfo(np.int32).max if rounds is None else int(self.state.round_index) + rounds)
        buffer, lengths, finish = jax.device_get((self.state.tokens, self.state.length, self.state.finish_code))
        for row, prompt in enumerate(self.prompts):
            ended = finish[row] != stopping.RUNNING and self.finish[row] == stopping.RUNNING
            new = buffer[row, len(prompt) + len(self.tokens[row]) : lengths[row]].tolist()
            text = ""
            if self.streams is not None:
                text = self.streams[row].push(new) + (self.streams[row].finish() if ended else "")
            self.tokens[row] += new
            self.texts[row] += text
            self.finish[row] = int(finish[row])
            if new or text:
                self._new.append(Piece(row, text, new))
        return all(code != stopping.RUNNING for code in self.finish)

    def pieces(self) -> list[Piece]:
        """What came out since the last call."""
        new, self._new = self._new, []
        return new

    def result(self) -> Generation:
        """What came out so far."""
        stats = jax.device_get(self.state.stats)
        stats = GenerationStats(stats.rounds, stats.accept_counts, self.seconds)
        columns: list[Any] = [
            self.tokens,
            self.texts if self.tokenizer else None,
            [FINISH_REASONS[code] for code in self.finish],
            self._new_columns(self.state.origin),
            None if self.state.logprobs is None else self._new_columns(self.state.logprobs),
            self.prompts,
        ]
        if self.single:
            columns = [column and column[0] for column in columns]
        tokens, texts, reasons, origin, logprobs, prompt = columns
        return Generation(tokens, texts, reasons, stats, origin, logprobs, prompt, self.tokenizer)

    def _new_columns(self, buffer) -> list[list]:
        rows = zip(jax.device_get(buffer), self.prompts, self.tokens, strict=True)
        return [row[len(prompt) : len(prompt) + len(new)].tolist() for row, prompt, new in rows]

    def _choose_decode(self) -> Callable[..., Any]:
        if self.debug:
            return partial(decode.decode_checked, **self.parts)
        return partial(decode.fastest(self.model.params, self.state, self.parts["drafter"]), **self.parts)

    def _advance_to(self, until: int) -> None:
        began = time.perf_counter()
        out = self._decode(self.model.params, self.state, jnp.int32(until))
        if self.debug:
            error, out = out
            error.throw()
        self.state = jax.block_until_ready(out)
        self.seconds += time.perf_counter() - began


def prefill_chunk(batch: int) -> int:
    """Columns of `batch` prompts that are read at once."""
    return bucket(PREFILL_TOKENS.get(platform.platform(), 4096) // batch, least=64)


def bucket(size: int, least: int = 16) -> int:
    """The next power of two: sizes in one bucket share a compiled program."""
    return max(least, 1 << (size - 1).bit_length())


def _bucket_states(table: np.ndarray | None) -> np.ndarray | None:
    """The automaton padded with states that are never entered, so that other stop strings run the same program."""
    if table is None:
        return None
    padding = bucket(len(table), least=1) - len(table)
    return np.pad(table, ((0, padding), (0, 0)))


def encode_prompts(model: Model, prompts) -> tuple[bool, list[list[int]]]:
    """Whether a single prompt was given, and the ids of each prompt.

    Raises:
      ValueError, TypeError: an argument that is no prompt and no list of prompts.
    """
    if not isinstance(prompts, str | Sequence | np.ndarray):
        raise TypeError(f"prompts is a {type(prompts).__name__}: give text, token ids, or a list of them")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    rows = [prompts] if single else list(prompts)
    if not rows:
        raise ValueError("prompts=[]: give at least one prompt")
    encoded = []
    for i, row in enumerate(rows):
        where = "prompts" if single else f"prompts[{i}]"
        if isinstance(row, str):
            if model.tokenizer is None:
                raise ValueError(f"{where} is text, and {model.name} has no tokenizer: give token ids")
            row = model.tokenizer.encode(row)
        ids = np.asarray(row)
        if ids.size == 0:
            raise ValueError(f"{where} is empty: give at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"{where}: a prompt is text or a flat list of token ids, not {ids.dtype} of {ids.shape}")
        if ids.min() < 0 or ids.max() >= model.target.vocab_size:
            bad = ids[(ids < 0) | (ids >= model.target.vocab_size)][0]
            raise ValueError(f"{where} holds the id {bad}: ids are 0 to {model.target.vocab_size - 1}")
        encoded.append(ids.tolist())
    return single, encoded


_keys = jax.jit(jax.vmap(jax.random.key))
"""Seeds to keys. As everything on the way to prefill it is one program or none, as each is compiled for each shape."""


def _pad(prompts: list[list[int]]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    width = bucket(max(len(prompt) for prompt in prompts))
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, np.array([len(prompt) for prompt in prompts], np.int32)
