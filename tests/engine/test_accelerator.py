"""On an accelerator, the bundled models give the same tokens as on the CPU, up to near-ties.

At a near-tie, the logits of two tokens, computed in float32 on the CPU, differ by less than the rounding error of the
accelerator. Either token is correct there.
"""

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.core import tree
from jspec.drafters import DRAFTERS
from jspec.loading.hub import bundled_draft

AS_SHIPPED = True

ACCELERATOR = jax.default_backend() != "cpu"
pytestmark = pytest.mark.skipif(not ACCELERATOR, reason="needs an accelerator: a GPU or TPU as JAX's default backend")

# Logits are in the tens here: bfloat16 has 8 bits of precision, and the errors of eight layers add up.
NEAR_TIE = {"float32": 2e-3, "bfloat16": 0.25}
TREE = {"depth": 5, "width": 8, "num_nodes": 32}
DRAFTED = [jspec.Ngram(depth=4), jspec.Standalone(depth=4), jspec.Eagle(depth=5), jspec.Eagle(**TREE)]
DRAFTED += [jspec.FrozenKvMtp(depth=4), jspec.FrozenKvMtp(**TREE)]


def load(drafter, dtype):
    """The bundled target with the draft for a drafter."""
    names = {kind: name for name, kind in DRAFTERS.items()}
    draft = None if drafter is None else bundled_draft("bundled:python-small", names[type(drafter)])
    return jspec.load("bundled:python-small", draft=draft, dtype=dtype)


@pytest.fixture(scope="module")
def on_cpu():
    """The target on the CPU in float32, some held-out prompts, and their greedy continuations."""
    prompts = heldout_prompts()[::8]
    with jax.default_device(jax.devices("cpu")[0]):
        model = jspec.load("bundled:python-small", dtype="float32")
        return model, prompts, jspec.generate(model, prompts, drafter=None, max_new_tokens=64).tokens


def logit_gap(model, prompt, common, ours, theirs):
    """The logit of the CPU's choice minus that of the accelerator's choice, after the tokens both have in common."""
    with jax.default_device(jax.devices("cpu")[0]):
        ids = jnp.asarray([model.tokenizer.encode(prompt) + common], jnp.int32)
        cache = model.target.init_cache(model.params.target, 1, 1, 16)
        logits = model.target.forward(model.params.target, tree.chain(ids), cache, None).logits[0, -1]
        return float(logits[theirs] - logits[ours])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", [None, *DRAFTED], ids=str)
def test_tokens_equal_those_of_the_cpu_up_to_near_ties(on_cpu, drafter, dtype):
    reference, prompts, wanted = on_cpu
    model = load(drafter, dtype)
    out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=64)
    gaps = []
    for prompt, ours, theirs in zip(prompts, out.tokens, wanted, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            assert len(ours) == len(theirs)
            continue
        gaps.append(logit_gap(reference, prompt, theirs[:at], ours[at], theirs[at]))
    print(f"{dtype} {drafter}: {len(gaps)} of {len(prompts)} sequences differ from a near-tie on, gaps {sorted(gaps)}")
    assert all(0 <= gap < NEAR_TIE[dtype] for gap in gaps)


@pytest.mark.parametrize("sampling", (None, jspec.Sampling(temperature=0.8, top_p=0.9)), ids=("greedy", "sampled"))
@pytest.mark.parametrize("drafter", DRAFTED, ids=str)
def test_drafting_equals_plain_decoding_in_float32(drafter, sampling):
    model, options = load(drafter, "float32"), {"sampling": sampling, "max_new_tokens": 64}
    prompts = heldout_prompts()[3::16]
    plain = jspec.generate(model, prompts, drafter=None, **options)
    assert jspec.generate(model, prompts, drafter=drafter, **options).tokens == plain.tokens
