"""Every argument of the Python API with values of every wrong kind: an error of our own before anything is compiled.

The tables below make more than a thousand calls. Each must raise a TypeError or a ValueError in this package,
not below it, whose message names the argument and shows the value.
"""

import dataclasses
import inspect
import itertools
import math
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import toy

import jspec
from jspec.analysis.evaluate import evaluate
from jspec.checkpoints.files import CheckpointError
from jspec.core import checks
from jspec.core.accept import Imposed, LossyThresholds
from jspec.core.loop import decode
from jspec.core.options import kind_of, options_of
from jspec.core.prefill import jitted_prefill
from jspec.core.types import Params, RowSampling
from jspec.generation.ids import IdsOptions
from jspec.generation.options import EngineOptions, GenerateOptions
from jspec.loading import memory
from jspec.text.tokenizer import Tokenizer

PACKAGE = str(Path(inspect.getfile(jspec)).parent)


pytestmark = pytest.mark.usefixtures("without_jaxtyping")


def byte_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(bpe)


TARGET = dataclasses.replace(toy.TARGET, vocab_size=256, num_layers=1)
SHORT = dataclasses.replace(TARGET, max_length=100)
"""A draft with a shorter context than the target's, of 512 tokens."""
PARAMS = toy.random_params(TARGET)
MODEL = jspec.Model("toy", TARGET, Params(PARAMS, PARAMS), byte_tokenizer(), (), SHORT)
KEY = jax.random.key(0)
IDS, LENGTHS = np.ones((2, 3), np.int32), np.array([1, 3], np.int32)


def generate(**options):
    return jspec.generate(MODEL, "abc", **({"drafter": "ngram"} | options))


def stream(**options):
    return jspec.stream(MODEL, "abc", **({"drafter": "ngram"} | options))


def generate_ids(**options):
    given = dict(params=MODEL.params, ids=IDS, lengths=LENGTHS, key=KEY, target=TARGET, max_new_tokens=2) | options
    return jspec.generate_ids(**given)


def engine(**options):
    return jspec.Engine(MODEL, **options)


def score(**options):
    return jspec.score(MODEL, "abc", **options)


def inspect_round(**options):
    return jspec.inspect_round(MODEL, **({"prompt": "abc"} | options))


def check_drafter(**options):
    return jspec.check_drafter("ngram", MODEL, **options)


def with_corpus(**options):
    return jspec.with_corpus(MODEL, **({"texts": "abc"} | options))


def measure(**options):
    return evaluate(MODEL, **({"prompts": ["abc", "d"], "drafter": "ngram"} | options))


# The tables

