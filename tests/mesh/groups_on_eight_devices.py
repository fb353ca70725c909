"""Sequences that are split over groups of devices: each gets what one device gives it.

test_mesh.py runs these tests in a process with eight CPU devices.
"""

import dataclasses

import gemma
import jax
import numpy as np
import on_eight_devices as split
import pytest
import tiny_targets as tiny
from random_models import arrays_of

import jspec
from jspec.checkpoints import language_model
from jspec.cli import main
from jspec.core.sharding import DATA, TENSOR
from jspec.drafters import Adaptive, Ngram, Standalone, Suffix
from jspec.engine import generate
from jspec.generation import run, score
from jspec.generation.run import Run
from jspec.loading import memory

directories = split.directories
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def load(directories):
    def loaded(name, draft, **devices):
        return jspec.load(directories(name), draft=draft and directories(draft), **devices)

    return loaded


def trips(run):
    """Rounds of each group's loop."""
    return np.asarray(run.state.round_index).tolist()


def assert_trips(run, out, size):
    """Each group of `size` sequences has run until its own last sequence ended."""
    rounds = out.stats.rounds.tolist()
    own = [max(rounds[start : start + size], default=0) for start in range(0, len(trips(run)) * size, size)]
    assert trips(run) == own


def draft_rows(run):
    """The rows of a draft's cache, of the committed tokens of each sequence."""
    cache = run.state.draft.cache
    cache, table, lengths = (np.asarray(x) for x in (cache.pool, cache.page_table, run.state.length))
    if lengths.ndim == 1:
        cache, table, lengths = cache[None], table[None], lengths[None]
    found = []
    for pool, tables, own in zip(cache, table, lengths, strict=True):
        for pages, length in zip(tables, own, strict=True):
            rows = pool[:, :, pages]
            found.append(rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])[:, :, : length - 1])
    return found[: len(run.prompts)]


@pytest.mark.slow
def test_groups_generate_what_one_device_does(load):
    """Tokens, rounds, log-probabilities and rows; greedy and sampled sequences, and one group that ends early."""
    drafter = Standalone(**tiny.TREE)
    options = dict(drafter=drafter, page_size=1, seed=7, logprobs=True, **tiny.KINDS["mixed"])
    options["max_new_tokens"] = [24, 24, 3]
    one = Run(load("tied", "draft of tied"), tiny.PROMPTS, jspec.GenerateOptions(**options))
    expected = one.finish()
    model = load("tied", "draft of tied", data=2, tensor=2, draft_tensor=True)
    assert "on 4 devices (data=2, tensor=2)" in repr(model)
    run = Run(model, tiny.PROMPTS, jspec.GenerateOptions(**options))
    split.assert_same(run.finish(), expected)
    assert expected.stats.accept_length > 1.3
    assert_trips(run, expected, 2)
    assert trips(run)[0] > 2 * trips(run)[1]
    for got, wanted in zip(draft_rows(run), draft_rows(one), strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-5)
    shape = run.state.cache.pool.shape
    own = (1, *shape[1:5], shape[5] // 2, *shape[6:])
    assert {shard.data.shape for shard in run.state.cache.pool.addressable_shards} == {own}
    pieces = list(jspec.stream(model, tiny.PROMPTS, rounds=2, **options))
    for i, out in enumerate(expected):
        assert [token for piece in pieces if piece.index == i for token in piece.tokens] == out.tokens
    assert len([piece for piece in pieces if piece.index == 0]) > 3


@slow
def test_more_groups_than_sequences(load):
    options = dict(drafter=Ngram(), max_new_tokens=16, page_size=1, seed=[3, 11, 5], logprobs=2)
    options["sampling"] = [None, tiny.SAMPLED, None]
    expected = jspec.generate(load("experts", None), tiny.PROMPTS, **options)
    run = Run(load("experts", None, data=4, tensor=2), tiny.PROMPTS, jspec.GenerateOptions(**options))
    got = run.finish()
    split.assert_same(got, expected)
    assert_trips(run, expected, 1)
    for a, b in zip(got, expected, strict=True):
        assert [[id for id, _ in top] for top in a.top_logprobs] == [[id for id, _ in top] for top in b.top_logprobs]


@slow
def test_groups_of_one_device_each(tmp_path):
    """With the tables of a corpus, which all groups have, and without communication."""
    language_model.save(tmp_path / "gemma", gemma.KINDS["dense"], gemma.params("dense"), dtype="float32")
    options = dict(drafter=Suffix(n=4, depth=3, width=3), max_new_tokens=12, seed=2, sampling=tiny.SAMPLED)
    models = [
        jspec.with_corpus(jspec.load(tmp_path / "gemma", **devices), [list(range(40))]) for devices in ({}, {"data": 3})
    ]
    one, three = (jspec.generate(model, tiny.PROMPTS, **options) for model in models)
    split.assert_same(three, one)
    mesh = jax.make_mesh((3,), (DATA,), devices=jax.devices()[:3])
    placement = jspec.load(tmp_path / "gemma", mesh=mesh).placement
    assert (placement.size, placement.groups) == (1, 3)


@slow
def test_texts_with_grammars_stop_strings_and_checked_invariants():
    """Each group has the automata of its own sequences; an adaptive drafter decides for each group."""
    grammar = jspec.Grammar.regex("[a-z]{3,8} = [0-9]+")
    options = dict(max_new_tokens=20, stop=["\n\n", "5"], seed=4, page_size=4)
    options["sampling"] = [
        None,
        jspec.Sampling(temperature=0.7, grammar=grammar, repetition_penalty=1.2),
        jspec.Sampling(temperature=0.0, grammar=jspec.Grammar.regex("[A-Z]+;")),
        jspec.Sampling(temperature=0.9, logit_bias={5: 1.0}),
    ]
    prompts = ["def f(x):\n", "x", "import ", "for i in range("]
    # One sequence per group decides as a batch of one; with equal costs for all batches the sizes do not matter.
    drafter = Adaptive([None, Ngram(depth=2), Ngram(depth=4)], costs=[1.0, 1.02, 1.04], probe=3)
    model, one = jspec.load("bundled:python-tiny", data=4, tensor=2), jspec.load("bundled:python-tiny")
    got = jspec.generate(model, prompts, drafter=drafter, debug=True, **options)
    together = jspec.generate(one, prompts, drafter=drafter, **options)
    for a, b in zip(got, together, strict=True):
        assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
    own = {**options, "seed": [(4, 1)], "sampling": options["sampling"][1]}
    alone = jspec.generate(one, prompts[1], drafter=drafter, **own)
    assert got[1].tokens == alone.tokens
    np.testing.assert_array_equal(got[1].stats.accept_counts, alone.stats.accept_counts)
    np.testing.assert_array_equal(got[1].stats.branches.counts, alone.stats.branches.counts)
    assert {out.finish_reason for out in got} != {"length"}


@slow
def test_many_prompts_take_turns(load, monkeypatch):
    """Each group has slots of its own."""
    monkeypatch.setattr(generate, "MAX_BATCH", 1)
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    options = dict(drafter="plain", max_new_tokens=[5, 9, 7], seed=1, sampling=[None, tiny.SAMPLED, tiny.SAMPLED])
    model = load("tied", None, data=2, tensor=1)
    got = jspec.generate(model, prompts, **options)
    monkeypatch.undo()
    split.assert_same(got, jspec.generate(load("tied", None), prompts, **options))


def test_memory_counts_the_sequences_of_a_group(load, monkeypatch):
    model, one = load("tied", None, data=2), load("tied", None)
    found = []
    monkeypatch.setattr(memory, "fit", lambda *args: found.append(args[3]) or args[5])
    monkeypatch.setattr(run, "jitted_prefill", lambda *_, **options: 1 / 0)
    for each in (model, one):
        with pytest.raises(ZeroDivisionError):
            Run(each, tiny.PROMPTS, jspec.GenerateOptions())
    assert found == [2, 3]


@pytest.mark.parametrize(
    "options, error, match",
    [
        (dict(data=0), ValueError, "data=0: must be at least 1"),
        (dict(data=True), TypeError, "data=True"),
        (dict(data=9), ValueError, "data=9: must be at most 8, the number of devices"),
        (dict(data=4, tensor=4), ValueError, "data=4, tensor=4: their product must be at most 8"),
        (dict(data=2, tensor=3), ValueError, "tensor=3: must divide 8 heads"),
        (dict(data=2, draft_tensor=True), ValueError, "draft_tensor=True: requires tensor"),
        (dict(mesh=(2, 2), data=4), ValueError, "data=4: the mesh has 2 devices on its axis 'data'; omit data"),
    ],
    ids=str,
)
def test_wrong_groups_are_an_error(options, error, match, directories):
    if "mesh" in options:
        options = {**options, "mesh": jax.make_mesh(options["mesh"], (DATA, TENSOR))}
    with pytest.raises(error, match=match):
        jspec.load(directories("tied"), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (8, None)])
