"""Several processes that generate together give what one device gives."""

import dataclasses
import json

import numpy as np
import product
import pytest
import several
import toy

import jspec
from jspec.checkpoints import language_model
from jspec.checkpoints.safetensors_file import SafetensorFiles
from jspec.drafters import Standalone

PROMPTS = toy.PROMPTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", several.KINDS)
def test_two_processes_generate_what_one_device_does(kind, tmp_path):
    """Groups of devices in each process, and a group over both; the processes must make the same calls."""
    target = toy.random_params(toy.TARGET, 0)
    near = toy.near(target, toy.random_params(toy.TARGET, 1))
    language_model.save(tmp_path / "target", toy.TARGET, target, dtype="float32")
    draft = dataclasses.replace(near, layers=near.layers[:1])
    language_model.save(tmp_path / "draft", toy.NEAR, draft, dtype="float32")
    sampling = [None, {"temperature": 0.8, "top_p": 0.9}, None]
    given = dict(prompts=PROMPTS, max_new_tokens=[16, 9, 4], seed=7, page_size=4, logprobs=True)
    (tmp_path / "options.json").write_text(json.dumps({**given, "sampling": sampling}))
    first, last = several.finish(
        several.start_all(several.worker("one_process.py", tmp_path, tmp_path), kind, tmp_path)
    )
    assert last == 3, several.logs(tmp_path)
    assert first != 0, "a process goes on without the other"
    zero, one = (json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2))

    model = jspec.load(tmp_path / "target", draft=tmp_path / "draft", dtype="float32")
    given["sampling"] = [one and jspec.Sampling(**one) for one in sampling]
    prompts = given.pop("prompts")
    drafted, copied = (
        jspec.generate(model, prompts, drafter=drafter, **given) for drafter in (Standalone(depth=2), "ngram")
    )
    for found in (zero, one):
        for name, expected in {"data": drafted, "tensor": copied, "again": copied}.items():
            assert found[name]["tokens"] == expected.tokens, name
            assert found[name]["rounds"] == expected.stats.rounds.tolist(), name
            assert found[name]["counts"] == expected.stats.accept_counts.tolist()
            assert found[name]["origin"] == [out.origin for out in expected]
            for got, out in zip(found[name]["logprobs"], expected, strict=True):
                np.testing.assert_allclose(got, out.logprobs, atol=1e-4)
        assert found["stream"] == drafted.tokens
        for got, out in zip(found["scores"], jspec.score(model, prompts), strict=True):
            np.testing.assert_allclose(got[1:], out.logprobs[1:], atol=1e-5)
        assert found["another seed"].startswith("seed: differs between process 0 and process 1")
        assert found["progress"].startswith(
            "progress, rounds or number of prompts: differs between process 0 and process 1"
        )
        assert several.EACH[kind] == 1 or "none of which belongs to process 1" in found["too few"]
        assert found["another top_k"].startswith("top_k: differs between process 0 and process 1")
    assert "page_size=0" in zero["one option fails"]
    assert one["one option fails"] == "process 0 has refused this call: the reason is in its own error"
    assert zero["one load fails"] == "process 1 has refused this call: the reason is in its own error"
    assert "config.json" in one["one load fails"]
    assert zero["one score fails"] == zero["one fails"]
    assert "contains the id 1000000" in one["one score fails"]
    assert zero["one fails"] == "process 1 has refused this call: the reason is in its own error"
    assert "contains the id 1000000" in one["one fails"]
    # Each byte of what is split is read by one process, but for heads that devices of both have.
    files = SafetensorFiles(tmp_path / "target")
    stored = {name: files.get(name).nbytes for name in files.names()}
    whole_heads = several.PROCESSES * several.EACH[kind] <= toy.TARGET.num_kv_heads
    heads = ("q_proj.weight", "o_proj.weight", *(("k_proj.weight", "v_proj.weight") if whole_heads else ()))
    split = {name for name in stored if name.endswith(heads) or ".mlp." in name}
    for found in (zero, one):
        assert found["read"] == {name: size // 2 if name in split else size for name, size in stored.items()}
    # Each process has the parts of its own devices: all of a model twice split over its two, or half of one over four.
    assert zero["tensor bytes"] == one["tensor bytes"] < 0.75 * zero["data bytes"]
    assert zero["8-bit bytes"] == one["8-bit bytes"] < zero["tensor bytes"] / 2


ON_GPUS = [
    ("qwen3", "eagle", "data 2", "engine"),
    ("qwen3", "standalone", "tensor 2", "engine"),
    ("experts", "block", "data 2", "generate"),
    ("latents", "eagle", "tensor 2", "generate"),
    ("states", "mtp", "tensor 2", "generate"),
    ("windows", "frozen_kv_mtp", "tensor 2", "generate_ids"),
    ("states and experts", "suffix", "data 2", "generate_ids"),
]
"""Points over two devices, one per process."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", several.KINDS)
def test_families_and_drafters_in_two_processes(kind, tmp_path):
    points = {"cpu": product.points_of_processes(), "gpu": [product.on_two(*names) for names in ON_GPUS]}
    check(points[kind], kind, tmp_path)


def check(points, kind, directory):
    """The tokens and rounds are those of one device."""
    checkpoints = product.Checkpoints(directory)
    expected = list(map(product.references(checkpoints), points))
    (directory / "points.json").write_text(json.dumps([dataclasses.asdict(point) for point in points]))
    processes = several.start_all(several.worker("product_process.py", directory, directory), kind, directory)
    ends = several.finish(processes, 3 * several.SECONDS)
    assert ends == [0, 0], several.logs(directory)
    for index in range(several.PROCESSES):
        found = json.loads((directory / f"{index}.json").read_text())
        for point, got, wanted in zip(points, found, expected, strict=True):
            if index == 0 or point.entry != "engine":
                product.assert_same(got, wanted, point)
            else:
                assert got == {}
