"""Tiny random models, for which the whole loop runs in seconds, and functions to run it."""

import dataclasses
import functools

import block_fits
import jax
import jax.numpy as jnp
import numpy as np

from jspec import models
from jspec.core import accept, stopping, tree
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.types import DecodeState, Drafter, Params, Prompts
from jspec.drafters import Adaptive, Block, Eagle, FrozenKvMtp, Mtp, Ngram, Plain, Standalone, Suffix
from jspec.models.assistant import ClusterParams, Clusters
from jspec.models.latent_weights import Latent
from jspec.models.layers import ForwardBatch
from jspec.models.stack import LayerParams

TARGET = models.Llama(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=512,
    qk_norm=True,
)
NEAR = dataclasses.replace(TARGET, num_layers=1)
"""The draft of `bound_drafters`: with the target's weights slightly perturbed, it is often right."""
DRAFT = models.Llama(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_length=512,
    tie_embeddings=True,
)

_SHAPE = dict(
    **dict(vocab_size=61, draft_vocab_size=48, hidden_size=96, target_hidden_size=32, intermediate_size=64),
    **dict(num_heads=2, num_kv_heads=1, head_dim=24, max_length=512, capture_layers=(0, 1, 2)),
)
HEAD = models.EagleHead(**_SHAPE, version=3, num_layers=1)
LATENT_HEAD = models.LatentHead(
    **{**vars(HEAD), "num_layers": 2, "num_kv_heads": 2, "head_dim": 8},
    latent=Latent(q_rank=20, kv_rank=16, nope_dim=12, rope_dim=8, value_dim=10, eps=HEAD.rms_norm_eps),
)
CANDIDATES_HEAD = dataclasses.replace(HEAD, hidden_size=32, windows=(6,), norm_output=True, rank=12, num_candidates=16)
MASKED_HEAD = dataclasses.replace(HEAD, num_layers=2, mask_token=60)
MASKED = dataclasses.replace(TARGET, hidden_size=96, mask_token=60)
"""Drafts that propose all tokens in one forward; their weights are in `masked`."""
BLOCK = models.BlockHead(
    **_SHAPE,
    num_layers=2,
    block_size=5,
    mask_token=60,
    next_token=True,
    windows=(None, 6),
    causal=(False, True),
    markov="rnn",
    markov_rank=8,
    own_embed=True,
    own_head=True,
)
FILL_IN = dataclasses.replace(
    BLOCK, next_token=False, num_layers=1, windows=(None,), causal=(False,), markov=None, markov_rank=0
)
"""A block whose rows predict the tokens at their own positions."""
DFLASH2 = dataclasses.replace(
    FILL_IN,
    **dict(num_layers=2, windows=(None, 6), causal=(False, False), conv_kernel_size=2, conv_group_size=16),
    **dict(selector_rank=8, selector_top_k=6),
)
ASSISTANT = models.Assistant(
    vocab_size=61,
    hidden_size=128,
    target_hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    target_layers=(1, 0),
    head_dims=(16, 16),
)
CLUSTERED = dataclasses.replace(ASSISTANT, clusters=Clusters(count=61, chosen=40))
"""Chooses some of its clusters."""

HEAD_LAYER = dataclasses.replace(TARGET, num_layers=1)
HEADS = models.MtpHeads(HEAD_LAYER, count=3)


def random_params(config: models.Llama, seed: int = 0, dtype=jnp.float32) -> models.ModelParams:
    """Weights whose spread keeps logits apart, so the argmax does not depend on rounding."""
    matrix = _matrices(seed, dtype)

    width, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    ones, norm = np.ones(width, dtype), np.ones(dim, dtype) if config.qk_norm else None
    layers = tuple(
        LayerParams(
            attention_norm=ones,
            qkv=matrix(width, (heads + 2 * kv_heads) * dim),
            q_norm=norm,
            k_norm=norm,
            o=matrix(heads * dim, width),
            mlp_norm=ones,
            gate_up=matrix(width, 2 * config.intermediate_size),
            down=matrix(config.intermediate_size, width),
        )
        for _ in range(config.num_layers)
    )
    head = None if config.tie_embeddings else matrix(width, config.vocab_size)
    return jax.device_put(models.ModelParams(matrix(config.vocab_size, width), layers, ones, head))


