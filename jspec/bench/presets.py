"""Shapes of published models and of the drafts made for them, without weights."""

import dataclasses
import functools
from typing import Any

from jspec.checkpoints import language_model
from jspec.checkpoints.fields import read_fields
from jspec.core import package
from jspec.models import Assistant, BlockHead, Deepseek, EagleHead, GptOss, Llama, MtpHeads, Qwen3Next
from jspec.models.assistant import Clusters
from jspec.models.decoder import Decoder
from jspec.models.draft import Draft

_DIRECTORY = package.ASSETS / "presets"
"""A directory per target, with its config.json."""
DRAFT_VOCAB_SIZE = 32_000
"""Draft vocabulary of the published EAGLE-3 heads for these targets."""
DRAFTS = {
    "eagle": "EAGLE head",
    "block": "block draft",
    "standalone": "smaller model of its vocabulary",
    "frozen-kv-mtp": "assistant",
    "mtp": "MTP heads",
}
"""Drafter -> its kind of draft model."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """A target and its drafts; None if there is none of a kind.

    head: an EAGLE-3 head.
    standalone: a smaller model with the same vocabulary.
    assistant: a draft on the target's keys and values.
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

    @property
    def drafts(self) -> dict[str, Draft | None]:
        """Drafter -> its draft model, or None."""
        drafts = self.head, self.block, self.standalone, self.assistant, self.mtp
        return dict(zip(DRAFTS, drafts, strict=True))


_LAYER = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_length"),
    *("rms_norm_eps", "rope"),
)
"""What a draft has in common with the layers that it is made after."""


def _fields(model: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(model, name) for name in names}


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
        draft_vocab_size=min(draft_vocab_size, target.vocab_size),
        target_hidden_size=target.hidden_size,
        num_layers=1,
        capture_layers=(2, count // 2, count - 3) if count >= 8 else (0, count // 2, count),
        # A head of the target rotates all dimensions.
        **{**_fields(target, *_LAYER), "rope": dataclasses.replace(target.rope, share=1.0)},
    )


def block_draft(target: Decoder, head: EagleHead) -> BlockHead:
    """A DSpark draft (arXiv 2607.05147) with five layers of an EAGLE-3 head's shape and a block of 7, like DeepSeek's.

    It shares the target's embedding and LM head.

    It reads the outputs of five layers, evenly spaced; of shallow targets, those of the head.
    """
    count = target.num_layers
    # Five layers; the mask is the last token of the vocabulary.
    spread = tuple(2 + round(index * (count - 4) / 4) for index in range(5))
    return BlockHead(
        draft_vocab_size=head.vocab_size,
        num_layers=5,
        capture_layers=spread if count >= 8 else head.capture_layers,
        block_size=7,
        mask_token=head.vocab_size - 1,
        next_token=True,
        windows=(None,) * 5,
        causal=(False,) * 5,
        markov="vanilla",
        markov_rank=min(256, head.hidden_size),
        **_fields(head, "target_hidden_size", *_LAYER),
    )


def gemma4_assistant(
    target: Decoder, *, hidden_size: int, intermediate_size: int, clusters: Clusters | None = None
) -> Assistant:
    """An assistant: three layers on the target's last sliding layer, and one on its last full layer."""
    # The last sliding and the last full layer.
    keys = [target.layer_keys(layer) for layer in range(target.num_layers)]
    sliding = max(layer for layer, shape in enumerate(keys) if shape.window is not None)
    full = max(layer for layer, shape in enumerate(keys) if shape.window is None)
    target_layers = (sliding, sliding, sliding, full)
    return Assistant(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=target.num_heads,
        target_layers=target_layers,
        head_dims=tuple(keys[layer].head_dim for layer in target_layers),
        clusters=clusters,
    )