NO_INT = (2.5, 3.0, math.nan, math.inf, "4", "", True, b"1", (1,), {}, 1 + 2j, np.float32(2), np.bool_(1), object)
NO_NUMBER = ("0.5", "", True, b"1", (0.5,), {}, [], 1 + 0j, np.bool_(1), np.ones(2), object, None)
NO_FLAG = (0, 1, "yes", None, 1.0, [])
HUGE = (2**31, 2**63, 2**70)
WHOLE = {
    generate: {
        "max_new_tokens": (0, -1, 510, None, *HUGE, [], [1, 2, 3, 4, 5], [0], [1.5]),
        "n": (0, -1),
        "seed": (-1, 2**32, *HUGE[1:]),
    },
    stream: {"max_new_tokens": (0, None), "seed": (-1, 2**32, None), "rounds": (0, -3, None)},
    jspec.GenerateOptions: {"max_new_tokens": (0, None), "seed": (-1, 2**32, None)},
    generate_ids: {"max_new_tokens": (0, -1, 510, None, *HUGE), "max_length": (2, 513, *HUGE)},
    engine: {"context": (513, *HUGE)},
    score: {"top_k": (-1, 257, None, *HUGE), "page_size": (0, -1, None)},
    inspect_round: {"round_index": (-1, None), "seed": (-1, 2**32, None)},
    check_drafter: {"max_new_tokens": (0, None), "seed": (-1, 2**32, None)},
    measure: {"batch": (0, -1, None), "max_new_tokens": (0, 600), "seed": (-1, 2**32, None)},
    jspec.loop_options: {"devices": (0, -1, None)},
    jspec.Sampling: {"top_k": (0, -1, 10**30), "min_new_tokens": (-1, None, 10**30)},
    jspec.Ngram: {"n": (0, -1, 65, None, *HUGE), "depth": (0, -1, 128, None, *HUGE)},
    jspec.Suffix: dict(n=(0, 17, None, *HUGE), depth=(0, 65, None), width=(0, 65, None), num_nodes=(0, 31, 994, *HUGE)),
    with_corpus: {"size": (0, 3, -1, *HUGE)},
    jspec.Standalone: {"depth": (0, -1, 65, 100_000, None), "width": (0, 65, None), "num_nodes": (0, -1, 2, 99, *HUGE)},
    jspec.Eagle: {"depth": (0, 65, None, *HUGE), "width": (0, 65, None, *HUGE), "num_nodes": (0, 5, 99)},
    jspec.FrozenKvMtp: {"depth": (0, 65, None), "width": (0, 65, None), "num_nodes": (0, 5, 99)},
    jspec.Mtp: {"depth": (0, 65), "width": (0, 65, None), "num_nodes": (0, 99), "heads": (0, -1)},
}
TINY, LARGE = (1e-40, 1e-46, -1e-45), (1e39, -1e39, 1e300, -1e300, math.nan, math.inf, -math.inf)
NUMBERS = {
    jspec.Sampling: {
        "temperature": (-0.1, 1e-7, *TINY, *LARGE),
        "top_p": (0, -0.5, 1.1, *TINY, *LARGE),
        "min_p": (-0.1, 1.1, *TINY, *LARGE),
        "repetition_penalty": (0, -1, 1e-7, 1e7, *TINY, *LARGE),
        "presence_penalty": (2e6, *TINY, *LARGE),
        "frequency_penalty": (-2e6, *TINY, *LARGE),
    },
    LossyThresholds: {"single": (-0.1, 1.1, *TINY, *LARGE), "total": (0, -1, 1.1, *TINY, *LARGE)},
    Imposed: {"tokens_per_round": (0, 0.99, 1001, *TINY, *LARGE)},
    check_drafter: {"temperature": (-0.1, 1e-7, *TINY, *LARGE)},
}
FLAGS = {
    generate: ("progress",),
    measure: ("progress",),
    jspec.Eagle: ("sampled", "exact"),
    jspec.Standalone: ("sampled",),
    jspec.FrozenKvMtp: ("sampled",),
    jspec.Mtp: ("sampled",),
    jspec.loop_options: ("many",),
}
OPTIONAL = {"top_k", "num_nodes", "heads", "max_length", "top_p", "min_p"}


@dataclasses.dataclass(frozen=True)
class Unhashable:
    """A rule or a drafter that cannot be a static argument."""

    depth: int = 1
    capture_layers = ()
    bind = init = draft = extend = None
    __hash__ = None

    def __call__(self, key, draft_tree, logits, position):
        raise AssertionError("never called")


ODD_LOGPROBS = (*(value for value in NO_INT if value is not True and not isinstance(value, np.bool_)), 0, -1, 21)
BOTH, NO_PROMPTS = (generate, generate_ids), ("abc", [1, 2], [], 5, [1.5], [None], [["a"]])