def _matrices(seed: int, dtype=np.float32):
    """Random NumPy matrices: eager JAX operations would compile once per shape."""
    generator = np.random.default_rng(seed)

    def matrix(*shape):
        return (generator.normal(size=shape) * shape[0] ** -0.5).astype(dtype)

    return matrix


def _norm(matrix, size: int):
    return 1 + np.float32(0.2) * matrix(1, size)[0]


def near(params, other, share: float = 0.1):
    """Weights moved by this fraction towards `other`, so a draft with them is often right."""
    return jax.device_put(jax.tree.map(lambda a, b: np.array(a) + np.float32(share) * (np.array(b) - a), params, other))


IDS = np.random.default_rng(5).integers(0, TARGET.vocab_size, (3, 9)).astype(np.int32)
LENGTHS = np.array([1, 5, 9], np.int32)
"""Three prompts of different lengths in one padded batch."""
PROMPTS = [ids[:length].tolist() for ids, length in zip(IDS, LENGTHS, strict=True)]
"""The same as lists."""
CAPACITY = 40


@functools.cache
def params(draft: models.Llama | None = None) -> Params:
    """The target's weights, and as draft those of `draft` or of `NEAR`."""
    target = random_params(TARGET)
    if draft is not None:
        return Params(target, random_params(draft, seed=1))
    off = near(target, random_params(TARGET, seed=1))
    return Params(target, dataclasses.replace(off, layers=off.layers[: NEAR.num_layers]))


@functools.cache
def head_params(head: models.EagleHead = HEAD) -> Params:
    """The target's weights and a head that is often right on the texts of `plain_tokens`."""
    return fit_head(TARGET, head, params().target, plain_tokens())


def fit_head(target: models.Llama, head: models.EagleHead, weights: models.ModelParams, tokens: np.ndarray) -> Params:
    """A random EAGLE-3 head with an LM head that is fitted to the target's logits on these texts."""
    matrix, width = _matrices(7), head.hidden_size
    common = np.argsort(-np.bincount(tokens.ravel(), minlength=head.vocab_size), kind="stable")
    ids = np.sort(common[: head.draft_vocab_size]).astype(np.int32)
    if isinstance(head, models.LatentHead):
        return _fit_head(target, head, weights, tokens, random_leaves(head.param_shapes(np.float32), 7, ids))
    layer = LayerParams(
        attention_norm=np.ones(target.hidden_size, np.float32),
        qkv=matrix(target.hidden_size + width, (head.num_heads + 2 * head.num_kv_heads) * head.head_dim),
        o=matrix(head.num_heads * head.head_dim, width),
        mlp_norm=np.ones(width, np.float32),
        gate_up=matrix(width, 2 * head.intermediate_size),
        down=matrix(head.intermediate_size, width),
    )
    made = models.EagleParams(
        **dict.fromkeys(("embed", "fc_bias", "fc_norms", "input_norm")),
        fc=matrix(len(head.capture_layers) * target.hidden_size, width),
        hidden_norm=np.ones(width, np.float32),
        layers=(layer,),
        norm=np.ones(width, np.float32),
        lm_head=matrix(width, head.draft_vocab_size),
        ids=ids,
    )
    return _fit_head(target, head, weights, tokens, jax.device_put(made))


def _fit_head(target, head: models.EagleHead, weights, tokens: np.ndarray, random: models.EagleParams) -> Params:
    """These weights with another LM head."""
    width, ids = head.hidden_size, np.array(random.ids)
    read = jax.jit(_read, static_argnames=("target", "head"))
    logits, feature = read(Params(weights, random), tokens, target=target, head=head)
    feature = np.array(feature).reshape(-1, width)
    feature *= np.array(random.norm) / np.sqrt((feature**2).mean(-1, keepdims=True) + head.rms_norm_eps)
    wanted = np.array(logits)[:, 1:, ids].reshape(len(feature), -1)
    fitted = np.linalg.solve(feature.T @ feature + 0.1 * np.eye(width), feature.T @ wanted)
    return Params(weights, dataclasses.replace(random, lm_head=jax.device_put(fitted.astype(np.float32))))


@functools.cache
def block_params(config: models.BlockHead) -> Params:
    """The target's weights and a block draft that is often right on the texts of `plain_tokens`."""
    return fit_block(TARGET, config, params().target, plain_tokens())


