"""Drafts that learn in an engine: what they read, that nothing else changes, and when they stop."""

import dataclasses
import time
from types import SimpleNamespace

import extras  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jspec
from jspec.core.method import with_last
from jspec.core.types import Params
from jspec.train import online, trainer
from jspec.train.block import BlockLearner
from jspec.train.head import HeadLearner
from jspec.train.online import LEAST_ROUNDS, Learn
from jspec.train.recipe import BlockRecipe, DraftRecipe

HEAD = dataclasses.replace(toy.HEAD, draft_vocab_size=61)
BLOCK = dataclasses.replace(toy.BLOCK, draft_vocab_size=61)
RECIPES = {"eagle": DraftRecipe(learning_rate=3e-3, ttt_steps=2), "block": BlockRecipe(learning_rate=3e-3, anchors=8)}
FAST = Learn(share=0.9, window=16, sequences=16, batch=4, every=2)
PROMPTS = [[5, 3, 9, 4, 1, 2, 8, 6], [5, 3, 9, 4, 1, 2, 8, 6, 11], [12], [5, 3, 9, 4, 7], [20, 21, 22, 23, 24, 25]] * 2


def model(kind: str) -> jspec.Model:
    """The toy target with a draft of random weights."""
    config = {"eagle": HEAD, "block": BLOCK}[kind]
    draft = toy.random_leaves(config.param_shapes(jnp.float32), seed=3)
    return jspec.Model("toy", toy.TARGET, Params(toy.params().target, draft), None, (7,), config)


def ids_of(generations):
    """The tokens of all items."""
    return [item.tokens for item in generations]


@jax.jit
def _forward(params, tokens):
    layers = with_last(toy.TARGET, HEAD.capture_layers)
    config = dataclasses.replace(HEAD, capture_layers=layers)
    return HeadLearner(DraftRecipe(), "float32", config, toy.TARGET).run_target(params, tokens).hidden[0]


def states_of(text):
    """The hidden states of a text, by one forward."""
    return _forward(toy.params().target, np.pad(text, (0, 64 - len(text)))[None])[: len(text)]


@dataclasses.dataclass
class Collector:
    """Takes the place of `Learn`: keeps the states of all sequences on the host."""

    window: int
    texts: list = dataclasses.field(default_factory=list)

    def begin(self, model):
        return self

    def keep(self, s, slots):
        watched = jax.device_get(s.watched)
        for slot in slots:
            length = int(s.length[slot])
            text = np.asarray(s.tokens[slot, :length])
            self.texts.append((text, watched.hidden[slot], int(watched.begin[slot]), int(watched.end[slot])))

    def turn(self, target, s, accept_counts, seconds):
        return None

    def replace(self, draft):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("window", "pages"), [(8, 24), (8, None), (64, 24), (64, None)])
def test_states_are_those_of_a_forward_over_the_text(window, pages):
    """Also after hits in the prefix cache, in chunks of prompts, over the end of the window, and after a preemption."""
    collector = Collector(window)
    options = {"slots": 4, "context": 64, "page_size": 4, "prefill_tokens": 16, "pages": pages, "learn": collector}
    with jspec.Engine(model("eagle"), **options) as engine:
        engine.generate(PROMPTS, max_new_tokens=30, ignore_eos=True)
        assert engine.metrics().prefix_hits > 0
        assert (engine.metrics().preemptions > 0) == (pages is not None)
    assert len(collector.texts) >= len(PROMPTS)
    full = 0
    for text, hidden, begin, end in collector.texts:
        if end < 0:  # preempted before its first chunk
            continue
        expected = states_of(text)
        assert end <= len(text) - 1
        full += end - begin == window
        positions = np.arange(begin, end)
        np.testing.assert_allclose(hidden[positions % window], expected[positions], atol=2e-5)
    finished = [text for text in collector.texts if len(text[0]) >= 30]
    assert all(end == len(text) - 1 for text, _, _, end in finished)
    assert full >= len(PROMPTS) or window == 64


def rest(engine):
    """Waits until an engine has nothing to do, and ends its steps: they consume the arrays that a test reads."""
    group, learning = engine.groups[0], engine.learning

    def end():
        idle = group.scheduler.idle
        if idle:
            learning.turn = lambda *args: None
        return idle

    while not group.ask(end).result():
        pass


@pytest.mark.slow
def test_the_ring_holds_generated_tokens_with_their_states():
    """The prompt is there, too, but only generated tokens are learned; a ring that is full loses the oldest ones."""
    learn = dataclasses.replace(FAST, window=32, sequences=8, batch=1, share=1e-9)
    with jspec.Engine(model("eagle"), slots=4, context=64, prefix_cache=False, learn=learn) as engine:
        generations = list(engine.generate(PROMPTS, max_new_tokens=12, ignore_eos=True))
        engine.generate([1, 2], max_new_tokens=1)  # after it, all slots above are empty; has nothing to learn
        rest(engine)
        ring = jax.device_get(engine.learning._ring)
    assert ring.count == len(PROMPTS) == 10
    texts = {tuple(item.prompt + item.tokens): len(item.prompt) for item in generations}
    rows = [next(text for text in texts if text == tuple(row[: len(text)])) for row in ring.tokens]
    assert len(set(rows)) >= 4
    for row, text in enumerate(rows):
        length = len(text) - 1  # The last token is in no cache.
        counted = np.zeros(32)
        counted[texts[text] : length] = 1
        np.testing.assert_array_equal(ring.mask[row], counted)
        np.testing.assert_allclose(ring.hidden[row, :length], states_of(text)[:length], atol=2e-5)
        assert not ring.hidden[row, length:].any()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), [("eagle", 0.9), ("eagle", 0.0), ("block", 0.9), ("block", 0.0)])
