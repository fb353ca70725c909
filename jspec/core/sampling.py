"""Sampling parameters: processes the target's logits, and makes the noise of its choices.

Logits are processed in this order: grammar, repetition penalty, frequency and presence penalty, logit bias,
min_new_tokens, temperature, top-k, top-p, min-p. Each is applied exactly at every node of a tree, along the node's own
path.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jspec.core import grammar as grammars
from jspec.core import stopping, truncation
from jspec.core.checks import check_each, check_hashable, check_int, check_kind, check_number, entries_of, shorten
from jspec.core.options import check_options, option
from jspec.core.types import DecodeState, RowSampling

NOISE, DRAFT, COINS, FINAL = range(4)
"""Independent random streams of a sequence: noise of the target's choice (drafts may share it), sampled drafts, coins
of an acceptance rule, and the rule's final token."""


_TEMPERATURE = "0 (greedy) or at least 1e-6"
_PENALTY = {"least": -1e6, "most": 1e6}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a sequence. Values are used in float32, and their bounds hold in that precision.

    The most probable token always stays: top_k, top_p and min_p never remove it.

    temperature: divides the logits; at least 1e-6, or 0, which chooses the highest (greedy).
    top_k: keeps the k highest logits, ties included. None: all.
    top_p: nucleus sampling: keeps the smallest set of most probable tokens with mass top_p, ties included. None: all.
    min_p: keeps tokens with at least this fraction of the highest probability. None: all.
    repetition_penalty: divides positive and multiplies negative logits of all tokens seen, prompt included (Keskar et
      al., arXiv 1909.05858, section 4.1); from 1e-6 to 1e6. 1: off.
    presence_penalty: subtracted from the logits of the tokens generated so far; from -1e6 to 1e6.
    frequency_penalty: the same, once for each time the token was generated.
    logit_bias: token id -> value added to its logit; -inf forbids the token.
    min_new_tokens: before this many new tokens, no token may end the text, unless every other token is forbidden.
    grammar: the allowed texts, such as a `jspec.Grammar`. None: all. No other option allows a token that the grammar
      forbids.
    thinking_budget: from this many new tokens on, a grammar ends its thinking (`Grammar.after`). None: no bound.

    Raises:
      TypeError, ValueError: a parameter of another type or out of its bounds.
    """

    temperature: float = option(1.0, bounds={"least": 0.0, "valid": _TEMPERATURE})
    top_k: int | None = option(None, least=1, most=2**63 - 1)
    top_p: float | None = option(None, above=0.0, most=1.0)
    min_p: float | None = option(None, least=0.0, most=1.0)
    repetition_penalty: float = option(1.0, least=1e-6, most=1e6)
    presence_penalty: float = option(0.0, bounds=_PENALTY)
    frequency_penalty: float = option(0.0, bounds=_PENALTY)
    logit_bias: Mapping[int, float] | None = None
    min_new_tokens: int = option(0, least=0, most=2**63 - 1)
    grammar: grammars.TokenGrammar | None = None
    thinking_budget: int | None = option(None, least=0, most=2**63 - 1)

    def __post_init__(self):
        check_options(self, "Sampling")
        # Lower values would make the highest logits equal: divided by them, all would be the largest float.
        if 0 < self.temperature and np.float32(self.temperature) < np.float32(1e-6):
            raise ValueError(f"Sampling(temperature={self.temperature!r}): must be {_TEMPERATURE}")
        if self.thinking_budget is not None and self.grammar is None:
            raise ValueError("Sampling(thinking_budget=...): requires a grammar that begins with thinking")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))
        if self.grammar is not None:
            if isinstance(self.grammar, type) or not isinstance(self.grammar, grammars.TokenGrammar):
                raise TypeError(f"Sampling(grammar={shorten(self.grammar)}): must be a jspec.Grammar, or None")
            check_hashable("grammar", self.grammar)


def _check_bias(logit_bias: object) -> dict[int, float]:
    """Check a bias; returns plain ids and values."""
    if not isinstance(logit_bias, Mapping):
        raise TypeError(f"Sampling(logit_bias={shorten(logit_bias)}): must map token ids to a bias each, or be None")
    checked: dict[int, float] = {}
    for token, value in logit_bias.items():
        token = check_int("token id of logit_bias", token, least=0)
        name = f"logit_bias[{token}]"
        valid = "finite, or -inf to forbid the token"
        forbids = isinstance(value, float | np.floating) and value == -math.inf
        checked[token] = -math.inf if forbids else check_number(name, value, valid=valid, owner="Sampling")
    return checked


def per_row(
    sampling: Sampling | Sequence[Sampling | None] | None, batch: int, vocab_size: int, always: Sequence[str] = ()
) -> RowSampling | None:
    """Convert parameters to arrays; None if every sequence is greedy and without other options.

    Grammars are not part of them, see `jspec.core.grammar.init`.

    sampling: one `Sampling` for all sequences, or one per sequence.
    always: options that have an array even if no sequence uses them.

    Raises:
      TypeError: anything else.
      ValueError: a list whose length is not `batch`, a bias for a token outside the vocabulary, or biases that forbid
        all tokens.
    """
    samplings = [Sampling(temperature=0.0) if one is None else one for one in each_of(sampling, batch)]
    off = {"top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, "thinking_budget": np.iinfo(np.int32).max}
    # Larger values have the same effect, but do not fit in int32.
    most = {"top_k": vocab_size, **dict.fromkeys(("min_new_tokens", "thinking_budget"), np.iinfo(np.int32).max)}
    columns = {}
    # Of other options that no sequence uses there is no array, so the program leaves them out.
    for field in dataclasses.fields(Sampling):
        values = [getattr(one, field.name) for one in samplings]
        unused = 0.0 if field.name == "temperature" else field.default
        used = field.name in always or any(value != unused for value in values)
        if used and field.name not in ("logit_bias", "grammar"):
            values = [off[field.name] if value is None else value for value in values]
            if field.name in most:
                column = np.array([min(value, most[field.name]) for value in values], np.int32)
            else:
                column = np.array(values, np.float32)
            columns[field.name] = jax.device_put(column)
    if "logit_bias" in always or any(one.logit_bias for one in samplings):
        columns["logit_bias"] = jax.device_put(_bias_matrix(samplings, vocab_size))
    return RowSampling(**columns) if columns else None


def each_of(sampling: Sampling | Sequence[Sampling | None] | None, batch: int) -> list[Sampling | None]:
    """List the parameters of each sequence; TypeError or ValueError for another type, or not `batch` of them."""
    check = partial(check_kind, kind=Sampling, otherwise="None (greedy)")
    return entries_of("sampling", check_each("sampling", sampling, check), batch)


def _bias_matrix(samplings: Sequence[Sampling], vocab_size: int) -> np.ndarray:
    bias = np.zeros((len(samplings), vocab_size), np.float32)
    for i, one in enumerate(samplings):
        for token, value in (one.logit_bias or {}).items():
            if not 0 <= token < vocab_size:
                raise ValueError(f"sampling: logit_bias={{{token}: ...}}: token ids must be from 0 to {vocab_size - 1}")
            bias[i, token] = value
        if np.isneginf(bias[i]).all():
            raise ValueError(
                f"sampling: logit_bias of sequence {i} is -inf for all {vocab_size} tokens; it must leave one"
            )
    return bias


def check_rows(rows: RowSampling, batch: int, vocab_size: int) -> None:
    """Check parameters in arrays, of traced ones only shapes and dtypes; TypeError or ValueError for invalid ones."""
    for field in dataclasses.fields(RowSampling):
        column = getattr(rows, field.name)
        if column is None:
            continue
        name = f"RowSampling.{field.name}"
        kind = jnp.integer if field.name in WHOLE else jnp.floating
        if not isinstance(column, jax.Array | np.ndarray) or not jnp.issubdtype(column.dtype, kind):
            shown = f"{column.dtype}" if hasattr(column, "dtype") else type(column).__name__
            raise TypeError(f"{name} is of type {shown}: must be an array of {np.dtype(_DTYPES[kind])}")
        expected = (batch, vocab_size) if field.name == "logit_bias" else (batch,)
        if column.shape != expected:
            raise ValueError(f"{name} has the shape {column.shape}: must be {expected}")
        if not isinstance(column, Tracer):
            _check_values(field.name, np.asarray(column, _DTYPES[kind]))


def _check_values(name: str, column: np.ndarray) -> None:
    """Check that each value of an array is valid in `Sampling`; ValueError for others."""
    if name == "logit_bias":
        if not column.max() < math.inf:
            raise ValueError(f"RowSampling.{name} has the value {column.max()}: must be finite, or -inf")
        return
    for value in np.unique(column).tolist():
        try:
            Sampling(**{name: value})
        except ValueError as error:
            raise ValueError(f"RowSampling.{name}: {error}") from None


WHOLE = ("top_k", "min_new_tokens", "thinking_budget")
"""Options with arrays of integers."""
_DTYPES = {jnp.integer: np.int32, jnp.floating: np.float32}


def process(s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]) -> Float[Array, "B M V"]:
    """Process logits: their softmax is the distribution after each of M nodes, a point mass in greedy sequences.

    path: the tokens after the committed ones up to each node, then -1.
    """
    options = s.sampling
    if options is None:
        return logits if s.grammar.table is None else grammars.forbid(s.grammar, logits, path, best_only=True)
    logits = adjust(s, logits, path)
    if options.temperature is None:
        return logits
    greedy = (options.temperature == 0).reshape(-1, 1, 1)
    return jnp.where(greedy, jnp.where(truncation.best_of(logits), 0.0, -jnp.inf), temper(options, logits))


def adjust(s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]) -> Float[Array, "B M V"]:
    """Apply grammar, penalties, bias and min_new_tokens. Finite logits stay finite unless one of these forbids them.

    An option other than the grammar is not applied at a node where it would forbid all remaining tokens.
    """
    if s.grammar.table is not None:
        logits = grammars.forbid(s.grammar, logits, path)
    options = s.sampling
    if options is None:
        return logits
    if options.thinking_budget is not None:
        ends = _new_tokens(s, path) >= options.thinking_budget[:, None]
        logits = grammars.leave(s.grammar, logits, path, ends)
    if options.repetition_penalty is not None:
        occurs = _count(s, path, jnp.zeros_like(s.prompt_length), logits.shape[-1]) > 0
        penalty = options.repetition_penalty.reshape(-1, 1, 1)
        logits = jnp.where(occurs, _bounded(jnp.where(logits > 0, logits / penalty, logits * penalty), logits), logits)
    if options.presence_penalty is not None or options.frequency_penalty is not None:
        count = _count(s, path, s.prompt_length, logits.shape[-1])
        if options.presence_penalty is not None:
            logits = logits - jnp.where(count > 0, options.presence_penalty.reshape(-1, 1, 1), 0.0)
        if options.frequency_penalty is not None:
            total = count.astype(jnp.float32) * options.frequency_penalty.reshape(-1, 1, 1)
            # `where` keeps the compiler from fusing product and difference into one rounding, as some programs do: the
            # same node would have other logits there.
            logits = logits - jnp.where(count > 0, total, 0.0)
    if options.logit_bias is not None:
        bias = options.logit_bias[:, None]
        logits = _forbid(_bounded(logits + bias, logits), jnp.isneginf(bias), otherwise=logits)
    if options.min_new_tokens is not None and s.stop.table is not None:
        early = _new_tokens(s, path) < options.min_new_tokens[:, None]
        logits = _forbid(logits, early[:, :, None] & stopping.ends_text(s.stop, path), otherwise=logits)
    return logits


def _new_tokens(s: DecodeState, path: Int[Array, "B M g"]) -> Int[Array, "B M"]:
    """Tokens after the prompt, those of each node's path included."""
    return (s.length - s.prompt_length)[:, None] + (path >= 0).sum(-1, dtype=jnp.int32)