def random_block(config: models.BlockHead, ids: np.ndarray | None = None, seed: int = 17) -> models.BlockParams:
    """Weights of a block draft. ids: the target's id for each of the draft's."""
    return random_leaves(config.param_shapes(np.float32), seed, ids)


def random_leaves(shapes, seed: int, ids: np.ndarray | None = None):
    """Weights of these shapes whose spread keeps logits apart. ids: what is not a weight."""
    matrix = _matrices(seed)

    def fill(shape):
        if shape.dtype == np.int32:
            return ids
        if len(shape.shape) > 1:
            return matrix(*shape.shape)
        return _norm(matrix, *shape.shape) if shape.shape else _norm(matrix, 1)[0]

    return jax.device_put(jax.tree.map(fill, shapes))


def fit_block(
    target: models.Llama, config: models.BlockHead, weights: models.ModelParams, tokens: np.ndarray
) -> Params:
    """A block draft that is often right on these texts, as `block_fits` makes it of a random one."""
    random = random_block(config, block_fits.common_ids(config, tokens))
    return block_fits.fit(target, config, Params(weights, random), tokens)


def _read(both: Params, tokens, *, target: models.Llama, head: models.EagleHead):
    """The target's logits over whole sequences, and the head's output for all pairs."""
    rows = len(tokens)
    cache = target.init_cache(both.target, rows, 4, 4)
    out = target.forward(both.target, tree.chain(tokens), cache, None, capture_layers=head.capture_layers)
    feature = head.fuse(both.draft, out.hidden[:, :-1])
    positions = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[None]
    cache = head.init_cache(both.draft, rows, 4, 4)
    return out.logits, head.apply(both, target, ForwardBatch(tokens[:, 1:], positions, cache, None), feature).feature


@functools.cache
def mtp_params() -> Params:
    """The target's weights and MTP heads that are often right on the texts of `plain_tokens`."""
    return fit_heads(TARGET, HEADS, Params(params().target, random_heads(HEAD_LAYER, HEADS.count)), plain_tokens())


def random_heads(layer: models.Llama, count: int, seed: int = 30) -> tuple[models.MtpParams, ...]:
    """Weights whose spread keeps logits apart; the embedding and the LM head are the target's."""
    width, made = layer.hidden_size, []
    for index in range(count):
        matrix, own = _matrices(seed + index), random_params(layer, seed=seed + index)
        norms = (_norm(matrix, width) for _ in range(3))
        made.append(models.MtpParams(next(norms), next(norms), matrix(2 * width, width), own.layers[0], next(norms)))
    return jax.device_put(tuple(made))


def fit_heads(
    target, heads: models.MtpHeads, both: Params, tokens: np.ndarray, judged: np.ndarray | None = None
) -> Params:
    """The same weights, with LM heads of the MTP heads that are fitted to the target's logits on these texts.

    judged: the tokens after which logits are fitted; None: all.
    """
    judged = np.ones(tokens.shape, bool) if judged is None else judged
    layer = target.num_layers + 1

    @jax.jit
    def read_target(params, tokens):
        cache = target.init_cache(params, len(tokens), 4, 4)
        out = target.forward(params, tree.chain(tokens), cache, None, capture_layers=(layer,))
        return out.logits, out.hidden

    @functools.partial(jax.jit, static_argnames="head")
    def read(both, tokens, feature, head):
        row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        cache = head.init_cache(both.draft, len(tokens), 4, 4)
        return head.read(both, target, ForwardBatch(tokens, row, cache, None), feature)[0]

    logits, feature = jax.device_get(read_target(both.target, tokens))
    fitted = []
    for index, own in enumerate(both.draft):
        columns = tokens.shape[1] - 1 - index
        feature = np.array(read(both, tokens[:, 1 + index :], feature[:, :columns], heads.head(index, target)))
        at = judged[:, 1 + index :]
        seen, wanted = feature[at], logits[:, 1 + index :][at]
        solved = np.linalg.solve(seen.T @ seen + 0.1 * np.eye(seen.shape[1]), seen.T @ wanted)
        fitted.append(dataclasses.replace(own, lm_head=jax.device_put(solved.astype(np.float32))))
    return Params(both.target, tuple(fitted))


