"""`jspec bench-kernels`: what attention and experts cost alone, beside the bytes that they read.

They run at the shapes of a preset, on random data, several times in one program: each time over another layer's rows,
or with other experts. The figure is the mean of a call, what lies between two kernels included.
"""

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.bench import machine
from jspec.bench.cli import positive
from jspec.bench.presets import PRESETS
from jspec.checkpoints.files import DTYPES, resolve_dtype
from jspec.engine.options import DEFAULT_PAGE_SIZE
from jspec.models import Deepseek, Llama, Qwen3Next
from pallas_kernels import grouped_matmul, mla_attention, paged_attention, platform
from pallas_kernels.group_rows import group_rows

CALLS = 8
"""Of a kernel in one program."""
_ATTENTION = (Deepseek, Llama, Qwen3Next)


@dataclasses.dataclass(frozen=True)
class Work:
    """A kernel and what it is given.

    package: `pallas_kernels`' own of it.
    shared: arrays of all calls. calls: those of each call, by name.
    static: what else each call is given, by name.
    bytes: that a call reads at least.
    """

    name: str
    package: Any
    shared: Sequence[Any]
    calls: Sequence[dict[str, jax.Array]]
    static: Sequence[dict[str, Any]]
    bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and sets `run`."""
    presets = tuple(name for name, preset in PRESETS.items() if isinstance(preset.target, _ATTENTION))
    parser.add_argument("kernel", choices=("attention", "experts"))
    parser.add_argument("--preset", choices=presets, required=True, help="the model whose shapes they are")
    parser.add_argument("--batch", type=positive, default=8, metavar="ROWS", help="sequences; default: 8")
    parser.add_argument("--nodes", type=positive, nargs="+", default=(1, 6, 32), metavar="N", help="default: 1 6 32")
    parser.add_argument("--context", type=positive, metavar="N", help="committed tokens; default: 8192")
    parser.add_argument("--page-size", type=positive, metavar="ROWS", help="default: 64")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bfloat16, float32 on CPU")
    parser.add_argument("--repeats", type=positive, default=7, metavar="N", help="of each figure; default: 7")
    parser.add_argument(
        "--tile",
        nargs="+",
        default=(),
        metavar="AxBx...",
        help="tiles of a GPU's kernel to try beside its own: the numbers of its Config, in order",
    )
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit status.

    Raises:
      ValueError: options that do not fit together.
    """
    target, dtype = PRESETS[options.preset].target, resolve_dtype(options.dtype)
    check(options, target)
    tiles = [_tile(text, _package(options.kernel, target)) for text in options.tile]
    context, page_size = options.context or 8192, options.page_size or DEFAULT_PAGE_SIZE
    copy = machine.copy_bandwidth(options.repeats).gb_per_second
    given = f"{options.preset}, batch {options.batch}, {jnp.dtype(dtype).name}"
    print(f"{given}; {_here()}, jax {jax.__version__}; copy {copy:.0f} GB/s")
    print(f"{'kernel':<28}{'nodes':>6}  {'tile':<20}{'us':>9}{'floor us':>10}{'of floor':>10}", flush=True)
    for nodes in options.nodes:
        if options.kernel == "experts":
            works = experts(target, options.batch * nodes, dtype)
        else:
            works = iter([attention(target, options.batch, nodes, context, page_size, dtype)])
        for work in works:
            for tile, seconds in measure(work, tiles, options.repeats):
                floor = work.bytes / copy / 1e9
                line = f"{work.name:<28}{nodes:>6}  {tile:<20}"
                if isinstance(seconds, str):
                    line += seconds
                else:
                    line += f"{seconds * 1e6:>9.1f}{floor * 1e6:>10.1f}{floor / seconds:>10.0%}"
                print(line, flush=True)
    return 0


