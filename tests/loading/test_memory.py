"""Caches are sized by the free memory; a generation that does not fit is an error that states how much fits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import toy

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.source import Source
from jspec.checkpoints.tensors import Tensors
from jspec.core import accept, stopping
from jspec.core.loop import decode
from jspec.core.method import Method
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params, Prompts
from jspec.drafters import Plain, Standalone
from jspec.loading import host_memory, memory
from jspec.loading.hub import locate
from jspec.models import Llama
from pallas_kernels import platform

TEXT_AS_SHIPPED = True

STANDALONE = Standalone(depth=3).bind(toy.TARGET, toy.TARGET)
# Keys and values of 2 layers with 2 heads of 16 features, in float32. The draft has the shape of the target.
PER_TOKEN = 2 * 2 * 2 * 16 * 4


def both():
    """The weights of the target, also as those of the draft."""
    return Params(toy.params().target, toy.params().target)


def model():
    return jspec.Model("toy", toy.TARGET, both(), None, (), toy.TARGET)


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free and total memory that the device reports."""

    def set_bytes(count, limit=1_000_000):
        monkeypatch.setattr(memory, "free_bytes", lambda device: (count, limit))

    return set_bytes


@pytest.mark.slow(unless=("64-64", "16-48"))
@pytest.mark.parametrize("page_size, rows", [(1, 40), (16, 48), (64, 64)])
def test_need_equals_the_size_of_the_arrays_of_prefill(page_size, rows):
    asked = memory.need(both(), toy.TARGET, STANDALONE, 3, 40, page_size)
    s = jax.eval_shape(partial(toy.start, STANDALONE, both(), page_size=page_size))
    assert asked.target == memory.tree_bytes(s.cache)
    assert asked.draft == memory.tree_bytes((s.draft.cache, s.draft.length))
    assert memory.tree_bytes(s.cache.pool) == 3 * rows * PER_TOKEN
    assert memory.tree_bytes(s.key) == 0, "NumPy does not know the size of keys"


def test_the_capacity_is_a_power_of_two_if_that_fits_otherwise_the_minimum(free):
    asked = (toy.params(), toy.TARGET, Plain(), 2, 1)
    free(2 * 128 * (PER_TOKEN + 4) + 50_000)
    assert memory.fit(*asked, 128, 70) == 128
    free(2 * 128 * (PER_TOKEN + 4) + 50_000 - 1)
    assert memory.fit(*asked, 128, 70) == 70


@pytest.mark.slow
def test_a_generation_that_does_not_fit_is_an_error(free):
    free(300_000)
    with pytest.raises(ValueError, match="this generation does not fit") as raised:
        jspec.generate(model(), [[1] * 9] * 2, drafter=Standalone(depth=3), max_new_tokens=300)
    text = str(raised.value)
    assert "2 sequences of 309 tokens take" in text
    fits = int(re.search(r"tokens fit: (\d+) in each of 2 sequences", text)[1])
    out = jspec.generate(model(), [[1] * 9] * 2, drafter=Standalone(depth=3), max_new_tokens=fits - 64 - 9)
    assert len(out.tokens[0]) == fits - 64 - 9, "minus the rest of a page"


def function_model(length=4096):
    def apply(params, tokens):
        return params["embed"][tokens] @ params["embed"].T

    return jspec.from_function(apply, {"embed": jnp.ones((61, 4))}, max_length=length)


def test_logits_of_functions_count(free):
    """A function computes the logits of all columns in each forward; as the draft, after the target's."""
    columns, model = 61 * 4, function_model()
    asked = memory.need(model.params, model.target, Plain(), 2, 128, 4)
    assert asked.logits == 2 * 128 * columns
    assert asked.total == memory.tree_bytes(model.target.empty_cache(2, 128, 4, jnp.int32)) + asked.logits
    assert "for the logits of whole texts" in str(asked)
    short = function_model(100)
    assert memory.need(short.params, short.target, Plain(), 2, 128, 4).logits == 2 * 100 * columns
    drafted, standalone = model.with_draft(short), Standalone(depth=3).bind(model.target, short.target)
    assert memory.need(drafted.params, model.target, standalone, 2, 128, 4).logits == 2 * 128 * columns
    assert memory.need(both(), toy.TARGET, STANDALONE, 3, 40, 1).logits == 0
    free(2_000_000)
    with pytest.raises(ValueError, match="this generation does not fit: 2 sequences of 4009 tokens.*logits of whole"):
        jspec.generate(model, [[1] * 9] * 2, drafter=None, max_new_tokens=4000)


@pytest.mark.slow
def test_an_engine_counts_the_logits_of_functions(monkeypatch):
    model = function_model()
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (4_000_000, 4_000_000))
    with pytest.raises(ValueError, match="use fewer slots or a shorter context"):
        jspec.Engine(model, slots=8, context=4096, page_size=16)


def test_allocation_errors_get_a_note(monkeypatch):
    monkeypatch.setattr(platform, "platform", lambda: "cpu")
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")
    memory.explain(error, memory.Need(8, 4096, 4_000_000_000, 500_000_000))
    assert error.__notes__ == [
        "jspec: 8 sequences of 4096 tokens take 4.50 GB, 137,329 bytes per token: 4.00 GB for the target's cache and "
        "0.50 GB for the draft's, in addition to weights and activations"
    ]
    monkeypatch.setattr(platform, "platform", lambda: "gpu")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    memory.explain(error, memory.Need(1, 1, 1, 1))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in error.__notes__[1]
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    memory.explain(other, memory.Need(1, 1, 1, 1))
    assert not hasattr(other, "__notes__")


