"""`generate`, `stream` and `generate_ids`, on tiny random models with a byte tokenizer."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from grammars import VOCAB, byte_model

import jspec
from jspec.core import tree
from jspec.core.accept import LossyThresholds
from jspec.core.loop import decode
from jspec.core.types import RowSampling

PROMPTS = ["def f(x):", "a", "for i in range(10):\n    print(i)"]
SAMPLED = jspec.Sampling(temperature=0.8, top_p=0.95)
DRAFTERS = [None, "ngram", "standalone", jspec.Ngram(n=2, depth=6), jspec.Standalone(depth=2)]


@pytest.fixture(scope="module")
def model():
    """The model over bytes, without EOS tokens."""
    return replace(byte_model(), eos=())


@pytest.fixture(scope="module")
def plain(model):
    return jspec.generate(model, PROMPTS, drafter=None, max_new_tokens=40)


def readable(text, start):
    """The first two characters from `start` on that contain no replacement character."""
    return next(text[i : i + 2] for i in range(start, len(text) - 1) if "\ufffd" not in text[i : i + 2])


@pytest.mark.slow(unless="ngram")
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_tokens_do_not_depend_on_the_drafter(model, plain, drafter):
    out = jspec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=40)
    assert out.tokens == plain.tokens
    assert out.text == plain.text
    assert out.finish_reason == ["length"] * 3
    assert out.stats.new_tokens == 120
    assert (out.stats.accept_counts.sum(1) == out.stats.rounds).all()
    assert out.stats.accept_length == pytest.approx(117 / out.stats.rounds.sum()), "three come from prefill"


@pytest.mark.slow
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 7, 39])
def test_max_new_tokens_is_exact_within_an_accepted_run(model, plain, max_new_tokens):
    out = jspec.generate(model, PROMPTS, drafter=jspec.Standalone(depth=5), max_new_tokens=max_new_tokens)
    assert out.tokens == [tokens[:max_new_tokens] for tokens in plain.tokens]


def test_a_single_prompt_gives_a_generation(model, plain):
    text = jspec.generate(model, PROMPTS[0], max_new_tokens=40)
    ids = jspec.generate(model, model.tokenizer.encode(PROMPTS[0]), max_new_tokens=40)
    array = jspec.generate(model, np.array(model.tokenizer.encode(PROMPTS[0])), max_new_tokens=40)
    assert text.tokens == ids.tokens == array.tokens == plain.tokens[0]
    assert text.text == ids.text == plain.text[0]
    assert text.finish_reason == "length"


def test_a_list_of_prompts_gives_generations(model, plain):
    out = jspec.generate(model, PROMPTS, max_new_tokens=8, logprobs=True)
    assert isinstance(out, jspec.Generations) and len(out) == 3
    assert all(isinstance(item, jspec.Generation) for item in out)
    for name in ("tokens", "text", "finish_reason", "origin", "logprobs", "prompt", "token_texts", "tokens_per_round"):
        assert getattr(out, name) == [getattr(item, name) for item in out], name
    assert [item.tokens for item in out[1:]] == out.tokens[1:]
    assert out[0].stats.new_tokens == 8 and out.stats.new_tokens == 24
    assert (out[2].stats.accept_counts == out.stats.accept_counts[2:]).all()
    alone = jspec.generate(model, PROMPTS[2], max_new_tokens=8)
    np.testing.assert_array_equal(alone.stats.accept_counts, out[2].stats.accept_counts)


def test_options_are_validated_and_frozen():
    options = jspec.GenerateOptions(stop="x", seed=[1, 2])
    assert options == jspec.GenerateOptions(stop=["x"], seed=(1, 2)) and hash(options) == hash(replace(options))
    assert options.seeds(2) == [(1, 0), (2, 0)] and jspec.GenerateOptions(seed=3).seeds(2) == [(3, 0), (3, 1)]
    with pytest.raises(ValueError, match="page_size=0: must be at least 1"):
        replace(options, page_size=0)


def test_a_checkpoint_without_a_tokenizer_works_with_ids(model, plain):
    bare = replace(model, tokenizer=None)
    out = jspec.generate(bare, [model.tokenizer.encode(p) for p in PROMPTS], max_new_tokens=40)
    assert out.tokens == plain.tokens
    assert out.text is None


@pytest.mark.slow(unless="ngram")
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_a_stop_string_ends_text_and_tokens(model, plain, drafter):
    stops = [readable(plain.text[0], 17), readable(plain.text[2], 9)]
    out = jspec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=40, stop=stops)
    for text, tokens, reason, whole, ids in zip(
        out.text, out.tokens, out.finish_reason, plain.text, plain.tokens, strict=True
    ):
        found = [whole.find(stop) for stop in stops if stop in whole]
        assert (reason == "stop") == bool(found)
        assert tokens == ids[: len(tokens)]
        if found:
            assert text == whole[: len(text)] and not any(stop in text for stop in stops)
            assert any(whole[len(text) :].startswith(stop) for stop in stops)
            shorter = model.tokenizer.decode(tokens[:-1])
            assert not any(stop in shorter for stop in stops), "ends at the token that completes the stop string"
    assert "stop" in out.finish_reason


def test_other_stop_strings_and_lengths_run_the_same_program(model):
    def run(prompts, **options):
        return jspec.generate(model, prompts, drafter=jspec.Ngram(depth=3), page_size=32, **options)

    run(PROMPTS, max_new_tokens=40, stop="abc")
    traces = decode._cache_size()
    run([p + "x" for p in PROMPTS], max_new_tokens=37, stop="xyz", seed=3)
    run(PROMPTS, max_new_tokens=33, stop=["\n\n\n"])
    assert decode._cache_size() == traces


@pytest.mark.parametrize("rounds", [1, 3, 50])
def test_streaming_gives_the_same_output_in_pieces(model, plain, rounds):
    stop = readable(plain.text[1], 15)
    whole = jspec.generate(model, PROMPTS, max_new_tokens=40, stop=stop)
    pieces = list(jspec.stream(model, PROMPTS, max_new_tokens=40, stop=stop, rounds=rounds))
    for i in range(3):
        assert "".join(piece.text for piece in pieces if piece.index == i) == whole.text[i]
        assert sum((piece.tokens for piece in pieces if piece.index == i), []) == whole.tokens[i]


def test_stream_returns_the_generation(model, plain):
    def drive():
        out = yield from jspec.stream(model, PROMPTS, max_new_tokens=40)
        assert out.tokens == plain.tokens and out.text == plain.text
        yield "end"

    assert list(drive())[-1] == "end"


@pytest.mark.slow
def test_progress_bar_and_debug_change_nothing(model, plain, capsys):
    out = jspec.generate(model, PROMPTS, max_new_tokens=40, progress=True, debug=True)
    assert out.tokens == plain.tokens
    assert "120/120" in capsys.readouterr().err


def test_statistics_follow_from_the_counts():
    counts = np.array([[1, 0, 2], [3, 0, 1]])
    dropped = np.array([0, 1])
    stats = jspec.GenerationStats(rounds=np.array([3, 4]), accept_counts=counts, seconds=2.0, dropped=dropped)
    assert stats.new_tokens == 12 + 2, "including the first token of each sequence"
    assert stats.accept_length == pytest.approx(12 / 7)
    assert stats.tokens_per_second == 6
    np.testing.assert_allclose(stats.acceptance_by_position, [3 / 7, 3 / 7])
    assert stats.accept_rate == pytest.approx((4 + 2) / (7 * 2)), "two drafts per round; one was dropped"
    assert stats.of_sequence(1).accept_rate == pytest.approx(2 / 8)


def test_generate_ids_inside_a_users_jit(model, plain):
    """The generation is part of another program, with a traced bound; its result is used there."""
    traces = []

    @jax.jit
    def total_length(params, ids, lengths, key, bound):
        traces.append(1)
        out = jspec.generate_ids(
            params,
            ids,
            lengths,
            key,
            target=model.target,
            draft=model.draft,
            drafter="standalone",
            max_new_tokens=bound,
            max_length=96,
        )
        return out, (out.length - lengths).sum()

    encoded = [model.tokenizer.encode(p) for p in PROMPTS]
    width = max(map(len, encoded))
    ids = np.array([row + [0] * (width - len(row)) for row in encoded], np.int32)
    lengths = np.array([len(row) for row in encoded], np.int32)
    for bound in (40, 11):
        out, total = jax.device_get(total_length(model.params, ids, lengths, jax.random.key(0), jnp.int32(bound)))
        assert int(total) == 3 * bound
        assert out.stats.rounds.sum() < 3 * bound
        assert out.logprobs is None
        for row, prompt, wanted, end in zip(out.tokens, encoded, plain.tokens, out.length, strict=True):
            assert row[: int(end)].tolist() == prompt + wanted[:bound]
            assert not row[int(end) :].any()
    assert len(traces) == 1
    out, _ = total_length(model.params, ids, lengths, jax.random.key(0), jnp.array([1, 2, 3], jnp.int32))
    assert [int((row != 0).sum()) for row in np.array(out.tokens)] <= [
        len(p) + n for p, n in zip(encoded, (1, 2, 3), strict=True)
    ]


@pytest.mark.slow
def test_generate_ids_ends_when_the_buffer_is_full(model, plain):
    ids = np.array([model.tokenizer.encode(PROMPTS[0])], np.int32)
    n = ids.shape[1]
    arrays = model.params, ids, np.array([n], np.int32), jax.random.key(0)

    def run(**options):
        call = partial(jspec.generate_ids, target=model.target, drafter="ngram", **options)
        out = jax.device_get(jax.jit(call)(*arrays))
        return out.tokens[0].tolist(), int(out.length[0])

    tokens, _ = run(max_new_tokens=6)
    assert len(tokens) == n + 6 and tokens[n:] == plain.tokens[0][:6]
    tokens, length = run(max_new_tokens=40, max_length=n + 3, eos=())
    assert length == n + 3 and tokens[n:] == plain.tokens[0][:3]
    eos = plain.tokens[0][4]
    tokens, length = run(max_new_tokens=40, eos=(eos,))
    assert tokens[n:length] == plain.tokens[0][: plain.tokens[0].index(eos) + 1]
    with pytest.raises(ValueError, match="max_length=None"):
        jspec.generate_ids(*arrays, target=model.target, max_new_tokens=jnp.int32(4))
    with pytest.raises(ValueError, match=f"max_length=2: must be at least the {n} columns of the prompts"):
        jspec.generate_ids(*arrays, target=model.target, max_new_tokens=4, max_length=2)


INVALID = [
    ([], {}, ValueError, r"prompts=\[\]"),
    ("", {}, ValueError, "prompts is empty"),
    (["a", ""], {}, ValueError, r"prompts\[1\] is empty"),
    ([[1, 2], []], {}, ValueError, r"prompts\[1\] is empty"),
    ([[1, VOCAB]], {}, ValueError, "contains the id 300: ids must be from 0 to 299"),
    ([[1, -1]], {}, ValueError, "contains the id -1"),
    ([[1.5]], {}, TypeError, "float64"),
    (7, {}, TypeError, "prompts is of type int: must be text, token ids, or a list of them"),
    ([[[1]]], {}, TypeError, "flat list"),
    ([1] * 512, {}, ValueError, "512 tokens, which leaves no space for new ones in the model's context of 512"),
    ([1] * 500, {"max_new_tokens": 13}, ValueError, "at most 12 fit"),
    ("a", {"page_size": 0}, ValueError, "page_size=0: must be at least 1"),
    (
        "a",
        {"drafter": "medusa"},
        ValueError,
        "'medusa' is unknown; valid names are adaptive, block, eagle, frozen-kv-mtp, mtp, ngram, plain, standalone",
    ),
    ("a", {"drafter": jspec.Ngram}, TypeError, "give an object, not a class"),
    ("a", {"drafter": 4}, TypeError, "drafter=int is not a drafter: it has no depth"),
    ("a", {"stop": ""}, ValueError, "stop"),
    ("a", {"stop": [3.5]}, TypeError, "stop"),
    ("a", {"sampling": 0.7}, TypeError, "must be a jspec.Sampling"),
    (["a", "b"], {"sampling": [SAMPLED]}, ValueError, "sampling: 1 for 2 sequences"),
    ("a", {"sampling": jspec.Sampling(logit_bias={VOCAB: 1.0})}, ValueError, "ids must be from 0 to 299"),
    (["a", "b"], {"seed": [1, 2, 3]}, ValueError, "seed: 3 for 2 sequences"),
    ("a", {"seed": 2**32}, ValueError, "must be from 0 to 4294967295"),
    ("a", {"sampling": SAMPLED, "accept": "greedy"}, ValueError, "ignores the temperature; omit it, or use 'coupled'"),
    ("a", dict(sampling=SAMPLED, accept="typical"), ValueError, "must be one of greedy, coupled, rejection, block"),
    ("a", {"sampling": SAMPLED, "accept": 3}, TypeError, "accept=3"),
    (
        "a",
        {"sampling": SAMPLED, "accept": "block", "drafter": jspec.Standalone(width=2)},
        ValueError,
        "judges chains only: give Standalone width=1",
    ),
    (
        "a",
        {"accept": LossyThresholds(single=0.5)},
        ValueError,
        "LossyThresholds has no effect when every sequence is greedy; omit it",
    ),
]


@pytest.mark.parametrize("prompts, options, error, message", INVALID)
def test_invalid_arguments_are_errors_before_anything_is_compiled(model, prompts, options, error, message):
    traces = decode._cache_size()
    with pytest.raises(error, match=message):
        jspec.generate(model, prompts, **options)
    assert decode._cache_size() == traces


def test_arguments_that_the_model_does_not_support(model):
    bare = replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="toy has no tokenizer: give token ids"):
        jspec.generate(bare, "text")
    with pytest.raises(ValueError, match="stop.*tokenizer"):
        jspec.generate(bare, [1], stop="x")
    with pytest.raises(ValueError, match="needs a language model as draft, but none is loaded"):
        jspec.generate(replace(model, draft=None), "text", drafter="standalone")
    with pytest.raises(ValueError, match="the draft has 61 tokens, the target 300"):
        jspec.generate(replace(model, draft=toy.DRAFT), "text", drafter="standalone")
    with pytest.raises(ValueError, match="rounds=0"):
        jspec.stream(model, "text", rounds=0)


MIXED_SAMPLING = [SAMPLED, None, jspec.Sampling(top_k=30, repetition_penalty=1.3, min_new_tokens=5)]


@pytest.mark.parametrize("rule", ("greedy", "coupled", "rejection", "block"))
def test_every_lossless_rule_is_greedy_if_all_sequences_are(model, plain, rule):
    out = jspec.generate(model, PROMPTS, drafter="standalone", accept=rule, max_new_tokens=40)
    assert out.tokens == plain.tokens


@pytest.mark.slow
def test_a_sequence_of_a_batch_equals_the_sequence_alone_with_its_seed_and_parameters(model):
    options, seeds = dict(sampling=MIXED_SAMPLING, max_new_tokens=20), [(3, 0), (3, 1), (3, 2)]
    whole = jspec.generate(model, PROMPTS, drafter="standalone", seed=3, **options)
    assert whole.tokens == jspec.generate(model, PROMPTS, drafter=None, seed=seeds, **options).tokens
    for i, prompt in enumerate(PROMPTS):
        options["sampling"] = MIXED_SAMPLING[i]
        alone = jspec.generate(model, prompt, drafter="ngram", seed=[(3, i)], **options)
        assert alone.tokens == whole.tokens[i]
    other = jspec.generate(model, PROMPTS, drafter="standalone", sampling=MIXED_SAMPLING, seed=4, max_new_tokens=20)
    assert (other.tokens[0] != whole.tokens[0], other.tokens[1]) == (True, whole.tokens[1])


@pytest.mark.slow
def test_limits_of_each_prompt_and_samples_of_each(model, plain):
    """Each sequence ends at its own limit; n samples are those of a list in which each prompt occurs n times."""
    limits = [3, 40, 11]
    out = jspec.generate(model, PROMPTS, drafter="standalone", max_new_tokens=limits)
    assert out.tokens == [tokens[:limit] for tokens, limit in zip(plain.tokens, limits, strict=True)]
    assert list(map(len, out.tokens)) == limits
    options = dict(drafter="ngram", seed=7, max_new_tokens=np.array(limits))
    repeated = jspec.generate(model, PROMPTS, n=2, sampling=MIXED_SAMPLING, **options)
    options["max_new_tokens"] = np.repeat(limits, 2)
    listed = jspec.generate(
        model, np.repeat(PROMPTS, 2).tolist(), sampling=np.repeat(MIXED_SAMPLING, 2).tolist(), **options
    )
    assert repeated.tokens == listed.tokens and list(map(len, repeated.tokens)) == np.repeat(limits, 2).tolist()
    many = jspec.generate(model, PROMPTS, n=30, sampling=MIXED_SAMPLING, seed=7, max_new_tokens=limits, drafter="ngram")
    assert (
        len(many) == 90
        and many.tokens[0] == repeated.tokens[0]
        and list(map(len, many.tokens[28:32])) == [3, 3, 40, 40]
    )
    assert len(jspec.generate(model, "a", n=1, max_new_tokens=2)) == 1


def test_prompts_may_be_arrays(model):
    ids = [[5, 6, 7], [8, 9, 10]]
    options = dict(drafter=None, max_new_tokens=4)
    wanted = jspec.generate(model, ids, **options).tokens
    for prompts in (jnp.array(ids), np.array(ids), [jnp.array(ids[0]), np.array(ids[1])]):
        assert jspec.generate(model, prompts, **options).tokens == wanted
    assert jspec.generate(model, jnp.array(ids[1]), **options).tokens == wanted[1]
    with pytest.raises(TypeError, match="prompts is traced: .* use jspec.generate_ids"):
        jax.jit(lambda x: jspec.generate(model, x))(jnp.array(ids))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=[4, 4]), "max_new_tokens: 2 for 3 sequences"),
        (dict(max_new_tokens=[4, 0, 4]), r"max_new_tokens\[1\]=0"),
        (dict(max_new_tokens=[4, 4, 2000]), "max_new_tokens=2000"),
        (dict(max_new_tokens=[]), "max_new_tokens"),
        (dict(n=2, sampling=[SAMPLED]), "sampling: 1 for 3 prompts"),
        (dict(n=2, seed=[1, 2, 3]), "seed: 3 for 6 sequences"),
    ],
)
def test_limits_and_samples_that_do_not_match_the_prompts_are_refused(model, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jspec.generate(model, PROMPTS, **options)


def test_copies_of_a_prompt_are_different_samples(model):
    out = jspec.generate(model, ["ab"] * 4, drafter=None, sampling=jspec.Sampling(), max_new_tokens=12)
    assert len({tuple(tokens) for tokens in out.tokens}) == 4


def log_distribution(logits, seen, sampling):
    """The log-probabilities that a token is sampled with, in float64: penalty, temperature, top-k, then top-p."""
    x = logits.astype(np.float64)
    if sampling is None:
        return np.where(np.arange(len(x)) == x.argmax(), 0.0, -np.inf)
    if sampling.repetition_penalty is not None:
        ids = sorted(set(seen))
        x[ids] = np.where(x[ids] > 0, x[ids] / sampling.repetition_penalty, x[ids] * sampling.repetition_penalty)
    x = x / sampling.temperature
    order = np.argsort(-x)
    kept = order[: sampling.top_k or len(x)]
    if sampling.top_p is not None:
        p = np.exp(x[kept] - x[kept].max())
        before = np.cumsum(p / p.sum()) - p / p.sum()
        kept = kept[before < sampling.top_p]
    y = np.full(len(x), -np.inf)
    y[kept] = x[kept] - x[kept].max()
    return y - np.log(np.exp(y).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accept", "drafter"),
    [(None, "standalone"), (None, jspec.Standalone(depth=3, width=3)), ("rejection", "standalone")],
)
def test_logprobs_are_those_of_one_forward_over_the_output(model, accept, drafter):
    options = dict(sampling=MIXED_SAMPLING, accept=accept, max_new_tokens=20, logprobs=4)
    out = jspec.generate(model, PROMPTS, drafter=drafter, **options)
    assert out.stats.accept_length > 1.2

    @jax.jit
    def read(params, ids):
        cache = model.target.init_cache(params, len(ids), 4, 4)
        return model.target.forward(params, tree.chain(ids), cache, None).logits

    rows = [model.tokenizer.encode(prompt) + new for prompt, new in zip(PROMPTS, out.tokens, strict=True)]
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    logits = np.array(read(model.params.target, padded))
    for i, row in enumerate(rows):
        for at, (token, sampled) in enumerate(zip(out.tokens[i], out.sampled_logprobs[i], strict=True)):
            first, options = len(row) - len(out.tokens[i]) + at, MIXED_SAMPLING[i]
            if options is None or not options.min_new_tokens or at >= options.min_new_tokens:
                wanted = log_distribution(logits[i, first - 1], row[:first], options)[token]
                np.testing.assert_allclose(sampled, wanted, atol=2e-5)
    assert out[0].sampled_logprobs == out.sampled_logprobs[0] != out.logprobs[0]
    assert out.sampled_logprobs[1] == [0.0] * len(rows[1][1:])
    distributions = jax.nn.log_softmax(logits)
    columns = distributions, rows, out.tokens, out.logprobs, out.top_logprobs
    for log_p, row, new, logprobs, top in zip(*columns, strict=True):
        before = log_p[np.arange(len(row) - len(new) - 1, len(row) - 1)]
        np.testing.assert_allclose(logprobs, before[np.arange(len(new)), new], atol=2e-5)
        ids, values = np.array(top)[..., 0].astype(int), np.array(top)[..., 1]
        np.testing.assert_allclose(values, -np.sort(-before)[:, :4], atol=2e-5)
        np.testing.assert_allclose(values, np.take_along_axis(before, ids, 1), atol=2e-5)
    assert out[0].top_logprobs == out.top_logprobs[0]


@pytest.mark.slow
def test_the_origin_of_each_token_adds_up_to_the_counters(model):
    out = jspec.generate(model, PROMPTS, drafter=jspec.Standalone(depth=3, width=2), max_new_tokens=40)
    for b, origin in enumerate(out.origin):
        rounds, run = [], 0
        assert origin[0] == 0, "the first token comes from prefill"
        for depth in origin[1:]:
            run += 1
            assert depth in (0, run), "drafts of a round count up from 1, and the target's own token ends it"
            if depth == 0:
                rounds, run = [*rounds, run], 0
        rounds += [run] if run else []
        assert len(rounds) == out.stats.rounds[b]
        rounds[-1] += out.stats.dropped[b]
        np.testing.assert_array_equal(np.bincount(rounds, minlength=5)[1:], out.stats.accept_counts[b])
    assert max(map(max, out.origin)) == 3


@pytest.mark.slow
def test_drafted_sampling_in_a_users_jit_equals_plain_sampling(model):
    """The sampling parameters are traced arrays, and each sequence has its own key."""

    def run(drafter):
        @jax.jit
        def inner(params, temperature, key):
            rows = RowSampling(temperature=temperature, top_p=jnp.full(2, 0.95))
            arguments = dict(target=model.target, draft=model.draft, max_new_tokens=12, logprobs=True)
            ids = jnp.asarray([[5, 6, 7], [5, 6, 7]], jnp.int32)
            return jspec.generate_ids(params, ids, jnp.array([3, 3]), key, drafter=drafter, sampling=rows, **arguments)

        return inner(model.params, jnp.array([1.0, 0.0]), jax.random.split(jax.random.key(1), 2))

    plain, drafted = run(None), run("standalone")
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    np.testing.assert_allclose(plain.logprobs, drafted.logprobs, atol=1e-5)
    np.testing.assert_allclose(plain.sampled_logprobs, drafted.sampled_logprobs, atol=1e-5)
    assert not plain.sampled_logprobs[1].any() and (plain.sampled_logprobs != plain.logprobs).any()
    assert (plain.tokens[0] != plain.tokens[1]).any() and plain.logprobs[0, 3:].all()
