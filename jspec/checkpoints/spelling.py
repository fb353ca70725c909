"""Spellings of the fields in config.json of drafts: one table per kind of draft, and keys without effect on a forward.

Writers of drafts (SafeAILab, SpecForge, AngelSlim, ModelOpt, speculators, z-lab, DeepSpec, JetSpec) share few names.
Keys are at the top level, in a section of the method, or in one of the layers. `Spellings.read` gives one object with
each field under one name. A key in no table might change the forward, so it is an error.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jspec.checkpoints.fields import Fields, refuse

LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), ()),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"), ()),
    **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), ()),
    **dict.fromkeys(("original_max_position_embeddings", "initial_context_length"), ()),
    **dict.fromkeys(("partial_rotary_factor", "layer_types", "sliding_window", "use_sliding_window"), ()),
    **dict.fromkeys(("max_window_layers", "attention_bias", "quantization_config", "draft_vocab_size"), ()),
    **dict.fromkeys(("target_hidden_size", "num_target_layers", "sliding_window_non_causal"), ()),
    "head_dim": ("attention_head_dim",),
    "num_hidden_layers": ("draft_num_hidden_layers",),
    "is_neox_style": ("rope_is_neox_style",),
    "is_causal": ("causal", "causal_head"),
    "target_layer_ids": ("dspark_target_layer_ids",),
    "aux_hidden_state_layer_ids": (
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config.layer_ids",
        "dflash_config.layer_ids",
    ),
    "eagle_layer_ids": ("eagle_config.eagle_aux_hidden_state_layer_ids",),
}
"""Fields of all drafts -> other keys of the same meaning, with the section if the key means it only there.

