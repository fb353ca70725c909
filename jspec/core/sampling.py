"""How the next token is chosen from the target's logits, and the noise of that choice.

Logits are processed in this order: repetition penalty, frequency and presence penalty, logit bias, min_new_tokens,
temperature, top-k, top-p, min-p. Each is applied exactly at every node of a tree, along the node's own path.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.core.bits import ordered_bits
from jspec.core.types import DecodeState, RowSampling

NOISE, DRAFT, COINS, FINAL = range(4)
"""Independent random streams of a sequence: the noise of the target's choice (which drafts may share), sampled drafts,
coins of an acceptance rule, and the final token that such a rule samples."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a sequence.

    temperature: divides the logits; 0 chooses the highest (greedy).
    top_k: keeps the k highest logits, ties included. None: all.
    top_p: nucleus sampling: keeps the fewest most probable tokens whose mass reaches top_p, ties included. None: all.
    min_p: keeps tokens with at least this fraction of the highest probability. None: all.
    repetition_penalty: divides positive and multiplies negative logits of all tokens seen, prompt included (Keskar et
      al., arXiv 1909.05858, section 4.1). 1: off.
    presence_penalty: subtracted from the logits of the tokens generated so far.
    frequency_penalty: the same, once for each time the token was generated.
    logit_bias: token id -> value added to its logit; -inf forbids the token.
    min_new_tokens: until the sequence has this many new tokens, no token that ends the text is chosen.
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
            # Lower values would divide a logit to infinity, which has no softmax.
            (
                "temperature",
                temperature,
                temperature == 0 or 1e-6 <= temperature < math.inf,
                "0 (greedy) or at least 1e-6",
            ),
            ("top_k", self.top_k, self.top_k is None or _is_int(self.top_k, 1), "an int of at least 1, or None"),
            ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            ("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1, or None"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "above 0; 1 is off",
            ),
            ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "finite; 0 is off"),
            ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "finite; 0 is off"),
            ("min_new_tokens", self.min_new_tokens, _is_int(self.min_new_tokens, 0), "an int of at least 0"),
        ):
            if not good:
                raise ValueError(f"Sampling({name}={value!r}): must be {wanted}")
        if any(math.isnan(bias) or bias == math.inf for bias in (self.logit_bias or {}).values()):
            raise ValueError(f"Sampling(logit_bias={self.logit_bias!r}): must be finite, or -inf to forbid a token")


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= least)


def per_row(sampling: Sampling | Sequence[Sampling | None] | None, batch: int, vocab_size: int) -> RowSampling | None:
    """The parameters as arrays; None if every sequence is greedy and without other options.

    sampling: one `Sampling` for all sequences, or one for each.

    Raises:
      TypeError: anything else.
      ValueError: a list whose length is not `batch`, or a bias for a token outside the vocabulary.
    """
    given = [sampling] * batch if sampling is None or isinstance(sampling, Sampling) else sampling
    if not isinstance(given, Sequence) or not all(one is None or isinstance(one, Sampling) for one in given):
        raise TypeError(
            f"sampling={sampling!r}: must be a jspec.Sampling, a list with one per sequence, or None (greedy)"
        )
    samplings = [Sampling(temperature=0.0) if one is None else one for one in given]
    if len(samplings) != batch:
        raise ValueError(f"sampling: {len(samplings)} for {batch} sequences; must be one, or one per sequence")
    off = {"top_k": vocab_size, "top_p": 1.0, "min_p": 0.0}
    columns = {}
    for field in dataclasses.fields(Sampling):
        values = [getattr(one, field.name) for one in samplings]
        unused = 0.0 if field.name == "temperature" else field.default
        if field.name != "logit_bias" and any(value != unused for value in values):
            values = [off[field.name] if value is None else value for value in values]
            kind = np.int32 if field.name in ("top_k", "min_new_tokens") else np.float32
            columns[field.name] = jax.device_put(np.array(values, kind))
    if any(one.logit_bias for one in samplings):
        columns["logit_bias"] = jax.device_put(_bias_matrix(samplings, vocab_size))
    return RowSampling(**columns) if columns else None


def _bias_matrix(samplings: Sequence[Sampling], vocab_size: int) -> np.ndarray:
    bias = np.zeros((len(samplings), vocab_size), np.float32)
    for i, one in enumerate(samplings):
        for token, value in (one.logit_bias or {}).items():
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias={{{token}: ...}}: token ids must be from 0 to {vocab_size - 1}")
            bias[i, token] = value
    return bias


def process(s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]) -> Float[Array, "B M V"]:
    """Logits whose softmax is the distribution of the token after each of M nodes; a point mass in greedy sequences.

    path: the tokens after the committed ones up to each node, then -1.
    """
    options = s.sampling
    if options is None:
        return logits
    logits = adjust(s, logits, path)
    if options.temperature is None:
        return logits
    greedy = (options.temperature == 0).reshape(-1, 1, 1)
    best = jnp.argmax(logits, axis=-1, keepdims=True) == jnp.arange(logits.shape[-1]).reshape(1, 1, -1)
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), temper(options, logits))


