"""`check_target` passes targets that read a text the same way in pieces, and finds what is wrong with others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jspec
from jspec.analysis.check_target import check_target
from jspec.core import tree
from jspec.core.struct import struct
from jspec.core.types import ForwardOutput

VOCAB, WIDTH, LENGTH = 23, 16, 48


@struct
class Rows:
    """Keys and values of committed tokens; `mistake` is what is wrong with `commit`."""

    keys: jax.Array
    values: jax.Array
    mistake: str = dataclasses.field(default="", metadata={"static": True})

    def commit(self, rows, start, path, length):
        def write(stored, new):
            new = new[:, : stored.shape[1]] if self.mistake == "commits no path" else tree.take_path(new, path)
            column = jnp.arange(new.shape[1])[None]
            begin = start + int(self.mistake == "commits one too far")
            kept = column < length[:, None]
            if self.mistake == "writes in finished sequences":
                kept = column < jnp.maximum(length, 1)[:, None]
                begin = jnp.where(length > 0, begin, 0)
            at = jnp.where(kept, begin[:, None] + column, stored.shape[1])
            new = new.astype(stored.dtype)
            return stored.at[jnp.arange(len(at))[:, None], at].set(new, mode="drop")

        keys = write(self.keys, rows[0])
        if self.mistake == "changes its dtype":
            keys = keys.astype(jnp.bfloat16)
        return dataclasses.replace(self, keys=keys, values=write(self.values, rows[1]))


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """A layer of attention; `mistake` is what is wrong with it."""

    mistake: str = ""
    vocab_size: int = VOCAB
    hidden_size: int = WIDTH
    max_length: int = LENGTH
    num_layers: int = 1

    def init_cache(self, params, batch, capacity, page_size):
        columns = 8 * page_size if self.mistake == "eight pages" else capacity
        dtype = jnp.bfloat16 if self.mistake == "half a cache" else params["embed"].dtype
        empty = jnp.zeros((batch, columns, WIDTH), dtype)
        return Rows(empty, empty, self.mistake)

    def embed(self, params, tokens):
        return params["embed"][tokens]

    def unembed(self, params, x):
        return (x @ params["embed"].T).astype(jnp.bfloat16 if self.mistake == "half logits" else jnp.float32)

    def forward(self, params, draft_tree, cache, start, *, capture_layers=(), select=None) -> Any:
        is_ = self.mistake.__eq__
        nodes = draft_tree.tokens.shape[1]
        begin = jnp.zeros(draft_tree.tokens.shape[0], jnp.int32) if start is None else start
        if is_("one length for all"):
            begin = jnp.broadcast_to(begin[:1], begin.shape)
        depth = jnp.arange(nodes)[None] if is_("nodes in a row") else tree.depths(draft_tree)
        off = int(is_("positions off by one") and start is not None)
        x = self.embed(params, draft_tree.tokens) + params["position"][begin[:, None] + depth + off]
        if is_("leaks between sequences"):
            x = x + 0.01 * x.mean(0, keepdims=True)
        q, k, v = (x @ params[name] for name in ("query", "key", "value"))
        # What a node sees: committed rows, and nodes of the tree.
        last = begin + int(is_("reads a row that is not committed")) - int(is_("forgets the last row"))
        committed = jnp.arange(cache.keys.shape[1])[None] < last[:, None]
        ancestors = tree.ancestor_mask(draft_tree)
        if ancestors is None or is_("trees are chains"):
            ancestors = jnp.tri(nodes, dtype=bool)[None]
        elif is_("forgets the branch"):
            ancestors = ancestors & (jnp.eye(nodes, dtype=bool) | (jnp.arange(nodes) == 0)[None])[None]
        if is_("sees what follows"):
            ancestors = jnp.ones_like(ancestors)
        before, values = jnp.einsum("bnd,bcd->bnc", q, cache.keys.astype(q.dtype)), cache.values.astype(q.dtype)
        if not is_("multiplies by zero"):
            values = jnp.where(committed[:, :, None], values, 0)
        before = jnp.where(committed[:, None], before, -jnp.inf)
        own = jnp.where(ancestors, jnp.einsum("bnd,bmd->bnm", q, k), -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([before, own], axis=2))
        x = x + weights @ jnp.concatenate([values, v], axis=1)
        if is_("writes in forward"):
            object.__setattr__(cache, "keys", cache.keys + 1)
        if select is not None and not is_("ignores select"):
            at = jnp.zeros_like(select) if is_("selects the first") else select
            x = jnp.take_along_axis(x, at[:, None, None], axis=1)
        hidden = None
        if capture_layers and not is_("forgets to refuse"):
            raise ValueError("no hidden states")
        if is_("always has hidden states"):
            hidden = x
        logits = self.unembed(params, x)
        if is_("NaN"):
            logits = logits.at[0, :, 3].set(jnp.nan)
        if is_("ignores the text"):
            logits = jnp.zeros_like(logits)
        if is_("returns logits"):
            return logits
        return ForwardOutput(logits, (k, v), hidden)


def weights():
    shapes = {"embed": (VOCAB, WIDTH), "position": (LENGTH, WIDTH)}
    shapes |= {name: (WIDTH, WIDTH) for name in ("query", "key", "value")}
    rng = np.random.default_rng(0)
    return {name: jnp.array(rng.normal(size=shape) / 3, jnp.float32) for name, shape in shapes.items()}


def check(target, **options):
    return check_target(jspec.from_target(target, weights()), **options)


@pytest.mark.slow
def test_a_right_target_passes(capsys):
    report = check(OneLayer(), progress=True)
    assert len(report.checks) == 13 and report.difference < 1e-5
    assert "OneLayer satisfies the contract" in repr(report) and "in trees, of which a path is committed" in repr(
        report
    )
    assert "13/13" in capsys.readouterr().err


@pytest.mark.slow
def test_a_family_passes():
    assert len(check_target(jspec.from_target(toy.NEAR, toy.random_params(toy.NEAR))).checks) == 13


def test_own_targets_decode_as_they_read_whole_texts():
    model = jspec.from_target(OneLayer(), weights(), eos=[VOCAB - 1])
    assert repr(model) == "Model('OneLayer': target OneLayer, vocabulary 23, float32; no draft)"
    out = jspec.generate(model, [[1, 2, 3], [4]], drafter="ngram", max_new_tokens=12)
    for prompt, new in zip(([1, 2, 3], [4]), out.tokens, strict=True):
        text = jnp.array([prompt + new])
        empty = model.target.init_cache(weights(), 1, 1, 1)
        logits = model.target.forward(weights(), tree.chain(text), empty, None).logits
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == new


MISTAKES = {
    "returns logits": r"forward returns a \w+: must be a jspec.core.types.ForwardOutput",
    "half logits": r"are bfloat16\[3, 5, 23\]: must be float32\[3, 5, 23\]",
    "always has hidden states": "hidden is float32.* without capture_layers",
    "writes in forward": "forward changes the cache: only commit may",
    "changes its dtype": r"commit: returns a state of another form: .*keys is bfloat16.*, but was float32",
    "NaN": "the logit of token 3 after position 0 of sequence 0 is nan",
    "ignores the text": "the logits of all tokens are equal",
    "sees what follows": "with other tokens from position",
    "leaks between sequences": "among other sequences in another order",
    "positions off by one": "sequence 0, position 0, read token by token: logits differ",
    "one length for all": "sequence 1, position 1, read token by token",
    "reads a row that is not committed": "in a cache that held another text before",
    "forgets the last row": "sequence 0, position 1, read token by token",
    "commits one too far": "read token by token",
    "writes in finished sequences": "read token by token|round . of trees",
    "half a cache": "read token by token: logits differ",
    "nodes in a row": "node 2 at position .*, round 0 of trees|node 3 at position .*, round 0 of trees",
    "trees are chains": "round 0 of trees, parents",
    "forgets the branch": "round 0 of trees",
    "commits no path": "round 1 of trees",
    "multiplies by zero": "uncommitted rows are NaN .*nan instead of",
    "eight pages": "with page_size=1: logits differ",
    "ignores select": r"with select the logits are float32\[3, 5, 23\]: must be those of one node",
    "selects the first": "sequence 0, position 4, selected: logits differ",
    "forgets to refuse": r"with capture_layers=\(0, 1\) hidden is None: must have the shape",
}


@pytest.mark.slow(
    unless=("half logits", "writes in forward", "positions off by one", "changes its dtype", "returns logits")
)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_found(mistake):
    with pytest.raises(AssertionError, match=f"OneLayer: .*({MISTAKES[mistake]})"):
        check(OneLayer(mistake))


class ByIdentity(OneLayer):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class NoCommit(OneLayer):
    def init_cache(self, params, batch, capacity, page_size):
        return jnp.zeros((batch, capacity, WIDTH))


@pytest.mark.parametrize(
    "target, error, message",
    [
        (ByIdentity(), AssertionError, "ByIdentity: it is hashed by identity"),
        (NoCommit(), AssertionError, "init_cache returns a ShapeDtypeStruct: must have the method commit"),
        (OneLayer(max_length=19), ValueError, "max_length=19: must be at least 20"),
        (
            OneLayer(vocab_size=24),
            AssertionError,
            r"are float32\[3, 5, 23\]: must be float32\[3, 5, 24\], for vocab_size",
        ),
        (OneLayer(hidden_size=4.5), AssertionError, "hidden_size=4.5: must be an int of at least 0"),
        (OneLayer(num_layers=-1), AssertionError, "num_layers=-1"),
    ],
)
def test_a_wrong_interface_is_found(target, error, message):
    with pytest.raises(error, match=message):
        check(target)


class Unhashable(OneLayer):
    __hash__ = None


class Raises(OneLayer):
    def forward(self, *args, **options):
        raise KeyError("mine")


def test_an_exception_of_the_target_gets_a_note():
    with pytest.raises(KeyError, match="mine") as raised:
        check(Raises())
    assert any("check_target(Raises(...))" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jspec.from_target(OneLayer, {}), TypeError, "target is the class OneLayer: must be an object"),
        (lambda: jspec.from_target(5, {}), TypeError, "target is of type int, which has no vocab_size, hidden_size"),
        (lambda: jspec.from_target(Unhashable(), {}), TypeError, "target=.*: must be hashable"),
        (lambda: jspec.from_target(OneLayer(vocab_size=0), {}), ValueError, r"OneLayer\(vocab_size=0\)"),
        (lambda: jspec.from_target(OneLayer(max_length=2.5), {}), TypeError, r"OneLayer\(max_length=2.5\)"),
        (lambda: jspec.from_target(OneLayer(), {}, eos=[23]), ValueError, r"eos\[0\]=23"),
        (lambda: jspec.from_target(OneLayer(), {}, tokenizer=5), TypeError, "tokenizer is of type int"),
        (lambda: jspec.from_target(OneLayer(), {}, name=5), TypeError, "name=5"),
        (lambda: check_target(OneLayer()), TypeError, "model=OneLayer.*must be a jspec.Model"),
        (lambda: check(OneLayer(), seed=-1), ValueError, "seed=-1"),
        (lambda: check(OneLayer(), tolerance=0), ValueError, "tolerance=0: must be above 0"),
        (lambda: check(OneLayer(), tolerance="x"), TypeError, "tolerance='x'"),
        (lambda: check(OneLayer(), progress=1), TypeError, "progress=1"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