OTHERS = (
    *((call, "sampling", v) for call in (generate, stream, measure) for v in (0.7, "greedy", {}, [0.7], object)),
    *((call, "accept", v) for call in BOTH for v in ("typical", 3, [], LossyThresholds, Unhashable())),
    *((call, "drafter", v) for call in BOTH for v in ("x", 4, [], jspec.Ngram, Unhashable())),
    *((generate, "stop", v) for v in ("", [""], {"a": 1}, ["a", ""], 3, None, b"a", [b"a"], [["a"]])),
    *((generate, "stop", v) for v in ("\ud800", ["a", "\udfff"])),
    *((call, "logprobs", v) for call in (generate, jspec.GenerateOptions) for v in (*ODD_LOGPROBS, None, *HUGE)),
    *((generate, "seed", v) for v in ([1, 2], [], [1.5], ["1"], [2**32], [-1], [None], np.array([1.0]), [[1]])),
    *((jspec.Sampling, "logit_bias", v) for v in ([1, 2], "a", 3, {1: "a"}, {1: None}, {1: math.nan}, {1: math.inf})),
    *((jspec.Sampling, "logit_bias", v) for v in ({"a": 1.0}, {1.5: 1}, {-1: 1}, {1: 1e300}, {1: 1e-40}, {None: 1})),
    *((generate, "sampling", jspec.Sampling(logit_bias=v)) for v in ({256: 1.0}, {2**70: 1.0})),
    (generate, "sampling", jspec.Sampling(logit_bias=dict.fromkeys(range(256), -math.inf))),
    (generate, "sampling", [None, None]),
    *((with_corpus, "texts", v) for v in ("", [], [[]], 5, None, b"abc", [1.5], [256], [[1], None], "\ud800")),
    *((jspec.FrozenKvMtp, "position", v) for v in ("last", None, 3, [])),
    *((jspec.loop_options, "flags", v) for v in (5, [], b"x")),
    *((MODEL.tokenizer.encode, "text", v) for v in (5, None, ["a"], b"a", "\ud800")),
    *((inspect_round, "sampling", v) for v in (0.7, [None])),
    *((inspect_round, "prompt", v) for v in (["a"], [[1]], "", [], 5, None)),
    *((check_drafter, "prompts", v) for v in NO_PROMPTS),
    *((measure, "prompts", v) for v in NO_PROMPTS),
    *((generate_ids, "eos", v) for v in (5, "a", [256], [-1], [1.5], ["1"], [None], np.array([1.0]), None)),
    *((generate_ids, "key", v) for v in (0, None, np.zeros(2, np.uint32), jax.random.split(KEY, 3))),
    *((generate_ids, "ids", v) for v in ([[1]], None, IDS[0], IDS[:0], IDS[:, :0], IDS.astype(float), IDS * 999, -IDS)),
    *((generate_ids, "lengths", v) for v in (3, [1, 3], None, LENGTHS[:1], LENGTHS * 1.0, LENGTHS * 0, LENGTHS + 1)),
    *((generate_ids, "params", v) for v in (None, PARAMS, 3)),
    *((generate_ids, "target", v) for v in (None, "toy", type(TARGET))),
    *((generate_ids, "max_new_tokens", v) for v in (np.array([1]), np.array([1.0, 2.0]), np.array([0, 1]), "2")),
    *((generate_ids, "sampling", v) for v in (0.7, "greedy", [None])),
)
PROMPTS = (
    *("", "\ud800", "a\udfffb", 5, 2.5, None, True, {}, {1}, b"abc", bytearray(b"a"), object, iter("a")),
    *([], [[]], [""], ["a", ""], [[1], []], [1.5], [[1.5]], [True, False], [[True, 2]], [None], [1, None], ["a", None]),
    *([1, "a"], [["a"]], [[1], 2], ["a", 5], [[1, [2]]], [[[1]]], [[1, 2], [[3]]], [[2**70]], [[2**63]], [-1], [256]),
    *([[1, 256]], [b"a"], [{}], [[1, None]], ["a", "\ud800"], [[math.nan]], ((),)),
    *(np.zeros((0,), int), np.zeros((2, 0), int), np.ones((1, 1, 1), int), np.array(3), np.ones(3)),
    *(np.array([None]), np.array([[1, 999]]), np.ones(2, bool), [1] * 512, "a" * 513, [[1], [1] * 600]),
)
SOURCES = (5, 2.5, None, True, [], {}, b"bundled:python-tiny", "", "  ", "\ud800", "a\0b", "x" * 5000, object)
SOURCES += ("bundled:none", "bundled:", "no/such/directory", "here", Path("no-such"), Path("x" * 5000), "org name/x")


