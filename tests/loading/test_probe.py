"""The probe of drafts names planted misreadings, and is silent about good drafts.

Good drafts are those bundled for `python-small`. A misreading is planted in the checkpoint of a good draft, by a wrong
key or by tensors in another order; or, if no key of config.json can state it, in its parsed configuration.
"""

import dataclasses
import json
import warnings

import fake_engine
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_files import TEMPLATES
from eagle_files import write
from safetensors.numpy import load_file

import jspec
from jspec import cli
from jspec.analysis.evaluate import heldout_prompts
from jspec.checkpoints import drafts
from jspec.core.types import Params
from jspec.loading import probe
from jspec.loading.hub import locate
from jspec.loading.model import probe_draft
from jspec.models import BlockHead

TARGET = "bundled:python-small"
EAGLE, BLOCK = "bundled:python-eagle3", "bundled:python-block"
AUX = "eagle_aux_hidden_state_layer_ids"


def test_prompts_of_chat_models_are_whole_chats_of_one_length():
    tokenizer = fake_engine.make_tokenizer(TEMPLATES["chatml"])
    prompts = probe.make_prompts(tokenizer, 1000)
    for prompt, text in zip(prompts, probe.PROMPTS, strict=True):
        message = tokenizer.decode(list(prompt)).partition("user\n")[2].partition("<|im_end|>")[0]
        assert message and text.startswith(message)
        assert list(prompt) == tokenizer.chat([{"role": "user", "content": message}])
    # Without a template, with one that refuses, or one that drops the message, they are plain texts.
    for template in (None, "{{ raise_exception('no') }}", "Hello!"):
        tokenizer = fake_engine.make_tokenizer(template)
        texts = [tokenizer.decode(list(prompt)) for prompt in probe.make_prompts(tokenizer, 1000)]
        assert all(text.startswith(part) for text, part in zip(probe.PROMPTS, texts, strict=True))


def pairs_side_by_side(tensors):
    """The rows of queries and keys, and norms of heads, with rotated pairs (2 i, 2 i + 1) in place of (i, i + 32)."""

    def turn(x):
        return x.reshape(-1, 2, 32, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    names = [name for name in tensors if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))]
    return tensors | {name: turn(tensors[name]) for name in names}


PLANTED = {
    "eagle layers higher": (EAGLE, {"eagle_config": {}, AUX: [3, 5, 6]}, None, "captured layers one lower"),
    "eagle layers lower": (EAGLE, {"eagle_config": {}, AUX: [1, 3, 4]}, None, "captured layers one higher"),
    "eagle residual": (EAGLE, {"norm_before_residual": True}, None, "norm_before_residual"),
    "eagle output": (EAGLE, {"norm_output": True}, None, "norm_output"),
    "eagle pairs": (EAGLE, {}, pairs_side_by_side, "the other layout of rotary pairs"),
    "eagle flag": (EAGLE, {"is_neox_style": False}, None, "the other layout of rotary pairs"),
    "eagle theta": (EAGLE, {"rope_theta": 100.0}, None, "the target's theta"),
    "block layers higher": (BLOCK, {"target_layer_ids": [2, 3, 4, 5, 6]}, None, "captured layers one lower"),
    "block layers lower": (BLOCK, {"target_layer_ids": [0, 1, 2, 3, 4]}, None, "captured layers one higher"),
    "block anchor": (BLOCK, {"sample_from_anchor": False}, None, "the other row as the first prediction"),
    "block causal": (BLOCK, {"is_causal": True}, None, "blocks that see both ways"),
    "block pairs": (BLOCK, {}, pairs_side_by_side, "the other layout of rotary pairs"),
    "block flag": (BLOCK, {"is_neox_style": False}, None, "the other layout of rotary pairs"),
    "block theta": (BLOCK, {"rope_theta": 100.0}, None, "the target's theta"),
}
"""Name -> the good draft, the keys that change, how tensors change, and a part of the warning."""


