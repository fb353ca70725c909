"""A draft learns while an engine serves it, from the hidden states of the verifying forwards.

The output of the engine does not depend on it: with exact products every token, otherwise up to near-ties of logits, as
with any other draft. Learning from the verifier: Liu et al., Online Speculative Decoding, arXiv 2310.07177, section 4;
here with the losses of `jspec train`.
"""

import dataclasses
import operator
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jspec.core.method import with_last
from jspec.core.options import option
from jspec.core.struct import struct
from jspec.core.types import DecodeState
from jspec.core.watch import Watched
from jspec.generation.embeds import embeds_dtype
from jspec.loading.model import Model, refuse_split
from jspec.train import trainer
from jspec.train.kinds import KINDS
from jspec.train.learner import Batch, DraftState, Learner
from jspec.train.model import cast
from jspec.train.recipe import Options, Recipe

CHUNK_BYTES = 2**30
"""Memory for logits and scores of the sequences whose gradient is computed at once; at least one sequence's."""
LEAST_ROUNDS = 64
"""The fewest rounds of sequences for an accept length."""
GAIN = 0.01
"""The smallest gain of the accept length, as a share of it."""
TIMED_STEPS, TIMED_EVERY = 3, 16
"""Steps whose time is measured, the first ones and then each of this number; they wait for the device."""


@dataclasses.dataclass(frozen=True)
class Learn(Options):
    """How the draft of an engine learns: `jspec.Engine(model, learn=Learn())`.

    Sequences that leave their slots go to a ring on the device, with the target's hidden states. Between bursts, an
    optimizer step takes some of them, and after every few steps the engine drafts with the new weights. Learning stops
    without a gain of the accept length. `Engine.update` starts it again: with the present optimizer and texts, if the
    new weights have the draft of `Engine.params`, and otherwise from the draft in them, without texts.

    recipe: hyperparameters of the draft's kind, as in `jspec.train.recipe`; length, steps and batch_tokens follow from
      the options here. None: the defaults, with `learning_rate`.
    """

    share: float = option(0.1, "largest share of the engine's time for steps", above=0.0, most=0.9)
    window: int = option(256, "positions to learn of each sequence, its last ones", least=8, most=2**16)
    sequences: int = option(128, "sequences in the ring, the latest ones", least=1, most=2**20)
    batch: int = option(8, "sequences of a step", least=1, most=2**16)
    every: int = option(8, "steps from one served draft to the next", least=1)
    patience: int = option(16, "drafts without a longer accept length until learning stops", least=1)
    learning_rate: float = option(2e-4, "of all steps after the first ones", above=0.0)
    recipe: Recipe | None = None

    def begin(self, model: Model) -> "Learning":
        """The learning of a model's draft; ValueError if it cannot learn, or the model is split over devices."""
        refuse_split(model, "learning in an engine")
        kind = next((kind for kind in KINDS.values() if isinstance(model.draft, kind.config)), None)
        if kind is None or not kind.load().replays:
            able = [kind.name for kind in KINDS.values() if kind.load().replays]
            shown = "none" if model.draft is None else type(model.draft).__name__
            raise ValueError(f"learn: the draft of {model.name!r} is {shown}: must be of a kind {' or '.join(able)}")
        if self.recipe is not None and type(self.recipe) is not kind.recipe:
            raise ValueError(f"learn: recipe is a {type(self.recipe).__name__}: must be a {kind.recipe.__name__}")
        # The recipe, without an end.
        recipe = kind.recipe() if self.recipe is None else self.recipe
        recipe = dataclasses.replace(
            recipe,
            steps=2**31 - 1,
            batch_tokens=self.batch * self.window,
            length=self.window,
            warmup=min(recipe.warmup, self.every),
            learning_rate=self.learning_rate if self.recipe is None else recipe.learning_rate,
        )
        # The dtype of the draft.
        weights = jax.tree.leaves(_without_ids(model.params.draft))
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1 for leaf in weights):
            raise ValueError("learn: the draft has quantized weights: load it with floats")
        dtypes = {str(leaf.dtype) for leaf in weights}
        if len(dtypes) > 1:
            raise ValueError(f"learn: the draft has weights of {', '.join(sorted(dtypes))}: must be of one dtype")
        learner = kind.load().of(model.draft, model.target, recipe, dtypes.pop(), CHUNK_BYTES)
        return Learning(self, learner, model)


@struct
class Ring:
    """The latest N sequences, each with at most L positions."""

    tokens: Int[Array, "N L"]
    mask: Float[Array, "N L"]
    """1 for generated tokens with a hidden state."""
    hidden: Float[Array, "N L C"]
    count: Int[Array, ""]
    """Sequences so far; the next one takes place `count % N`."""


