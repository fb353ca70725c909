"""Output, logits and checkpoints equal those of `transformers` in float32, for every family.

Greedy tokens with each drafter, depth and page size; logits of checkpoints in all layouts; ours load there.
"""

import itertools
import json
from typing import Any, NamedTuple

import hf
import parity
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec.drafters import Eagle, Ngram, Standalone, Suffix

pytestmark = pytest.mark.filterwarnings("ignore:.*long_factor is not used")
PAGES = (1, 16, 64)
CHAIN, TREE = Standalone(depth=4), Standalone(depth=4, width=3, num_nodes=24)
"""The tree has more nodes than the shortest window has tokens; it is 4 deep."""
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
GEMMA4 = [f"gemma4-{kind}" for kind in hf.GEMMA4_KINDS]
DEEPSEEK = [f"deepseek-{kind}" for kind in hf.DEEPSEEK_KINDS]


class Case(NamedTuple):
    """What generates. chunk: columns in which prompts are read; window: None: that of the family."""

    family: str
    drafter: Any
    page_size: int
    chunk: int | None = None
    draft: str | None = None
    """In place of the drafter's own: one that is nearly never right, of `RANDOM_HEAD` or "llama", another family's."""
    window: int | None = None

    def __str__(self) -> str:
        name = "plain" if self.drafter is None else f"{type(self.drafter).__name__}-{self.drafter.depth}"
        width = getattr(self.drafter, "width", 1)
        name += f"x{width}" if width > 1 else ""
        details = [self.page_size, self.chunk, self.draft, self.window and f"window {self.window}"]
        return "-".join([self.family, name, *(str(detail) for detail in details if detail is not None)])


def turns(families, drafters, pages=(1, 16, 5), chunks=(None, 20, 7)):
    """All pairs with their indices, a page size and a chunk; these take turns."""
    for (i, family), (k, drafter) in itertools.product(enumerate(families), enumerate(drafters)):
        yield i, k, (family, drafter, pages[(i + k) % 3], chunks[(i + 2 * k) % 3])


