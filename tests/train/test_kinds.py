"""Every kind of draft through its command and in memory: checkpoints that load, cards, and input that is refused."""

import dataclasses
import json

import extras  # noqa: F401
import numpy as np
import pytest
import train_files
from train_files import lines, run
from train_models import TARGET, sharp_params

import jspec
from jspec.checkpoints import language_model
from jspec.core.options import options_of
from jspec.core.types import Params
from jspec.train import distill, draft, tokenizer
from jspec.train.head import HeadLearner
from jspec.train.kinds import KINDS
from jspec.train.recipe import HeadShape

ROUNDS = {"steps": 4, "batch_tokens": 64, "prompts": 2}
HEAD = {"capture_layers": (1, 2, 4), "draft_vocab_size": 200, "intermediate_size": 40, "num_kv_heads": 1}
BLOCK = {"capture_layers": (1, 3), "block_size": 4, "markov_rank": 6}
COMMANDS = {
    "eagle3": {**HEAD, "length": 16, "ttt_steps": 2, "depth": 2, "layout": "speculators"},
    "dspark-deepspec": {**BLOCK, "length": 24, "anchors": 4, "depth": 3, "eval_every": 2, "layout": "deepspec"},
    "dspark-speculators": {**BLOCK, "length": 24, "anchors": 4, "depth": 3, "eval_every": 2, "layout": "speculators"},
    "dspark-z-lab": {
        "capture_layers": (1, 3), "block_size": 4, "fill_in": True, "markov": "none", "no_confidence": True,
        "conv_kernel_size": 2, "selector_rank": 4, "length": 24, "anchors": 4, "depth": 3, "eval_every": 2,
    },
    "frozen-kv-mtp": {
        "reads": (1, 0, 1), "intermediate_size": 40, "num_heads": 2, "target_head": True,
        "length": 16, "ttt_steps": 1, "depth": 1,
    },
}  # fmt: skip
CARDS = {
    "eagle3": (
        "An EAGLE-3 head (arXiv 2503.01840) for small", "200 of the target's 280 tokens",
        "--layout speculators --intermediate-size 40 --num-kv-heads 1 --capture-layers 1 2 4 --draft-vocab-size 200 "
        "--steps 4",
    ),
    "dspark": (
        "DSpark block draft of 4 tokens", "blocks after 4 anchors in each text", "jspec train dspark",
        'drafter="block"',
    ),
    "dspark-z-lab": (
        "A DFlash2 block draft of 3 tokens (vLLM #52816) for small", "a selector of rank 4 among 16 candidates",
        "1 times the selector's cross-entropy", "in the layout `z-lab`", "--selector-rank 4",
    ),
    "frozen-kv-mtp": (
        "An assistant for small (frozen-KV MTP", "of the target's layers 1, 0, 1, the LM head of",
        "--intermediate-size 40 --num-heads 2 --reads 1 0 1 --target-head --steps 4", 'drafter="frozen-kv-mtp"',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory):
    """A directory as `jspec train data` writes it, for a made-up text, with a target and its tokenizer."""
    directory = tmp_path_factory.mktemp("data")
    bpe = train_files.write(directory)
    small = dataclasses.replace(TARGET, vocab_size=train_files.VOCABULARY, max_length=256)
    language_model.save(directory / "small", small, sharp_params(small), dtype="float32", eos=(0,))
    tokenizer.save(bpe, directory / "small", 256)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_writes_a_draft_that_loads(data_directory, tmp_path, name):
    """Also after a stop; its metrics are those of the draft that it writes."""
    kind, out = next(kind for kind in KINDS if name.startswith(kind)), tmp_path / "draft"
    common = {"data": data_directory, "target": data_directory / "small", "rows": data_directory / "rows.npy"}
    common |= {"work": tmp_path / "work", "out": out, **ROUNDS, **COMMANDS[name]}
    run(kind, **common, stop_after=2)
    run(kind, **common, resume=True)
    loaded = jspec.load(data_directory / "small", draft=out, dtype="float32")
    shape = {option: value for option, value in COMMANDS[name].items() if option in options_of(KINDS[kind].shape)}
    for option in ("reads", "fill_in", "markov", "no_confidence"):
        shape.pop(option, None)
    assert shape == {option: getattr(loaded.draft, option) for option in shape}
    if kind == "eagle3":
        assert isinstance(loaded.draft, jspec.models.EagleHead)
        written = json.loads((out / "config.json").read_text())
        assert written["speculators_config"]["verifier"]["name_or_path"] == "small"
        assert loaded.params.draft.ids.tolist() == np.unique(loaded.params.draft.ids).tolist()
    elif kind == "dspark":
        assert (loaded.draft.confidence, loaded.draft.method) == {"dspark-z-lab": (None, "DFlash2")}.get(
            name, ("markov", "DSpark")
        )
    else:
        assert isinstance(loaded.draft, jspec.models.Assistant) and loaded.draft.target_layers == (1, 0, 1)
        assert loaded.draft.target_head and loaded.draft.num_heads == 2
    # The metrics and the card.
    final, depth = lines(tmp_path / "work")[-1], COMMANDS[name]["depth"]
    assert final["step"] == 4 and len(final["acceptance_by_position"]) == depth
    assert len(final["heldout_agreement"]) == COMMANDS[name].get("ttt_steps", getattr(loaded.draft, "depth", None))
    served = distill.accept_length(loaded, loaded.draft, loaded.params.draft, train_files.PROMPTS[:2], depth=depth)
    assert final["accept_length"] == pytest.approx(served["accept_length"], abs=0.1) and final["accept_length"] >= 1
    card = (out / "README.md").read_text()
    for text in (*CARDS.get(name, CARDS[kind]), "jspec train data --out data --tokenizer small", "| free | 1 | MIT |"):
        assert text in card, text
    assert str(tmp_path) not in card and str(data_directory) not in card


def test_the_tokenizer_of_another_target_is_refused(data_directory, tmp_path):
    common = {"data": data_directory, "steps": 4, "work": tmp_path / "w", "out": tmp_path / "o"}
    with pytest.raises(ValueError, match="the tokenizer is not that of bundled:python-tiny"):
        run("eagle3", **common, target="bundled:python-tiny")


def test_prompts_that_cannot_be_evaluated_are_refused(data_directory):
    plain = jspec.load(data_directory / "small", dtype="float32")
    config = HeadLearner.configure(plain.target, HeadShape(capture_layers=(1, 2, 4), draft_vocab_size=40))
    distill.check_evaluation(plain, config, train_files.PROMPTS, 5)
    for prompts in (["", "x"], ["x", "def f(a):" * 200]):
        with pytest.raises(
            ValueError, match=r"held-out prompt [01] has \d+ tokens: must be from 1 to 128, so that 128"
        ):
            distill.check_evaluation(plain, config, prompts, 5)


INVALID = [
    ({"kind": "eagle"}, ValueError, "kind='eagle': must be one of eagle3, dspark, frozen-kv-mtp"),
    ({"model": "small"}, TypeError, "model is of type str: must be a jspec.Model"),
    ({"sequences": [[1, 2, 3], [4]]}, ValueError, "sequences: is ragged"),
    ({"sequences": np.zeros((3, 9))}, TypeError, r"sequences: is float64\[3, 9\]; must be token ids"),
    ({"sequences": np.zeros(9, int)}, ValueError, "sequences: .* must have tokens along 2 axes"),
    ({"sequences": np.zeros((0, 9), int)}, ValueError, "sequences: "),
    ({"sequences": np.zeros((3, 1), int)}, ValueError, "a sequence must have at least 2 tokens"),
    ({"sequences": np.full((3, 9), 61)}, ValueError, "sequences: holds token 61, but the model has vocab_size=61"),
    ({"sequences": np.full((3, 9), -1)}, ValueError, "sequences: holds token -1"),
    ({"sequences": np.zeros((3, 65), int)}, ValueError, "65: must be between 3 and 64, the target's context"),
    ({"steps": 1}, ValueError, "steps=1: must be from 2"),
    ({"steps": 2.0}, TypeError, "steps=2.0: must be an int"),
    ({"steps": True}, TypeError, "steps=True: must be an int"),
    ({"batch_tokens": 0}, ValueError, "batch_tokens=0"),
    ({"batch_tokens": "8"}, TypeError, "batch_tokens='8'"),
    ({"capture_layers": 2}, TypeError, "capture_layers=2: must be a list of int"),
    ({"capture_layers": (1.0,)}, TypeError, r"capture_layers\[0\]=1.0: must be an int"),
    ({"capture_layers": ()}, ValueError, r"capture_layers=\(\)"),
    ({"draft_vocab_size": 0}, ValueError, "draft_vocab_size=0: must be at least 1"),
    ({"draft_vocab_size": 2.5}, TypeError, "draft_vocab_size=2.5"),
    ({"progress": "no"}, TypeError, "progress='no': must be True or False"),
    (
        {"learning_rte": 1e-3},
        TypeError,
        "learning_rte=0.001: no such argument; recipe options are clip, decay, learning",
    ),
    ({"length": 9}, TypeError, "length=9: no such argument"),
    ({"learning_rate": float("nan")}, ValueError, "learning_rate=nan: must be above 0"),
    ({"learning_rate": None}, TypeError, "learning_rate=None: must be a number"),
    ({"clip": 0.0}, ValueError, "clip=0.0"),
    ({"seed": -1}, ValueError, "seed=-1: must be from 0"),
    ({"seed": 2**32}, ValueError, "seed=4294967296"),
    ({"decay": 1.5}, ValueError, "decay=1.5: must be from 0 to 1"),
    ({"ttt_steps": 0}, ValueError, "ttt_steps=0"),
    ({"ttt_steps": 65}, ValueError, "ttt_steps=65"),
    ({"warmup": -1}, ValueError, "warmup=-1"),
    ({"weight_decay": float("inf")}, ValueError, "weight_decay=inf"),
]


def test_invalid_arguments_of_the_training_in_memory():
    """Each is refused before anything is compiled."""
    plain = jspec.Model("tiny", TARGET, Params(sharp_params(TARGET)), None, ())
    good = {
        "kind": "eagle3",
        "model": plain,
        "sequences": np.zeros((3, 9), np.int64),
        "steps": 2,
        "capture_layers": (1,),
        "progress": False,
    }
    for changes, error, message in INVALID:
        with pytest.raises(error, match=message):
            draft.train_draft(**good | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_learns_from_an_exact_target(kind):
    """Training has an attention of its own, and gradients pass the target's LM head."""
    target = TARGET.exactly()
    options = {"eagle3": {"capture_layers": (1, 2, 4)}, "dspark": {"capture_layers": (1, 3)}}.get(kind, {})
    recipe = KINDS[kind].recipe(steps=2, batch_tokens=64, length=16)
    learner = KINDS[kind].load().make(target, KINDS[kind].shape(**options), recipe, "float32")
    assert learner.target == TARGET
