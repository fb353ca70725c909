"""How the next token is chosen from the target's logits, and the random numbers of that choice.

Logits are processed in this order: repetition penalty, frequency and presence penalty, logit bias, min_new_tokens,
temperature, top-k, top-p, min-p. Each holds exactly at every node of a tree, along the node's own path.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.core.types import DecodeState, RowSampling

NOISE, DRAFT, COINS, FINAL = range(4)
"""Streams of random numbers of a row, independent of each other: the noise of the target's choice (which drafts may
share), drafts that are drawn, coins of a rule of acceptance, and the token that such a rule draws at the end."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Parameters of the choice of tokens.

    temperature: divides the logits; 0 takes the highest (greedy).
    top_k: keeps the k highest logits, and those that equal the last of them. None: all.
    top_p: keeps the tokens that are not outweighed: those for which all tokens that are more probable have less than
      this mass together. None: all.
    min_p: keeps tokens with at least this share of the highest probability. None: all.
    repetition_penalty: divides positive logits, multiplies negative ones, of all tokens seen, the prompt's too (Keskar
      et al., arXiv 1909.05858, section 4.1). 1: none.
    presence_penalty: subtracted from the logits of the tokens generated so far.
    frequency_penalty: the same, once for each time the token was generated.
    logit_bias: token id -> what is added to its logit; -inf forbids it.
    min_new_tokens: while a row has fewer new tokens, no token is chosen that would end its text.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_new_tokens: int = 0

    def __post_init__(self):
        temperature = self.temperature
        for name, value, good, wanted in (
            # Lower ones would divide a logit to infinity, and infinities have no law.
            (
                "temperature",
                temperature,
                temperature == 0 or 1e-6 <= temperature < math.inf,
                "0 (greedy) or at least 1e-6",
            ),
            ("top_k", self.top_k, self.top_k is None or _whole(self.top_k, 1), "a whole number from 1 up, or None"),
            ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            ("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1, or None"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "above 0; 1 is off",
            ),
            ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "a number; 0 is off"),
            ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "a number; 0 is off"),
            ("min_new_tokens", self.min_new_tokens, _whole(self.min_new_tokens, 0), "a whole number from 0 up"),
        ):
            if not good:
                raise ValueError(f"Sampling({name}={value!r}): give {wanted}")
        if any(math.isnan(bias) or bias == math.inf for bias in (self.logit_bias or {}).values()):
            raise ValueError(
                f"Sampling(logit_bias={self.logit_bias!r}): give finite numbers, or -inf to forbid a token"
            )


def _whole(value, least: int) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= least)


def per_row(sampling: Sampling | Sequence[Sampling | None] | None, batch: int, vocab_size: int) -> RowSampling | None:
    """The parameters as arrays: one `Sampling` for all rows, or one for each; None where every row is merely greedy.

    Raises:
      TypeError: something else.
      ValueError: not as many as rows, or a bias for a token outside the vocabulary.
    """
    given = [sampling] * batch if sampling is None or isinstance(sampling, Sampling) else sampling
    if not isinstance(given, Sequence) or not all(row is None or isinstance(row, Sampling) for row in given):
        raise TypeError(f"sampling={sampling!r}: give a jspec.Sampling, one for each row, or None for greedy decoding")
    rows = [Sampling(temperature=0.0) if row is None else row for row in given]
    if len(rows) != batch:
        raise ValueError(f"sampling: {len(rows)} of them for {batch} rows; give one, or one for each row")
    off = {"top_k": vocab_size, "top_p": 1.0, "min_p": 0.0}
    columns = {}
    for field in dataclasses.fields(Sampling):
        values = [getattr(row, field.name) for row in rows]
        unused = 0.0 if field.name == "temperature" else field.default
        if field.name != "logit_bias" and any(value != unused for value in values):
            values = [off[field.name] if value is None else value for value in values]
            kind = np.int32 if field.name in ("top_k", "min_new_tokens") else np.float32
            columns[field.name] = jax.device_put(np.array(values, kind))
    if any(row.logit_bias for row in rows):
        columns["logit_bias"] = jax.device_put(_bias_matrix(rows, vocab_size))
    return RowSampling(**columns) if columns else None


def _bias_matrix(rows: Sequence[Sampling], vocab_size: int) -> np.ndarray:
    bias = np.zeros((len(rows), vocab_size), np.float32)
    for i, row in enumerate(rows):
        for token, value in (row.logit_bias or {}).items():
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias names the token {token}: ids are 0 to {vocab_size - 1}")
            bias[i, token] = value
    return bias


def process(s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]) -> Float[Array, "B M V"]:
    """Logits whose softmax is the law of the token after each of M nodes; a point mass in greedy rows.

    path: the tokens between the committed ones and each token to be chosen; -1 where there are fewer.
    """
    rows = s.sampling
    if rows is None:
        return logits
    logits = adjust(s, logits, path)
    if rows.temperature is None:
        return logits
    greedy = (rows.temperature == 0).reshape(-1, 1, 1)
    best = jnp.argmax(logits, axis=-1, keepdims=True) == jnp.arange(logits.shape[-1]).reshape(1, 1, -1)
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), temper(rows, logits))