def plant(directory, name):
    """Writes a checkpoint that will be misread."""
    source, keys, reorder, _ = PLANTED[name]
    raw = json.loads((locate(source) / "config.json").read_text())
    tensors = load_file(locate(source) / "model.safetensors")
    return write(directory, {**raw, **keys}, reorder(tensors) if reorder else tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_misreading_is_named(name, tmp_path):
    directory = plant(tmp_path / "draft", name)
    with pytest.warns(UserWarning, match=PLANTED[name][3]) as caught:
        jspec.load(TARGET, draft=directory, probe=True)
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith(f"draft {directory}: ") and "tokens are right as read" in text and probe.DOCS in text


@pytest.mark.slow
def test_the_command_line_prints_the_warning_and_goes_on(tmp_path, capsys):
    directory = plant(tmp_path / "draft", "eagle residual")
    words = ["def f(", "--model", TARGET, "--draft", str(directory), "--max-new-tokens", "4"]
    assert cli.main(["generate", *words]) == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"jspec: draft {directory}: ") and "check norm_before_residual in config.json" in first
    assert cli.main(["generate", *words, "--no-probe"]) == 0
    assert "as read" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_doctor_prints_and_writes_every_reading(tmp_path, capsys):
    directory, path = plant(tmp_path / "draft", "eagle residual"), tmp_path / "doctor.json"
    assert cli.main(["doctor", "--model", TARGET, "--draft", str(directory), "--json", str(path)]) == 1
    out, written = capsys.readouterr().out, json.loads(path.read_text())["draft"]
    assert f"as read: {written['right']} of {written['total']} first tokens are right" in out
    assert all(f"with {other['name']}" in out for other in written["others"])
    assert f"\ndraft {directory}: " in out and "check norm_before_residual" in out
    assert cli.main(["doctor", "--draft", EAGLE]) == 2
    assert "requires --model" in capsys.readouterr().err


# Good drafts


SPELLINGS = {
    "eagle": (EAGLE, "safeailab"),
    "eagle speculators": (EAGLE, "speculators"),
    "block": (BLOCK, "deepspec"),
    "block speculators": (BLOCK, "speculators"),
    "assistant": ("bundled:python-assistant", None),
    "language model": ("bundled:python-tiny", None),
}


@pytest.fixture(scope="module", params=SPELLINGS)
def good(request, tmp_path_factory):
    """A bundled draft, as bundled or written again in another layout."""
    source, layout = SPELLINGS[request.param]
    if layout is None:
        return jspec.load(TARGET, draft=source)
    model, directory = jspec.load(TARGET, draft=source), tmp_path_factory.mktemp("draft")
    drafts.save(directory, model.draft, model.params.draft, layout=layout, dtype="float32")
    return jspec.load(TARGET, draft=directory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_good_draft_is_not_warned_of(good, seed, monkeypatch):
    """With the texts of the probe, and with beginnings of held-out texts in their place."""
    if seed:
        monkeypatch.setattr(probe, "PROMPTS", heldout_prompts()[6 * seed : 6 * seed + 6])
    fit = probe_draft(good)
    assert fit.warning("it") is None and fit.right > fit.total // 2
    assert fit.others or good.draft.drafter == "standalone"


@pytest.mark.slow
def test_nothing_is_probed_unless_asked_for(monkeypatch):
    monkeypatch.setattr(probe, "write", None)
    assert jspec.load(TARGET).draft is not None
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jspec.load("bundled:python-tiny", probe=True).draft is None
        jspec.load(TARGET, probe=True)


# Drafts that do not fit


@pytest.mark.slow
def test_a_draft_for_another_target_fits_under_no_reading():
    """The head reads the same shapes, but from the target with its vocabulary in another order."""
    model = jspec.load(TARGET)
    other = np.random.default_rng(0).permutation(model.target.vocab_size)
    target = dataclasses.replace(model.params.target, embed=model.params.target.embed[other])
    fit = probe_draft(dataclasses.replace(model, params=Params(target, model.params.draft)))
    assert fit.better is None and "no reading fits better: is it a draft for this target?" in fit.warning("it")


@pytest.mark.slow
def test_a_language_model_with_a_shifted_vocabulary_does_not_fit():
    model = jspec.load(TARGET, draft="bundled:python-tiny")
    weights = dataclasses.replace(model.params.draft, embed=jnp.roll(model.params.draft.embed, 3, axis=0))
    fit = probe_draft(dataclasses.replace(model, params=Params(model.params.target, weights)))
    assert not fit.others and "no reading fits" in fit.warning("it")


def test_without_a_draft_or_over_devices_there_is_nothing_to_probe():
    with pytest.raises(ValueError, match="must have a draft"):
        probe_draft(jspec.load("bundled:python-tiny"))
    with pytest.raises(ValueError, match="probe=True: must be False for a model that is split"):
        jspec.load(TARGET, mesh=jax.make_mesh((1,), ("data",)), probe=True)


class LaterBlocks(BlockHead):
    """Reads blocks one position later than they were trained."""

    def apply(self, params, target, tokens, positions, cache, start):
        return super().apply(params, target, tokens, positions + 1, cache, start)


@pytest.mark.slow
def test_blocks_at_later_positions_are_named():
    model = jspec.load(TARGET, draft=BLOCK)
    draft = LaterBlocks(**{field.name: getattr(model.draft, field.name) for field in dataclasses.fields(model.draft)})
    fit = probe_draft(dataclasses.replace(model, draft=draft))
    assert "with positions one lower" in fit.warning("it")
