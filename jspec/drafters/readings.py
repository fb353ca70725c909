"""Readings of a draft: as its checkpoint was read, and as neighboring conventions would have it.

A flag of a head, read wrongly, lowers acceptance without an error. `predict` gives the first proposals of a draft at
all positions of some texts, under a reading, in one forward of the draft.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jspec.cache.pages import DEFAULT_PAGE_SIZE
from jspec.core import tree
from jspec.core.commit import commit_rows
from jspec.core.struct import struct
from jspec.core.types import Params, Target
from jspec.models import Assistant, BlockHead, EagleHead, MtpHead, MtpHeads
from jspec.models.decoder import Decoder
from jspec.models.layers import ForwardBatch


@struct
class Text:
    """Texts that a target wrote greedily after prompts of P tokens, and its own results for them."""

    tokens: Int[Array, "B T"]
    choices: Int[Array, "B N"]
    """The target's choices after the last N = T - P + 1 tokens: those to predict."""
    probs: Float[Array, "B N V"]
    """Its distributions there."""
    hidden: Float[Array, "B T S E"]
    """Hidden states: the input of each layer, the output of the last one, and the same after the final norm."""
    cache: PyTree
    """The target's, with all T tokens."""


@partial(jax.jit, static_argnames=("target", "new"))
def write(params: Params, prompts: Int[Array, "B P"], *, target: Target, new: int) -> Text:
    """Reads prompts of one length and writes after them, token by token, so only one forward is compiled.

    new: N, the choices after the prompt.
    """
    batch, width = prompts.shape
    steps, layers = width + new - 1, tuple(range(target.num_layers + 2))

    def step(carry: tuple[PyTree, Array], place: Int[Array, ""]) -> tuple[tuple[PyTree, Array], tuple[Array, ...]]:
        cache, choice = carry
        stated = lax.dynamic_slice_in_dim(prompts, jnp.minimum(place, width - 1), 1, axis=1)
        token, start = jnp.where(place < width, stated, choice), jnp.broadcast_to(place, (batch,))
        out = target.forward(params.target, tree.chain(token), cache, start, capture_layers=layers)
        cache = commit_rows(cache, out.rows, start, None, jnp.ones_like(start), after=out.logits)
        assert out.hidden is not None
        return (cache, _best(out.logits)), (token[:, 0], out.logits[:, 0], out.hidden[:, 0])

    cache = target.init_cache(params.target, batch, steps, DEFAULT_PAGE_SIZE)
    begin = cache, jnp.zeros((batch, 1), jnp.int32)
    (cache, _), written = lax.scan(step, begin, jnp.arange(steps, dtype=jnp.int32))
    tokens, logits, hidden = (jnp.moveaxis(x, 0, 1) for x in written)
    logits, hidden = logits[:, width - 1 :], hidden.reshape(batch, steps, len(layers), -1)
    return Text(tokens, _best(logits), jax.nn.softmax(logits), hidden, cache)


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A draft under a reading.

    draft: its configuration; of several MTP heads, that of the first.
    params: the weights of target and draft.
    layers: the hidden states of the target to read.
    shift: how many positions later features are taken, or blocks and queries stand.
    row: the first predicting row of a block.
    second: predict second tokens, each after a right first one; there is one fewer in each text.
    """

    draft: Any
    params: Params
    layers: tuple[int, ...] = ()
    shift: int = 0
    row: int = 0
    second: bool = False


def as_read(params: Params, target: Target, draft: Any) -> View:
    """The view of a draft as it was read."""
    if isinstance(draft, MtpHeads):
        draft = draft.head(0, target)
    layers = (target.num_layers + 1,) if isinstance(draft, Assistant) else getattr(draft, "capture_layers", ())
    return View(draft, params, layers, row=int(not getattr(draft, "next_token", True)))


# Other readings


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A neighboring convention.

    name: the difference, after "with".
    field: the key of config.json to change; "": there is none.
    kinds: of configurations.
    change: the view under it, given the view as read; None: there is no other.
    """

    name: str
    field: str
    kinds: tuple[type, ...]
    change: Callable[[View, Target], View | None]


def other_readings(view: View, target: Target) -> Iterator[tuple[Reading, View]]:
    """The neighboring readings of a draft, and its view under each of them."""
    for reading in READINGS:
        other = reading.change(view, target) if isinstance(view.draft, reading.kinds) else None
        if other is not None:
            yield reading, other


