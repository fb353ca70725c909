"""Random schedules through the engine's loop, compared with a batch that runs alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toy
from invariants import check_scheduler

from jspec.cache import RecurrentCache
from jspec.core import accept, slots, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.sampling import Sampling, per_row
from jspec.core.sharding import Placement
from jspec.core.types import Drafter, Params, Prompts
from jspec.engine.group import Group
from jspec.engine.pages import Pages
from jspec.engine.schedule import Scheduler
from jspec.engine.versions import Versions
from jspec.loading.model import Model
from jspec.runner import slot_state
from jspec.runner.device import Device
from jspec.runner.request import Phase, Request
from jspec.runner.slot_state import Sizes

CONTEXT, PAGE, SLOTS, CHUNK, POOL = 48, 4, 4, 6, 40
PIECES = [(4, CHUNK // 2), (2, CHUNK // 2)]
EOS = 7


@dataclasses.dataclass(frozen=True)
class Setup:
    """What generates. The drafter is bound. lossless: an acceptance rule other than greedy and coupled.

    placement: of the weights over devices.
    """

    target: Any
    drafter: Drafter
    weights: Callable[[], Params]
    sampling: Sampling | None = None
    lossless: Any = None
    placement: Placement | None = None

    @property
    def method(self) -> Method:
        return Method(self.target, self.drafter, self.rule, self.placement)

    @property
    def rule(self) -> Any:
        return self.lossless or (accept.greedy if self.sampling is None else accept.coupled)


def requests(count: int, seed: int, setup: Setup) -> list[Request]:
    """Prompts of which most share beginnings; some of those end at the edge of a page."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, 61, 14).tolist() for _ in range(2)]
    made = []
    for index in range(count):
        beginning = shared[rng.integers(2)][: rng.integers(6, 15)] if rng.random() < 0.75 else []
        prompt = [*beginning, *rng.integers(0, 61, rng.integers(1, 9)).tolist()]
        request = Request(prompt, int(rng.integers(1, 22)), -int(rng.integers(2)))
        request.sampling, request.seed = setup.sampling, (index, 0)
        made.append(request)
    return made


@dataclasses.dataclass
class Alone:
    """What each request gives in a batch of all of them.

    rows: for each request the rows [L, planes, position, ...] of each of the drafter's paged caches.
    """

    tokens: list[list[int]]
    rounds: list[int]
    accept_counts: list[list[int]]
    finish_codes: list[int]
    rows: list[list[np.ndarray]]


def alone(setup: Setup, given: list[Request], eos: tuple[int, ...]) -> Alone:
    """Generates all requests at once, without the engine."""
    batch = len(given)
    lengths = np.array([len(request.prompt) for request in given], np.int32)
    ids = np.zeros((batch, 32), np.int32)
    for row, request in zip(ids, given, strict=True):
        row[: len(request.prompt)] = request.prompt
    limits = lengths + np.array([request.max_new_tokens for request in given], np.int32)
    keys = toy.row_keys(np.array([request.seed[0] for request in given], np.uint32))
    vocab_size = setup.target.vocab_size
    stop = stopping.init(stopping.build_table(vocab_size, eos), batch)
    sampling = per_row([request.sampling for request in given], batch, vocab_size)
    params = setup.weights()
    prompts = Prompts(ids, lengths, limits, keys, stop, sampling)
    s = jitted_prefill(params, prompts, method=setup.method, capacity=CONTEXT, page_size=PAGE)
    s = jax.device_get(decode(params, s, jnp.int32(1 << 30), method=setup.method))
    caches = paged_caches(s.draft)
    return Alone(
        [s.tokens[i, lengths[i] : s.length[i]].tolist() for i in range(batch)],
        s.stats.rounds.tolist(),
        s.stats.accept_counts.tolist(),
        s.finish_code.tolist(),
        [[rows_of(cache, cache.page_table[i]) for cache in caches] for i in range(batch)],
    )


def paged_caches(state: Any) -> list[Any]:
    """The caches in a drafter's state, or in groups of layers of them, that have pages of the common pool."""
    caches = [part for cache in slot_state.all_caches(state) for part in getattr(cache, "groups", (cache,))]
    return [cache for cache in caches if hasattr(cache, "page_table") and not hasattr(cache, "window")]


