"""Shapes of published models, from their config.json, and of the drafts made for them."""

import dataclasses

from jspec.cache import RecurrentLayer
from jspec.models import Assistant, BlockHead, Deepseek, EagleHead, Gemma4, GptOss, Llama, MtpHeads, Qwen3Next
from jspec.models.assistant import Clusters
from jspec.models.decoder import Decoder
from jspec.models.deepseek import Indexer, Latent
from jspec.models.gemma4 import Attention
from jspec.models.layers import Llama3Rope, YarnRope
from jspec.models.moe import Routed
from jspec.models.router import Router

DRAFT_VOCAB_SIZE = 32_000
"""Draft vocabulary of the published EAGLE-3 heads for these targets."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """A target and its drafts; None if there is none of a kind.

    head: an EAGLE-3 head.
    standalone: a smaller model with the same vocabulary.
    assistant: a draft that reads the target's keys and values.
    mtp: the MTP heads of the target's own checkpoint.
    """

    target: Decoder
    head: EagleHead | None = None
    standalone: Decoder | None = None
    assistant: Assistant | None = None
    mtp: MtpHeads | None = None

    @property
    def block(self) -> BlockHead | None:
        """A block draft for targets with an EAGLE-3 head."""
        return None if self.head is None else block_draft(self.target, self.head)


def mtp_heads(target: Deepseek | Qwen3Next, count: int = 1) -> MtpHeads:
    """The heads of a target's checkpoint, each a layer of its family."""
    return MtpHeads(target.mtp_layer(), count)


def eagle_head(target: Llama | Qwen3Next, *, draft_vocab_size: int = DRAFT_VOCAB_SIZE) -> EagleHead:
    """An EAGLE-3 head of one layer with the shape of the target's layers.

    It reads the inputs of layers 2, L/2 and L - 3, like heads trained by SpecForge; in shallower targets, the inputs of
    the first and the middle layer and the output of the last.

    draft_vocab_size: at most the target's.
    """
    count = target.num_layers
    return EagleHead(
        version=3,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(draft_vocab_size, target.vocab_size),
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_length=target.max_length,
        capture_layers=(2, count // 2, count - 3) if count >= 8 else (0, count // 2, count),
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
    )


def block_draft(target: Decoder, head: EagleHead) -> BlockHead:
    """A DSpark draft (arXiv 2607.05147) with five layers of an EAGLE-3 head's shape and a block of 7, like DeepSeek's.

    It shares the target's embedding and LM head.

    It reads the outputs of five layers, evenly spaced; of shallow targets, those that the head reads.
    """
    count = target.num_layers
    spread = tuple(2 + round(index * (count - 4) / 4) for index in range(5))
    return BlockHead(
        vocab_size=head.vocab_size,
        draft_vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        target_hidden_size=head.target_hidden_size,
        intermediate_size=head.intermediate_size,
        num_layers=5,
        num_heads=head.num_heads,
        num_kv_heads=head.num_kv_heads,
        head_dim=head.head_dim,
        max_length=head.max_length,
        capture_layers=spread if count >= 8 else head.capture_layers,
        block_size=7,
        mask_token=head.vocab_size - 1,
        next_token=True,
        windows=(None,) * 5,
        causal=(False,) * 5,
        markov="vanilla",
        markov_rank=min(256, head.hidden_size),
        rms_norm_eps=head.rms_norm_eps,
        rope_theta=head.rope_theta,
        rope_scaling=head.rope_scaling,
    )


_LLAMA_3_1_8B = Llama(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=131_072,
    rope_theta=500_000.0,
    rope_scaling=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192),
)
_LLAMA_3_2_1B = dataclasses.replace(
    _LLAMA_3_1_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope_scaling=Llama3Rope(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192),
    tie_embeddings=True,
)
_LLAMA_3_3_70B = dataclasses.replace(
    _LLAMA_3_1_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64
)
_QWEN3_8B = Llama(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)
_QWEN3_32B = dataclasses.replace(_QWEN3_8B, hidden_size=5120, intermediate_size=25_600, num_layers=64, num_heads=64)
_QWEN3_06B = dataclasses.replace(
    _QWEN3_8B, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True
)
_TINY = Llama(
    vocab_size=128,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_length=4096,
)


