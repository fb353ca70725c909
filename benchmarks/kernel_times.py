"""The time of attention, experts or products alone, beside the time to copy the bytes they read.

They run at the shapes of a preset, on random data, several times in one program: each time on another layer's rows, or
with other experts. The time is the mean of a call, including the gaps between kernels.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec import cli
from jspec.bench import machine, measurement, report
from jspec.bench.presets import PRESETS
from jspec.checkpoints.files import DTYPES, resolve_dtype
from jspec.cli.arguments import Parser, check_output, set_options
from jspec.core.options import check_options, option, typed
from jspec.core.xla_options import TRITON_GEMM_MAX_TOKENS, loop_options
from jspec.generation.options import DEFAULT_PAGE_SIZE
from jspec.loading import memory
from jspec.models import layers
from jspec.models.decoder import Decoder
from jspec.models.llama import require_llama
from jspec.models.moe import Routed
from pallas_kernels import (
    exact_attention,
    exact_matmul,
    gated_matmul,
    grouped_matmul,
    mla_attention,
    paged_attention,
    platform,
)
from pallas_kernels.dispatch import BACKENDS, Operation
from pallas_kernels.group_rows import group_rows

_INEXACT = "inexact"
"""The label of what an exact operation is timed beside."""
KERNELS = ("attention", "experts", "gated-products", "exact-attention", "exact-products")
CALLS = 8
"""Calls of a kernel in one program."""


@dataclasses.dataclass(frozen=True)
class Work:
    """An operation and its arguments.

    shared: arrays of all calls.
    calls: arrays of each call, by name.
    static: the other arguments of each call, by name.
    bytes: the fewest a call reads.
    peer: a label and a function of the same arguments to time beside it; None: the operation on XLA.
    many: it is a product of more tokens than XLA's own products are for, see `loop_options`.
    """

    name: str
    operation: Operation
    shared: Sequence[jax.Array | None]
    calls: Sequence[dict[str, jax.Array]]
    static: Sequence[dict[str, Any]]
    bytes: float
    peer: tuple[str, Callable] | None = None
    many: bool = False


_COUNT = {"least": 1, "most": 2**31 - 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the script.

    Raises:
      ValueError, TypeError: a value out of bounds.
    """

    kernel: str = option(help="those named exact are timed beside the others", choices=KERNELS, positional=True)
    preset: str = option(help="the model whose shapes are used", choices=tuple(PRESETS))
    batch: int = option(8, "sequences", bounds=_COUNT)
    nodes: tuple[int, ...] = option((1, 6, 32), "per sequence (default: 1 6 32)", bounds=_COUNT)
    context: int | None = option(None, "committed tokens (default: 8192)", bounds=_COUNT)
    page_size: int | None = option(None, "rows per page (default: 64)", bounds=_COUNT)
    dtype: str | None = option(None, "default: bfloat16, float32 on CPU", choices=tuple(DTYPES))
    repeats: int = option(7, "measurements of each time", least=1, most=10_000)
    tile: tuple[str, ...] = option(
        (),
        "configurations of a GPU kernel to try beside its default: the fields of its Config, in order",
        metavar="AxBx...",
    )
    json: Path | None = option(None, "write each time to FILE as a line of JSON", metavar="FILE")
    command: str | None = None

    def __post_init__(self):
        check_options(self)


def run(options: Options) -> int:
    """Measures and prints; returns the exit status.

    Raises:
      ValueError: the options do not fit together.
    """
    dtype, target = resolve_dtype(options.dtype), PRESETS[options.preset].target
    check(options, target)
    tiles = [_tile(text, _operation(options.kernel, target)) for text in options.tile]
    copy = machine.copy_bandwidth(options.repeats)
    here, name = machine.environment(), jnp.dtype(dtype).name
    setting = f"{options.preset}, batch {options.batch}, {name}"
    print(f"{setting}; {here.device}, jax {here.jax}; copy {copy.gb_per_second:.0f} GB/s")
    print(f"{'kernel':<28}{'nodes':>6}  {'tile':<20}{'us':>9}{'floor us':>10}{'of floor':>10}", flush=True)
    lines = [_copy_line(options, here, copy)]
    for nodes, work in _works(options, target, dtype):
        floor = work.bytes / copy.gb_per_second / 1e9
        for way, seconds in measure(work, tiles, options.repeats):
            text = f"{work.name:<28}{nodes:>6}  {way:<20}"
            if isinstance(seconds, str):
                text += seconds
            else:
                median = statistics.median(seconds)
                text += f"{median * 1e6:>9.1f}{floor * 1e6:>10.1f}{floor / median:>10.0%}"
            print(text, flush=True)
            lines.append(_line(options, here, work, nodes, way, seconds, 1e6 * floor, name))
            if options.json:
                measurement.write(options.json, lines)
    return 0