@functools.cache
def assistant_params(clustered: bool = False) -> Params:
    """The target's weights and an assistant that is often right on the texts of `plain_tokens`."""
    if clustered:
        both = assistant_params()
        return Params(both.target, in_clusters(CLUSTERED, both.draft))
    return fit_assistant(TARGET, ASSISTANT, params().target, IDS, LENGTHS, plain_tokens())


def random_assistant(config: models.Assistant, seed: int = 11) -> models.AssistantParams:
    """Random weights, with a head over the whole vocabulary."""
    return random_leaves(dataclasses.replace(config, clusters=None).param_shapes(np.float32), seed)


def in_clusters(config: models.Assistant, own: models.AssistantParams, seed: int = 0) -> models.AssistantParams:
    """The same weights with a clustered head, whose centroids are sums of their tokens' rows."""
    assert config.clusters is not None and own.head is not None
    ids = np.random.default_rng(seed).permutation(config.vocab_size).reshape(config.clusters.count, -1)
    head = np.array(own.head)[ids]
    clusters = jax.device_put(ClusterParams(head.sum(1).T, ids.astype(np.int32), head))
    return dataclasses.replace(own, head=None, clusters=clusters)


def fit_assistant(target, config: models.Assistant, weights, ids, length, texts, limit=None, steps: int = 3) -> Params:
    """A random assistant with a head that is fitted to the continuations of these prompts.

    ids, length: the prompts, as for `prefill`. texts, limit: prompts with their continuations, and their lengths
    (None: all columns). steps: steps of each round's chain to fit.
    """
    # With the identity as its head, an assistant's logits are the inputs of the head.
    width = config.hidden_size
    bare = dataclasses.replace(config, vocab_size=width, clusters=None)
    random = dataclasses.replace(random_assistant(config), head=jax.device_put(np.eye(width, dtype=np.float32)))
    both, drafter = Params(weights, random), FrozenKvMtp(depth=1).bind(target, config)
    bound, capacity = dataclasses.replace(drafter, model=bare), texts.shape[1]
    end = np.full(len(ids), capacity) if limit is None else np.asarray(limit)

    @jax.jit
    def read(both, s, texts):
        hidden, found = s.draft, []
        for ahead in range(steps):
            token = jnp.take_along_axis(texts, s.length[:, None] - 1 + ahead, axis=1, mode="clip")
            out = bare.apply(both, target, token, hidden, s.cache, s.length - 1, jnp.maximum(s.length - 2, 0))
            found.append(out.logits[:, 0])
            hidden = out.hidden
        return jnp.stack(found, axis=1)

    keys = row_keys(np.zeros(len(ids)))
    count, last = np.asarray(length, np.int32), np.asarray(end, np.int32)
    method = Method(target, bound, accept.greedy)
    prompts = Prompts(ids, count, last, keys, stopping.init(None, len(ids)))
    s = jitted_prefill(both, prompts, method=method, capacity=capacity, page_size=4)
    features, wanted = [], []
    while not np.array(s.done).all():
        made, lengths = np.array(read(both, s, texts)), np.array(s.length)
        for row, column in zip(*np.nonzero(lengths[:, None] + np.arange(steps) < end[:, None]), strict=True):
            features.append(made[row, column])
            wanted.append(texts[row, lengths[row] + column])
        s = decode(both, s, jnp.int32(int(s.round_index) + 1), method=method)
    feature = np.array(features)
    right = np.eye(config.vocab_size, dtype=np.float32)[np.array(wanted)]
    head = np.linalg.solve(feature.T @ feature + 0.1 * np.eye(width), feature.T @ right).T
    fitted = dataclasses.replace(random, head=jax.device_put((8 * head).astype(np.float32)))
    return Params(weights, in_clusters(config, fitted) if config.clusters else fitted)


def row_keys(seeds):
    """One key per sequence."""
    return _keys(np.asarray(seeds, np.uint32))


_keys = jax.jit(jax.vmap(jax.random.key))