MAKERS = (Standalone, Eagle)
OUTPUTS = [
    *(Case("llama", None, size) for size in PAGES),
    # Every depth from 1 to 6, each with some drafter and one page size.
    *(
        Case("llama", make(depth=depth), PAGES[depth % 3])
        for make, depths in ((Ngram, (1, 4, 6)), (Standalone, (1, 2, 4, 6)), (Eagle, (2, 3, 5)))
        for depth in depths
    ),
    # Trees from narrow to wide and from flat to deep.
    *(
        Case("llama", make(depth, width, num_nodes=min(64, 1 + width + (depth - 1) * width**2)), PAGES[depth % 3])
        for make, shapes in zip(MAKERS, (((1, 2), (4, 5)), ((2, 8), (6, 3))), strict=True)
        for depth, width in shapes
    ),
    # The loop is the same for every family.
    *(
        Case("qwen3", drafter, PAGES[i % 3])
        for i, drafter in enumerate([None, Ngram(depth=5), *(make(4, width) for make in MAKERS for width in (1, 3))])
    ),
    *(
        Case(family, drafter, (1, 5, 16)[(i + k) % 3], chunk)
        for i, k, (family, drafter, _, chunk) in turns(
            hf.VARIANTS, (None, Ngram(depth=12), CHAIN, TREE, Eagle(depth=4, width=3), Suffix())
        )
        if (i + k) % 2
    ),
    # A chain of 12, trees and a chunk of 20 are longer than a window of 8.
    Case("gemma3", None, 16),
    Case("gemma3", Ngram(depth=12), 1, 20),
    Case("gemma3", CHAIN, 5, 7),
    Case("gemma3", TREE, 16, 20),
    Case("gemma3", Eagle(depth=4, width=3), 16, 7),
    Case("gemma4-dense", Ngram(depth=12), 1, 20, window=8),
    Case("gemma4-dense", TREE, 16, window=16),
    Case("gemma4-shared", TREE, 1, 7, window=8),
    Case("gemma4-shared", None, 16, 20, window=16),
    Case("gemma4-experts", CHAIN, 16, 20, window=8),
    *(
        Case(family, drafter, (1, 16, 5)[(i + k // 2) % 3], chunk, window=(8, 16, 64)[(i + k) % 3])
        for i, k, (family, drafter, _, chunk) in turns(
            GEMMA4, (None, Ngram(depth=12), CHAIN, TREE, Eagle(depth=3), Eagle(4, width=3))
        )
        if (i + k) % 2
    ),
    Case("gpt_oss", None, 16, 20),
    Case("gpt_oss", Suffix(depth=8, width=3, num_nodes=20), 5, 20),
    Case("gpt_oss", Suffix(depth=12), 1),
    Case("gpt_oss", TREE, 16, 7),
    Case("gpt_oss", Eagle(depth=3), 16, draft=parity.RANDOM_HEAD),
    Case("gpt_oss", Eagle(depth=4, width=3, num_nodes=12), 5, 7, draft=parity.RANDOM_HEAD),
    Case("gpt_oss", Eagle(depth=4, width=3), 1),
    Case("deepseek-v2", Standalone(depth=4, width=3, num_nodes=16), 1),
    Case("deepseek-v2_groups", CHAIN, 16, 20),
    Case("deepseek-v3", None, 1),
    *(
        Case(*point, (None, 20, 7)[i % 3])
        for i, k, (*point, _) in turns(DEEPSEEK, (None, Ngram(6), CHAIN, Standalone(4, width=3, num_nodes=16)))
        if (i + k) % 3 == 0
    ),
    Case("qwen3_next", Ngram(depth=12), 16),
    Case("qwen3_5", Standalone(depth=3, width=2), 1, 20),
    *(
        Case(*point, (None, 20, 7, 70)[(i + k) % 4], draft="llama" if k == 5 else None)
        for i, k, (*point, _) in turns(
            RECURRENT, (None, Ngram(depth=12), CHAIN, TREE, Standalone(2, width=4), CHAIN, Eagle(depth=4, width=3))
        )
        if (i + k) % 3 == 0
    ),
    Case("qwen3_moe", Standalone(depth=3, width=2, num_nodes=8), 16),
    Case("qwen3_moe", None, 1),
    Case("qwen3_moe", Ngram(depth=5), 16),
    Case("qwen3_moe", CHAIN, 1),
]
LEAST = {"": 1.2, "llama": 1.3, "qwen3": 1.3, "qwen3_": 1.5, "qwen3_moe": 1.2}
"""The beginning of a family's name -> tokens per round of a draft that is close to its target."""


@pytest.mark.slow
@pytest.mark.parametrize("case", OUTPUTS, ids=str)
def test_greedy_output_equals_transformers(pair, case, monkeypatch):
    ours = pair(case.family, **({} if case.window is None else {"sliding_window": case.window}))
    model = None if case.draft is None else ours.with_draft(case.draft)
    out = parity.check_output(ours, case.drafter, case.page_size, case.chunk, monkeypatch, model)
    if model is None and isinstance(case.drafter, MAKERS):
        least = parity.by_family(LEAST, case.family) if isinstance(case.drafter, Standalone) else 1.05
        assert out.stats.accept_length > least, "the draft is close to its target: something must be accepted"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, Ngram(depth=4), Standalone(depth=4, width=3)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eos_cuts_where_transformers_stops(pair, family, drafter):
    model, oracle = pair(family).model, pair(family).oracle
    prompts, plain = pair(family).texts
    # Tokens from the middle of the outputs, so sequences end at different positions, also within accepted runs.
    eos = sorted({plain[1][7], plain[2][11], plain[3][4]})
    wanted = [hf.greedy(oracle, prompt, parity.NEW_TOKENS, eos_token_id=eos, pad_token_id=0) for prompt in prompts]
    ending = jspec.Model(model.name, model.target, model.params, None, tuple(eos), model.draft)
    out = jspec.generate(ending, prompts, drafter=drafter, max_new_tokens=parity.NEW_TOKENS)
    assert out.tokens == wanted
    assert out.finish_reason == ["eos" if row[-1] in eos else "length" for row in wanted]
    assert len({len(row) for row in wanted}) > 1


# Checkpoints

LAYOUTS = [
    *((family, old, sharded) for family in ("llama", "qwen3") for old in (False, True) for sharded in (False, True)),
    *((family, old, old) for family in (*hf.VARIANTS, "gemma3", *GEMMA4) for old in (False, True)),
]
"""Family, whether its config.json is of the older generation, and whether there are several files."""


@pytest.mark.slow(
    unless=(
        *("llama", "qwen", "mistral", "smollm", "olmo", "phi3", "granite", "glm", "gemma3"),
        *("gemma4-dense-new", "gemma4-shared-old", "gemma4-experts-new"),
    )
)
@pytest.mark.parametrize(
    ("family", "old", "sharded"),
    LAYOUTS,
    ids=[f"{family}-{'old' if old else 'new'}{'-sharded' * sharded}" for family, old, sharded in LAYOUTS],
)
def test_logits_equal_transformers(tmp_path, family, old, sharded):
    oracle = hf.build(family, seed=3)
    parity.save(oracle, tmp_path, sharded=sharded, old=old)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    parity.check_logits(oracle, tmp_path, family)


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("qwen3", {"attention_bias": True, "head_dim": 64}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen2-windows", {"layer_types": [FULL, SLIDING, FULL]}),
    ("mistral", {"head_dim": 32, "rope_parameters": {**hf.LLAMA3_ROPE}}),
    ("smollm3", {"attention_bias": True, "no_rope_layers": None, "tie_word_embeddings": False}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    ("olmo2", {"num_key_value_heads": 1}),
    ("olmo3", {"layer_types": [FULL] * 5, "rope_parameters": None}),
    ("phi3", {"sliding_window": None, "num_key_value_heads": 4}),
    ("granite", {"attention_bias": True, "tie_word_embeddings": True}),
    ("glm4", {"attention_bias": False, "head_dim": 32, "num_key_value_heads": 4}),
    ("glm", {"attention_bias": False, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ("gemma3", {"final_logit_softcapping": 3.0, "num_key_value_heads": 4}),
    ("gemma3", {"rope_parameters": None, "sliding_window": 1}),
    ("gemma3", {"layer_types": [FULL] * 4}),
    ("gemma3", {"layer_types": [SLIDING] * 4, "head_dim": 32}),
    ("gemma4-dense", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
    ("gemma4-dense", {"final_logit_softcapping": None, "num_attention_heads": 8}),
    ("gemma4-dense", {"layer_types": [FULL] * 2}),
    ("gemma4-dense", {"layer_types": [SLIDING] * 5 + [FULL], "sliding_window": 1}),
    ("gemma4-shared", {"use_double_wide_mlp": False}),
    ("gemma4-shared", {"num_kv_shared_layers": 0}),
    ("gpt_oss", {"tie_word_embeddings": True, "attention_bias": False}),
    ("gpt_oss", {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 1}),
    ("gpt_oss", {"layer_types": [FULL] * 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("gpt_oss", {"swiglu_alpha": 1.0, "swiglu_limit": 7.0, "num_experts_per_tok": 4, "num_key_value_heads": 1}),
    ("gpt_oss", {"rope_parameters": {**hf.GPT_OSS["rope_parameters"], "truncate": True}, "head_dim": 24}),
    ("deepseek-v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    ("deepseek-v2", {"tie_word_embeddings": True, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-3}),
    ("deepseek-v3", {"q_lora_rank": None, "num_hidden_layers": 1}),
    ("qwen3_next", {"layer_types": [LINEAR, FULL] * 2}),
    ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("qwen3_next", {"decoder_sparse_step": 2, "linear_conv_kernel_dim": 3}),
    ("qwen3_5_moe", {"linear_num_value_heads": 2}),
    ("qwen3_5", {"head_dim": 32, "num_attention_heads": 6}),
]
OLD = ({"norm_topk_prob", "n_group", "topk_group"}, {"layer_types"})
"""Changes of DeepSeek and Qwen3-Next that are in several files, and in a config.json of the older generation."""


@pytest.mark.slow(
    unless=(
        *("llama", "qwen3-", "gemma4-dense-final_logit_softcapping", "gemma4-shared-use_double_wide_mlp"),
        "qwen3_next-norm_topk_prob",
    )
)
@pytest.mark.parametrize(
    ("family", "changes"), OPTIONS, ids=[f"{family}-{'-'.join(changes)}" for family, changes in OPTIONS]
)
def test_logits_equal_transformers_with_other_options(tmp_path, family, changes):
    oracle = hf.build(family, seed=4, **changes)
    old = family in ("deepseek-v3", "qwen3_next") and set(changes) in OLD
    parity.check_logits(oracle, parity.save(oracle, tmp_path, sharded=old, old=old), family)


@pytest.mark.slow(unless=("llama", "qwen2", "phi3-long", "glm4", "olmo3", "gemma", "deepseek", "qwen3_moe"))
@pytest.mark.parametrize(
    "family", ("llama", "qwen3", *hf.VARIANTS, "gemma3", *GEMMA4, "gpt_oss", *DEEPSEEK, "qwen3_moe")
)
def test_our_checkpoint_loads_in_transformers_and_here(tmp_path, pair, family):
    parity.check_saved(tmp_path, pair(family), family)


@pytest.mark.parametrize("family", ("mistral", "gemma3", "gemma4-dense", "qwen3_5"))
@pytest.mark.parametrize("name", ("model.layers.1.self_attn.q_proj.bias", "model.towers.weight", "model.layers.3.x"))
def test_an_unused_tensor_is_an_error(tmp_path, family, name):
    hf.save(hf.build(family), tmp_path)
    parity.check_unused(tmp_path, name)


VISION = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
MULTIMODAL = {
    "gemma3": ("Gemma3", dict(vision_config={**VISION, "image_size": 28}, mm_tokens_per_image=4)),
    "gemma4-shared": ("Gemma4", dict(vision_config={**VISION, "head_dim": 8}, audio_config=None)),
}


@pytest.mark.parametrize(
    ("family", "root"), [("gemma3", None), ("gemma3", "model.language_model."), ("gemma4-shared", None)], ids=str
)
def test_the_text_model_of_a_multimodal_one(tmp_path, family, root):
    prefix, options = MULTIMODAL[family]
    config = getattr(parity.transformers, f"{prefix}Config")(text_config=hf.build(family).config.to_dict(), **options)
    whole = hf.randomize(getattr(parity.transformers, f"{prefix}ForConditionalGeneration")(config).eval(), seed=3)
    path = hf.save(whole, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    assert any("vision_tower." in name for name in tensors), "there is nothing to skip"
    # Names of the two generations: the tensors of the text model keep what follows the root.
    (embed,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    if root is not None:
        theirs = embed.removesuffix("embed_tokens.weight")
        renamed = {name.replace(theirs, root, 1): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, path, metadata={"format": "pt"})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 96]}))
    parity.edit(tmp_path, lambda raw: raw["text_config"].update(eos_token_id=7))
    loaded = parity.check_logits(lambda ids: whole(input_ids=ids), tmp_path, family)
    assert loaded.eos == (1, 7, 96)


def test_a_tied_head_and_projections_of_sharing_layers_may_be_there(tmp_path):
    oracle = hf.build("gemma4-shared")
    hf.save(oracle, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        tensors[f"model.layers.2.self_attn.{name}"] = tensors[f"model.layers.0.self_attn.{name}"]
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path)
    parity.check_logits(oracle, tmp_path, "gemma4-shared")


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"norm_topk_prob": False, "tie_word_embeddings": True}, ()),
        ({"num_hidden_layers": 3, "decoder_sparse_step": 2}, (0, 2)),
        ({"num_experts": 0}, ()),
    ],
)
def test_layers_without_experts(tmp_path, changes, dense):
    oracle = hf.build("qwen3_moe", seed=4, **changes)
    loaded = parity.check_logits(oracle, hf.save(oracle, tmp_path), "qwen3_moe")
    assert loaded.config.dense_layers == dense
    assert (loaded.config.experts is None) == (changes.get("num_experts") == 0)


@pytest.mark.parametrize("name", ("num_experts", "num_local_experts"))
def test_the_number_of_experts_has_two_names(tmp_path, name):
    oracle = hf.build("qwen3_moe")
    path = hf.save(oracle, tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    count = [raw.pop(key) for key in ("num_experts", "num_local_experts") if key in raw][0]
    path.write_text(json.dumps({**raw, name: count}))
    parity.check_logits(oracle, tmp_path, "qwen3_moe")