def test_a_cpu_has_the_memory_of_its_machine():
    if jax.default_backend() != "cpu":
        pytest.skip("needs a CPU as JAX's default backend")
    free, limit = memory.free_bytes()
    assert 0 < free < limit


GIGABYTE = 2**30
MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemFree: 7 kB\nMemAvailable: {9 * 2**20} kB\n"


def host(tmp_path, groups, files):
    """A root with a machine of 16 GiB, 9 of them free, whose process is in these control groups."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory.free_bytes(tmp_path)


@pytest.mark.parametrize(
    "groups, files, free, limit",
    [
        ("", {}, 9, 16),
        ("0::/\n", {}, 9, 16),
        ("0::/a/b\n", {"a/b/memory.max": 4, "a/b/memory.current": 3}, 1, 4),
        ("0::/a/b\n", {"a/memory.max": 5, "a/memory.current": 2, "a/b/memory.max": None}, 3, 5),
        ("0::/a\n", {"memory.max": 4, "memory.current": 3}, 1, 4),
        ("0::/a\n", {"a/memory.max": 2, "a/memory.current": 3}, 0, 2),
        ("0::/a\n", {"a/memory.max": None, "a/memory.current": 3}, 9, 16),
        ("4:cpu,memory:/a\n", {"a/memory.limit_in_bytes": 6, "a/memory.usage_in_bytes": 4}, 2, 6),
        ("4:memory:/a\n", {"a/memory.limit_in_bytes": 2**33, "a/memory.usage_in_bytes": 4}, 9, 16),
        ("3:cpu:/a\n", {"a/memory.limit_in_bytes": 6, "a/memory.usage_in_bytes": 4}, 9, 16),
    ],
)
def test_the_memory_of_a_host_is_what_its_control_groups_allow(tmp_path, groups, files, free, limit):
    top = "sys/fs/cgroup/" if groups.startswith("0") else "sys/fs/cgroup/memory/"
    written = {top + name: "max\n" if size is None else f"{size * GIGABYTE}\n" for name, size in files.items()}
    assert host(tmp_path, groups, written) == (free * GIGABYTE, limit * GIGABYTE)


def test_cached_files_of_a_control_group_count_as_free(tmp_path):
    sizes = {"max": 4 * GIGABYTE, "current": 3 * GIGABYTE, "stat": f"anon 5\ninactive_file {GIGABYTE}\n"}
    files = {f"sys/fs/cgroup/a/memory.{name}": str(text) for name, text in sizes.items()}
    assert host(tmp_path, "0::/a\n", files) == (2 * GIGABYTE, 4 * GIGABYTE)


def test_a_host_without_proc_does_not_report_its_memory(tmp_path):
    assert host_memory.free_bytes(tmp_path) is None


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch):
    monkeypatch.setattr(Tensors, "get", None)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (1_000_000, 8_000_000))
    message = r"bundled:python-tiny: 0.00 GB of weights \(float32\) do not fit: 0.00 GB of 0.01 GB are free"
    with pytest.raises(ValueError, match=message):
        jspec.load("bundled:python-tiny", dtype="float32")


@pytest.mark.parametrize("draft", ("python-tiny", "python-eagle3", "python-assistant"))
def test_a_draft_that_does_not_fit_is_refused_before_the_target_is_read(monkeypatch, draft):
    target = language_model.plan(Source(locate("bundled:python-small")), dtype="float32", mtp=False)
    free = memory.tree_bytes(target.held()) + 1000
    monkeypatch.setattr(Tensors, "get", None)
    monkeypatch.setattr(memory, "free_bytes", lambda device=None: (free, 8 * free))
    message = rf"bundled:python-small with draft='bundled:{draft}': .* of weights \(float32.*\) do not fit"
    with pytest.raises(ValueError, match=message):
        jspec.load("bundled:python-small", draft=f"bundled:{draft}", dtype="float32")


WIDE = Llama(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    max_length=4096,
)


@pytest.mark.slow
@pytest.mark.parametrize("depth", (0, 3), ids=("plain", "standalone"))
def test_no_second_copy_of_weights_is_ever_made(depth):
    """The temporary memory of the loop is small compared with the weights. test_program.py checks the cache pools."""
    weights = toy.random_params(WIDE)
    params = Params(weights, weights if depth else None)
    drafter = Standalone(depth=depth).bind(WIDE, WIDE) if depth else Plain()
    ids = jnp.ones((1, 16), jnp.int32)
    one = jnp.full(1, 16, jnp.int32)
    keys, stop = jax.random.split(jax.random.key(0), 1), stopping.init(None, 1)
    method = Method(WIDE, drafter, accept.greedy)
    s = jitted_prefill(params, Prompts(ids, one, one + 64, keys, stop), method=method, capacity=80, page_size=16)
    loop = decode.lower(params, s, jnp.int32(9), method=method).compile()
    used = loop.memory_analysis()
    assert used.alias_size_in_bytes >= (1 + bool(depth)) * s.cache.pool.nbytes, (
        "the result does not reuse the donated state"
    )
    assert used.temp_size_in_bytes < memory.tree_bytes(weights) / 4