def _gemma4_attention(layers: int, every: int, sliding: Attention, full: Attention) -> tuple[Attention, ...]:
    """Sliding-window layers, with full attention in every `every`-th layer."""
    return tuple(full if i % every == every - 1 else sliding for i in range(layers))


def gemma4_assistant(
    target: Gemma4, *, hidden_size: int, intermediate_size: int, clusters: Clusters | None = None
) -> Assistant:
    """An assistant of three layers that read the target's last sliding layer and one that reads its last full layer."""
    windows = [kind.window is not None for kind in target.attention]
    sliding = max(index for index, slides in enumerate(windows) if slides)
    full = max(index for index, slides in enumerate(windows) if not slides)
    target_layers = (sliding, sliding, sliding, full)
    return Assistant(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=target.num_heads,
        target_layers=target_layers,
        head_dims=tuple(target.attention[index].head_dim for index in target_layers),
        clusters=clusters,
    )


_GEMMA_4_31B = Gemma4(
    vocab_size=262_144,
    hidden_size=5376,
    intermediate_size=21_504,
    num_heads=32,
    attention=_gemma4_attention(
        60,
        6,
        Attention(kv_heads=16, head_dim=256, window=1024, rope_theta=1e4),
        Attention(kv_heads=4, head_dim=512, window=None, rope_theta=1e6, rotary_share=0.25, values_are_keys=True),
    ),
    max_length=262_144,
    soft_cap=30.0,
)
_GEMMA_4_E4B = Gemma4(
    vocab_size=262_144,
    hidden_size=2560,
    intermediate_size=10_240,
    num_heads=8,
    attention=_gemma4_attention(
        42,
        6,
        Attention(kv_heads=2, head_dim=256, window=512, rope_theta=1e4),
        Attention(kv_heads=2, head_dim=512, window=None, rope_theta=1e6, rotary_share=0.25),
    ),
    max_length=131_072,
    shared_layers=18,
    per_layer_size=256,
    soft_cap=30.0,
)
_TINY_GEMMA_4 = Gemma4(
    vocab_size=128,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    attention=_gemma4_attention(
        4,
        2,
        Attention(kv_heads=1, head_dim=8, window=16, rope_theta=1e4),
        Attention(kv_heads=1, head_dim=16, window=None, rope_theta=1e6, rotary_share=0.25),
    ),
    max_length=4096,
    shared_layers=2,
    per_layer_size=4,
    soft_cap=30.0,
)
_QWEN3_NEXT = Qwen3Next(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5120,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    is_full_attention=(False, False, False, True) * 12,
    state=RecurrentLayer(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    max_length=262_144,
    experts=Routed(Router(count=512, chosen=10, normalize=True), width=512, shared_width=512, shared_gate=True),
)
_QWEN3_NEXT_16 = dataclasses.replace(_QWEN3_NEXT, is_full_attention=_QWEN3_NEXT.is_full_attention[:16])
_QWEN3_5_9B = Qwen3Next(
    vocab_size=248_320,
    hidden_size=4096,
    intermediate_size=12_288,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    is_full_attention=(False, False, False, True) * 8,
    state=RecurrentLayer(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    max_length=262_144,
)
_QWEN3_6_27B = dataclasses.replace(
    _QWEN3_5_9B,
    hidden_size=5120,
    intermediate_size=17_408,
    num_heads=24,
    is_full_attention=(False, False, False, True) * 16,
    state=RecurrentLayer(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
)
_QWEN3_6_35B_A3B = dataclasses.replace(
    _QWEN3_NEXT,
    vocab_size=248_320,
    intermediate_size=0,
    is_full_attention=(False, False, False, True) * 10,
    experts=Routed(Router(count=256, chosen=8, normalize=True), width=512, shared_width=512, shared_gate=True),
)
_QWEN3_5_122B_A10B = dataclasses.replace(
    _QWEN3_6_35B_A3B,
    hidden_size=3072,
    num_heads=32,
    is_full_attention=(False, False, False, True) * 12,
    state=RecurrentLayer(key_heads=16, value_heads=64, key_dim=128, value_dim=128),
    experts=Routed(Router(count=256, chosen=8, normalize=True), width=1024, shared_width=1024, shared_gate=True),
)
_TINY_QWEN3_NEXT = Qwen3Next(
    vocab_size=128,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    is_full_attention=(False, True),
    state=RecurrentLayer(key_heads=1, value_heads=2, key_dim=8, value_dim=8),
    max_length=4096,
    experts=Routed(Router(count=8, chosen=2, normalize=True), width=8, shared_width=8, shared_gate=True),
)

_DEEPSEEK_V2_LITE = Deepseek(
    vocab_size=102_400,
    hidden_size=2048,
    intermediate_size=10_944,
    num_layers=27,
    num_heads=16,
    latent=Latent(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts=Routed(Router(count=64, chosen=6), width=1408, shared_width=2816),
    dense_layers=1,
    max_length=163_840,
    rope_scaling=YarnRope(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
)
_DEEPSEEK_V3_2 = Deepseek(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    num_layers=61,
    num_heads=128,
    latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts=Routed(
        Router(count=256, chosen=8, sigmoid=True, groups=8, kept_groups=4, best_of_group=2, normalize=True, scale=2.5),
        width=2048,
        shared_width=2048,
    ),
    dense_layers=3,
    max_length=163_840,
    rope_scaling=YarnRope(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
    indexer=Indexer(heads=64, size=128, top_k=2048),
)
_DEEPSEEK_V3_2_4 = dataclasses.replace(_DEEPSEEK_V3_2, num_layers=4)
_QWEN3_30B_A3B = dataclasses.replace(
    _QWEN3_8B,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    experts=Routed(Router(count=128, chosen=8, normalize=True), width=768),
)
_GPT_OSS_20B = GptOss(
    vocab_size=201_088,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    windows=(128, None) * 12,
    max_length=131_072,
    experts=Routed(Router(count=32, chosen=4, normalize=True), width=2880),
    rope_scaling=YarnRope(factor=32.0, original_length=4096, truncate=False),
)
_GPT_OSS_120B = dataclasses.replace(
    _GPT_OSS_20B,
    windows=(128, None) * 18,
    experts=Routed(Router(count=128, chosen=4, normalize=True), width=2880),
)


def gpt_oss_head(target: GptOss) -> EagleHead:
    """The EAGLE-3 head of gpt-oss in SpecForge's configuration: dense, and six times as wide as the stream."""
    shape = Llama(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=6 * target.hidden_size,
        num_layers=target.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_length=4096,
    )
    return eagle_head(shape)


_TINY_DEEPSEEK = Deepseek(
    vocab_size=128,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    latent=Latent(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
    experts=Routed(Router(count=8, chosen=2), width=8, shared_width=16),
    dense_layers=1,
    max_length=4096,
)
_TINY_DEEPSEEK_V3_2 = dataclasses.replace(
    _TINY_DEEPSEEK,
    latent=Latent(q_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
    experts=Routed(Router(count=8, chosen=2, sigmoid=True, normalize=True), width=8, shared_width=16),
    indexer=Indexer(heads=2, size=16, top_k=32),
)

PRESETS = {
    "llama-3.1-8b": Preset(_LLAMA_3_1_8B, eagle_head(_LLAMA_3_1_8B), _LLAMA_3_2_1B),
    "llama-3.3-70b": Preset(_LLAMA_3_3_70B, eagle_head(_LLAMA_3_3_70B), _LLAMA_3_2_1B),
    "llama-3.2-1b": Preset(_LLAMA_3_2_1B, eagle_head(_LLAMA_3_2_1B)),
    "qwen3-8b": Preset(_QWEN3_8B, eagle_head(_QWEN3_8B), _QWEN3_06B),
    "qwen3-0.6b": Preset(_QWEN3_06B, eagle_head(_QWEN3_06B)),
    "qwen3-32b": Preset(_QWEN3_32B, eagle_head(_QWEN3_32B), _QWEN3_06B),
    "tiny": Preset(
        _TINY,
        eagle_head(_TINY, draft_vocab_size=64),
        dataclasses.replace(_TINY, num_layers=1, tie_embeddings=True),
    ),
    "qwen3-next": Preset(_QWEN3_NEXT, eagle_head(_QWEN3_NEXT), _QWEN3_06B, mtp=mtp_heads(_QWEN3_NEXT)),
    # The 16 of 48 layers that fit on one GPU with 80 GB.
    "qwen3-next-16-layers": Preset(
        _QWEN3_NEXT_16, eagle_head(_QWEN3_NEXT_16), _QWEN3_06B, mtp=mtp_heads(_QWEN3_NEXT_16)
    ),
    "qwen3.5-9b": Preset(_QWEN3_5_9B, eagle_head(_QWEN3_5_9B), mtp=mtp_heads(_QWEN3_5_9B)),
    # With their MTP heads alone: the shapes of published EAGLE-3 heads are not known here.
    "qwen3.6-27b": Preset(_QWEN3_6_27B, mtp=mtp_heads(_QWEN3_6_27B)),
    "qwen3.6-35b-a3b": Preset(_QWEN3_6_35B_A3B, mtp=mtp_heads(_QWEN3_6_35B_A3B)),
    "qwen3.5-122b-a10b": Preset(_QWEN3_5_122B_A10B, mtp=mtp_heads(_QWEN3_5_122B_A10B)),
    "tiny-qwen3-next": Preset(
        _TINY_QWEN3_NEXT, eagle_head(_TINY_QWEN3_NEXT, draft_vocab_size=64), mtp=mtp_heads(_TINY_QWEN3_NEXT)
    ),
    # No draft has been published; this one, its first layer and its head, has a typical cost.
    "deepseek-v2-lite": Preset(_DEEPSEEK_V2_LITE, standalone=dataclasses.replace(_DEEPSEEK_V2_LITE, num_layers=1)),
    "qwen3-30b-a3b": Preset(_QWEN3_30B_A3B, eagle_head(dataclasses.replace(_QWEN3_30B_A3B, experts=None)), _QWEN3_06B),
    "tiny-deepseek": Preset(_TINY_DEEPSEEK, standalone=dataclasses.replace(_TINY_DEEPSEEK, num_layers=1)),
    "deepseek-v3.2": Preset(_DEEPSEEK_V3_2, mtp=mtp_heads(_DEEPSEEK_V3_2)),
    # The 3 dense layers and the first with experts, which fit on one GPU with 80 GB, together with the MTP head.
    "deepseek-v3.2-4-layers": Preset(_DEEPSEEK_V3_2_4, mtp=mtp_heads(_DEEPSEEK_V3_2_4)),
    "tiny-deepseek-v3.2": Preset(_TINY_DEEPSEEK_V3_2, mtp=mtp_heads(_TINY_DEEPSEEK_V3_2)),
    "gpt-oss-20b": Preset(_GPT_OSS_20B, gpt_oss_head(_GPT_OSS_20B)),
    "gpt-oss-120b": Preset(_GPT_OSS_120B, gpt_oss_head(_GPT_OSS_120B)),
    "gemma-4-31b": Preset(
        _GEMMA_4_31B, assistant=gemma4_assistant(_GEMMA_4_31B, hidden_size=1024, intermediate_size=8192)
    ),
    # The width of E4B's assistant is published; its MLP is assumed to have the proportions of 31B's.
    "gemma-4-e4b": Preset(
        _GEMMA_4_E4B,
        assistant=gemma4_assistant(
            _GEMMA_4_E4B, hidden_size=256, intermediate_size=2048, clusters=Clusters(count=2048, chosen=32)
        ),
    ),
    "tiny-gemma-4": Preset(
        _TINY_GEMMA_4,
        assistant=gemma4_assistant(
            _TINY_GEMMA_4, hidden_size=8, intermediate_size=16, clusters=Clusters(count=16, chosen=4)
        ),
    ),
}
"""Name -> shapes. The tiny ones have about 10,000 parameters, for tests and for trying a report on a CPU."""