class Learning:
    """The state of learning. The methods are called by the thread of the engine.

    Attributes:
      steps: optimizer steps so far.
      drafts: drafts served so far, the first one not included.
      accept_lengths: tokens per round with each of them, measured while it was served; the first draft's first.
      stopped: whether learning has stopped, until the target changes; for lack of gain or by `error`.
      error: what ended it for good; None: nothing.
    """

    def __init__(self, options: Learn, learner: Learner, model: Model):
        self.options, self.learner = options, learner
        self.steps = self.drafts = 0
        self.accept_lengths: list[float] = []
        self.stopped, self.error = False, None
        # The ring, with the dtype of the residual stream, and the optimizer's state.
        width = model.target.hidden_size * len(with_last(model.target, learner.capture_layers))
        places, columns = options.sequences, options.window
        self._ring = Ring(
            jnp.zeros((places, columns), jnp.int32),
            jnp.zeros((places, columns), jnp.float32),
            jnp.zeros((places, columns, width), embeds_dtype(model.target, model.params.target)),
            jnp.zeros((), jnp.int32),
        )
        self._served = self._best = model.params.draft
        self._before: list[weakref.ref[Array]] | None = None
        """The weights of the draft served before."""
        self._state = _begin(model.params.draft, learner=learner)
        self._best_length, self._stale = 0.0, 0
        self._counts: np.ndarray | None = None
        """Rounds by accepted drafts at the last judgement; None: those of the next turn."""
        self._kept, self._seconds, self._spent, self._step_seconds = 0, 0.0, 0.0, float("inf")
        self._compiled = threading.Event()
        threading.Thread(target=self._compile, args=(model.params.target,), name="jspec learn", daemon=True).start()

    @property
    def window(self) -> int:
        """Positions of each sequence whose hidden states are needed."""
        return self.options.window

    def keep(self, s: DecodeState, slots: Sequence[int]) -> None:
        """Copies the sequences of slots to the ring, if they have anything to learn."""
        if self.stopped:
            return
        # Few programs: slots out of range are padding, up to a power of two.
        size = 1 << (len(slots) - 1).bit_length()
        padded = np.full(size, s.length.shape[0], np.int32)
        padded[: len(slots)] = slots
        assert s.watched is not None
        self._ring = _keep(self._ring, s.watched, s.tokens, s.prompt_length, padded)
        self._kept += len(slots)

    def turn(self, target: PyTree, s: DecodeState, accept_counts: Sequence[int], seconds: float) -> PyTree | None:
        """Maybe a step. Returns weights to serve from now on, or None.

        s: the state of the engine; only waited for.
        accept_counts: rounds of sequences so far, by accepted drafts.
        seconds: work of the engine since the last turn, steps included.
        """
        # A step needs texts, its program, and time.
        self._seconds += seconds
        if self._counts is None:
            self._counts = np.array(accept_counts)
        enough = self._kept >= min(self.options.batch, self.options.sequences)
        if self.stopped or not enough or not self._compiled.is_set():
            return None
        if self._spent > self.options.share * self._seconds:
            return None
        try:
            self._step(target, s)
        except Exception as error:
            self._fail(error)
            return self._best
        if self.steps % self.options.every:
            return None
        return self._serve(accept_counts)

    def replace(self, draft: PyTree) -> None:
        """Begins again after `Engine.update`: with the present state if `draft` is the one served."""
        # The optimizer's moments belong to the served draft. A trainer serves it again with the next weights of its
        # target: texts of the last ones are nearly as good, and many more. If it has read the weights just before the
        # latest draft was served, they are those before.
        leaves, served = jax.tree.leaves(draft), jax.tree.leaves(self._served)
        before = served if self._before is None else [leaf() for leaf in self._before]
        if not any(all(map(operator.is_, leaves, other)) for other in (served, before)):
            self._state = _begin(draft, learner=self.learner)
            self._kept, self._ring = 0, dataclasses.replace(self._ring, count=jnp.zeros((), jnp.int32))
        self._served, self._best, self._before = draft, draft, None
        # Rounds with the old target say nothing about the new one.
        self._best_length, self._stale, self.stopped, self._counts = 0.0, 0, self.error is not None, None

    def _step(self, target: PyTree, s: DecodeState) -> None:
        # Most steps are only dispatched. A GPU captures its graphs in the first ones, so the fastest one counts.
        timed = self.steps < TIMED_STEPS or self.steps % TIMED_EVERY == 0
        if timed:
            jax.block_until_ready(s)
        began = time.monotonic()
        batch = _sample(self._ring, np.int32(self.steps), size=self.options.batch, learner=self.learner)
        self._state, loss, _ = trainer.train_step(self._state, target, batch, self.steps, setup=self.learner)
        if timed:
            jax.block_until_ready(loss)
            self._step_seconds = min(self._step_seconds, time.monotonic() - began)
        self.steps += 1
        self._spent += self._step_seconds

    def _serve(self, accept_counts: Sequence[int]) -> PyTree:
        """The next draft to serve, after the judgement of the last one."""
        # The accept length of the served draft, since the last judgement.
        rounds = np.array(accept_counts) - self._counts
        if rounds.sum() >= LEAST_ROUNDS:
            self._counts = np.array(accept_counts)
            length = float(rounds @ np.arange(1, len(rounds) + 1) / rounds.sum())
            self.accept_lengths.append(length)
            if length > self._best_length * (1 + GAIN):
                self._best, self._best_length, self._stale = self._served, length, 0
            else:
                self._stale += 1
            if self._stale >= self.options.patience:
                self.stopped = True
                self._serve_next(self._best)
                return self._best
        # The weights of now.
        self._serve_next(self._state.serve(self.learner.dtype))
        self.drafts += 1
        return self._served

    def _serve_next(self, draft: PyTree) -> None:
        self._before = [weakref.ref(leaf) for leaf in jax.tree.leaves(self._served)]
        self._served = draft

    def _compile(self, target: PyTree) -> None:
        """Compiles the step in a thread of its own: no request waits for it."""
        try:
            sample = partial(_sample, size=self.options.batch, learner=self.learner)
            batch = jax.eval_shape(sample, self._ring, np.int32(0))
            trainer.compile_step(self._state, target, batch, setup=self.learner)
        except Exception as error:
            self._fail(error)
        finally:
            self._compiled.set()

    def _fail(self, error: Exception) -> None:
        self.error, self.stopped = error, True
        warnings.warn(f"the draft has stopped learning: {error}", stacklevel=2)