def _capture(by: int, view: View, target: Target) -> View | None:
    layers = tuple(layer + by for layer in view.layers)
    # The last of a target's states, after the final norm, is that of other kinds of heads.
    inside = layers[0] >= 0 and max(layers + view.layers) <= target.num_layers
    return dataclasses.replace(view, layers=layers) if inside else None


def _before_final_norm(view: View, target: Target) -> View | None:
    last = target.num_layers
    return dataclasses.replace(view, layers=(last,)) if view.layers == (last + 1,) else None


def _shifted(by: int, view: View, target: Target) -> View:
    return dataclasses.replace(view, shift=by)


def _other_row(view: View, target: Target) -> View | None:
    return dataclasses.replace(view, row=1 - view.row) if view.draft.block_size > 1 else None


def _configured(view: View, target: Target, *, second: bool = False, **values: Any) -> View | None:
    draft = dataclasses.replace(view.draft, **values)
    return None if draft == view.draft else dataclasses.replace(view, draft=draft, second=second)


def _flag(name: str, view: View, target: Target, *, second: bool = False) -> View | None:
    """Inverts a flag of heads with a norm of the feature; a head with masks reads no output of its own."""
    if view.draft.version == 1 or (second and view.draft.at_once):
        return None
    return _configured(view, target, second=second, **{name: not getattr(view.draft, name)})


def _block_mask(causal: bool, view: View, target: Target) -> View | None:
    return _configured(view, target, causal=(causal,) * view.draft.num_layers)


def _rope(view: View, target: Target, **values: Any) -> View | None:
    return _configured(view, target, rope=dataclasses.replace(view.draft.rope, **values))


def _target_theta(view: View, target: Target) -> View | None:
    rope = getattr(target, "rope", view.draft.rope)
    return _rope(view, target, theta=getattr(rope, "theta", view.draft.rope.theta))


def _other_pairs(view: View, target: Target) -> View | None:
    """Queries and keys as if their checkpoint had the other order of rotated pairs."""
    draft, params = view.draft, view.params
    if not hasattr(params.draft.layers[0], "qkv"):  # Latent attention has pairs of neighbors alone.
        return None
    pairs = np.arange(draft.head_dim).reshape(-1, 2).T.reshape(-1)
    order = pairs if draft.neox else np.argsort(pairs)
    rotated = draft.num_heads + draft.num_kv_heads
    columns = (order[None] + draft.head_dim * np.arange(rotated)[:, None]).reshape(-1)
    columns = np.append(columns, np.arange(columns.size, columns.size + draft.num_kv_heads * draft.head_dim))
    indices = {"qkv": columns, "qkv_bias": columns, "q_norm": order, "k_norm": order}

    def reorder(path: tuple[Any, ...], x: Array) -> Array:
        index = next((indices[key.name] for key in path if getattr(key, "name", None) in indices), None)
        return x if index is None or x.shape[-1] != index.size else jnp.take(x, index, axis=-1)

    layers = jax.tree_util.tree_map_with_path(reorder, params.draft.layers)
    params = dataclasses.replace(params, draft=dataclasses.replace(params.draft, layers=layers))
    return dataclasses.replace(view, params=params)


