"""Models of the user's own: a function of tokens, a module of flax, a target with a cache, or weights in arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from jspec.checkpoints import named
from jspec.checkpoints.loading import LoadOptions, place_model
from jspec.core import package
from jspec.core.checks import check_flag, check_hashable, check_int, check_sequence, check_text
from jspec.core.types import TARGET_PARTS, Params, Target
from jspec.loading.model import Model, assemble
from jspec.loading.replacement import check_alive
from jspec.models.decoder import Decoder
from jspec.models.function import Function, FunctionModel, describe, is_causal
from jspec.models.quantized import check_weights
from jspec.text.tokenizer import Tokenizer

_CHECKED_TOKENS = 8
"""Tokens of the texts to check a function with."""


def from_function(
    function: Function,
    params: PyTree,
    *,
    max_length: int,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] = (),
    name: str | None = None,
    check: bool = True,
) -> Model:
    """Make a model of any function of tokens, for experiments: every forward computes all tokens anew.

    The result works wherever one of `jspec.load` does: as a target with chains and trees, and as the draft of another
    model with `model.with_draft(...)`. It has no keys and values, so a round costs a forward of the whole sequence, and
    a tree of N nodes costs N of them. Weights are taken by reference.

        model = jspec.from_function(apply, params, max_length=512)
        print(jspec.generate(model, [[1, 2, 3]], max_new_tokens=32).tokens)

    Args:
      function: f(params, tokens [B, T] int32) -> logits [B, T, V], floating point, of the token after each. It must be
        causal: texts are padded on the right, and what follows a token must not change its logits. Compiled programs
        are kept for equal functions; a new `lambda` is another function.
      params: its first argument: any pytree of arrays.
      max_length: largest T.
      vocab_size: V; None: from the logits.
      tokenizer: of `jspec.text.tokenizer`; None: prompts and outputs are token ids.
      eos: end-of-text ids.
      name: for messages; None: the function's.
      check: whether to run the function once on two short texts, to see if it is causal.

    Raises:
      TypeError, ValueError: arguments of the wrong type, a result of another shape or dtype, or dependent on later
        tokens.
    """
    # Types.
    if not callable(function):
        raise TypeError(f"function is of type {type(function).__name__}: must be f(params, tokens) -> logits")
    check_hashable("function", function)
    max_length = check_int("max_length", max_length, least=2)
    name = describe(function) if name is None else check_text("name", name)
    check = check_flag("check", check)
    _check_tokenizer(tokenizer)
    check_alive(params)
    # The vocabulary is known from a trace, causality from a run.
    length = min(_CHECKED_TOKENS, max_length)
    size = _check_result(function, params, name, length)
    if vocab_size is not None and check_int("vocab_size", vocab_size, least=1) != size:
        raise ValueError(f"vocab_size={vocab_size}: {name} returns logits of {size} tokens")
    # Ids and causality, for this vocabulary.
    ids = _check_eos(eos, size)
    if check and not is_causal(function, params, size, length):
        raise ValueError(
            f"function: the logits of {name} depend on later tokens; must be causal, since texts are padded on the "
            "right; layers that are random, such as dropout, must be off"
        )
    return Model(name, FunctionModel(function, size, max_length), Params(params), tokenizer, ids)


def from_module(
    module: Any,
    variables: PyTree = None,
    *,
    max_length: int,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] = (),
    name: str | None = None,
    check: bool = True,
) -> Model:
    """Make a model of a module of flax, as `from_function`; requires the extra `train`.

    Modules of one structure share compiled programs. What a call changes in the module, such as statistics, is dropped.

    Args:
      module: of `flax.nnx`, or of `flax.linen`: module(tokens [B, T]) -> logits [B, T, V]. Its weights are taken by
        reference: they are `model.params.target`, and `model.with_params` replaces them.
      variables: of a module of linen, as `init` returns them; None for one of nnx, with its own.
      max_length, vocab_size, tokenizer, eos, name, check: as in `from_function`.

    Raises:
      TypeError, ValueError: as `from_function`; or neither kind of module.
    """
    function, params = _split(module, variables)
    name = type(module).__name__ if name is None else name
    options = {"max_length": max_length, "vocab_size": vocab_size, "tokenizer": tokenizer, "eos": eos, "check": check}
    return from_function(function, params, name=name, **options)


def from_target(
    target: Target,
    params: PyTree,
    *,
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] = (),
    name: str | None = None,
) -> Model:
    """Make a model of a target with a cache of its own; `jspec.check_target` checks it.

    Args:
      target: a frozen dataclass with the attributes and methods of `jspec.core.types.Target`. Compiled programs are
        kept for equal ones.
      params: its weights, by reference: any pytree of arrays.
      tokenizer, eos: as in `from_function`.
      name: for messages; None: the name of its class.

    Raises:
      TypeError, ValueError: arguments of the wrong type, or a missing or wrong attribute or method.
    """
    # Parts of a target.
    kind = type(target).__name__
    if isinstance(target, type):
        raise TypeError(f"target is the class {target.__name__}: must be an object of it")
    if missing := [part for part in TARGET_PARTS if not hasattr(target, part)]:
        raise TypeError(
            f"target is of type {kind}, which has no {', '.join(missing)}: must be a jspec.core.types.Target"
        )
    # Values.
    check_hashable("target", target)
    for size in ("vocab_size", "max_length"):
        check_int(size, getattr(target, size), least=1, owner=kind)
    _check_tokenizer(tokenizer)
    check_alive(params)
    name = kind if name is None else check_text("name", name)
    unchecked: Any = target
    return Model(name, unchecked, Params(params), tokenizer, _check_eos(eos, target.vocab_size))


def from_named(
    config: Mapping[str, Any] | str | Path | Decoder,
    arrays: Mapping[str, Array] | PyTree,
    *,
    names: str = named.TRANSFORMERS,
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] | None = None,
    dtype: str | None = None,
    name: str | None = None,
    tensor: int | None = None,
    data: int | None = None,
    mesh: Mesh | None = None,
    exact: bool | None = None,
    weights: str | None = None,
    kv: str | None = None,
) -> Model:
    """Make a model of a supported family from arrays under the names of a library, without files.

    One program fuses the weights, where the arrays are. It compiles once per shape, and may be part of a program of the
    caller's, with `generate_ids`. Does not check for NaN or infinity. A training loop updates with

        model = model.with_params(jspec.from_named(config, arrays).params.target)

    and `engine.update` takes the `params` of the result. MTP heads become the draft, as with `jspec.load`.

    Args:
      config: the content of a config.json, its file or directory, or the target of another model.
      arrays: by the names that `transformers` gives them, with its shapes; floating point. With other `names`, weights
        as that library holds them: nested dictionaries, a state of flax.nnx, or arrays by their paths.
      names: whose names and shapes they are: "transformers"; "tunix" or "maxtext" for Llama and Qwen3; "tunix" or
        "gemma" for Gemma 4.
      tokenizer: of `jspec.text.tokenizer`; None: prompts and outputs are token ids.
      eos: end-of-text ids; None: those of `config`.
      dtype: "bfloat16", "float16" or "float32"; None: as the arrays.
      name: for messages; None: the family's.
      tensor, data, mesh: the devices over which the model is split, as in `jspec.load`. Arrays on other devices are
        copied to these, and those on the same devices may be split in any way.
      exact: as in `jspec.load`. None for a target: as it is, unless other options rule it out.
      weights: as in `jspec.load`; the fusing program quantizes them.
      kv: as in `jspec.load`; a target with a narrow cache keeps it.

    Raises:
      CheckpointError: an unsupported configuration, or a missing or unused array, or one of another shape or dtype; the
        message has its name.
      TypeError, ValueError: other arguments of the wrong type, or a number of devices over which the model cannot be
        split.
    """
    check_weights(weights)
    options = LoadOptions(place_model(tensor, data, mesh), dtype, exact, weights, kv)
    options = options.of_target(config) if isinstance(config, Decoder) else options
    if names == named.TRANSFORMERS and not isinstance(arrays, Mapping):
        raise TypeError(f"arrays is of type {type(arrays).__name__}: must map Hugging Face names to arrays")
    parsed, ends = named.parse(config)
    if eos is not None:
        ends = _check_eos(eos, parsed.vocab_size)
    _check_tokenizer(tokenizer)
    name = type(parsed).__name__ if name is None else check_text("name", name)
    plan = named.plan(parsed, arrays, options, names)
    return assemble(name, dataclasses.replace(plan.read(), eos=ends), None, tokenizer, options)


@dataclasses.dataclass(frozen=True)
class LinenApply:
    """The call of a module of linen."""

    module: Any

    def __call__(self, variables: PyTree, tokens: Int[Array, "B T"]) -> Array:
        """The logits."""
        return self.module.apply(variables, tokens)


@dataclasses.dataclass(frozen=True)
class NnxCall:
    """The call of a module of nnx. graphdef: its structure, without arrays."""

    graphdef: Any

    def __call__(self, state: PyTree, tokens: Int[Array, "B T"]) -> Array:
        """The logits."""
        from flax import nnx

        return nnx.merge(self.graphdef, state)(tokens)


def _split(module: Any, variables: PyTree) -> tuple[Function, PyTree]:
    """The function of a module, and its weights."""
    try:
        from flax import linen, nnx
    except ModuleNotFoundError:
        raise ValueError(f"jspec.from_module requires flax: {package.install('train')}") from None
    # Each library has its own split into structure and weights.
    if isinstance(module, linen.Module):
        if variables is None:
            raise ValueError("variables=None: a module of linen needs those that `module.init` returns")
        return LinenApply(module), variables
    if isinstance(module, nnx.Module):
        if variables is not None:
            raise ValueError("variables: a module of nnx holds its own; must be None")
        graphdef, state = nnx.split(module)
        return NnxCall(graphdef), state
    raise TypeError(
        f"module is of type {type(module).__name__}: must be a module of flax.nnx or flax.linen; "
        "jspec.from_function takes any function"
    )


def _check_tokenizer(tokenizer: object) -> None:
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer is of type {type(tokenizer).__name__}: must be a jspec.text.tokenizer.Tokenizer")


def _check_eos(eos: object, vocab_size: int) -> tuple[int, ...]:
    ids = check_sequence("eos", eos, items="ids that end a text")
    return tuple(check_int(f"eos[{i}]", token, least=0, most=vocab_size - 1) for i, token in enumerate(ids))


def _check_result(function: Function, params: PyTree, name: str, length: int) -> int:
    """The vocabulary of a function's logits; TypeError or ValueError if it does not return them."""
    tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
    # Trace it.
    try:
        out = jax.eval_shape(function, params, tokens)
    except Exception as error:
        raise ValueError(
            f"function: {name}(params, tokens) fails for tokens of shape (2, {length}) and dtype int32: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    # Its result must be one array of logits.
    shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(f"function: {name} returns {type(out).__name__}; must return one array of logits")
    if len(shape) != 3 or shape[:2] != (2, length) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"function: for tokens of shape (2, {length}), {name} returns {dtype}{list(shape)}; must return floating-"
            f"point logits of shape (2, {length}, vocab_size)"
        )
    return shape[2]