def test_scores_are_those_of_one_device(load, data, tensor, monkeypatch):
    """Prompts in several batches and chunks, and groups without one."""
    monkeypatch.setattr(score, "LOGITS_BYTES", 4 * 64 * 16)
    model = load("tied", None, data=data, tensor=tensor)
    expected = jspec.score(load("tied", None), split.LONG, top_k=3, page_size=8)
    split.assert_same_scores(jspec.score(model, split.LONG, top_k=3, page_size=8), expected)
    split.assert_same_scores([jspec.score(model, split.LONG[0], top_k=3, page_size=8)], expected[:1])


def test_what_cannot_have_groups_is_refused(load, capsys):
    model = load("tied", None, data=2, tensor=2)
    calls = {
        "check_drafter": lambda: jspec.check_drafter("ngram", model),
        "inspect_round": lambda: jspec.inspect_round(model, tiny.PROMPTS[1]),
    }
    for user, call in calls.items():
        with pytest.raises(ValueError, match=rf"split over 4 devices .*, which {user} does not support yet; load it w"):
            call()
    assert main(["generate", "x", "--model", "bundled:python-tiny", "--data", "2"]) == 2
    assert "--data 2: must be at most --batch, the prompts that run together: 1" in capsys.readouterr().err
    assert main(["evaluate", "--model", "bundled:python-tiny", "--batch", "9", "--data", "9"]) == 2
    assert "--data 9: must be at most 8, the number of devices" in capsys.readouterr().err


@slow
def test_the_command_splits_prompts(tmp_path, capsys):
    """Results come in the order of the prompts; the last batch is filled up."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('"def f("\n"import os"\n"x = 1"\n')
    command = ["generate", "--model", "bundled:python-tiny", "--prompts", str(path), "--json", "--max-new-tokens", "6"]
    assert main([*command, "--drafter", "plain", "--batch", "2", "--data", "2"]) == 0
    split_lines = capsys.readouterr().out
    assert main([*command, "--drafter", "plain", "--batch", "2"]) == 0
    assert split_lines == capsys.readouterr().out


def test_weights_of_arrays_are_those_of_files(load):
    config = tiny.TARGETS["tied"]
    model = load("tied", None, data=2, tensor=2)
    arrays = arrays_of(config, tiny.weights(config))
    new = jspec.from_named(config, arrays, data=2, tensor=2)
    split.assert_same_model(new, model)
    assert dataclasses.replace(model, params=new.params).placement.groups == 2
    assert model.with_params(new.params).placement == model.placement