def check(options: argparse.Namespace, target: Any) -> None:
    """Raises where options do not fit together."""
    if options.tile and platform.platform() != "gpu":
        raise ValueError(f"--tile {' '.join(options.tile)}: only kernels of GPUs have tiles, this is a {_here()}")
    if options.kernel == "attention":
        return
    for name in ("context", "page_size"):
        value = getattr(options, name)
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value}: experts read no cache, only attention does")
    if getattr(target, "experts", None) is None:
        others = ", ".join(name for name, preset in PRESETS.items() if getattr(preset.target, "experts", None))
        raise ValueError(f"--preset {options.preset} has no experts; {others} have")


def measure(work: Work, tiles: Sequence[Any], repeats: int) -> Iterator[tuple[str, float | str]]:
    """This platform's own way to run a kernel, its tiles and XLA's way: the median seconds of a call of each, or why it
    does not run."""
    name = work.package.__name__.split(".")[-1]
    api = getattr(work.package, name)
    ways: list[tuple[str, Callable]] = [("default", api)]
    for tile in tiles:
        label = "x".join(map(str, dataclasses.astuple(tile)))
        ways.append((label, functools.partial(getattr(work.package.gpu, name), config=tile)))
    if platform.KERNELS.get(platform.platform()) in work.package.BACKENDS:
        ways.append(("XLA", functools.partial(api, backend="xla")))
    for label, way in ways:

        def program(shared, calls, way=way):
            return [way(*shared, **call, **static) for call, static in zip(calls, work.static, strict=True)]

        try:
            seconds = machine.seconds_of(jax.jit(program), work.shared, work.calls, repeats=repeats)
            yield label, statistics.median(seconds) / len(work.calls)
        except jax.errors.JaxRuntimeError as error:
            yield label, str(error).splitlines()[0]


def attention(target: Any, batch: int, nodes: int, context: int, page_size: int, dtype: Any) -> Work:
    """Attention of a chain of nodes over `context` committed tokens, whose pages lie in no order."""
    pages = -(-context // page_size)
    total = batch * (pages + 1)
    table = np.random.default_rng(0).permutation(total).reshape(batch, -1).astype(np.int32)
    prefix = jnp.asarray(table), jnp.full(batch, context, jnp.int32)
    package = _package("attention", target)
    if package is mla_attention:
        latent = target.latent
        heads, width = (batch, nodes, target.num_heads), latent.width
        own = _random(dtype, (*heads, latent.size), (*heads, latent.rope), (batch, nodes, width))
        (pool,) = _random(dtype, (CALLS, 1, total, page_size, width))
    else:
        keys = target.num_kv_heads, target.head_dim
        own = _random(dtype, (batch, nodes, target.num_heads, target.head_dim), *[(batch, nodes, *keys)] * 2)
        (pool,) = _random(dtype, (CALLS, 2, total, page_size, *keys))
    static = [{"layer": layer, "scale": 0.1} for layer in range(CALLS)]
    row_bytes = pool.shape[1] * math.prod(pool.shape[4:]) * pool.dtype.itemsize
    name = package.__name__.split(".")[-1]
    chain = None
    return Work(name, package, (*own, pool, *prefix, chain), [{}] * CALLS, static, batch * context * row_bytes)


def experts(target: Any, tokens: int, dtype: Any) -> Iterator[Work]:
    """Both products of the experts that tokens choose at random, one after the other."""
    routed, rng = target.experts, np.random.default_rng(0)
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
        yield Work(name, grouped_matmul, shared, calls, static, read * math.prod(shape) * shared[1].dtype.itemsize)


def _random(dtype: Any, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _package(kernel: str, target: Any) -> Any:
    if kernel == "experts":
        return grouped_matmul
    return mla_attention if isinstance(target, Deepseek) else paged_attention


def _tile(text: str, package: Any) -> Any:
    """The Config of a package's kernel for GPUs."""
    names, numbers = [field.name for field in dataclasses.fields(package.gpu.Config)], text.split("x")
    if len(numbers) != len(names) or not all(number.isdigit() for number in numbers):
        raise ValueError(f"--tile {text}: {len(names)} whole numbers with x between them: {', '.join(names)}")
    return package.gpu.Config(*map(int, numbers))


def _here() -> str:
    return jax.devices()[0].device_kind