def _works(options: Options, target: Decoder, dtype: DTypeLike) -> Iterator[tuple[int, Work]]:
    """The operations of each number of nodes, with it. Their arrays are large, so each is made when it is needed."""
    context, page_size = options.context or 8192, options.page_size or DEFAULT_PAGE_SIZE
    for nodes in options.nodes:
        if options.kernel == "experts":
            for work in experts(target, options.batch * nodes, dtype):
                yield nodes, work
        elif options.kernel == "exact-products":
            for work in exact_products(target, options.batch * nodes, dtype):
                yield nodes, work
        elif options.kernel == "gated-products":
            yield nodes, gated_products(target, options.batch * nodes, dtype)
        else:
            work = attention(target, options.batch, nodes, context, page_size, dtype)
            yield nodes, _exactly(work) if options.kernel == "exact-attention" else work


def _copy_line(options: Options, here: machine.Environment, copy: machine.Bandwidth) -> measurement.Measurement:
    speeds, command = [copy.bytes / seconds / 1e9 for seconds in copy.seconds], options.command
    return report.measurement(
        here,
        options.kernel,
        options.preset,
        metric="copy bandwidth",
        unit="GB/s",
        values=speeds,
        subject="copy bandwidth",
        command=command,
    )


def _line(
    options: Options,
    here: machine.Environment,
    work: Work,
    nodes: int,
    way: str,
    seconds: list[float] | str,
    floor: float,
    dtype: str,
) -> measurement.Measurement:
    """A time as a line of data; floor in microseconds."""
    settings: dict[str, measurement.Scalar] = {"preset": options.preset, "nodes": nodes}
    context = None
    if options.kernel in ("attention", "exact-attention"):
        context, settings["page_size"] = options.context or 8192, options.page_size or DEFAULT_PAGE_SIZE
    if way in itertools.chain(*BACKENDS.values()):
        settings["backend"] = way
    elif way not in ("default", "XLA", _INEXACT):
        settings["tile"] = way
    return report.measurement(
        here,
        options.preset,
        work.name,
        way,
        f"b{options.batch}",
        f"n{nodes}",
        metric="time per call",
        unit="us",
        values=[] if isinstance(seconds, str) else [1e6 * each for each in seconds],
        note=seconds if isinstance(seconds, str) else None,
        floor=floor,
        command=options.command,
        subject=work.name,
        mode=way if way in ("XLA", _INEXACT) else "kernel",
        batch=options.batch,
        context=context,
        dtype=dtype,
        settings=settings,
    )


def check(options: Options, target: Decoder) -> None:
    """Raises a ValueError if the options do not fit together, or a file cannot be written."""
    if options.json:
        check_output("--json", options.json)
    if options.tile and platform.platform() != "gpu":
        raise ValueError(f"--tile {' '.join(options.tile)}: requires a GPU, but this device is a {_device_kind()}")
    if options.kernel in ("exact-attention", "exact-products", "gated-products"):
        # The shapes below are those of its layers.
        require_llama(target, options.kernel)
    if options.kernel in ("attention", "exact-attention"):
        return
    for name in ("context", "page_size"):
        if getattr(options, name) is not None:
            kernel = options.kernel.removeprefix("exact-")
            raise ValueError(f"{typed(options, name)}: {kernel} do not read the cache; omit it")
    if options.kernel == "experts" and _experts(target) is None:
        others = ", ".join(name for name, preset in PRESETS.items() if _experts(preset.target))
        raise ValueError(f"--preset {options.preset} has no experts; must be one of {others}")
    if options.kernel == "gated-products" and _gate_up(target) is None:
        raise ValueError(f"--preset {options.preset}: its last layer has experts; gated-products requires a dense one")