def adjust(s: DecodeState, logits: Float[Array, "B M V"], path: Int[Array, "B M g"]) -> Float[Array, "B M V"]:
    """Penalties, bias and min_new_tokens."""
    options = s.sampling
    assert options is not None
    if options.repetition_penalty is not None:
        seen = _count(s, path, jnp.zeros_like(s.prompt_length), logits.shape[-1]) > 0
        penalty = options.repetition_penalty.reshape(-1, 1, 1)
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if options.presence_penalty is not None or options.frequency_penalty is not None:
        count = _count(s, path, s.prompt_length, logits.shape[-1])
        if options.presence_penalty is not None:
            logits = logits - jnp.where(count > 0, options.presence_penalty.reshape(-1, 1, 1), 0.0)
        if options.frequency_penalty is not None:
            logits = logits - count.astype(jnp.float32) * options.frequency_penalty.reshape(-1, 1, 1)
    if options.logit_bias is not None:
        logits = logits + options.logit_bias[:, None]
    if options.min_new_tokens is not None and s.stop.table is not None:
        new = (s.length - s.prompt_length)[:, None] + (path >= 0).sum(-1, dtype=jnp.int32)
        early = new < options.min_new_tokens[:, None]
        logits = jnp.where(early[:, :, None] & _ends_text(s, path), -jnp.inf, logits)
    return logits


def _count(s: DecodeState, path: Int[Array, "B M g"], first: Int[Array, " B"], vocabulary: int) -> Int[Array, "B M V"]:
    """How often each token occurs from position `first` on, up to each node."""
    nodes = path.shape[1]
    column = jnp.arange(s.tokens.shape[1], dtype=jnp.int32)[None]
    counted = (column >= first[:, None]) & (column < s.length[:, None])
    sequence = jnp.arange(path.shape[0])
    count = jnp.zeros((path.shape[0], vocabulary), jnp.int32)
    count = count.at[sequence[:, None], s.tokens].add(counted.astype(jnp.int32), mode="drop")
    count = jnp.broadcast_to(count[:, None], (path.shape[0], nodes, vocabulary))
    # The -1 after shorter paths become an index outside the vocabulary, which is dropped.
    at = jnp.where(path < 0, vocabulary, path)
    return count.at[sequence[:, None, None], jnp.arange(nodes)[None, :, None], at].add(1, mode="drop")


def _ends_text(s: DecodeState, path: Int[Array, "B M g"]) -> Bool[Array, "B M V"]:
    """Whether a token would end the text after each node, as an EOS or by completing a stop string."""
    assert s.stop.table is not None and s.stop.state is not None
    state = jnp.broadcast_to(s.stop.state[:, None], path.shape[:2])
    for i in range(path.shape[2]):
        read = s.stop.table.at[state, path[:, :, i]].get(mode="clip")
        state = jnp.where(path[:, :, i] >= 0, read, state)
    # Choices after an end-of-text token are ignored, so any table row will do.
    return s.stop.table.at[jnp.maximum(state, 0)].get(mode="clip") < 0


def temper(options: RowSampling, logits: Float[Array, "B M V"]) -> Float[Array, "B M V"]:
    """Logits after temperature (greedy sequences: 1), top-k, top-p and min-p; -inf for removed tokens."""
    if options.temperature is not None:
        logits = logits / jnp.where(options.temperature > 0, options.temperature, 1.0).reshape(-1, 1, 1)
    if options.top_k is not None:
        logits = _keep_heaviest(logits, jnp.ones_like(logits), options.top_k.astype(jnp.float32))
    if options.top_p is not None:
        bound = jnp.where(options.top_p < 1, options.top_p, jnp.inf)
        logits = _keep_heaviest(logits, jax.nn.softmax(logits, axis=-1), bound)
    if options.min_p is not None:
        least = logits.max(-1, keepdims=True) + jnp.log(options.min_p).reshape(-1, 1, 1)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def _keep_heaviest(
    logits: Float[Array, "B M V"], weights: Float[Array, "B M V"], bound: Float[Array, " B"]
) -> Float[Array, "B M V"]:
    """Keeps a token if the weights of all tokens with higher logits sum to less than `bound`.

    The threshold is found by bisection over the 2^32 bit patterns of a float, in the order of the floats: 32 sums, no
    sort, and exact.
    """
    order = ordered_bits(logits)
    low = jnp.zeros((*logits.shape[:2], 1), jnp.uint32)
    high = jnp.full_like(low, np.iinfo(np.uint32).max)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + ((high - low) >> 1)
        above = jnp.where(order > middle, weights, 0.0).sum(-1, keepdims=True)
        enough = above < bound.reshape(-1, 1, 1)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    _, threshold = lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(order >= threshold, logits, -jnp.inf)


def stream(key: Key[Array, " B"], name: int, position: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of one random stream at a position, for each sequence."""
    return jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, name), at))(key, position)


def gumbel(
    key: Key[Array, " B"], name: int, position: Int[Array, " B"], count: int, vocab_size: int
) -> Float[Array, "B count V"]:
    """Standard Gumbel noise of each token at `count` positions from `position` on, independent between positions."""
    steps = [stream(key, name, position + i) for i in range(count)]
    draw = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))
    return jnp.stack([draw(keys) for keys in steps], axis=1)
