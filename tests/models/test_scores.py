"""Log-probabilities equal those of `transformers`, for every family."""

import hf
import numpy as np
import optional
import pytest

import jspec
from jspec.checkpoints import language_model
from jspec.core.types import Params

torch, transformers = optional.lazy("torch", "transformers")

FAMILIES = (
    *("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gpt_oss"),
    *(f"gemma4-{kind}" for kind in hf.GEMMA4_KINDS),
    *(f"deepseek-{kind}" for kind in hf.DEEPSEEK_KINDS),
)
TOLERANCE = {"gemma4": 3e-5, "qwen3_next": 1e-3, "qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}
"""Families with some logits that differ by more than 1e-5, but less than half of all do."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(tmp_path, family):
    torch.set_num_threads(1)
    oracle = hf.build(family, seed=3)
    loaded = language_model.load(hf.save(oracle, tmp_path), dtype="float32")
    model = jspec.Model(family, loaded.config, Params(loaded.params), None, ())
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, n).tolist() for n in (1, 12, 70, 130)]
    tolerance = TOLERANCE.get(family.split("-")[0], 1e-5)
    got = jspec.score(model, prompts, top_k=4)
    for prompt, scores in zip(prompts, got, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].double(), -1)
        wanted = log_p[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(scores.logprobs[1:], wanted, atol=tolerance, rtol=0)
        if len(prompt) > 10:
            assert np.median(np.abs(scores.logprobs[1:] - wanted)) < 1e-5
        values, _ = log_p[:-1].topk(4, dim=-1)
        if len(prompt) > 1:
            top = [[x for _, x in entry] for entry in scores.top[1:]]
            np.testing.assert_allclose(top, values.numpy(), atol=tolerance, rtol=0)