def rows_of(cache: Any, pages: Any) -> np.ndarray:
    """The rows in these pages, by position: [L, planes, position, ...]."""
    pool = np.asarray(cache.pool)[:, :, np.asarray(pages)]
    return pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])


@jax.jit
def _poison(s: Any, free: Any, empty: Any) -> Any:
    """NaN in all pages of the common pool that nobody has, and in the states and rings of empty slots."""

    def pool(x, free):
        shape = (1, 1, -1, *[1] * (x.ndim - 3))
        return jnp.where(free.reshape(shape), jnp.array(jnp.nan, x.dtype), x)

    def spoil(cache):
        if isinstance(cache, RecurrentCache):
            states = tuple(jnp.where(empty.reshape(-1, 1, 1, 1), jnp.nan, x) for x in cache.layer_states)
            windows = jnp.where(empty.reshape(1, -1, 1, 1), jnp.nan, cache.windows)
            return RecurrentCache(states, windows)
        if hasattr(cache, "groups"):
            return dataclasses.replace(cache, groups=tuple(map(spoil, cache.groups)))
        if hasattr(cache, "latent"):
            return dataclasses.replace(cache, latent=spoil(cache.latent), index=spoil(cache.index))
        own = jnp.repeat(empty, cache.pool.shape[2] // empty.size) if hasattr(cache, "window") else free
        return dataclasses.replace(cache, pool=pool(cache.pool, own))

    return slots.map_parts(spoil, lambda x: x, s)


@jax.jit
def _poison_snapshots(snapshots: Any, free: Any) -> Any:
    """NaN in these places."""
    return jax.tree.map(lambda x: jnp.where(free.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x), snapshots)


def _placed(made: Any, like: Any, setup: Setup) -> Any:
    """Arrays on the devices of others, split as these are."""
    return made if setup.placement is None else jax.device_put(made, jax.tree.map(lambda x: x.sharding, like))


@dataclasses.dataclass
class Storm:
    """A schedule: how requests arrive and leave, and how the engine is set up.

    pages: those that the scheduler gives away. The pools have `POOL` in all storms, which share programs so; the others
      count as free. snapshots: for a target that keeps more than pages. max_in_flight: 1: every report is collected
      before the next plan, so that the drafter's rows can be compared.
    """

    count: int = 12
    pages: int = POOL
    snapshots: int = 3
    max_in_flight: int = 2
    cancels: float = 0.0
    eos: tuple[int, ...] = ()
    share: bool = True
    seed: int = 0
    ahead: int | None = None
    poison: bool = True


def start(setup: Setup, storm: Storm, given: list[Request]) -> Group:
    """A group for these requests, driven by the thread of the test."""
    model: Any = Model("toy", setup.target, setup.weights(), None, storm.eos, placement=setup.placement)
    keeps = jax.eval_shape(lambda p: setup.target.init_cache(p, SLOTS, CONTEXT, PAGE), model.params.target)
    snapshots = storm.snapshots if storm.share and jax.tree.leaves(slot_state.slot_states(keeps)) else 0
    sizes = Sizes(SLOTS, CONTEXT, PAGE, POOL, snapshots, max_rounds=4)
    samples = slot_state.always_samples(model.params, method=setup.method, sizes=sizes)
    device = Device(model, setup.method, dataclasses.replace(sizes, samples=samples))
    for request in given:
        device.hold(request)
    ahead = slot_state.lookahead(device.runner.state, setup.drafter) if storm.share else None
    scheduler = Scheduler(
        slots=SLOTS,
        pages=Pages(storm.pages, PAGE, ahead if storm.ahead is None else storm.ahead, snapshots),
        context=CONTEXT,
        depth=setup.drafter.depth,
        extra_rows=slot_state.extra_rows(device.runner.state, setup.drafter),
        read_shapes=PIECES if device.packs else [(2, CHUNK)],
        prefill_tokens=2 * CHUNK,
        max_in_flight=storm.max_in_flight,
    )
    scheduler.packs = device.packs
    return Group(model, device, scheduler, burst_seconds=1.0, versions=Versions(), fail=lambda error: None)


def spoil(group: Group, setup: Setup, storm: Storm) -> None:
    """NaN in everything on the device that belongs to nobody."""
    scheduler, runner = group.scheduler, group.device.runner
    free, empty = np.zeros(POOL, bool), np.zeros(SLOTS, bool)
    free[[0, *scheduler.pages._free, *range(storm.pages, POOL)]] = True
    empty[scheduler._free_slots] = True
    runner.state = _placed(_poison(runner.state, free, empty), runner.state, setup)
    if scheduler.pages.snapshots is not None:
        unused = np.zeros(scheduler.pages.snapshots.count, bool)
        unused[scheduler.pages.snapshots._free] = True
        runner.snapshots = _placed(_poison_snapshots(runner.snapshots, unused), runner.snapshots, setup)


def run(setup: Setup, storm: Storm, reference: Setup | None = None) -> dict[str, int]:
    """Runs a storm; every request must get what it gets alone, from the reference if there is one.

    Returns counts of what happened: preemptions, shared tokens, restored snapshots, compared rows, turns.
    """
    given = requests(storm.count, storm.seed, setup)
    wanted = alone(reference or setup, given, storm.eos)
    group = start(setup, storm, given)
    scheduler, dispatch = group.scheduler, group._dispatch
    counts = {"preemptions": 0, "shared": 0, "restored": 0, "rows": 0, "turns": 0}

    def count(plan):
        counts["shared"] += sum(request.cached for request in plan.admissions)
        counts["restored"] += sum(request.restore is not None for request in plan.admissions)
        dispatch(plan)

    group._dispatch = count
    rng = np.random.default_rng(storm.seed)
    todo, handles = list(given), {}
    while todo or not scheduler.idle:
        counts["turns"] += 1
        assert counts["turns"] < 2000, "stuck"
        while todo and rng.random() < 0.5:
            request = todo.pop(0)
            (handles[request],) = group.submit([request])
        if handles and rng.random() < storm.cancels:
            handles[given[rng.integers(len(handles))]].cancel()
        group._take_calls(wait=False)
        if storm.poison:
            spoil(group, setup, storm)
        group.turn(int(rng.integers(1, 5)))
        check_scheduler(scheduler)
        if storm.max_in_flight == 1:
            counts["rows"] += compare_rows(group.device, given, wanted)
    for index, request in enumerate(given):
        counts["preemptions"] += request.preemptions
        if request.phase is Phase.CANCELLED:
            assert request.tokens == wanted.tokens[index][: len(request.tokens)], f"request {index}"
            continue
        assert request.tokens == wanted.tokens[index], f"request {index}, preempted {request.preemptions} times"
        assert request.finish_code == wanted.finish_codes[index]
        assert (request.rounds, request.accept_counts) == (wanted.rounds[index], wanted.accept_counts[index]), index
        assert len(handles[request].generation().origin) == len(request.tokens)
    assert not any(scheduler.pages._users), "pages are left"
    return counts


def _is_state(x: Any) -> bool:
    return isinstance(x, RecurrentCache)


def compare_rows(device: Device, given: list[Request], wanted: Alone) -> int:
    """Compares the rows of the drafter's paged caches of all running requests. Returns how many."""
    caches = paged_caches(device.runner.state.draft)
    # A recurrent state is summed in other blocks where a prompt is read in other chunks.
    recurrent = any(map(_is_state, jax.tree.leaves(device.runner.state.cache, is_leaf=_is_state)))
    compared, atol = 0, 2e-4 if recurrent else 3e-5
    for index, request in enumerate(given):
        if request.phase is not Phase.RUNNING or not caches:
            continue
        # The last rows of MTP heads are those of drafts until the tokens are known.
        count = max(0, len(request.all_tokens) - 1 - 3)
        for cache, rows in zip(caches, wanted.rows[index], strict=True):
            pages = [*request.pages, 0]
            got = rows_of(cache, pages)[:, :, :count]
            if got.shape != rows[:, :, :count].shape:  # several devices have copies of a head
                rows = np.repeat(rows, got.shape[3] // rows.shape[3], axis=3)
            np.testing.assert_allclose(got, rows[:, :, :count], atol=atol, err_msg=f"request {index}")
            compared += count
    return compared