def test_the_output_is_the_same_and_the_draft_improves(kind, temperature):
    """Tokens are equal though the drafts change, and the accept length grows on texts that repeat."""
    options = {"max_new_tokens": 24, "ignore_eos": True, "sampling": jspec.Sampling(temperature=temperature)}
    with jspec.Engine(model(kind), slots=8, context=64) as engine:
        expected = engine.generate(PROMPTS, **options)
    learn = dataclasses.replace(FAST, recipe=RECIPES[kind])
    with jspec.Engine(model(kind), slots=8, context=64, learn=learn) as engine:
        ends, gain = time.monotonic() + 240, 0.0
        while gain < 0.15 and time.monotonic() < ends:
            again = engine.generate(PROMPTS, **options)
            assert ids_of(again) == ids_of(expected)
            gain = again.stats.accept_length - expected.stats.accept_length
        assert engine.params.draft is not engine.model.params.draft
    assert gain >= 0.15 and engine.learning.drafts >= 2
    assert engine.learning.error is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_kept_states_teach_what_a_forward_teaches(kind):
    """The loss of a batch with states equals that of a batch without."""
    loaded = model(kind)
    learner = {"eagle": HeadLearner, "block": BlockLearner}[kind](RECIPES[kind], "float32", loaded.draft, toy.TARGET)
    ids = getattr(loaded.params.draft, "ids", None)
    params = dataclasses.replace(loaded.params, draft=dataclasses.replace(loaded.params.draft, ids=None))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 16)), jnp.int32)
    mask = learner.count_rows(tokens, np.ones((2, 16), np.float32))
    layers = with_last(toy.TARGET, learner.capture_layers)
    watching = dataclasses.replace(learner, config=dataclasses.replace(learner.config, capture_layers=layers))
    hidden = watching.run_target(params.target, tokens).hidden
    batch = tokens, mask, jnp.arange(2, dtype=jnp.int32)
    losses = [learner.learn_batch(params, (*batch, *states), ids, 0)[0] for states in ((), (hidden,))]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def learning_without_steps(monkeypatch, **changes):
    """Learning whose steps only count themselves, each one second long."""
    learning = dataclasses.replace(FAST, **changes).begin(model("eagle"))
    learning._compiled.wait()

    def step(target, s):
        learning.steps += 1
        learning._spent += 1.0

    monkeypatch.setattr(learning, "_step", step)
    learning._kept = 100
    return learning


@pytest.mark.slow
def test_steps_take_no_more_than_their_share(monkeypatch):
    """One of ten seconds, whatever the length of a turn."""
    learning = learning_without_steps(monkeypatch, share=0.1)
    for turn in range(1, 301):
        learning.turn(None, None, [0, 0], 1.0 if turn % 2 else 0.5)
        assert learning.steps <= 0.1 * learning._seconds + 1
    assert learning.steps >= 22


