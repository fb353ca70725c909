"""`Run`: the host's side of one generation."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree

from jspec.cache.pages import fit_page_size
from jspec.core import grammar, groups, stopping
from jspec.core.automaton import Automaton
from jspec.core.checks import check_text, shorten
from jspec.core.embeds import Embeds
from jspec.core.loop import decode_checked, fastest
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.processes import agreement, fetch, least
from jspec.core.sampling import per_row, seeds_to_keys
from jspec.core.types import DecodeState, Params, Prompts, RowSampling, Support
from jspec.drafters.plain import Plain
from jspec.generation import costs
from jspec.generation.embeds import PromptEmbeds, embeds_dtype, embeds_of
from jspec.generation.method import choose_drafter, choose_method
from jspec.generation.options import GenerateOptions, check_draft_fits, check_fits, grammars_of, longest_sequence
from jspec.generation.result import FINISH_REASONS, Branches, Generation, Generations, GenerationStats, Piece, top_pairs
from jspec.generation.speculation import limits_of_batch
from jspec.generation.support import TokenSupport, token_supports
from jspec.loading import memory
from jspec.loading.model import Model
from jspec.loading.replacement import check_alive
from jspec.models.sizes import tree_bytes
from jspec.text.grammar import compile_grammar
from jspec.text.stream import TextStream, compile_stops
from pallas_kernels import platform

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Int[np.ndarray, " T"] | Int[Array, " T"]
"""Text or token ids, or a `PromptEmbeds`, which reads as token ids."""

PREFILL_TOKENS = {"cpu": 1024}
"""Prompt tokens of the whole batch per prefill chunk, by platform; 4096 on the others. Enough to keep the matrix units
busy, and so few that activations are small compared with the weights."""

_PLAN = "progress, rounds or number of prompts"
COMPARED = (*(field.name for field in dataclasses.fields(GenerateOptions)), "target", "prompts", "eos", _PLAN)
"""Arguments that must be equal in all processes."""


class Run:
    """Host-side driver of one generation: owns the decode state and the decoded text.

    `__init__` reads the prompts and compiles the loop; `advance` runs rounds.

    Args:
      model, prompts: as in `jspec.generate`.
      options: the other arguments of `jspec.generate`.
      chunk: columns of the prompts in each prefill; None: `prefill_chunk`.
      plan: later calls, such as the rounds of each `advance`; must be equal in all processes.

    Attributes:
      model: the model.
      options: the options.
      single: whether a single prompt was given, not a list of them.
      prompts: ids of each prompt.
      method: target, bound drafter, acceptance rule, and the number of recorded tokens.
      state: the decode state.
      tokens, texts: new ids and text of each sequence so far.

    Raises:
      ValueError, TypeError: as `jspec.generate`.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompt | Sequence[Prompt],
        options: GenerateOptions,
        *,
        chunk: int | None = None,
        plan: object = None,
    ):
        check_model(model)
        self.model, self.options, placement = model, options, model.placement
        with one_call(model) as compare:
            # Arguments, before anything is allocated.
            self.single, self.prompts = encode_prompts(model, prompts, embeds=True)
            batch, self._limits = len(self.prompts), options.limits(len(self.prompts))
            seeds = options.seeds(batch)
            self.method, row_sampling = check(model, self.prompts, options)
            local = groups.batch_of(placement, batch)
            drafts = limits_of_batch(options.speculation, batch, self.method.drafter)
            self._trial = None if options.debug else costs.trial(model.params, self.method, local, row_sampling)
            if options.drafter == "auto" and self._trial is not None and self._trial.waits(max(self._limits) - 1):
                self.method, self._trial, drafts = dataclasses.replace(self.method, drafter=Plain()), None, None
            drafter = self.method.drafter
            stop, constraint, embeds = *_automata(model, options, batch), _embeds(model, self.prompts)
            # The memory of each device, for its sequences.
            columns, length = max(map(len, self.prompts)), sum(longest_sequence(self.prompts, self._limits))
            extra = tree_bytes((stop, constraint)) + tree_bytes((row_sampling, embeds)) * local // batch
            sizes = model.params, model.target, drafter, local
            capacity = memory.fit(*sizes, options.page_size, bucket(length), max(bucket(columns), length), extra)
            static = {"target": model.target, "drafter": drafter, "accept": self.method.accept}
            compare({**vars(options), **static, "prompts": self.prompts, "eos": model.eos, _PLAN: plan})
        capacity = least(placement, capacity)

        # Results on the host.
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.texts = [""] * batch
        self.finish_codes = [stopping.RUNNING] * batch
        self.seconds = 0.0
        self._new_pieces: list[Piece] = []
        self._streams: list[TextStream] | None = None
        if model.tokenizer is not None:
            self._streams = [TextStream(model.tokenizer, prompt, options.stop) for prompt in self.prompts]

        # Allocate, read the prompts, and compile the loop.
        ids, lengths = _pad(self.prompts)
        ids, lengths, ends = (cast(Array, x) for x in (ids, lengths, lengths + np.array(self._limits, np.int32)))
        keys, drafts = _keys(np.array(seeds, np.uint32)), cast(Array | None, drafts)
        padded = Prompts(ids, lengths, ends, keys, stop, row_sampling, constraint, drafts, embeds)
        shape = {"capacity": capacity, "page_size": fit_page_size(options.page_size, capacity)}
        shape["chunk"] = prefill_chunk(local) if chunk is None else chunk
        try:
            self.state = jitted_prefill(model.params, padded, method=self.method, **shape)
            self._decode = self._choose_decode()
            if self._trial is not None:
                self.state = costs.with_costs(self.state, self._trial.costs)
            self._run_until(0)
        except jax.errors.JaxRuntimeError as error:
            memory.explain(error, memory.need(*sizes, capacity, options.page_size, extra))
            raise
        self.seconds = 0.0

    @property
    def new_tokens(self) -> int:
        """New tokens of all sequences so far."""
        return sum(map(len, self.tokens))

    def advance(self, rounds: int | None) -> bool:
        """Runs up to `rounds` more rounds (None: all of them, in one call of the device) and collects their tokens.

        Returns True when every sequence has ended.
        """
        unbounded = int(np.iinfo(np.int32).max)
        # A group of devices whose sequences have ended runs fewer rounds than the others.
        done = 0 if rounds is None else int(np.max(fetch(self.state.round_index)))
        self._run_until(unbounded if rounds is None else min(done + rounds, unbounded))
        # Collect new tokens and text of each sequence.
        s = self.state
        buffer, lengths, codes = self._of_sequences((s.tokens, s.length, s.finish_code))
        for i, prompt in enumerate(self.prompts):
            new = buffer[i, len(prompt) + len(self.tokens[i]) : lengths[i]].tolist()
            has_ended = codes[i] != stopping.RUNNING and self.finish_codes[i] == stopping.RUNNING
            text = ""
            if self._streams is not None:
                text = self._streams[i].push(new) + (self._streams[i].finish() if has_ended else "")
            self.tokens[i] += new
            self.texts[i] += text
            self.finish_codes[i] = int(codes[i])
            if new or text:
                self._new_pieces.append(Piece(i, text, new))
        return all(code != stopping.RUNNING for code in self.finish_codes)

    def finish(self) -> Generations:
        """Runs all remaining rounds; returns the result."""
        self.advance(None)
        return self.result()

    def stream(self, rounds: int) -> Iterator[Piece]:
        """Runs all remaining rounds and yields new pieces after every `rounds` of them."""
        finished = self.advance(0)  # each sequence has its first token from prefill
        yield from self.pieces()
        while not finished:
            finished = self.advance(rounds)
            yield from self.pieces()

    def pieces(self) -> list[Piece]:
        """New pieces since the last call."""
        new, self._new_pieces = self._new_pieces, []
        return new

    def result(self) -> Generations:
        """The result so far."""
        # Counters.
        stats = self._of_sequences(self.state.stats)
        branches = Branches.of(self.method.drafter, stats.branch_counts, len(self.prompts))
        limits = self._of_sequences(self.state.draft_limits)
        stats = GenerationStats(stats.rounds, stats.accept_counts, self.seconds, stats.dropped, branches, limits)
        # Records of new tokens.
        origin = self._new_columns(self.state.origin)
        logprobs = sampled = top = support = None
        if (recorded := self.state.recorded) is not None:
            logprobs = self._new_columns(recorded.logprobs)
            sampled = [[0.0] * len(tokens) for tokens in self.tokens]
            if recorded.sampled_logprobs is not None:
                sampled = self._new_columns(recorded.sampled_logprobs)
            if recorded.top is not None:
                top = [top_pairs(part, self.options.top_logprobs) for part in self._of_new_tokens(recorded.top)]
            support = self._support(recorded.support) if self.options.support else None
        # One result per sequence.
        tokenizer = self.model.tokenizer
        items = [
            Generation(
                tokens=self.tokens[i],
                text=None if tokenizer is None else self.texts[i],
                finish_reason=FINISH_REASONS.get(self.finish_codes[i]),
                stats=stats.of_sequence(i),
                origin=origin[i],
                logprobs=None if logprobs is None else logprobs[i],
                prompt=list(prompt),
                tokenizer=tokenizer,
                top_logprobs=None if top is None else top[i],
                sampled_logprobs=None if sampled is None else sampled[i],
                support=None if support is None else support[i],
            )
            for i, prompt in enumerate(self.prompts)
        ]
        return Generations(items, stats)

    def _of_sequences(self, tree: PyTree) -> Any:
        """Arrays of the state on the host, [B, ...]."""
        return groups.unstack(self.model.placement, fetch(tree), len(self.prompts))

    def _new_columns(self, buffer: Array) -> list[list[Any]]:
        """The columns of a [B, C] buffer that belong to new tokens."""
        rows = zip(self._of_sequences(buffer), self.prompts, self.tokens, strict=True)
        return [row[len(prompt) : len(prompt) + len(new)].tolist() for row, prompt, new in rows]

    def _support(self, buffer: Support | None) -> list[list[TokenSupport]]:
        """The possible tokens where each new token was chosen."""
        size = self.model.target.vocab_size
        parts = [None] * len(self.tokens) if buffer is None else self._of_new_tokens(buffer)
        both = zip(parts, self.tokens, strict=True)
        return [token_supports(part, tokens, self.options.support, size) for part, tokens in both]

    def _of_new_tokens(self, buffers: T) -> list[T]:
        """The columns of [B, C, ...] buffers that belong to the new tokens of each sequence."""
        buffers = self._of_sequences(buffers)
        ends = [(len(prompt), len(prompt) + len(new)) for prompt, new in zip(self.prompts, self.tokens, strict=True)]
        return [jax.tree.map(lambda x, i=i, at=slice(*at): x[i, at], buffers) for i, at in enumerate(ends)]

    def _choose_decode(self) -> Callable[[Params, DecodeState, Int[Array, ""]], DecodeState]:
        if not self.options.debug:
            return partial(fastest(self.model.params, self.state, self.method), method=self.method)

        def checked(params: Params, s: DecodeState, until: Int[Array, ""]) -> DecodeState:
            error, s = decode_checked(params, s, until, method=self.method)
            fetch(error).throw()
            return s

        return checked

    def _run_until(self, round_index: int) -> None:
        began = time.perf_counter()
        self.state = costs.run(self._decode, self.model.params, self.state, round_index, self._trial)
        self.seconds += time.perf_counter() - began


