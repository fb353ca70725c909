"""Rollouts for Tunix: its trainers sample through `jspec.Engine`, with a draft, and get the tokens of plain sampling.

Tunix takes a rollout engine as a class or as a `functools.partial` of one:

    rollout = functools.partial(TunixRollout, model=model, to_params=to_params)
    config = rl_cluster.ClusterConfig(..., rollout_engine=rollout)

The interface is `tunix.rl.rollout.base_rollout.BaseRollout` of Tunix 0.1.7 and 0.1.8. Without Tunix the class
works as well; trainers of one's own can use it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jspec.core.checks import check_int, check_sequence, shorten
from jspec.core.sampling import Sampling
from jspec.core.types import Params
from jspec.engine.engine import Engine
from jspec.generation.options import MAX_SEED, EngineKeywords
from jspec.generation.result import Generations
from jspec.generation.run import encode_prompts
from jspec.loading.model import Model

if TYPE_CHECKING:
    Base = object
else:
    try:
        from tunix.rl.rollout.base_rollout import BaseRollout as Base
    except ModuleNotFoundError:
        Base = object


class RolloutConfig(Protocol):
    """Fields of Tunix's configuration; all others belong to engines of its own."""

    max_tokens_to_generate: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: Any
    max_prompt_length: int
    eos_tokens: list[int] | None


class SpecialIds(Protocol):
    """Methods of a trainer's tokenizer."""

    def pad_id(self) -> int:
        """The padding id."""
        ...

    def eos_id(self) -> int:
        """The end-of-text id."""
        ...


@dataclasses.dataclass
class RolloutOutput:
    """Samples, with the fields of Tunix's class of this name.

    logits: None, as they never leave the device.
    tokens: ids of each sample, [length], without padding.
    left_padded_prompt_tokens: ids of the prompts, [B, max_prompt_length].
    logprobs: for each sample the log-probabilities of its tokens under the distribution they were sampled from,
      [length]; None unless the configuration has `return_logprobs`.
    """

    text: list[str]
    logits: None
    tokens: list[Int[np.ndarray, " length"]]
    left_padded_prompt_tokens: Int[np.ndarray, "B max_prompt_length"]
    logprobs: list[Float[np.ndarray, " length"]] | None