def measure(work: Work, tiles: Sequence[Any], repeats: int) -> Iterator[tuple[str, list[float] | str]]:
    """Times an operation with its default backend, with each tile of a GPU kernel, and its peer.

    If it has several kernels for this platform, each is timed by name as well.

    Yields:
      a label, and the seconds per call of each repetition, or why it cannot run.
    """
    operation = work.operation
    api = getattr(importlib.import_module(operation.package), operation.name)
    ways: list[tuple[str, Callable]] = [("default", api)]
    for tile in tiles:
        label = "x".join(map(str, dataclasses.astuple(tile)))
        modules = map(operation.module, _kernels(operation, "gpu"))
        module = next(each for each in modules if isinstance(tile, each.Config))
        ways.append((label, functools.partial(getattr(module, operation.name), config=tile)))
    kernels = _kernels(operation, platform.platform())
    if len(kernels) > 1:
        ways += [(kernel, functools.partial(api, backend=kernel)) for kernel in kernels]
    if work.peer is not None:
        ways.append(work.peer)
    elif kernels:
        ways.append(("XLA", functools.partial(api, backend="xla")))
    for label, way in ways:

        def program(shared, calls, way=way):
            return [way(*shared, **call, **static) for call, static in zip(calls, work.static, strict=True)]

        try:
            run = jax.jit(program, compiler_options=loop_options(many=work.many))
            seconds = machine.seconds_of(run, work.shared, work.calls, repeats=repeats)
            yield label, [each / len(work.calls) for each in seconds]
        except jax.errors.JaxRuntimeError as error:
            yield label, str(error).splitlines()[0]
        except ValueError as error:
            if label not in kernels:
                raise
            yield label, str(error)


