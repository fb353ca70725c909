"""Families x drafters x placements x entry points: tiny checkpoints, what each point runs, and what it must give.

A point is one of these products. Its details (chains or trees, rows per page, how tokens are chosen, whether the draft
is split) follow from it by arithmetic. The tests run points in which every two values of any two axes meet
(`covering`), and processes of `product_process.py` others.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepseek
import jax
import numpy as np
import tiny_targets as tiny
import toy
from engine_storm import paged_caches, rows_of

import jspec
from jspec.checkpoints import drafts, language_model
from jspec.drafters import Adaptive, Block, Eagle, FrozenKvMtp, Mtp, Ngram, Standalone, Suffix
from jspec.generation.run import Run
from jspec.models import Assistant
from jspec.models.deepseek import Deepseek
from jspec.models.llama import Llama

FAMILIES: dict[str, Any] = {
    "llama": dataclasses.replace(tiny.TIED, num_layers=2, attention_bias=True),
    "qwen3": toy.TARGET,
    "experts": tiny.EXPERTS,
    "latents": dataclasses.replace(deepseek.MLA, mtp_layers=2),
    "indexed latents": dataclasses.replace(deepseek.KINDS["dsa"], mtp_layers=1),
    **tiny.DIFFERENT,
    **{name: dataclasses.replace(config, mtp_layers=1) for name, config in tiny.HYBRIDS.items()},
}
"""Name -> a tiny target: dense with biases and a tied embedding, with norms of queries and a vocabulary that no number
of devices divides, Qwen3's experts, DeepSeek V3 and V3.2, Gemma 4 with shared keys and with experts, gpt-oss, Qwen3.5
and Qwen3-Next."""
WIDE = {
    "wide": dataclasses.replace(
        tiny.BLOCKS, head_dim=64, intermediate_size=512, experts=dataclasses.replace(tiny.BLOCKS.experts, width=512)
    )
}
"""A target of which four devices have whole blocks of 128 rows each."""
MTP = {name for name, config in FAMILIES.items() if getattr(config, "mtp_layers", 0)}
PER_HEAD = {name for name, config in FAMILIES.items() if not isinstance(config, Deepseek)}
"""Families whose keys an assistant can read."""
TREE = tiny.TREE
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"chain": None},
    "ngram": {"chain": Ngram(n=2, depth=3)},
    "suffix": {"chain": Suffix(n=3, depth=3, width=1), "tree": Suffix(n=3, **TREE)},
    "eagle": {"chain": Eagle(depth=3), "tree": Eagle(**TREE)},
    "block": {"chain": Block(depth=3), "tree": Block(width=3, num_nodes=8)},
    "standalone": {"chain": Standalone(depth=3), "tree": Standalone(**TREE)},
    "mtp": {"chain": Mtp(depth=2), "tree": Mtp(**TREE, heads=1)},
    "frozen_kv_mtp": {"chain": FrozenKvMtp(depth=3), "tree": FrozenKvMtp(**TREE)},
    "adaptive": {
        "chain": Adaptive([None, Eagle(depth=2), Ngram(depth=3)], (1, 1, 1), probe=2),
        "tree": Adaptive([None, Eagle(depth=2), Suffix(n=3, **TREE)], (1, 1, 1), probe=2),
    },
}
"""Name -> shape of its drafts -> drafter."""
OF_FILES = {"eagle", "block", "standalone", "frozen_kv_mtp", "adaptive"}
"""Drafters with a checkpoint of a draft of their own."""
CHOOSE = OF_FILES - {"frozen_kv_mtp"}
"""Those whose draft is split or whole on each device, as one likes."""
PLACEMENTS = {"tensor 2": dict(tensor=2), "tensor 4": dict(tensor=4), "data 2 x tensor 2": dict(data=2, tensor=2)}
ON_TWO = {"tensor 2": PLACEMENTS["tensor 2"], "data 2": dict(data=2)}
"""Placements over two devices."""
CHOSEN: dict[str, dict[str, Any]] = tiny.KINDS
PAGES = (1, 16)
LIMITS = [20, 9, 3]
"""New tokens: the sequences of a batch end one after the other."""
SEEDS = [7, 3, 11]
CONTEXT = 48
FLOAT32: dict[str, Any] = dict(dtype="float32")
"""In which sums in another order give the same tokens."""


@dataclasses.dataclass(frozen=True)
class Point:
    """What runs. draft_tensor: whether a draft with a checkpoint of its own is split; None: it has none, or no choice.

    weights, kv: the formats of `jspec.load`.
    """

    family: str
    drafter: str
    placement: str
    entry: str
    shape: str
    page: int
    chosen: str
    draft_tensor: bool | None
    weights: str | None = None
    kv: str | None = None

    def __str__(self) -> str:
        formats = [name for name in (self.weights, self.kv and f"kv {self.kv}") if name]
        return "-".join([self.family, self.drafter, self.placement, self.entry, *formats]).replace(" ", "_")

    @property
    def reference(self) -> "Point":
        """The point of one device, which points that differ in nothing else share."""
        return dataclasses.replace(self, placement="", entry="generate", page=4, draft_tensor=None)

    @property
    def same_rounds(self) -> bool:
        """Whether each sequence has the rounds of one device: `Adaptive` decides by the sequences that run together."""
        return self.drafter != "adaptive" or (self.entry != "engine" and "data" not in self.placement)


def make_point(family: str, drafter: str, placement: str, entry: str, **formats: str | None) -> Point:
    """The point of these names, with its details."""
    tables = {**FAMILIES, **WIDE}, DRAFTERS, PLACEMENTS, ENTRIES
    i, j, k, m = (
        list(table).index(name) for table, name in zip(tables, (family, drafter, placement, entry), strict=True)
    )
    shape = (i + j + k + m) % 2 if len(DRAFTERS[drafter]) > 1 else 0
    # What `Adaptive` takes depends on the batch, and with "rejection" tokens depend on what it takes.
    chosen = (i + j + shape) % (2 if drafter == "adaptive" else 3)
    split_draft = bool((i // 2 + k + m) % 2) if drafter in CHOOSE else None
    details = ["chain", "tree"][shape], PAGES[(i + m) % 2], list(CHOSEN)[chosen], split_draft
    return Point(family, drafter, placement, entry, *details, **formats)


def points() -> list[Point]:
    """All points; those of a family and a drafter together, since they share references."""
    return [
        make_point(*names) for names in itertools.product(FAMILIES, DRAFTERS, PLACEMENTS, ENTRIES) if suits(*names[:2])
    ]


AXES = ("family", "drafter", "placement", "entry", "shape", "page", "chosen", "draft_tensor")


def covering(points: list[Point]) -> list[Point]:
    """Some of the points, in which every two values of two axes meet that meet in any of them.

    The next one is always a point with the most pairs that have not met.
    """
    shuffled = random.Random(0).sample(points, len(points))
    pairs = {
        point: {(x, getattr(point, x), y, getattr(point, y)) for x, y in itertools.combinations(AXES, 2)}
        for point in points
    }
    missing, selected = set().union(*pairs.values()), set()
    while missing:
        point = max(shuffled, key=lambda point: len(pairs[point] & missing))
        selected.add(point)
        missing -= pairs[point]
    return [point for point in points if point in selected]


def on_two(family: str, drafter: str, placement: str, entry: str) -> Point:
    """A point of two devices: those of "data 2" have the details of "tensor 2", but nothing is split."""
    point = make_point(family, drafter, "tensor 2", entry)
    split = placement == "tensor 2"
    return dataclasses.replace(point, placement=placement, draft_tensor=point.draft_tensor if split else None)


def suits(family: str, drafter: str) -> bool:
    """Whether there is such a drafter for this family."""
    if family in WIDE:
        return drafter in ("plain", "ngram", "suffix", "standalone")
    return family in {"mtp": MTP, "frozen_kv_mtp": PER_HEAD}.get(drafter, FAMILIES)


FORMATS: dict[str, dict[str, str]] = {
    "int8": dict(weights="int8"),
    "int4": dict(weights="int4"),
    "fp8": dict(weights="fp8"),
    "kv": dict(kv="fp8"),
    "both": dict(weights="fp8", kv="fp8"),
    "int4 and kv": dict(weights="int4", kv="fp8"),
}
"""Formats of fewer bits; those of 4 bits need whole blocks of rows."""


def narrow_points() -> list[Point]:
    """Weights of two formats and caches of 8 bits in every family; placements, drafters and entry points take turns."""
    pairs = [
        *itertools.product(FAMILIES, ("int8", "both")),
        ("experts", "fp8"),
        ("states", "kv"),
        *itertools.product(WIDE, ("int4", "int4 and kv")),
    ]
    points = []
    for turn, (family, kind) in enumerate(pairs):
        drafters = [name for name in DRAFTERS if suits(family, name)]
        placement, entry = list(PLACEMENTS)[(turn + turn // 3) % 3], list(ENTRIES)[turn % 3]
        points.append(make_point(family, drafters[turn % len(drafters)], placement, entry, **FORMATS[kind]))
    return points


def points_of_processes() -> list[Point]:
    """Each family and drafter in one group over both of two processes, or in a group in each."""
    together, drafters = ("tensor 4", "data 2 x tensor 2"), list(DRAFTERS)
    return [
        make_point(family, drafters[2 * i % len(drafters)], together[i % 2], list(ENTRIES)[i % 3])
        for i, family in enumerate(FAMILIES)
    ]


def generate(model: jspec.Model, point: Point, rows: bool = False) -> dict[str, Any]:
    """rows: returns those of all paged caches, too, by position."""
    options = dict(drafter=DRAFTERS[point.drafter][point.shape], page_size=point.page, **CHOSEN[point.chosen])
    run = Run(model, tiny.PROMPTS, jspec.GenerateOptions(max_new_tokens=LIMITS, seed=SEEDS, logprobs=True, **options))
    found = _described(run.finish())
    return {**found, "rows": list(_rows(run.state))} if rows else found


def through_engine(model: jspec.Model, point: Point) -> dict[str, Any]:
    """A slot in each group, so sequences wait for each other. Nothing in a process that does not lead."""
    given = dict(CHOSEN[point.chosen])
    options = dict(drafter=DRAFTERS[point.drafter][point.shape], accept=given.pop("accept", None))
    sizes = dict(slots=1, context=CONTEXT, page_size=point.page, prefill_tokens=1, burst_ms=1.0)
    with jspec.Engine(model, **options, **sizes) as engine:
        given |= dict(max_new_tokens=LIMITS, seed=SEEDS, logprobs=True)
        return _described(engine.generate(tiny.PROMPTS, **given)) if engine.leads else {}


def through_ids(model: jspec.Model, point: Point) -> dict[str, Any]:
    """Inside of a `jit` of the caller."""
    placement = model.placement
    options = dict(drafter=DRAFTERS[point.drafter][point.shape], page_size=point.page, **CHOSEN[point.chosen])
    options |= dict(target=model.target, draft=model.draft, placement=placement, max_length=32, logprobs=True)

    @functools.partial(jax.jit, out_shardings=None if placement is None else placement.everywhere)
    def complete(params, ids, lengths, limits, seeds):
        keys = jax.vmap(jax.random.key)(seeds)
        return jspec.generate_ids(params, ids, lengths, keys, max_new_tokens=limits, **options)

    limits, seeds = np.array(LIMITS, np.int32), np.array(SEEDS, np.uint32)
    out = jax.device_get(complete(model.params, toy.IDS, toy.LENGTHS.astype(np.int32), limits, seeds))
    assert out.logprobs is not None
    spans = [slice(start, end) for start, end in zip(toy.LENGTHS, out.length, strict=True)]
    return {
        "tokens": [row[span].tolist() for row, span in zip(out.tokens, spans, strict=True)],
        "logprobs": [row[span].tolist() for row, span in zip(out.logprobs, spans, strict=True)],
        "rounds": out.stats.rounds.tolist(),
        "counts": out.stats.accept_counts.tolist(),
    }


ENTRIES = {"generate": generate, "engine": through_engine, "generate_ids": through_ids}


def _described(out: jspec.Generations) -> dict[str, Any]:
    return {
        "tokens": out.tokens,
        "logprobs": [item.logprobs for item in out],
        "rounds": out.stats.rounds.tolist(),
        "counts": out.stats.accept_counts.tolist(),
    }


def _rows(state: Any) -> Iterable[np.ndarray]:
    """The rows of the committed tokens of each sequence, in each cache that has pages of the common pool."""
    for cache in [*paged_caches(state.cache), *paged_caches(state.draft)]:
        for pages, length in zip(np.asarray(cache.page_table), np.asarray(state.length), strict=True):
            yield rows_of(cache, pages)[:, :, : length - 1]


def assert_same(found: dict[str, Any], expected: dict[str, Any], point: Point) -> None:
    """Tokens, rounds and accepted drafts are equal; log-probabilities and rows of caches up to rounding."""
    assert found["tokens"] == expected["tokens"]
    if point.same_rounds:
        assert found["rounds"] == expected["rounds"]
        assert found["counts"] == expected["counts"]
    # A value in 8 bits may be rounded to its neighbor, where sums in another order differ.
    for got, wanted in zip(found["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4 if point.kv is None else 0.05)
    pairs = zip(found["rows"], expected["rows"], strict=True) if "rows" in found else ()
    for got, wanted in pairs:
        copies = got.shape[-2] // wanted.shape[-2] if got.ndim == 5 else 1  # several devices may have one head
        np.testing.assert_allclose(got, np.repeat(wanted, copies, axis=-2), atol=1e-4)


class Checkpoints:
    """The checkpoints of all families, which are written to a directory when they are first needed.

    A process finds those that another one has written.
    """

    def __init__(self, root: Path):
        self.root = root
        self.target = functools.cache(self._target)
        self.draft = functools.cache(self._draft)

    def load(self, point: Point, **devices: Any) -> jspec.Model:
        """The model of a point, over these devices; by default those of its placement."""
        devices = devices or {**PLACEMENTS, **ON_TWO}.get(point.placement, {})
        draft = self.draft(point.family, point.drafter) if point.drafter in OF_FILES else None
        options = dict(weights=point.weights, kv=point.kv, draft_tensor=point.draft_tensor if devices else None)
        options |= FLOAT32
        return jspec.load(self.target(point.family), draft=draft, **devices, **options)

    def _target(self, family: str) -> Path:
        config, path = {**FAMILIES, **WIDE}[family], self.root / family.replace(" ", "_")
        if path.exists():
            return path
        made = tiny.weights(config, 0)
        if isinstance(config, Deepseek):
            language_model.save(path, config, made, dtype="float32")
            model = jspec.load(path, **FLOAT32)
            made = dataclasses.replace(
                made, mtp=toy.fit_heads(model.target, model.draft, model.params, _texts(model)).draft
            )
        language_model.save(path, config, made, dtype="float32")
        return path

    def _draft(self, family: str, drafter: str) -> Path:
        """A draft that is often right on the texts that the target generates."""
        drafter = "eagle" if drafter == "adaptive" else drafter
        config, path = {**FAMILIES, **WIDE}[family], self.root / f"{drafter}_of_{family.replace(' ', '_')}"
        if path.exists():
            return path
        if drafter == "standalone":
            near = toy.near(tiny.weights(config, 0), tiny.weights(config, 1))
            if isinstance(config, Llama):
                config = dataclasses.replace(config, num_layers=1)
                near = dataclasses.replace(near, layers=near.layers[:1])
                config = dataclasses.replace(config, dense_layers=(), experts=config.layer_experts(0))
            elif family in MTP:
                config, near = dataclasses.replace(config, mtp_layers=0), dataclasses.replace(near, mtp=())
            language_model.save(path, config, near, dtype="float32")
            return path
        model = jspec.load(self.target(family), **FLOAT32)
        given, texts = (model.target, model.params.target), _texts(model)
        if drafter == "eagle":
            head = dataclasses.replace(tiny.HEAD, vocab_size=config.vocab_size, num_heads=4)
            made = toy.fit_head(given[0], head, given[1], texts)
            drafts.save(path, head, made.draft, layout="safeailab", dtype="float32")
        elif drafter == "block":
            shape = dict(vocab_size=config.vocab_size, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64)
            head = dataclasses.replace(toy.FILL_IN, **shape)
            made = toy.fit_block(given[0], head, given[1], texts)
            drafts.save(path, head, made.draft, layout="speculators", dtype="float32")
        else:
            layers = [layer for layer in range(config.num_layers) if layer in config.attention_layers][-2:]
            head = Assistant(
                vocab_size=config.vocab_size,
                hidden_size=96,
                target_hidden_size=config.hidden_size,
                intermediate_size=64,
                num_heads=4,
                target_layers=tuple(layers),
                head_dims=tuple(config.layer_keys(layer).head_dim for layer in layers),
            )
            made = toy.fit_assistant(given[0], head, given[1], toy.IDS, toy.LENGTHS, texts)
            drafts.save(path, head, made.draft, dtype="float32")
        return path


def references(checkpoints: Checkpoints) -> Callable[[Point], dict[str, Any]]:
    """A function that gives what one device gives for a point, the rows of its caches included."""

    @functools.cache
    def made(point: Point) -> dict[str, Any]:
        found = generate(checkpoints.load(point), point, rows=True)
        # Drafts are fitted to the texts of wide weights, and fewer bits may give others. MTP heads that share the
        # target's LM head are not fitted.
        wide, config = point.weights is None and point.kv is None, {**FAMILIES, **WIDE}[point.family]
        if wide and (point.drafter in OF_FILES or (point.drafter == "mtp" and isinstance(config, Deepseek))):
            assert sum(found["rounds"]) < sum(map(len, found["tokens"])) - len(found["tokens"]), "drafts are accepted"
        return found

    return lambda point: made(point.reference)


def _texts(model: jspec.Model) -> np.ndarray:
    """Prompts with what the target continues them with, to 40 tokens each."""
    limits = [40 - len(prompt) for prompt in tiny.PROMPTS]
    out = jspec.generate(model, tiny.PROMPTS, drafter=None, max_new_tokens=limits, ignore_eos=True)
    return np.array([prompt + new for prompt, new in zip(tiny.PROMPTS, out.tokens, strict=True)], np.int32)
