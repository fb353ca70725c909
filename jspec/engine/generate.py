"""The user's call: text or ids in, a `Generation` out; and the pure function under it."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from tqdm import tqdm

from jspec import drafters
from jspec.core import accept, decode, stopping
from jspec.core.sampling import RowSampling, Sampling, per_row
from jspec.core.struct import struct
from jspec.core.types import Accept, DecodeState, Drafter, Params, Stats, Target
from jspec.engine import memory
from jspec.engine.model import Model
from jspec.engine.result import Generation, GenerationStats, Piece
from jspec.text.tokenizer import TextStream, compile_stops
from pallas_kernels import platform

FINISH_REASONS = {stopping.RUNNING: None, stopping.EOS: "eos", stopping.STOP: "stop", stopping.LENGTH: "length"}
DEFAULT_PAGE_SIZE = 64
PREFILL_TOKENS = {"cpu": 1024}
"""Tokens of all prompts that are read at once, by platform, and else 4096: enough to keep the matrix products busy, and
few enough that their activations are small beside the weights."""


@struct
class GeneratedIds:
    """The result of `generate_ids`."""

    tokens: Int[Array, "B C"]
    """Prompts included; zeros behind each row's end."""
    length: Int[Array, " B"]
    """Of each row, prompt included."""
    logprobs: Float[Array, "B C"] | None
    """log p of each new token under the target's own logits, 0 elsewhere; None unless asked for."""
    stats: Stats


def generate_ids(
    params: Params,
    ids: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""] | Key[Array, " B"],
    *,
    target: Target,
    max_new_tokens: int | Int[Array, ""] | Int[Array, " B"],
    drafter: str | Drafter | None = None,
    draft: Target | None = None,
    max_length: int | None = None,
    eos: Sequence[int] = (),
    page_size: int = DEFAULT_PAGE_SIZE,
    sampling: Sampling | Sequence[Sampling | None] | RowSampling | None = None,
    accept: str | Accept | None = None,
    logprobs: bool = False,
) -> GeneratedIds:
    """Generation as a pure function of arrays, to be called inside a `jit` of your own.

    Args:
      params: weights, `model.params`.
      ids: prompts, padded on the right with any id.
      lengths: tokens of each prompt, at least 1.
      key: of the random choices: one for each row, or one that is split among the rows. Greedy decoding uses none.
      target, draft: configurations, `model.target` and `model.draft`.
      max_new_tokens: bound on new tokens, for all rows or for each; may be traced.
      drafter: a name, an object, or None for plain decoding.
      max_length: C, columns of the result, a shape. A row ends where it is full. None: T + max_new_tokens, which must
        then be an int.
      eos: ids that end a row.
      page_size: rows of a cache page.
      sampling: for all rows, or one for each; a `RowSampling` where the parameters are arrays of your program.
      accept: the rule of acceptance, as in `generate`.
      logprobs: record the log-probability of each new token.

    Raises:
      ValueError: arguments that do not fit together; see the message.
    """
    if max_length is None:
        if not isinstance(max_new_tokens, int):
            raise ValueError("max_length=None: give the columns of the result where max_new_tokens is an array")
        max_length = ids.shape[1] + max_new_tokens
    if max_length < ids.shape[1]:
        raise ValueError(f"max_length={max_length} is less than the prompts' {ids.shape[1]} columns")
    rows = sampling if isinstance(sampling, RowSampling) else per_row(sampling, ids.shape[0], target.vocab_size)
    rule, chosen = choose_rule(accept, rows, drafters.resolve(drafter))
    bound = chosen.bind(target, draft)
    table = stopping.build_table(target.vocab_size, eos)
    limit = jnp.broadcast_to(jnp.minimum(lengths + jnp.asarray(max_new_tokens, jnp.int32), max_length), lengths.shape)
    s = decode.prefill(
        params,
        ids,
        lengths,
        limit,
        key if key.ndim else jax.random.split(key, ids.shape[0]),
        stopping.init(table, ids.shape[0]),
        rows,
        target=target,
        drafter=bound,
        accept=rule,
        capacity=max_length,
        page_size=page_size,
        logprobs=logprobs,
        chunk=prefill_chunk(ids.shape[0]),
    )
    until = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    s = decode.run_rounds(params, s, until, target=target, drafter=bound, accept=rule)
    written = jnp.arange(max_length, dtype=jnp.int32)[None] < s.length[:, None]
    return GeneratedIds(jnp.where(written, s.tokens, 0), s.length, s.logprobs, s.stats)