def bound_drafters() -> dict[str, Drafter]:
    """Drafters for each name in `DRAFTERS`, to run with `planted.weights_of`. Add new drafters here."""
    # Equal costs and a probe in every second round: all choices are taken.
    switching = Adaptive((None, Eagle(depth=2), Suffix(n=4, depth=4, width=3, num_nodes=12)), (1, 1, 1), probe=2)
    return {
        "adaptive": switching.bind(TARGET, HEAD),
        "block": Block(depth=3).bind(TARGET, FILL_IN),
        "block_tree": Block(width=3, num_nodes=12).bind(TARGET, BLOCK),
        "dflash2": Block(depth=3).bind(TARGET, DFLASH2),
        "dflash2_tree": Block(width=3, num_nodes=12).bind(TARGET, DFLASH2),
        "eagle": Eagle(depth=3).bind(TARGET, HEAD),
        "eagle_tree": Eagle(depth=4, width=3, num_nodes=12).bind(TARGET, HEAD),
        "eagle_candidates_tree": Eagle(depth=4, width=3, num_nodes=12).bind(TARGET, CANDIDATES_HEAD),
        "eagle_latents_tree": Eagle(depth=4, width=3, num_nodes=12).bind(TARGET, LATENT_HEAD),
        "eagle_masks": Eagle(depth=3).bind(TARGET, MASKED_HEAD),
        "eagle_masks_tree": Eagle(depth=4, width=3, num_nodes=12).bind(TARGET, MASKED_HEAD),
        "frozen_kv_mtp": FrozenKvMtp(depth=3).bind(TARGET, ASSISTANT),
        "frozen_kv_mtp_tree": FrozenKvMtp(depth=4, width=3, num_nodes=12).bind(TARGET, CLUSTERED),
        "mtp": Mtp(depth=3).bind(TARGET, HEADS),
        "mtp_reused_tree": Mtp(depth=3, width=3, num_nodes=12, heads=1).bind(TARGET, HEADS),
        "ngram": Ngram(n=2, depth=4),
        "plain": Plain(),
        "standalone": Standalone(depth=3).bind(TARGET, NEAR),
        "standalone_masks": Standalone(depth=4, width=2, num_nodes=12).bind(TARGET, MASKED),
        "standalone_tree": Standalone(depth=4, width=3, num_nodes=16).bind(TARGET, NEAR),
        "suffix": Suffix(n=4, depth=4, width=3, num_nodes=12),
    }


def start(
    drafter: Drafter,
    weights: Params,
    *,
    limit=None,
    ids=IDS,
    length=LENGTHS,
    page_size=4,
    table=None,
    rows=None,
    seeds=None,
    chunk=None,
    rule=accept.greedy,
    grammar=None,
) -> DecodeState:
    """The state after prefill. limit: by default 24 tokens to generate; seeds: by default 0, 1, ..."""
    limit = np.asarray(length) + 24 if limit is None else limit
    length, limit = np.asarray(length, np.int32), np.asarray(limit, np.int32)
    keys = row_keys(np.arange(len(ids)) if seeds is None else seeds)
    stop = stopping.init(table, len(ids))
    prompts = Prompts(np.asarray(ids), length, limit, keys, stop, rows, grammar)
    shape = dict(capacity=CAPACITY, page_size=page_size, chunk=chunk)
    return jitted_prefill(weights, prompts, method=Method(TARGET, drafter, rule), **shape)


def run(drafter: Drafter, weights: Params, s: DecodeState, until: int = 1000, rule=accept.greedy) -> DecodeState:
    """`decode` with the target and an acceptance rule."""
    return decode(weights, s, jnp.int32(until), method=Method(TARGET, drafter, rule))


def generated(s: DecodeState) -> list[list[int]]:
    """The tokens of each sequence, prompt included, without padding."""
    return [list(map(int, row[:length])) for row, length in zip(np.array(s.tokens), np.array(s.length), strict=True)]


@functools.cache
def plain_tokens() -> np.ndarray:
    """The buffer after plain decoding to the last column, which every drafter must reproduce."""
    return np.array(run(Plain(), params(), start(Plain(), params(), limit=[CAPACITY] * len(IDS))).tokens)


def arrays(tree) -> list[np.ndarray]:
    """Copies of the leaves of a state, which outlive its donation; keys as their bits."""
    return [
        np.array(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def assert_same(got, expected):
    """Bit for bit, NaN included; an error names the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, _), a, b in zip(jax.tree_util.tree_leaves_with_path(got), arrays(got), arrays(expected), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def padded(texts) -> tuple[np.ndarray, np.ndarray]:
    """Texts as the rows of an array, and their lengths."""
    ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return ids, np.array(list(map(len, texts)), np.int32)
