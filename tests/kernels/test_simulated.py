"""Every TPU kernel in a simulation of its DMAs, semaphores and memories, against the operation in XLA.

Other tests compare a kernel with an oracle, in an interpreter that runs a copy where it starts. Here it runs where it
starts or where the kernel waits for it, a race is an error, and memory that was never written is NaN.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest
from backends import FAST_COMPILE, HERE
from cases import (
    ATTENTION_CASES,
    CASES,
    SINK_CASES,
    Case,
    attention_inputs,
    attention_options,
    compaction_inputs,
    latent_inputs,
    latent_options,
    normal,
    rng_of,
    tree_mask,
)
from simulate import DMA_MODES, drop_wait, record_copies, simulate

from pallas_kernels import delta_rule, kv_compact, mla_attention, paged_attention, topk
from pallas_kernels.delta_rule import mosaic_tpu as delta
from pallas_kernels.dispatch import Operation
from pallas_kernels.kv_compact import mosaic_tpu as compaction
from pallas_kernels.mla_attention import mosaic_tpu as latent_attention
from pallas_kernels.paged_attention import mosaic_tpu as attention
from pallas_kernels.topk import mosaic_tpu as best

pytestmark = pytest.mark.skipif(HERE != "cpu", reason="requires a CPU, which simulates copies and semaphores of a TPU")
# In bfloat16 the weights of the softmax and the result are rounded to 8 bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Simulation:
    """How a kernel is run for a case."""

    operation: Operation
    cases: tuple[Case, ...]
    arguments: Callable[[Case], tuple[tuple, dict]]
    """The arguments of the kernel, and its options."""
    config: object
    """Small steps, so that several copies are in flight."""
    copies: int
    """Lines of the kernel that copy."""

    def run(self, case: Case, dma_mode: str) -> tuple:
        """What the simulation found, and the result of XLA."""
        args, options = self.arguments(case)
        kernel = getattr(self.operation.module("mosaic_tpu"), self.operation.name)
        found = simulate(kernel, dma_mode, *args, config=self.config, **options)
        program = jax.jit(lambda *args: self.operation.xla(*args, **options), compiler_options=FAST_COMPILE)
        return found, program(*args)


def placed(options: dict) -> dict:
    """With arrays on the device."""
    return {name: jax.device_put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def attention_arguments(case: Case) -> tuple[tuple, dict]:
    return attention_inputs(case), placed(attention_options(case))


def latent_arguments(case: Case) -> tuple[tuple, dict]:
    return latent_inputs(case), placed(latent_options(case))


def topk_arguments(case: Case) -> tuple[tuple, dict]:
    """Rows with ties, and one without a possible logit."""
    logits = np.round(normal(rng_of(case), (case.batch * case.nodes, 300), "float32"), 1).astype(case.dtype)
    logits[0] = -np.inf
    return (logits,), {"k": 4}


def delta_arguments(case: Case) -> tuple[tuple, dict]:
    """Two heads of values for each head of keys; sequences without a prefix have no state."""
    rng, keys, values = rng_of(case), case.kv_heads, 2 * case.kv_heads
    q, k = normal(rng, (2, case.batch, case.nodes, keys, case.head_dim), "float32") * case.head_dim**-0.5
    v = normal(rng, (case.batch, case.nodes, values, 24), "float32")
    g, beta = rng.uniform(size=(2, case.batch, case.nodes, values)).astype("float32")
    state, live = normal(rng, (case.batch, values, case.head_dim, 24), "float32"), None
    if case.prefix is not None:
        live = np.array(case.prefix) > 0
        state[~live] = np.nan
    mask = tree_mask(rng, case) if case.tree else None
    return (state, q, k, v, -g, beta, mask, None, live), {}


def compaction_arguments(case: Case) -> tuple[tuple, dict]:
    pool, rows, *rest = compaction_inputs(case, with_path=case.tree)
    return (pool, tuple(rows.reshape(-1, *rows.shape[2:])), *rest), {}


def latent_compaction_arguments(case: Case) -> tuple[tuple, dict]:
    """The same for a pool of one part without heads."""
    (pool, rows, *rest), options = compaction_arguments(case)
    return (pool[:, :1, :, :, 0], tuple(each[:, :, 0] for each in rows[::2]), *rest), options


SIMULATIONS = {
    "attention": Simulation(
        paged_attention.OPERATION,
        (*ATTENTION_CASES, *SINK_CASES),
        attention_arguments,
        attention.Config(16, step_pages=1, step_rows=16),
        copies=2,
    ),
    "latent_attention": Simulation(
        mla_attention.OPERATION, CASES, latent_arguments, latent_attention.Config(16, 1, 16), copies=2
    ),
    "selected_attention": Simulation(
        mla_attention.OPERATION,
        tuple(dataclasses.replace(case, selected=True) for case in CASES if case.prefix is not None and case.tree),
        latent_arguments,
        latent_attention.Config(16, 1, 16),
        copies=3,
    ),
    "topk": Simulation(
        topk.OPERATION,
        (Case("rows_12"), Case("one_row", prefix=(0,), nodes=1), Case("bfloat16", dtype="bfloat16", nodes=6)),
        topk_arguments,
        best.Config(128),
        copies=0,
    ),
    "delta_rule": Simulation(
        delta_rule.OPERATION,
        tuple(case for case in CASES if case.nodes <= delta.MAX_NODES and not case.earlier),
        delta_arguments,
        delta.Config(24),
        copies=0,
    ),
    "compaction": Simulation(kv_compact.OPERATION, CASES[::2], compaction_arguments, compaction.Config(2), copies=1),
    "latent_compaction": Simulation(
        kv_compact.OPERATION, CASES[::2], latent_compaction_arguments, compaction.Config(2), copies=2
    ),
}
BOTH = ("page_of_3", "nodes_17_tree", "windows_tree")
"""Cases that run in both modes; the others alternate."""
POINTS = [
    pytest.param(simulation, case, mode, id=f"{name}-{case.name}-{mode}")
    for name, simulation in SIMULATIONS.items()
    for place, case in enumerate(simulation.cases)
    for mode in (DMA_MODES if case.name in BOTH else DMA_MODES[place % 2 :][:1])
]


@pytest.mark.slow(unless="latent_compaction-nodes_17_tree-on_wait")
@pytest.mark.parametrize(("simulation", "case", "mode"), POINTS)
def test_equals_xla_without_a_race(simulation, case, mode):
    """All rows of a pool that are not committed are NaN."""
    found, expected = simulation.run(case, mode)
    assert not found.races
    tolerance = TOLERANCE[case.dtype]
    for ours, theirs in zip(jax.tree.leaves(found.out), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


FAULTY = Case("faulty", nodes=9, page_size=8, pages=4, prefix=(17, 9))


def faulty(name: str) -> Case:
    return dataclasses.replace(FAULTY, selected=name == "selected_attention")


FAULTS = [(name, number) for name, simulation in SIMULATIONS.items() for number in range(simulation.copies)]


@pytest.mark.slow(unless="latent_compaction-1-eager")
@pytest.mark.parametrize("mode", DMA_MODES)
@pytest.mark.parametrize(("name", "number"), FAULTS, ids=lambda x: str(x))
def test_a_wait_that_is_dropped_is_found(name, number, mode, monkeypatch):
    """Copies that run where they start then race; those that run where the kernel waits for them never run."""
    drop_wait(monkeypatch, number)
    found, expected = SIMULATIONS[name].run(faulty(name), mode)
    if mode == "eager":
        assert found.races
    else:
        pairs = zip(jax.tree.leaves(found.out), jax.tree.leaves(expected), strict=True)
        assert not all(np.allclose(ours, theirs, 1e-3, 1e-3, equal_nan=True) for ours, theirs in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATIONS)
def test_every_line_that_copies_has_a_planted_fault(name, monkeypatch):
    lines = drop_wait(monkeypatch, -1)
    found, _ = SIMULATIONS[name].run(faulty(name), "eager")
    assert not found.races
    assert len(lines) == SIMULATIONS[name].copies


@pytest.mark.slow
@pytest.mark.parametrize("nodes", (3, 17))
@pytest.mark.parametrize("name", ("latent_attention", "selected_attention"))
def test_latent_attention_copies_committed_pages_only(name, nodes, monkeypatch):
    """Each page with a committed row once for a tile of 16 query rows, and nothing else of the pool."""
    case = Case("bytes", prefix=(17, 0, 8, 32), page_size=8, pages=4, nodes=nodes, layers=3)
    case = dataclasses.replace(case, selected=name == "selected_attention")
    args, options = SIMULATIONS[name].arguments(case)
    pool, table = args[3], args[4]
    copied = record_copies(monkeypatch, pool.shape)
    kernel = latent_attention.mla_attention
    simulate(kernel, "eager", *args, config=latent_attention.Config(16, 2, 16), **options)
    tiles = -(-nodes * case.heads // 16)
    committed = [table[b, t] for b, length in enumerate(case.prefix) for t in range(-(-length // case.page_size))]
    assert sorted(copied) == sorted((options["layer"], page, pool[0, 0, 0].nbytes) for page in committed * tiles)


@pytest.mark.slow
@pytest.mark.parametrize("step_pages", (1, 2))
def test_windows_copy_the_first_pages_and_their_own(step_pages, monkeypatch):
    """Each page once, in steps; of the pages between them none."""
    case = Case("windows_bytes", prefix=(61, 7, 30), page_size=4, pages=16, nodes=2, keep_first=5)
    q, k, v, pool, table, prefix, mask = attention_inputs(case)
    starts = np.array([[50, 52], [0, 1], [30, 9]], np.int32)
    copied = record_copies(monkeypatch, pool.shape, place=2)
    options = {"layer": 1, "scale": 0.3, "prefix_start": jax.device_put(starts), "keep_first": case.keep_first}
    config = attention.Config(16, step_pages=step_pages, step_rows=16)
    simulate(attention.paged_attention, "eager", q, k, v, pool, table, prefix, mask, config=config, **options)
    read = {0: [0, 1, 12, 13, 14, 15], 1: [0, 1], 2: [0, 1, 2, 3, 4, 5, 6, 7]}
    assert sorted(page for _, page, _ in copied) == sorted(
        int(table[b, at]) for b, pages in read.items() for at in pages
    )