OPTIONS = {
    generate: GenerateOptions,
    stream: GenerateOptions,
    GenerateOptions: GenerateOptions,
    generate_ids: IdsOptions,
    engine: EngineOptions,
}
"""Functions -> the dataclass of their options, whose fields have a type and bounds."""


def derived():
    """(function, the name of an option, a value of another type or out of bounds)."""
    for call, kind in OPTIONS.items():
        for name, (field, spec) in options_of(kind).items():
            wrong = {int: NO_INT, float: (*NO_NUMBER, *LARGE), bool: NO_FLAG}[kind_of(field).type]
            beyond = [
                spec.bounds[key] + step
                for key, step in (("least", -1), ("above", 0), ("most", 1))
                if key in spec.bounds
            ]
            missing = () if kind_of(field).optional else (None,)
            yield from ((call, name, v) for v in (*wrong, *beyond, *missing) if v is not None or missing)


LISTED = (generate, stream, jspec.GenerateOptions)
"""Functions that take a list of limits."""


def calls():
    """(function, its keywords, the argument that is wrong)."""
    for call, arguments in WHOLE.items():
        for name, values in arguments.items():
            for value in itertools.chain(NO_INT, values):
                listed = name == "seed" or (name == "max_new_tokens" and call in LISTED)
                if not listed or not isinstance(value, tuple):  # a tuple of seeds or limits is valid
                    yield call, {name: value}, name
    for call, arguments in NUMBERS.items():
        for name, values in arguments.items():
            for value in itertools.chain(NO_NUMBER, values):
                if value is not None or name not in OPTIONAL:
                    yield call, {name: value}, name
    yield from ((call, {name: v}, name) for call, names in FLAGS.items() for name in names for v in NO_FLAG)
    yield from ((call, {name: value}, name) for call, name, value in (*OTHERS, *derived()))


def programs():
    return decode._cache_size(), jitted_prefill._cache_size()


def fault(call, options, name):
    """What is wrong with the outcome; None if it is an error of our own."""
    try:
        call(**options)
    except (TypeError, ValueError, CheckpointError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error)
        if not last.filename.startswith(PACKAGE):
            return f"raised by {last.filename}:{last.lineno}: {text}"
        if name not in text:
            return f"does not name {name}: {text}"
        shown = f"{name}={options.get(name)}", f"{name}=int is", f"{name} is"
        if type(options.get(name)) in (int, float) and not any(words in text for words in shown):
            return f"does not show {shown[0]}: {text}"
        if len(text) > 600:
            return f"is {len(text)} characters long"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_every_wrong_argument_is_an_error_of_our_own():
    before, tried, faults = programs(), 0, []
    for call, options, name in calls():
        tried += 1
        found = fault(call, options, name)
        if found is not None:
            faults.append(f"{call.__name__}({name}={checks.shorten(options[name])}): {found}")
    assert not faults, f"{len(faults)} of {tried}:\n" + "\n".join(faults)
    assert tried > 900
    assert programs() == before