def _swapped_inputs(view: View, target: Target) -> View | None:
    """The other order of token and feature before their projection."""
    weights, params = view.params.draft, view.params
    first, name = (weights[0], "projection") if isinstance(weights, tuple) else (weights, "fc")
    matrix = getattr(first, name)
    if getattr(view.draft, "version", 1) != 1 or not isinstance(matrix, jax.Array):
        return None
    swapped = dataclasses.replace(first, **{name: jnp.roll(matrix, matrix.shape[0] // 2, axis=0)})
    draft = (swapped, *weights[1:]) if isinstance(weights, tuple) else swapped
    return dataclasses.replace(view, params=dataclasses.replace(params, draft=draft))


_FEATURES, _STACKS = (EagleHead, MtpHead), (EagleHead, BlockHead)
_NORMED = (*_FEATURES, Assistant)
_HEAD_LAYERS, _BLOCK_LAYERS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
READINGS = (
    Reading("captured layers one lower", _HEAD_LAYERS, (EagleHead,), partial(_capture, -1)),
    Reading("captured layers one higher", _HEAD_LAYERS, (EagleHead,), partial(_capture, 1)),
    Reading("captured layers one lower", _BLOCK_LAYERS, (BlockHead,), partial(_capture, -1)),
    Reading("captured layers one higher", _BLOCK_LAYERS, (BlockHead,), partial(_capture, 1)),
    Reading("hidden states before the final norm", "", _NORMED, _before_final_norm),
    Reading("hidden states one position earlier", "", _FEATURES, partial(_shifted, -1)),
    Reading("hidden states one position later", "", _FEATURES, partial(_shifted, 1)),
    Reading("token and hidden state in the other order", "", _FEATURES, _swapped_inputs),
    Reading("its other value", "norm_before_residual", (EagleHead,), partial(_flag, "norm_before_residual")),
    Reading("its other value", "norm_output", (EagleHead,), partial(_flag, "norm_output", second=True)),
    Reading("the other layout of rotary pairs", "is_neox_style", _STACKS, _other_pairs),
    Reading("no scaling of positions", "rope_scaling", _STACKS, partial(_rope, scaling=None)),
    Reading("rotation of all dimensions", "partial_rotary_factor", _STACKS, partial(_rope, share=1.0)),
    Reading("the target's theta", "rope_theta", _STACKS, _target_theta),
    Reading("the other row as the first prediction", "sample_from_anchor", (BlockHead,), _other_row),
    Reading("causal blocks", "causal", (BlockHead,), partial(_block_mask, True)),
    Reading("blocks that see both ways", "causal", (BlockHead,), partial(_block_mask, False)),
    Reading("positions one lower", "", (BlockHead, Assistant), partial(_shifted, -1)),
    Reading("positions one higher", "", (BlockHead, Assistant), partial(_shifted, 1)),
)
"""All readings beside the checkpoint's."""


# Predictions


@struct
class Predictions:
    """Proposals in place of the target's choices."""

    tokens: Int[Array, "B N"]
    overlap: Float[Array, "B N"]
    """Probability of accepting a sampled draft: the sum of the smaller of both probabilities of each token."""


@struct
class Where:
    """The traced part of a view: readings that differ in it alone share a program."""

    layers: Int[Array, " k"]
    shift: Int[Array, ""]
    row: Int[Array, ""]


def predict(view: View, target: Target, text: Text) -> Predictions:
    """The predictions of all choices of the text; for second tokens, of all but the first one."""
    run = next((run for kinds, run in _PROGRAMS if isinstance(view.draft, kinds)), _of_model)
    at = Where(*(jnp.asarray(value, jnp.int32) for value in (view.layers, view.shift, view.row)))
    return run(view.params, text, at, draft=view.draft, target=target, second=view.second)


_program = partial(jax.jit, static_argnames=("draft", "target", "second"))


def _best(logits: Float[Array, "B N V"]) -> Int[Array, "B N"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _compare(text: Text, logits: Float[Array, "B N Vd"], ids: Array | None) -> Predictions:
    """Compares with the last N choices.

    ids: target ids of the draft's vocabulary, shared or per prediction; None: the target's vocabulary.
    """
    best, probs = _best(logits), text.probs[:, -logits.shape[1] :]
    if ids is not None:
        ids = jnp.broadcast_to(ids if ids.ndim > 1 else ids.reshape(1, 1, -1), logits.shape)
        best = jnp.take_along_axis(ids, best[..., None], axis=2, mode="clip")[..., 0]
        probs = jnp.take_along_axis(probs, ids, axis=2, mode="clip")
    return Predictions(best, jnp.minimum(probs, jax.nn.softmax(logits)).sum(-1))


def _captured(text: Text, at: Where) -> Float[Array, "B T C"]:
    return jnp.take(text.hidden, at.layers, axis=2, mode="clip").reshape(*text.tokens.shape, -1)


@_program
def _of_features(
    params: Params, text: Text, at: Where, *, draft: EagleHead | MtpHead, target: Target, second: bool
) -> Predictions:
    """Row p reads the feature at p + 1 and the token at p + 2, all rows at once; so each prediction is a row's."""
    tokens, feature = text.tokens[:, 2:], draft.fuse(params.draft, _captured(text, at))
    batch, rows = tokens.shape
    feature = lax.dynamic_slice_in_dim(feature, 1 + at.shift, rows, axis=1)
    cache = draft.init_cache(params.draft, batch, rows, DEFAULT_PAGE_SIZE)
    place, count = jnp.arange(rows, dtype=jnp.int32), text.choices.shape[1]
    out = draft.apply(params, target, ForwardBatch(tokens, place[None], cache, None), feature)
    if second:
        # Each row goes on with its own output, and sees the first rows up to its own, and itself.
        seen = jnp.concatenate([place[:, None] >= place[None], place[:, None] == place[None]], axis=1)
        following = jnp.roll(tokens, -1, axis=1)
        batch = ForwardBatch(following, place[None] + 1, cache, None, mask=seen[None], earlier=out.rows)
        out = draft.apply(params, target, batch, out.feature)
    judged = slice(-count, -1 if second else None)
    return _compare(
        text, out.logits[:, judged], out.ids if out.ids is None or out.ids.ndim == 1 else out.ids[:, judged]
    )


@_program
def _of_block(params: Params, text: Text, at: Where, *, draft: BlockHead, target: Target, second: bool) -> Predictions:
    """A sequence for each block, with the same text before its anchor."""
    (batch, length), count = text.tokens.shape, text.choices.shape[1]
    root = text.tokens[:, -count:].reshape(-1, 1)
    start = jnp.tile(jnp.arange(length - count, length, dtype=jnp.int32), batch)
    _, rows = draft.read(params.draft, _captured(text, at), jnp.arange(length, dtype=jnp.int32)[None])
    rows = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), rows)
    cache = draft.init_cache(params.draft, start.size, length, DEFAULT_PAGE_SIZE)
    cache = commit_rows(cache, rows, jnp.zeros_like(start), None, start, after=rows[0][0])
    # The block of each anchor, and one of its rows.
    column = jnp.arange(draft.block_size, dtype=jnp.int32)[None]
    block = jnp.where(column == 0, root, draft.mask_token)
    out = draft.apply(params, target, block, start[:, None] + column + at.shift, cache, start)
    out = lax.dynamic_slice_in_dim(out, at.row, 1, axis=1)
    logits, ids = draft.candidates(params.draft, draft.unembed(params, target, out))
    logits, _ = draft.correct(params.draft, draft.begin(params.draft, start.size), root, out, logits, ids)
    ids = ids if ids is None or ids.ndim == 1 else ids.reshape(batch, count, -1)
    return _compare(text, logits.reshape(batch, count, -1), ids)


@_program
def _of_assistant(
    params: Params, text: Text, at: Where, *, draft: Assistant, target: Decoder, second: bool
) -> Predictions:
    """One position of all texts after the other, since each sees another part of the target's cache."""
    hidden, (_, length) = _captured(text, at), text.tokens.shape

    def propose(place: Int[Array, ""]) -> tuple[Array, Array | None]:
        column = partial(lax.dynamic_slice_in_dim, slice_size=1, axis=1)
        token, before = column(text.tokens, place), column(hidden, place - 1)
        committed = jnp.broadcast_to(place, token.shape[:1])
        out = draft.apply(params, target, token, before, text.cache, committed, committed - 1 + at.shift)
        return out.logits[:, 0], None if out.ids is None else out.ids[:, 0]

    out = lax.map(propose, jnp.arange(length - text.choices.shape[1], length, dtype=jnp.int32))
    return _compare(text, *jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out))


@_program
def _of_model(params: Params, text: Text, at: Where, *, draft: Decoder, target: Target, second: bool) -> Predictions:
    """A small language model reads tokens alone."""
    batch, length = text.tokens.shape
    cache = draft.init_cache(params.draft, batch, length, DEFAULT_PAGE_SIZE)
    out = draft.apply(params.draft, ForwardBatch(text.tokens, jnp.arange(length, dtype=jnp.int32)[None], cache, None))
    return _compare(text, out.logits[:, -text.choices.shape[1] :], draft.ids(params.draft))


_PROGRAMS = ((_FEATURES, _of_features), (BlockHead, _of_block), (Assistant, _of_assistant))
"""Kinds of drafts -> how they predict; others are language models."""