def adjust(s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]) -> Float[Array, "B M V"]:
    """Penalties, bias and min_new_tokens."""
    rows: RowSampling = s.sampling
    if rows.repetition_penalty is not None:
        seen = _count(s, path, jnp.zeros_like(s.prompt_length), logits.shape[-1]) > 0
        penalty = rows.repetition_penalty.reshape(-1, 1, 1)
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if rows.presence_penalty is not None or rows.frequency_penalty is not None:
        count = _count(s, path, s.prompt_length, logits.shape[-1])
        if rows.presence_penalty is not None:
            logits = logits - jnp.where(count > 0, rows.presence_penalty.reshape(-1, 1, 1), 0.0)
        if rows.frequency_penalty is not None:
            logits = logits - count.astype(jnp.float32) * rows.frequency_penalty.reshape(-1, 1, 1)
    if rows.logit_bias is not None:
        logits = logits + rows.logit_bias[:, None]
    if rows.min_new_tokens is not None and s.stop.table is not None:
        new = (s.length - s.prompt_length)[:, None] + (path >= 0).sum(-1, dtype=jnp.int32)
        early = new < rows.min_new_tokens[:, None]
        logits = jnp.where(early[:, :, None] & _ends_text(s, path), -jnp.inf, logits)
    return logits


def _count(s: DecodeState, path: Int[Array, "B M g"], first: Int[Array, " B"], vocabulary: int) -> Int[Array, "B M V"]:
    """How often each token stands from position `first` on, on the way to each node."""
    nodes = path.shape[1]
    column = jnp.arange(s.tokens.shape[1], dtype=jnp.int32)[None]
    counted = (column >= first[:, None]) & (column < s.length[:, None])
    row = jnp.arange(path.shape[0])
    count = jnp.zeros((path.shape[0], vocabulary), jnp.int32)
    count = count.at[row[:, None], s.tokens].add(counted.astype(jnp.int32), mode="drop")
    count = jnp.broadcast_to(count[:, None], (path.shape[0], nodes, vocabulary))
    # Where the path is shorter, an index outside the vocabulary, which is dropped.
    at = jnp.where(path < 0, vocabulary, path)
    return count.at[row[:, None, None], jnp.arange(nodes)[None, :, None], at].add(1, mode="drop")


def _ends_text(s: DecodeState, path: Int[Array, "B M g"]) -> Bool[Array, "B M V"]:
    """Whether a token would end the text after each node: as an EOS, or by completing a stop string."""
    assert s.stop.table is not None and s.stop.state is not None
    state = jnp.broadcast_to(s.stop.state[:, None], path.shape[:2])
    for i in range(path.shape[2]):
        read = s.stop.table.at[state, path[:, :, i]].get(mode="clip")
        state = jnp.where(path[:, :, i] >= 0, read, state)
    # Behind a token that ends the text no choice counts, whatever row of the table stands for it.
    return s.stop.table.at[jnp.maximum(state, 0)].get(mode="clip") < 0


def temper(rows: RowSampling, logits: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
    """Temperature (greedy rows: 1), then what top-k, top-p and min-p leave; -inf elsewhere."""
    if rows.temperature is not None:
        logits = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0).reshape(-1, 1, 1)
    if rows.top_k is not None:
        ones = jnp.ones_like(logits)
        logits = _keep_heaviest(logits, ones, rows.top_k.astype(jnp.float32))
    if rows.top_p is not None:
        bound = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)
        logits = _keep_heaviest(logits, jax.nn.softmax(logits, axis=-1), bound)
    if rows.min_p is not None:
        least = logits.max(-1, keepdims=True) + jnp.log(rows.min_p).reshape(-1, 1, 1)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def _keep_heaviest(logits, weights, bound):
    """Keeps a token if the weights of those with higher logits sum to less than `bound`.

    The threshold is found by bisection over the 2^32 bit patterns of a float, ordered as the floats are: 32 sums, no
    sort, and exact.
    """
    # -0 equals 0, but its bits do not.
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits).astype(jnp.float32), jnp.int32)
    order = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    low = jnp.full((*logits.shape[:2], 1), np.iinfo(np.int32).min, jnp.int32)
    high = jnp.full_like(low, np.iinfo(np.int32).max)

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.where(order > middle, weights, 0.0).sum(-1, keepdims=True)
        enough = above < bound.reshape(-1, 1, 1)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    _, threshold = lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(order >= threshold, logits, -jnp.inf)


def stream(key: Key[Array, " B"], name: int, position: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of one stream of random numbers at a position, for each row."""
    return jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, name), at))(key, position)


def gumbel(
    key: Key[Array, " B"], name: int, position: Int[Array, " B"], count: int, vocab_size: int
) -> Float[Array, "B count V"]:
    """Standard Gumbel noise of each token at `count` positions from `position` on, each position's its own."""
    steps = [stream(key, name, position + i) for i in range(count)]
    draw = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))
    return jnp.stack([draw(keys) for keys in steps], axis=1)