def attention(target: Decoder, batch: int, nodes: int, context: int, page_size: int, dtype: DTypeLike) -> Work:
    """Attention of a chain of nodes over `context` committed tokens, in pages of random order, as in the last layer."""
    pages = -(-context // page_size)
    total = batch * (pages + 1)
    keys, queries = target.layer_keys(target.num_layers - 1), (batch, nodes, target.num_heads)
    if keys.latent is not None:
        rope = keys.head_dim - keys.latent
        own = _random(dtype, (*queries, keys.latent), (*queries, rope), (batch, nodes, keys.head_dim))
        (pool,) = _random(dtype, (CALLS, 1, total, page_size, keys.head_dim))
    else:
        row = keys.kv_heads, keys.head_dim
        own = _random(dtype, (*queries, keys.head_dim), *[(batch, nodes, *row)] * 2)
        (pool,) = _random(dtype, (CALLS, 2, total, page_size, *row))
    table = np.random.default_rng(0).permutation(total).reshape(batch, -1).astype(np.int32)
    prefix = jnp.asarray(table), jnp.full(batch, context, jnp.int32)
    static = [{"layer": layer, "scale": 0.1} for layer in range(CALLS)]
    row_bytes = pool.shape[1] * math.prod(pool.shape[4:]) * pool.dtype.itemsize
    operation, chain = _operation("attention", target), None
    return Work(
        operation.name, operation, (*own, pool, *prefix, chain), [{}] * CALLS, static, batch * context * row_bytes
    )


def _exactly(work: Work) -> Work:
    """Exact attention with the arguments of attention, timed beside it."""
    peer = (_INEXACT, paged_attention.paged_attention)
    return dataclasses.replace(work, name="exact_attention", operation=exact_attention.OPERATION, peer=peer)


def exact_products(target: Decoder, tokens: int, dtype: DTypeLike) -> Iterator[Work]:
    """The products of a layer of the target and of its LM head, one after the other."""
    shapes = target.param_shapes(dtype)
    layer = shapes.layers[-1]
    head = shapes.embed if shapes.lm_head is None else shapes.lm_head
    named = [("qkv", layer.qkv, {}), ("o", layer.o, {})]
    if layer.gate_up is not None:
        named += [("gate and up", layer.gate_up, {"activation": jax.nn.silu}), ("down", layer.down, {})]
    named.append(("LM head", head, {"transposed": shapes.lm_head is None}))
    for name, shape, static in named:
        inner = shape.shape[1 if static.get("transposed") else 0]
        work = _products(f"exact_matmul, {name}", exact_matmul.OPERATION, (tokens, inner), shape.shape, static, dtype)
        yield dataclasses.replace(work, peer=(_INEXACT, _product))


def gated_products(target: Decoder, tokens: int, dtype: DTypeLike) -> Work:
    """The first half of a layer's gated MLP."""
    matrix, static = _gate_up(target).shape, {"activation": jax.nn.silu}
    return _products("gated_matmul", gated_matmul.OPERATION, (tokens, matrix[0]), matrix, static, dtype)


def _gate_up(target: Decoder) -> Any:
    """The shape of the matrix of gate and up of the last layer; None: it has experts."""
    return target.param_shapes(jnp.float32).layers[-1].gate_up


def _products(
    name: str,
    operation: Operation,
    rows: tuple[int, int],
    matrix: tuple[int, ...],
    static: dict[str, Any],
    dtype: DTypeLike,
) -> Work:
    """Calls with other rows each, as XLA computes equal calls once.

    Two matrices take turns, to keep each out of the cache of the device.
    """
    *each, one, other = _random(dtype, *[rows] * CALLS, *[matrix] * 2)
    calls = [{"x": x, "weight": (one, other)[i % 2]} for i, x in enumerate(each)]
    read = math.prod(matrix) * one.dtype.itemsize
    return Work(name, operation, (), calls, [static] * CALLS, read, many=rows[0] > TRITON_GEMM_MAX_TOKENS)


def _product(
    x: jax.Array,
    weight: jax.Array,
    *,
    transposed: bool = False,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """The product as a model that is not exact computes it."""
    if activation is not None:
        return gated_matmul.gated_matmul(x, weight, activation=activation)
    return layers.linear(x, weight.T if transposed else weight)


def experts(target: Decoder, tokens: int, dtype: DTypeLike) -> Iterator[Work]:
    """Both products of the experts, chosen at random by the tokens, one after the other."""
    routed, rng = _experts(target), np.random.default_rng(0)
    if routed is None:
        raise ValueError("the target has no experts")
    count, chosen, always = routed.router.count, routed.router.chosen, routed.shared
    ids = [np.stack([rng.permutation(count)[:chosen] for _ in range(tokens)]).astype(np.int32) for _ in range(CALLS)]
    order = jax.jit(functools.partial(group_rows, count=count, always=always))
    orders = [order(each) for each in ids]
    read = float(np.mean([len(np.unique(each)) for each in ids])) + always
    size, width = target.hidden_size, routed.width
    for name, shape, rows in (
        ("grouped_matmul, gated", (size, 2 * width), tokens),
        ("grouped_matmul", (width, size), tokens * (chosen + always)),
    ):
        shared = _random(dtype, (rows, shape[0]), (count + always, *shape))
        calls = [{"sizes": sizes} for _, _, sizes in orders]
        static: list[dict[str, Any]] = [{}] * CALLS
        if rows == tokens:
            calls = [call | {"rows": places} for call, (places, _, _) in zip(calls, orders, strict=True)]
            static = [{"activation": jax.nn.silu}] * CALLS
        read_bytes = read * math.prod(shape) * shared[1].dtype.itemsize
        yield Work(name, grouped_matmul.OPERATION, shared, calls, static, read_bytes)


def _random(dtype: DTypeLike, *shapes: tuple[int, ...]) -> list[jax.Array]:
    asked = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    memory.check_weights("this measurement", asked, "random arrays")
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _experts(target: Decoder) -> Routed | None:
    """The experts of the last layer."""
    return target.layer_experts(target.num_layers - 1)


def _operation(kernel: str, target: Decoder) -> Operation:
    fixed = {
        "experts": grouped_matmul.OPERATION,
        "exact-attention": exact_attention.OPERATION,
        "exact-products": exact_matmul.OPERATION,
        "gated-products": gated_matmul.OPERATION,
    }
    if kernel in fixed:
        return fixed[kernel]
    latent = target.layer_keys(target.num_layers - 1).latent
    return paged_attention.OPERATION if latent is None else mla_attention.OPERATION


def _kernels(operation: Operation, name: str) -> list[str]:
    """The operation's kernels for a platform, best first."""
    return [kernel for kernel in BACKENDS.get(name, ()) if kernel in operation.kernels]


def _tile(text: str, operation: Operation) -> Any:
    """The Config of one of the operation's GPU kernels, such as 16x64x4x4x3: that with as many fields."""
    values, wanted = text.split("x"), []
    for kernel in _kernels(operation, "gpu"):
        fields = dataclasses.fields(operation.module(kernel).Config)
        if len(values) == len(fields) and all(value.isdigit() for value in values):
            kinds = [bool if field.type is bool else int for field in fields]
            return operation.module(kernel).Config(
                *(kind(int(value)) for kind, value in zip(kinds, values, strict=True))
            )
        wanted.append(", ".join(field.name for field in fields))
    raise ValueError(f"--tile {text}: must be integers joined by x: {'; or '.join(wanted)}")


def _device_kind() -> str:
    return jax.devices()[0].device_kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    parser = Parser(prog="python benchmarks/kernel_times.py", description=__doc__)
    set_options(parser, Options, run, {})
    return cli.main(arguments, parser)


if __name__ == "__main__":
    sys.exit(main())