@pytest.mark.slow
def test_the_time_of_a_step_is_not_that_of_the_first_ones(monkeypatch):
    """A GPU needs seconds for the first runs of a program, which would leave too few steps in a share of the time."""
    learning, now = FAST.begin(model("eagle")), [0.0]
    learning._compiled.wait()
    monkeypatch.setattr(online, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train_step(state, *args, **kwargs):
        now[0] += 2.0 if learning.steps < 5 else 0.125
        return state, jnp.zeros(()), None

    monkeypatch.setattr(online, "_sample", lambda *args, **kwargs: None)
    monkeypatch.setattr(online.trainer, "train_step", train_step)
    for _ in range(33):
        learning._step(None, None)
    assert learning._spent == 2.0 * 16 + 0.125 * 17


@pytest.mark.slow
def test_learning_stops_without_gain_and_serves_the_best(monkeypatch):
    """The judgement is by the rounds between two drafts; too few rounds give none."""
    learning = learning_without_steps(monkeypatch, every=1, patience=3)
    first, served, counts = learning._served, [], np.zeros(4, int)

    def turn(length, rounds=LEAST_ROUNDS):
        # `length - 1` accepted drafts in each round.
        counts[length - 1] += rounds
        served.append(learning.turn(None, None, list(counts), 10.0))

    # Rounds before the first turn count for no draft.
    learning._kept = 0
    turn(4)
    assert served.pop() is None and not learning.steps
    learning._kept = 100
    turn(2)
    turn(3)
    turn(1, rounds=2)
    for _ in range(2):
        turn(2)
    assert learning.accept_lengths[:2] == [2.0, 3.0] and not learning.stopped
    turn(2)
    assert learning.stopped and learning.error is None
    # The second draft was served while the accept length was 3: it comes from the first turn.
    assert served[-1] is served[0] is not first
    assert learning.turn(None, None, list(counts), 10.0) is None
    # A new target begins anew, with the rounds after the change alone.
    learning.replace(served[-1])
    assert not learning.stopped and learning.steps == 6
    learning._kept = 100
    counts[3] += 10 * LEAST_ROUNDS
    turn(1, rounds=0)
    turn(2)
    assert learning.accept_lengths[-1] == learning._best_length == 2.0


def test_a_trainer_may_hold_the_draft_before_the_one_served(monkeypatch):
    """The next one may be served between the two halves of `engine.update(Params(target, engine.params.draft))`."""
    learning = learning_without_steps(monkeypatch, every=1)
    learning._ring = dataclasses.replace(learning._ring, count=jnp.int32(5))
    served = [learning.turn(None, None, [0] * 4, 10.0) for _ in range(3)]
    for draft, texts in ((served[2], 5), (served[0], 0)):
        learning.replace(draft)
        assert int(learning._ring.count) == texts
    learning._ring = dataclasses.replace(learning._ring, count=jnp.int32(5))
    learning._kept = 100
    assert learning.turn(None, None, [0] * 4, 10.0) is not served[0]
    learning.replace(served[0])
    assert int(learning._ring.count) == 5


@pytest.mark.slow
def test_update_goes_on_with_the_same_draft_and_begins_anew_with_another():
    """Told apart by the arrays themselves."""
    loaded = model("eagle")
    with jspec.Engine(loaded, slots=4, context=64, learn=dataclasses.replace(FAST, recipe=RECIPES["eagle"])) as engine:
        while engine.learning.drafts < 2:
            engine.generate(PROMPTS, max_new_tokens=16, ignore_eos=True)
        rest(engine)
        target = jax.tree.map(lambda x: x * 1.01, loaded.params.target)
        steps, texts = int(engine.learning._state.step), int(engine.learning._ring.count)
        engine.update(Params(target, engine.params.draft))
        assert int(engine.learning._state.step) == steps > 0
        assert int(engine.learning._ring.count) == texts > 0
        engine.update(loaded.params)
        assert int(engine.learning._state.step) == int(engine.learning._ring.count) == 0
        np.testing.assert_array_equal(engine.learning._state.params.fc, loaded.params.draft.fc)
        text = ids_of(engine.generate(PROMPTS, max_new_tokens=16))
    with jspec.Engine(loaded, slots=4, context=64) as engine:
        assert text == ids_of(engine.generate(PROMPTS, max_new_tokens=16))


def test_an_error_of_learning_ends_no_request(monkeypatch):
    """A warning has the reason, and the draft stays as it is."""

    def fail(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer, "compile_step", fail)
    with pytest.warns(UserWarning, match="stopped learning: out of memory"):
        with jspec.Engine(model("eagle"), slots=4, context=64, learn=FAST) as engine:
            engine.learning._compiled.wait()
            assert len(engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)[0].tokens) == 8
    assert engine.learning.stopped and str(engine.learning.error) == "out of memory"


@pytest.mark.slow
def test_what_cannot_learn_is_refused():
    """Each message names what is there and what would do."""
    loaded = model("eagle")
    with pytest.raises(TypeError, match="learn=0.1: must be a jspec.train.online.Learn"):
        jspec.Engine(loaded, learn=0.1)
    with pytest.raises(ValueError, match="is none: must be of a kind eagle3 or dspark"):
        jspec.Engine(dataclasses.replace(loaded, draft=None, params=Params(loaded.params.target)), learn=FAST)
    with pytest.raises(ValueError, match="is Llama: must be of a kind"):
        near = jspec.Model("toy", toy.TARGET, toy.params(), None, (7,), toy.NEAR)
        jspec.Engine(near, learn=FAST)
    with pytest.raises(ValueError, match="is Assistant: must be of a kind"):
        FAST.begin(dataclasses.replace(loaded, draft=toy.ASSISTANT, params=toy.assistant_params()))
    with pytest.raises(ValueError, match="draft_vocab_size=48: a block draft is trained with the target's 61"):
        FAST.begin(dataclasses.replace(loaded, draft=toy.BLOCK, params=toy.block_params(toy.BLOCK)))
    with pytest.raises(ValueError, match="drafter Ngram reads no hidden states"):
        jspec.Engine(loaded, drafter="ngram", learn=FAST)
    with pytest.raises(ValueError, match="recipe is a BlockRecipe: must be a DraftRecipe"):
        dataclasses.replace(FAST, recipe=BlockRecipe()).begin(loaded)
    with pytest.raises(ValueError, match="quantized weights"):
        small = jax.tree.map(lambda x: x.astype(jnp.int8), loaded.params.draft)
        FAST.begin(dataclasses.replace(loaded, params=Params(loaded.params.target, small)))
    with pytest.raises(ValueError, match="share=0.95"):
        Learn(share=0.95)