def check(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> tuple[Method, RowSampling | None]:
    """The method for prompts with these options, checked as `jspec.generate` does, and the sampling of each prompt."""
    batch, target = len(prompts), model.target
    limits = options.limits(batch)
    options.seeds(batch)
    options.check_vocabulary(target.vocab_size)
    check_fits(target, *longest_sequence(prompts, limits))
    row_sampling = per_row(options.sampling, batch, target.vocab_size)
    choice = target, model.draft, choose_drafter(options.drafter, model), options.accept, row_sampling
    method, row_sampling = choose_method(*choice, batch=batch, placement=model.placement, record=options.records)
    check_draft_fits(method.drafter, prompts, limits)
    limits_of_batch(options.speculation, batch, method.drafter)
    return method, row_sampling


def in_batches(model: Model, prompts: Sequence[Prompt], options: GenerateOptions, size: int) -> Iterator[Generations]:
    """Runs prompts in order, `size` at a time, and yields the results of each batch.

    Copies of the last prompt fill up the last batch, so that all run the same programs. Only its `stats.seconds`
    includes them.

    options: of all prompts, or in lists with one entry for each; one seed becomes `(seed, i)` for prompt i.

    Raises:
      ValueError, TypeError: another number of entries than of prompts, or as `Run`.
    """
    count = len(prompts)
    entries, size = options.entries(count), min(size, count)
    for start in range(0, count, size):
        # Indices beyond the last prompt repeat it.
        index, left = [min(i, count - 1) for i in range(start, start + size)], count - start
        batch = dataclasses.replace(options, **{name: [values[i] for i in index] for name, values in entries.items()})
        out = Run(model, [prompts[i] for i in index], batch, plan=f"{left} prompts in batches").finish()
        yield Generations(out.items[:left], out.stats.of_first(left))


def one_call(model: object) -> AbstractContextManager[Callable[[Mapping[str, object]], None]]:
    """A context in which several processes check the arguments of a generation: see `jspec.core.processes.agreement`.

    It may be entered several times, the last one with the comparison.
    """
    return agreement(model.placement if isinstance(model, Model) else None, COMPARED)


def prefill_chunk(batch: int) -> int:
    """The columns of `batch` prompts in each prefill."""
    return bucket(PREFILL_TOKENS.get(platform.platform(), 4096) // batch, least=64)


def bucket(size: int, least: int = 16) -> int:
    """The next power of two, at least `least`: sizes in one bucket share a compiled program."""
    return max(least, 1 << (size - 1).bit_length())


def _automata(model: Model, options: GenerateOptions, batch: int) -> tuple[Automaton, Automaton]:
    """The automata of the stop strings and of the grammars of a batch."""
    vocab_size, eos = model.target.vocab_size, () if options.ignore_eos else model.eos
    grammars = grammars_of(options.sampling, batch, options.accept, ignore_eos=options.ignore_eos)
    tables = [compile_grammar(one, model.tokenizer, vocab_size, model.eos) for one in grammars]
    table = compile_stops(model.tokenizer, vocab_size, eos, options.stop)
    if table is not None:  # Pad it, so that other stop strings run the same program.
        states, classes = table.table.shape
        table = table.padded(bucket(states, least=1), bucket(classes, least=64))
    return stopping.init(table, batch), grammar.init(tables, vocab_size)


def check_model(model: object) -> None:
    """Raises TypeError unless `model` is a `Model`, or ValueError if its weights have been deleted."""
    if not isinstance(model, Model):
        raise TypeError(f"model={shorten(model)}: must be a jspec.Model, as jspec.load returns it")
    check_alive(model.params, f"model={shorten(model.name)}: params")


def encode_prompts(
    model: Model, prompts: object, name: str = "prompts", *, embeds: bool = False
) -> tuple[bool, list[Sequence[int]]]:
    """Whether `prompts` is a single prompt, and the ids of each prompt.

    name: the argument, for messages. embeds: whether a prompt may hold embeddings; it is returned as it is.

    Raises:
      ValueError, TypeError: neither a prompt nor a list of prompts, or ids outside the vocabulary.
    """
    check_model(model)
    prompts = _on_host(name, prompts)
    if isinstance(prompts, bytes | bytearray | memoryview) or not (
        isinstance(prompts, str | Sequence) or (isinstance(prompts, np.ndarray) and prompts.ndim)
    ):
        raise TypeError(f"{name} is of type {type(prompts).__name__}: must be text, token ids, or a list of them")
    # One prompt, or a list.
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    items = [prompts] if single else list(prompts)
    if not items:
        raise ValueError(f"{name}=[]: must contain at least one prompt")
    names = [name] if single else [f"{name}[{i}]" for i in range(len(items))]
    return single, [_encode(model, name, prompt, embeds) for name, prompt in zip(names, items, strict=True)]


def _on_host(name: str, prompt: object) -> object:
    """An array of JAX as one of NumPy; everything else as it is. TypeError for a traced array."""
    if isinstance(prompt, Tracer):
        raise TypeError(f"{name} is traced: prompts must be known; inside jax.jit use jspec.generate_ids")
    return np.asarray(prompt) if isinstance(prompt, jax.Array) else prompt


def _encode(model: Model, name: str, prompt: object, embeds: bool) -> Sequence[int]:
    """The ids of one prompt."""
    if isinstance(prompt, PromptEmbeds):
        if not embeds:
            raise TypeError(f"{name} holds embeddings: must be text or token ids; jspec.generate and engines take them")
        _encode(model, name, prompt.tokens, False)
        prompt.check_fits(name, model.target)
        return prompt
    prompt = _on_host(name, prompt)
    if isinstance(prompt, str):
        if model.tokenizer is None:
            need = "give token ids, as jspec.generate in Python takes them, or add a tokenizer.json"
            raise ValueError(f"{name} is text, but {model.name} has no tokenizer: {need}")
        prompt = model.tokenizer.encode(check_text(name, prompt))
    wrong = f"{name}: must be text or a flat list of token ids, not "
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence | np.ndarray):
        raise TypeError(wrong + type(prompt).__name__)
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        raise TypeError(f"{wrong}{shorten(prompt)}") from None
    # Flat lists of ids in the vocabulary.
    if ids.size == 0:
        raise ValueError(f"{name} is empty: must have at least one token")
    if ids.dtype == object and ids.ndim == 1 and all(isinstance(one, int) for one in prompt):
        raise ValueError(f"{name}={shorten(prompt)}: ids must be from 0 to {model.target.vocab_size - 1}")
    mixed = not isinstance(prompt, np.ndarray) and any(isinstance(one, bool | np.bool_) for one in prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or mixed:
        raise TypeError(f"{wrong}{'bool' if mixed else ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= model.target.vocab_size:
        bad = ids[(ids < 0) | (ids >= model.target.vocab_size)][0]
        raise ValueError(f"{name} contains the id {bad}: ids must be from 0 to {model.target.vocab_size - 1}")
    return ids.tolist()


_keys = jax.jit(seeds_to_keys)
"""Seeds to keys, in a single jitted program: every eager op would compile once per shape."""


def _embeds(model: Model, prompts: Sequence[Sequence[int]]) -> Embeds | None:
    """The embeddings of prompts in the columns of `_pad`; None: there are none."""
    if not any(isinstance(prompt, PromptEmbeds) for prompt in prompts):
        return None
    lengths = list(map(len, prompts))
    shape = len(prompts), bucket(max(lengths)), model.target.hidden_size
    return embeds_of(prompts, [0] * len(prompts), lengths, shape, embeds_dtype(model.target, model.params.target))


def _pad(prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Prompts padded on the right to a common width, and their lengths."""
    width = bucket(max(map(len, prompts)))
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = list(prompt)
    return ids, np.array([len(prompt) for prompt in prompts], np.int32)