class TunixRollout(Base):
    """A rollout engine over `jspec.Engine`: continuous batching, prompts of one group share their pages.

    Args:
      rollout_actor, tokenizer, mesh, rollout_config: what Tunix passes. `rollout_actor`, the policy, must have the
        weights of `model` at first; `tokenizer` gives the ids for padding and end. The mesh must have one device.
      model: the policy, with its tokenizer and draft.
      to_params: the weights of the engine from those of the trainer, by reference or as new arrays: target and draft,
        or the target alone, whose draft then stays. None: they have the engine's structure already.
      pad_id: padding id of rows; None: the tokenizer's.
      engine: options of `jspec.Engine`.

    Raises:
      ValueError, TypeError: invalid arguments; or as `jspec.Engine`.
    """

    def __init__(
        self,
        rollout_actor: object = None,
        tokenizer: SpecialIds | None = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        model: Model,
        to_params: Callable[[Any], PyTree] | None = None,
        pad_id: int | None = None,
        **engine: Unpack[EngineKeywords],
    ):
        # One device, and ids from the trainer or the model.
        if mesh is not None and mesh.size != 1:
            raise ValueError(f"mesh: has {mesh.size} devices; must have one")
        if pad_id is None and tokenizer is None:
            raise ValueError("pad_id=None: must be given if there is no tokenizer of a trainer")
        if not model.eos and tokenizer is None:
            raise ValueError(f"model={model.name!r}: has no id that ends a text; pass the tokenizer of the trainer")
        pad = tokenizer.pad_id() if pad_id is None and tokenizer is not None else pad_id
        self._pad = check_int("pad_id", pad, least=0, most=model.target.vocab_size - 1)
        self._eos = model.eos[0] if tokenizer is None else tokenizer.eos_id()
        # The engine, and how weights reach it.
        if rollout_config is not None:
            _check_eos(rollout_config, model)
        self._to_params = to_params
        self._samples = 0
        self.engine = Engine(model, **engine)

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: object) -> RolloutOutput:
        """One sample per prompt; equal prompts give different samples.

        prompts: texts, or token ids.
        rollout_config: limits, sampling parameters and `seed`, an int or a key: sample i uses (seed, i). None:
          the samples of a first call use the seeds from 0 on, those of later calls the next ones.

        Raises:
          ValueError, TypeError: invalid options, or a prompt longer than `max_prompt_length`: it is not truncated.
        """
        if kwargs:
            raise TypeError(f"{', '.join(sorted(kwargs))}: not supported")
        _check_eos(rollout_config, self.engine.model)
        # Prompts keep all their tokens.
        prompt_ids = encode_prompts(self.engine.model, list(check_sequence("prompts", prompts, items="prompts")))[1]
        width = check_int("max_prompt_length", rollout_config.max_prompt_length, least=1)
        for i, ids in enumerate(prompt_ids):
            if len(ids) > width:
                raise ValueError(f"prompts[{i}]: has {len(ids)} tokens; must have at most max_prompt_length={width}")
        wants_logprobs = bool(getattr(rollout_config, "return_logprobs", False))
        # Sample.
        out = self.engine.generate(
            prompt_ids,
            max_new_tokens=rollout_config.max_tokens_to_generate,
            sampling=_sampling(rollout_config),
            seed=self._seeds(rollout_config.seed, len(prompt_ids)),
            logprobs=wants_logprobs,
        )
        assert isinstance(out, Generations)
        # Rows of equal width, padded on the left.
        padded = np.full((len(prompt_ids), width), self._pad, np.int32)
        for row, ids in zip(padded, prompt_ids, strict=True):
            row[width - len(ids) :] = ids
        return RolloutOutput(
            text=["" for _ in out] if out.text is None else out.text,
            logits=None,
            tokens=[np.array(tokens, np.int32) for tokens in out.tokens],
            left_padded_prompt_tokens=padded,
            logprobs=[np.array(row, np.float32) for row in out.sampled_logprobs or []] if wants_logprobs else None,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: Int[Array, "B P"],
        completion_tokens: Int[Array, "B C"],
        completion_mask: Bool[Array, "B C"] | None = None,
    ) -> Float[Array, "B C"]:
        """log p of each token of the completions under the policy's own logits, at temperature 1; 0 at padding.

        prompt_tokens: padded on the left. completion_tokens: padded on the right.
        completion_mask: tokens of a completion, from the first one on without gaps; None: those before the
          padding at the end of a row.

        Raises:
          ValueError: a row without a prompt, or a mask with gaps.
        """
        # Rectangles of ids.
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        if prompts.ndim != 2 or completions.ndim != 2 or len(prompts) != len(completions):
            raise ValueError(
                f"prompt_tokens, completion_tokens: have the shapes {prompts.shape} and {completions.shape}; must be "
                "[B, P] and [B, C]"
            )
        belongs = completions != self._pad if completion_mask is None else np.asarray(completion_mask, bool)
        # Score each sequence without its padding.
        result = np.zeros(completions.shape, np.float32)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            begin = int((prompt != self._pad).argmax())
            if prompt[begin] == self._pad:
                raise ValueError(f"prompt_tokens[{i}]: is empty; must have at least one token")
            count = completions.shape[1] - int(belongs[i][::-1].argmax()) if belongs[i].any() else 0
            if completion_mask is not None and not belongs[i][:count].all():
                raise ValueError(f"completion_mask[{i}]: has gaps; must be ones, then zeros")
            if count:
                scores = self.engine.score([*prompt[begin:].tolist(), *completion[:count].tolist()])
                result[i, :count] = scores.logprobs[len(prompt) - begin :]
        return jnp.asarray(result)

    def update_params(self, params: PyTree, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the weights of the policy, without compiling anything.

        params: weights of the trainer; `to_params` makes those of the engine.
        filter_types: kinds of parameters in `params`; `to_params` must know what to do with fewer than all.

        Raises:
          ValueError: another structure, shape or dtype than the engine's, with the path of the leaf.
        """
        weights = params if self._to_params is None else self._to_params(params)
        if not isinstance(weights, Params):
            weights = Params(weights, self.engine.params.draft)
        self.engine.update(weights)

    def pad_id(self) -> int:
        """The padding id."""
        return self._pad

    def eos_id(self) -> int:
        """The end-of-text id."""
        return self._eos

    def model(self) -> None:
        """None: the engine has weights of its own. With those of its policy here, Tunix would never update them."""

    def _seeds(self, seed: Any, count: int) -> list[tuple[int, int]]:
        """The seed of each sample of a call."""
        if seed is None:
            begin, self._samples = self._samples, self._samples + count
            return [((begin + i) % (MAX_SEED + 1), 0) for i in range(count)]
        if isinstance(seed, jax.Array) and (jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) or seed.ndim):
            first = int(jax.random.bits(seed))
        else:
            first = check_int("seed", int(seed) if isinstance(seed, jax.Array) else seed, least=0, most=MAX_SEED)
        return [(first, i) for i in range(count)]


def _sampling(config: RolloutConfig) -> Sampling:
    top_k = None if config.top_k in (None, -1) else config.top_k
    return Sampling(temperature=config.temperature, top_k=top_k, top_p=config.top_p)


def _check_eos(config: RolloutConfig, model: Model) -> None:
    """Raises ValueError if a configuration ends texts at other ids than the model."""
    if config.eos_tokens is not None and set(config.eos_tokens) != set(model.eos):
        raise ValueError(
            f"eos_tokens={shorten(config.eos_tokens)}: must be those of the model, {list(model.eos)}, or None; "
            "dataclasses.replace(model, eos=...) gives a model others"
        )