@pytest.mark.parametrize("call", (jspec.generate, jspec.stream, jspec.score), ids=("generate", "stream", "score"))
def test_every_wrong_prompt_is_an_error_of_our_own(call):
    # A prompt that fills the context leaves no space for new tokens, but can be scored.
    wrong = [one for one in PROMPTS if call is not jspec.score or not (isinstance(one, list) and one == [1] * 512)]
    faults = [
        f"{checks.shorten(prompts)}: {found}"
        for prompts in wrong
        if (found := fault(lambda prompts=prompts: call(MODEL, prompts), {}, "prompt")) is not None
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "call", (jspec.generate, jspec.stream, jspec.score, jspec.inspect_round, evaluate), ids=lambda call: call.__name__
)
def test_a_model_of_another_type_is_an_error_of_our_own(call):
    for model in (None, "bundled:python-tiny", 5, TARGET):
        more = {"drafter": None} if call is evaluate else {}
        assert fault(lambda model=model, more=more: call(model, ["a"], **more), {}, "model") is None


@pytest.mark.parametrize("name", ("source", "draft"))
def test_every_wrong_source_is_an_error_of_our_own(name):
    for value in SOURCES:
        if name == "draft" and value is None:
            continue
        given = {"source": "bundled:python-tiny"} | {name: value}
        wanted = name if not isinstance(value, str | Path) else ""
        assert fault(jspec.load, given, wanted) is None, checks.shorten(value)
    for dtype in (5, 2.5, [], True, jnp.float32, "float8", ""):
        assert fault(jspec.load, {"source": "bundled:python-tiny", "dtype": dtype}, "dtype") is None


ROWS = {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "logit_bias": 0.0, "min_new_tokens": 1}


@pytest.mark.parametrize("name", ROWS)
def test_sampling_arrays_of_another_shape_or_dtype_are_errors(name):
    value = ROWS[name]
    kind = np.int32 if isinstance(value, int) else np.float32
    for wrong in (value, np.full(3, value, kind), np.full((2, 2), value, kind), np.ones(2, bool), [value] * 2):
        found = fault(generate_ids, {"sampling": RowSampling(**{name: wrong})}, f"RowSampling.{name}")
        assert found is None, (wrong, found)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    (
        ("temperature", -1.0, r"Sampling\(temperature=-1.0\): must be 0 \(greedy\) or at least 1e-6"),
        ("temperature", 1e-7, "must be 0"),
        ("temperature", math.nan, "must be 0"),
        ("top_k", 0, r"Sampling\(top_k=0\): must be from 1"),
        ("top_p", 1.5, "must be above 0 and at most 1"),
        ("repetition_penalty", 0.0, "must be from 1e-06"),
        ("logit_bias", math.inf, "has the value inf: must be finite, or -inf"),
        ("thinking_budget", 5, "requires a grammar"),
    ),
)
def test_sampling_arrays_of_invalid_values_are_errors(name, value, message):
    kind, shape = np.int32 if isinstance(value, int) else np.float32, (2, 256) if name == "logit_bias" else (2,)
    with pytest.raises(ValueError, match=f"^RowSampling.{name}.*{message}"):
        generate_ids(sampling=RowSampling(**{name: np.full(shape, value, kind)}))


def test_bounds_of_sampling_hold_in_float32():
    assert jspec.Sampling(temperature=np.float32(1e-6)).temperature > 0


def test_a_generation_that_does_not_fit_is_an_error_in_generate_ids(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (3_000, 1_000))
    with pytest.raises(ValueError, match="this generation does not fit: 2 sequences of 5 tokens take"):
        generate_ids()
    with pytest.raises(ValueError, match="this generation does not fit"):
        jax.eval_shape(lambda params, ids: generate_ids(params=params, ids=ids), MODEL.params, IDS)


@pytest.mark.slow
def test_a_text_beyond_the_context_of_the_draft_is_an_error():
    with pytest.raises(ValueError, match="max_new_tokens=98: .* exceeds the draft's context of 100, .* at most 97 new"):
        generate(max_new_tokens=98, drafter="standalone")
    fallback = jspec.Adaptive((None, jspec.Standalone(depth=2)))
    for prompts, limit, drafter in ((["a", "bb"], [20, 99], "standalone"), (["bb"], 99, fallback)):
        outs = [jspec.generate(MODEL, prompts, max_new_tokens=limit, drafter=one) for one in (drafter, None)]
        assert outs[0].tokens == outs[1].tokens
    with pytest.raises(ValueError, match="max_length=101: exceeds the draft's context of 100"):
        generate_ids(max_length=101, drafter="standalone", draft=SHORT)