def gpt_oss_head(target: GptOss) -> EagleHead:
    """The EAGLE-3 head of gpt-oss in SpecForge's configuration: dense, and six times as wide as the stream."""
    same = _fields(target, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    shape = Llama(intermediate_size=6 * target.hidden_size, max_length=4096, **same)
    return eagle_head(shape)


@functools.cache
def _target(name: str) -> Any:
    """The language model of this preset: its config.json has the published shapes."""
    return language_model.parse_config(read_fields(_DIRECTORY / name / "config.json"))


def _llama(name: str, standalone: str | None = None) -> Preset:
    """A dense model with an EAGLE-3 head, and with a small model of its vocabulary."""
    return Preset(_target(name), eagle_head(_target(name)), None if standalone is None else _target(standalone))


def _with_mtp(name: str, *, head: bool = False, **drafts: Any) -> Preset:
    """A model with its MTP heads and, if wanted, an EAGLE-3 head."""
    target = _target(name)
    size = 64 if name.startswith("tiny") else DRAFT_VOCAB_SIZE
    return Preset(target, eagle_head(target, draft_vocab_size=size) if head else None, mtp=mtp_heads(target), **drafts)


def _first_layer(target: Any, **changes: Any) -> Any:
    """The target's embedding, first layer and head as a small model."""
    return dataclasses.replace(target, num_layers=1, **changes)


def _presets() -> dict[str, Preset]:
    tiny, moe, lite, tiny_lite = map(_target, ("tiny", "qwen3-30b-a3b", "deepseek-v2-lite", "tiny-deepseek"))
    small, gemma, edge, tiny_gemma = map(_target, ("qwen3-0.6b", "gemma-4-31b", "gemma-4-e4b", "tiny-gemma-4"))
    wide_clusters, tiny_clusters = Clusters(count=2048, chosen=32), Clusters(count=16, chosen=4)
    return {
        "llama-3.1-8b": _llama("llama-3.1-8b", "llama-3.2-1b"),
        "llama-3.3-70b": _llama("llama-3.3-70b", "llama-3.2-1b"),
        "llama-3.2-1b": _llama("llama-3.2-1b"),
        "qwen3-8b": _llama("qwen3-8b", "qwen3-0.6b"),
        "qwen3-0.6b": _llama("qwen3-0.6b"),
        "smollm2-135m": _llama("smollm2-135m"),
        "qwen3-32b": _llama("qwen3-32b", "qwen3-0.6b"),
        "tiny": Preset(tiny, eagle_head(tiny, draft_vocab_size=64), _first_layer(tiny, tie_embeddings=True)),
        "qwen3-next": _with_mtp("qwen3-next", head=True, standalone=small),
        # 16 of the 48 layers fit on one GPU with 80 GB.
        "qwen3-next-16-layers": _with_mtp("qwen3-next-16-layers", head=True, standalone=small),
        "qwen3.5-9b": _with_mtp("qwen3.5-9b", head=True),
        # With their MTP heads alone: the shapes of published EAGLE-3 heads are not known here.
        "qwen3.6-27b": _with_mtp("qwen3.6-27b"),
        "qwen3.6-35b-a3b": _with_mtp("qwen3.6-35b-a3b"),
        "qwen3.5-122b-a10b": _with_mtp("qwen3.5-122b-a10b"),
        "tiny-qwen3-next": _with_mtp("tiny-qwen3-next", head=True),
        # No draft has been published; this one, its first layer and its head, has a typical cost.
        "deepseek-v2-lite": Preset(lite, standalone=_first_layer(lite)),
        "qwen3-30b-a3b": Preset(moe, eagle_head(dataclasses.replace(moe, experts=None)), small),
        "tiny-deepseek": Preset(tiny_lite, standalone=_first_layer(tiny_lite)),
        "deepseek-v3.2": _with_mtp("deepseek-v3.2"),
        # The 3 dense layers and the first with experts fit on one GPU with 80 GB, together with the MTP head.
        "deepseek-v3.2-4-layers": _with_mtp("deepseek-v3.2-4-layers"),
        "tiny-deepseek-v3.2": _with_mtp("tiny-deepseek-v3.2"),
        "gpt-oss-20b": Preset(_target("gpt-oss-20b"), gpt_oss_head(_target("gpt-oss-20b"))),
        "gpt-oss-120b": Preset(_target("gpt-oss-120b"), gpt_oss_head(_target("gpt-oss-120b"))),
        "gemma-4-31b": Preset(gemma, assistant=gemma4_assistant(gemma, hidden_size=1024, intermediate_size=8192)),
        # The width of E4B's assistant is published; its MLP is assumed to have the proportions of 31B's.
        "gemma-4-e4b": Preset(
            edge, assistant=gemma4_assistant(edge, hidden_size=256, intermediate_size=2048, clusters=wide_clusters)
        ),
        "tiny-gemma-4": Preset(
            tiny_gemma,
            assistant=gemma4_assistant(tiny_gemma, hidden_size=8, intermediate_size=16, clusters=tiny_clusters),
        ),
    }


PRESETS = _presets()
"""Name -> shapes. The tiny ones have about 10,000 parameters, for tests and for trying a report on a CPU."""