def generate(
    model: Model,
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: str | Drafter | None = "auto",
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    accept: str | Accept | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    logprobs: bool = False,
    page_size: int = DEFAULT_PAGE_SIZE,
    progress: bool = False,
    debug: bool = False,
) -> Generation:
    """Continues prompts; the tokens are those that the target alone would give.

    With sampling, too: by default the tokens are those of plain sampling with the same seed, whatever the drafter, the
    shape of its tree, the batch or the page size.

    Args:
      model: from `jspec.load`.
      prompts: one prompt or a list of them, as text or as token ids.
      drafter: a name in `jspec.drafters.DRAFTERS`, an object such as `jspec.Eagle(depth=5, width=8)`, or None for plain
        decoding. "auto": what the draft that is loaded is made for; without one, ngram.
      max_new_tokens: bound on the new tokens of each row.
      sampling: for all rows, or one for each; None is greedy.
      accept: the rule of acceptance, one of `jspec.core.accept.RULES` by name, or an object. None: "coupled" where a
        row samples, else "greedy". "rejection" and "block" have drafts drawn from the drafter's own law; all rules are
        the greedy one where all rows are greedy.
      stop: strings that end a row; the text ends before them.
      seed: of the random choices. Row i takes seed + i; or give a list, a seed for each row.
      logprobs: record the log-probability of each new token.
      page_size: rows of a cache page.
      progress: shows a bar of the tokens produced.
      debug: checks the invariants of every round and raises at the first that is broken. Slower.

    Raises:
      ValueError, TypeError: an argument that cannot be honoured, or a generation whose caches do not fit the device's
        memory, before anything runs.
    """
    with tqdm(unit="tok", desc="compiling", disable=not progress) as bar:
        run = Run(model, prompts, drafter, max_new_tokens, sampling, accept, stop, seed, logprobs, page_size, debug)
        bar.set_description()
        bar.reset(run.most_tokens)
        while not run.advance(16 if progress else None):
            bar.update(run.new_tokens - bar.n)
        bar.update(run.new_tokens - bar.n)
    return run.result()


def stream(
    model: Model,
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    *,
    rounds: int = 4,
    drafter: str | Drafter | None = "auto",
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling | None] | None = None,
    accept: str | Accept | None = None,
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    logprobs: bool = False,
    page_size: int = DEFAULT_PAGE_SIZE,
    debug: bool = False,
) -> Iterator[Piece]:
    """As `generate`, in pieces as they are produced; its return value (of `yield from`) is the `Generation`.

    Arguments are those of `generate`, and `rounds`: rounds between two looks of the host. A multi-byte character
    comes whole, and text that may turn out to be the beginning of a stop string is held back.
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds={rounds!r}: the host looks after at least 1 round")
    run = Run(model, prompts, drafter, max_new_tokens, sampling, accept, stop, seed, logprobs, page_size, debug)
    return _stream(run, rounds)


def _stream(run: "Run", rounds: int):
    finished = run.advance(0)  # the prompt gave each row its first token
    yield from run.pieces()
    while not finished:
        finished = run.advance(rounds)
        yield from run.pieces()
    return run.result()


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
        _check_int("max_new_tokens", max_new_tokens, 1, "at least 1 token is generated")
        _check_int("page_size", page_size, 1, "a page holds at least 1 row")
        seeds = _seeds(seed, len(self.prompts))
        longest = max(len(prompt) for prompt in self.prompts)
        _check_fits(model.target, longest, max_new_tokens)
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


def choose(drafter: str | Drafter | None, model: Model) -> Drafter:
    """As `drafters.resolve`; "auto" is what the model's draft is made for, and ngram where it has none."""
    if isinstance(drafter, str) and drafter == "auto":
        drafter = "ngram" if model.draft is None else model.draft.drafter
    return drafters.resolve(drafter)


def choose_rule(rule: str | Accept | None, rows: RowSampling | None, drafter: Drafter) -> tuple[Accept, Drafter]:
    """The rule of acceptance for these parameters, and the drafter that drafts for it.

    Raises:
      ValueError: an unknown name, or a rule that would not keep the target's law.
      TypeError: neither a name nor a callable.
    """
    greedy = rows is None or rows.temperature is None
    if rule is None:
        rule = "greedy" if greedy else "coupled"
    if not isinstance(rule, str):
        if not callable(rule):
            raise TypeError(f"accept={rule!r}: give one of {', '.join(accept.RULES)}, or an object to call")
        if greedy and isinstance(rule, accept.LossyThresholds):
            raise ValueError(f"accept={rule}: thresholds change nothing where all rows are greedy; leave it out")
        return rule, drafter
    if rule not in accept.RULES:
        raise ValueError(f"accept={rule!r} is unknown; there are {', '.join(accept.RULES)}")
    if greedy:
        return accept.greedy, drafter
    if rule == "greedy":
        raise ValueError("accept='greedy' with a temperature above 0 would not sample: leave it out, or name 'coupled'")
    if rule == "block" and getattr(drafter, "width", 1) > 1:
        raise ValueError(f"accept='block' judges chains only: give {type(drafter).__name__} width=1, or another rule")
    if rule in ("rejection", "block") and hasattr(drafter, "sampled"):
        drafter = dataclasses.replace(drafter, sampled=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return accept.RULES[rule], drafter


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


def _check_int(name: str, value, least: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r}: give an int")
    if value < least:
        raise ValueError(f"{name}={value}: {why}")


def _check_fits(target: Target, longest: int, max_new_tokens: int) -> None:
    if longest >= target.max_length:
        raise ValueError(f"the longest prompt has {longest} tokens: the model's context holds {target.max_length}")
    if longest + max_new_tokens > target.max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: with a prompt of {longest} tokens that is {longest + max_new_tokens}, "
            f"and the model's context holds {target.max_length}; at most {target.max_length - longest} fit"
        )


def _seeds(seed, batch: int) -> np.ndarray:
    """A seed for each row."""
    given = [seed + i for i in range(batch)] if isinstance(seed, int | np.integer) else list(seed)
    if len(given) != batch:
        raise ValueError(f"seed={seed!r}: {len(given)} seeds for {batch} rows; give one, or one for each row")
    for value in given:
        _check_int("seed", value, 0, "seeds are not negative")
        if value > np.iinfo(np.uint32).max:
            raise ValueError(f"seed={value}: a seed is less than 2^32")
    return np.asarray(given, np.uint32)