@dataclasses.dataclass(frozen=True)
class Deep:
    """Drafts longer chains than can be recorded."""

    depth: int = 128
    capture_layers = ()
    init = draft = extend = None

    def bind(self, target, draft):
        return self


def test_a_drafter_of_ones_own_that_is_too_deep_is_an_error():
    for call in (generate, generate_ids):
        with pytest.raises(ValueError, match=r"Deep\(depth=128\): must be from 0 to 127"):
            call(drafter=Deep())


# Valid values


def tokens(**options):
    return jspec.generate(MODEL, "abc", **({"max_new_tokens": 3, "drafter": "ngram"} | options)).tokens


@pytest.mark.parametrize("kind", (np.int64, np.int32, np.uint8, np.array, jnp.int32), ids=lambda kind: kind.__name__)
def test_ints_of_numpy_and_of_jax_are_ints(kind):
    options = jspec.GenerateOptions(max_new_tokens=kind(3), seed=kind(1), page_size=kind(8))
    assert options == jspec.GenerateOptions(max_new_tokens=3, seed=1, page_size=8)
    assert type(options.max_new_tokens) is type(options.seed) is type(options.page_size) is int
    assert jspec.GenerateOptions(seed=[kind(1), 2]).seed == (1, 2)
    sampling = jspec.Sampling(np.float32(0.5), top_k=kind(5), logit_bias={kind(3).item(): np.float32(1)})
    assert sampling == jspec.Sampling(0.5, top_k=5, logit_bias={3: 1.0}) and type(sampling.top_k) is int
    assert jspec.Ngram(n=kind(2), depth=kind(3)) == jspec.Ngram(n=2, depth=3)
    assert jspec.Standalone(depth=kind(2), width=kind(2), num_nodes=kind(4)) == jspec.Standalone(2, 2, 4)
    assert jspec.Mtp(heads=kind(2)) == jspec.Mtp(heads=2)


def test_a_page_is_no_longer_than_the_sequences():
    assert tokens(page_size=10**6) == tokens(page_size=10**30, max_new_tokens=np.int64(3)) == tokens()
    asked = [memory.need(MODEL.params, TARGET, jspec.Plain(), 2, 16, size).target for size in (64, 10**6, 10**30)]
    assert asked == [asked[0]] * 3


def test_seeds_reach_the_last_one():
    last = 2**32 - 1
    assert jspec.GenerateOptions(seed=last).seeds(2) == [(last, 0), (last, 1)]
    assert jspec.GenerateOptions(seed=[last, (3, last)]).seeds(2) == [(last, 0), (3, last)]


@pytest.mark.slow
def test_values_at_the_bounds_have_their_meaning():
    everything = tokens(sampling=jspec.Sampling(), seed=2**32 - 1)
    for sampling in (
        jspec.Sampling(top_k=10**12, top_p=1.0, min_p=0.0),
        jspec.Sampling(repetition_penalty=1, presence_penalty=0, min_new_tokens=2**40, logit_bias={}),
    ):
        assert tokens(sampling=sampling, seed=2**32 - 1) == everything
    greedy = tokens()
    for sampling in (jspec.Sampling(top_k=1), jspec.Sampling(top_p=1.2e-38), jspec.Sampling(min_p=1.0)):
        assert tokens(sampling=sampling) == greedy, "only the most probable token stays"


@pytest.mark.slow
def test_a_match_may_be_longer_than_the_text():
    assert tokens(drafter=jspec.Ngram(n=64)) == tokens(drafter=None)
    assert generate_ids(drafter=jspec.Ngram(n=20)).tokens.shape == (2, 5)