def _without_ids(draft: PyTree) -> PyTree:
    """The weights of a draft without the target ids of its vocabulary."""
    return draft if getattr(draft, "ids", None) is None else dataclasses.replace(draft, ids=None)


@partial(jax.jit, static_argnames=("learner",))
def _begin(draft: PyTree, *, learner: Learner) -> DraftState:
    """The state before the first step, from the weights of a draft."""
    params = cast(_without_ids(draft), jnp.float32)
    return trainer.begin(DraftState, learner, params, ids=getattr(draft, "ids", None))


@partial(jax.jit, donate_argnames=("ring",))
def _keep(
    ring: Ring, watched: Watched, tokens: Int[Array, "S C"], prompt_length: Int[Array, " S"], slots: Int[Array, " n"]
) -> Ring:
    """The ring with the sequences of some slots, those without generated tokens left out; see `Learning.keep`."""
    places, columns = ring.tokens.shape
    inside = slots < tokens.shape[0]
    begin, end, prompt = (x.at[slots].get(mode="clip") for x in (watched.begin, watched.end, prompt_length))
    position = begin[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    generated = (position >= prompt[:, None]) & (position < end[:, None])
    # Each sequence goes to the next place; out of range, it is dropped.
    useful = inside & (generated.sum(1) > 1)
    place = jnp.where(useful, (ring.count + jnp.cumsum(useful) - 1) % places, places).astype(jnp.int32)
    row = jnp.where(inside, slots, 0)[:, None]
    hidden = watched.hidden[row, position % columns]
    text = tokens.at[row, position].get(mode="clip")
    return Ring(
        ring.tokens.at[place].set(text, mode="drop"),
        ring.mask.at[place].set(generated.astype(jnp.float32), mode="drop"),
        ring.hidden.at[place].set(jnp.where((position < end[:, None])[:, :, None], hidden, 0), mode="drop"),
        ring.count + useful.sum(dtype=jnp.int32),
    )


@partial(jax.jit, static_argnames=("size", "learner"))
def _sample(ring: Ring, step: Int[Array, ""], *, size: int, learner: Learner) -> Batch:
    """A batch of sequences of the ring, with their states."""
    key = jax.random.fold_in(jax.random.key(learner.recipe.seed), step)
    there = jnp.maximum(jnp.minimum(ring.count, ring.tokens.shape[0]), 1)
    index = jax.random.randint(key, (size,), 0, there)
    tokens, mask, hidden = (x[index] for x in (ring.tokens, ring.mask, ring.hidden))
    return tokens, learner.count_rows(tokens, mask), jnp.arange(size, dtype=jnp.int32), hidden