is_neox_style: whether the pairs of rotated dimensions are (i, i + D/2); otherwise (2 i, 2 i + 1).
is_causal: whether a row of a block sees only the rows up to its own.
target_layer_ids, aux_hidden_state_layer_ids: captured layers of the target, by what leaves and by what enters them.
eagle_layer_ids: captured layers by either; see `draft.read_captured`.
"""

STOCK: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu",)),
    **dict.fromkeys(("mlp_bias", "use_gemma_norm", "enable_qwen35_gated_q_proj"), (False,)),
    **dict.fromkeys(("shift_label", "draft_shift", "parallel_drafting", "attention_sink_bias"), (False,)),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "enable_moe", "use_mla", "use_mrope"), (False,)),
    **dict.fromkeys(("attention_value_scale", "residual_multiplier"), (1.0,)),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "attention_multiplier"), (1.0,)),
    **dict.fromkeys(("use_rope", "use_rotary_pos_emb"), (True,)),
    "norm_type": ("rms", "rmsnorm"),
    "position_embedding_type": ("rope", "rotary"),
}
"""Options of other forwards -> the values of a decoder layer of a Llama or Qwen3."""

_HARMLESS = re.compile(
    r"_.*|.*version|((base|target)_)?(model|tokenizer|dataset|project|run)_name|.*_path|auto_map|architectures"
    r"|model_type|speculators_(model_type|config)|(torch_)?dtype|use_bfloat16|torchscript|tokenizer_class|prefix"
    r"|return_dict.*|use_cache|pretraining_tp|has_(embed_tokens|lm_head)|num_aux_layers|draft_layer_init_from_target"
    r"|(attn|cache)_implementation|attention_backend"
    r"|output_(attentions|hidden_states|(router_)?logits|scores)|is_(encoder_)?decoder|.*cross_attention.*|id2label"
    r"|tie_(encoder_decoder|weights|word_embeddings)|chunk_size_feed_forward|label2id|problem_type|num_labels"
    r"|has_no_defaults_at_init|task_specific_params|finetuning_task|(max|min|max_sequence)_length|pruned_heads"
    # Sampling of the target, and its special tokens.
    r"|do_sample|early_stopping|num_beams?(_groups)?|.*_penalty|temperature|top_[kp]|typical_p|.*no_repeat_ngram_size"
    r"|bad_words_ids|num_return_sequences|remove_invalid_values|(begin_)?suppress_tokens|(bos|eos|pad|sep|mask)_token"
    r"|(bos|eos|eod|pad|unk|sep|cls|decoder_start|forced_[be]os|(image|video|audio|vision|bo[ia]|eo[ia])(_\w+)?)"
    r"_token_(id|ids|index)|(im|text)_(start|end|newline)_id|pad_id|mask_init_id|org_vocab_size"
    # Training.
    r"|(.*_)?(dropout|pdrop|loss|lr|seed|ttt|train|training|epochs?|dataset|warmup|anchors|distillation)(_.*)?"
    r"|.*(loss|lk|kl|kd|l1|ce|confidence_head)_alpha|.*(learning_rate|weight_decay|decay_gamma|freeze)(_.*)?"
    r"|initializer_range|gradient_checkpointing|embed_requires_grad|confidence_temperatures|target_model.*|verifier.*"
    r"|eagle_(report_acc|reuse_base_decoder|offline|enable_nvtx|use_torch_compile|mix_hidden_states)"
    r"|parallel_draft_heads_num_layers|modal_type|class_num|dense_list|pool_type|cla_share_factor"
    # Copied from the target: experts, recurrent layers and MTP heads have tensors of their own.
    r"|num_(local_|routed_|shared_)?experts.*|n_(routed|shared)_experts|experts_per_token|(shared_expert|moe)_.*"
    r"|n_group|topk_(group|method)|routed_scaling_factor|scoring_func|seq_aux|ep_size"
    r"|norm_topk_prob|decoder_sparse_step|mlp_only_layers|router_.*|first_k_dense_replace|mamba_.*"
    r"|linear_(attn_config|(conv|key|num|value)_.*)|(use_)?qk_(layer)?norm|mtp_(num_hidden_layers|use_dedicated_.*)"
    r"|num_nextn_predict_layers|full_attention_interval|attn_output_gate|swiglu_limit"
)
"""Keys without effect on the forward of a draft."""
_OFF = re.compile(r"(use|enable|has|with|add)_(?!.*(anchor|causal|directional|embed|norm|position|residual|rope)).*")
"""Names of options without effect if they are false."""


@dataclasses.dataclass(frozen=True)
class Spellings:
    """The keys of a kind of draft.

    owner: the kind, for messages.
    sections: objects in config.json with fields.
    fields: those beside `LAYERS`, with other keys of the same meaning.
    options: keys beside `STOCK` -> their supported values; none: the key must be absent.
    """

    owner: str
    sections: Sequence[str]
    fields: Mapping[str, tuple[str, ...]]
    options: Mapping[str, tuple[object, ...]]

    def read(self, config: Fields) -> Fields:
        """One object with the fields under their own names; errors name the keys of the file.

        Raises:
          CheckpointError: two spellings of a field contradict each other, or options or keys are not supported; names
            all of these, with their values.
        """
        fields = {**LAYERS, **self.fields}
        names = {key: name for name, others in fields.items() for key in (name, *others)}
        objects = [config, *(config.section(name) for name in self.sections)]
        wrong = [part for keys in objects for part in self._refused(keys, names)]
        refuse(config.where, wrong, self.owner)
        return Fields.flattened(objects, names)

    def _refused(self, keys: Fields, names: Mapping[str, str]) -> list[str]:
        """The options of an object for other forwards, and its unknown keys."""
        options = {**STOCK, **self.options}
        wrong = keys.unsupported({key: values for key, values in options.items() if values})
        for key in keys.keys():
            path = keys.path + key
            if options.get(key) == ():
                wrong += [f"{keys.describe(key)} (must be absent)"] if keys.is_set(key) else []
            elif not (key in options or key in names or path in names or path in self.sections):
                off = keys.is_off(key) and _OFF.fullmatch(key)
                if not off and not keys.is_empty(key) and not _HARMLESS.fullmatch(key):
                    wrong.append(f"{keys.describe(key)} (unknown: remove it if the draft does not depend on it)")
        return wrong