def _bounded(changed: Float[Array, "B M V"], before: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
    """Clip `changed` to finite values; -inf in `before` stays."""
    most = float(np.finfo(np.float32).max)
    return jnp.where(jnp.isneginf(before), before, jnp.clip(changed, -most, most))


def _forbid(
    logits: Float[Array, "B M V"], forbidden: Bool[Array, "B _ V"], *, otherwise: Float[Array, "B M V"]
) -> Float[Array, "B M V"]:
    """Set forbidden tokens to -inf; `otherwise` at nodes where no token would remain."""
    possible = ~jnp.isneginf(logits) & ~forbidden
    return jnp.where(possible.any(-1, keepdims=True), jnp.where(forbidden, -jnp.inf, logits), otherwise)


def _count(s: DecodeState, path: Int[Array, "B M g"], first: Int[Array, " B"], vocabulary: int) -> Int[Array, "B M V"]:
    """Count each token from position `first` on, up to each node."""
    nodes = path.shape[1]
    # Committed tokens, the same for all nodes.
    column = jnp.arange(s.tokens.shape[1], dtype=jnp.int32)[None]
    counted = (column >= first[:, None]) & (column < s.length[:, None])
    sequence = jnp.arange(path.shape[0])
    count = jnp.zeros((path.shape[0], vocabulary), jnp.int32)
    count = count.at[sequence[:, None], s.tokens].add(counted.astype(jnp.int32), mode="drop")
    count = jnp.broadcast_to(count[:, None], (path.shape[0], nodes, vocabulary))
    # Tokens of the path. The -1 after shorter paths become an index outside the vocabulary, which is dropped.
    at = jnp.where(path < 0, vocabulary, path)
    return count.at[sequence[:, None, None], jnp.arange(nodes)[None, :, None], at].add(1, mode="drop")


def temper(options: RowSampling, logits: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
    """Apply temperature (greedy sequences: 1), top-k, top-p and min-p; removed tokens get -inf."""
    best = truncation.best_of(logits)
    if options.temperature is not None:
        temperature = jnp.where(options.temperature > 0, options.temperature, 1.0).reshape(-1, 1, 1)
        logits = _bounded(logits / temperature, logits)
    return truncation.truncate(options, logits, best)


def stream(key: Key[Array, " B"], name: int, position: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of a random stream at a position of each sequence."""
    return jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, name), at))(key, position)


def gumbel(
    key: Key[Array, " B"], name: int, position: Int[Array, " B"], count: int, vocab_size: int
) -> Float[Array, "B count V"]:
    """Standard Gumbel noise of each token at `count` positions from `position` on, independent between positions."""
    steps = [stream(key, name, position + i) for i in range(count)]
    draw = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))
    return jnp.stack([draw(keys) for keys in steps], axis=1)


def seeds_to_keys(seeds: UInt32[Array, "n 2"]) -> Key[Array, " n"]:
    """The random key of each pair (seed, index): that of the seed for index 0, otherwise with the index folded in.

    The complement of the index is folded in, as the noise of a token folds its position into the key of a sequence.
    """

    def key(pair: UInt32[Array, "2"]) -> Key[Array, ""]:
        first = jax.random.key(pair[0])
        return jnp.where(pair[1] == 0, first, jax.random.fold_in(first, ~pair[1]))

    return jax.vmap(key)(seeds)
