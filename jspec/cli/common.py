"""Options shared by the commands with a model, and functions from these options to models, drafters and prompts."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jspec import drafters
from jspec.analysis.records import read_records, read_text
from jspec.bench.options import COUNT, DraftOptions
from jspec.cli.arguments import naming_models
from jspec.core.accept import REPEATING, RULES
from jspec.core.options import check_options, option, typed
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.generation.corpus import with_corpus
from jspec.generation.method import choose_drafter
from jspec.generation.options import MAX_SEED, check_fits
from jspec.generation.result import GenerationStats
from jspec.generation.run import Prompt, encode_prompts
from jspec.loading.hub import bundled_draft
from jspec.loading.model import Model, load, probe_draft
from jspec.models.quantized import FORMATS, WIDE

DRAFTERS = ("auto", *sorted(drafters.DRAFTERS))
DRAFTER_HELP = (
    "how tokens are drafted; auto: as the loaded draft model requires; without one, plain or ngram in each round, "
    "by measured cost; plain: not at all"
)
ACCEPT_HELP = "acceptance rule (default: coupled, whose output is that of plain sampling with the same seed)"
GROUPS_HELP = "{} N groups of devices, each with the whole model (default: one group)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(DraftOptions):
    """Options of the model, its devices, and the shape of the draft."""

    model: str = option("bundled:python-small", "bundled:NAME, a Hugging Face directory, a .gguf file or a hub id")
    draft: str | None = option(
        None, "the draft model, given like the model (default: the draft of a bundled model, or none)"
    )
    adapter: str | None = option(None, "LoRA adapter, a directory of peft or a hub id")
    corpus: tuple[str, ...] = option(
        (),
        "text files that --drafter suffix copies from, such as earlier outputs; the last ones win ties",
        metavar="FILE",
    )
    hot_tokens: str | None = option(
        None, "the draft proposes only the tokens in this JSON list of ids (default: all)", metavar="FILE"
    )
    weights: str | None = option(
        None,
        "quantize the linear layers of model and draft, with a scale for each column (int4: each 128 rows of it); "
        "wide: all weights are those of --dtype (default: as stored in 8 or 4 bits, otherwise those of --dtype)",
        choices=(*FORMATS, WIDE),
    )
    exact: bool | None = option(
        None,
        "drafts and the rest of the batch change no bit of the logits; --no-exact is faster (default: exact in half "
        "precision on a Hopper GPU, where all parts have kernels)",
    )
    tensor: int | None = option(
        None, "split the model over N devices: heads, MLPs and vocabulary (default: one device)", bounds=COUNT
    )
    data: int | None = option(None, GROUPS_HELP.format("split the prompts of a batch over"), bounds=COUNT)
    probe: bool = option(True, "do not check at the start whether the draft fits the model, see `jspec doctor`")

    def __post_init__(self):
        check_options(self)
        for name in ("model", "draft", "adapter"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} '': must be bundled:NAME, a directory or a hub id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of the sampler and the acceptance rule, and the number of tokens."""

    max_new_tokens: int = option(128, "maximum number of new tokens per prompt", bounds=COUNT)
    temperature: float | None = option(None, "divides the logits; 0 is greedy (default when sampling: 1)", metavar="T")
    top_k: int | None = option(None, "sample from the K most probable tokens", metavar="K", bounds=COUNT)
    top_p: float | None = option(None, "sample from the most probable tokens whose total probability is P", metavar="P")
    min_p: float | None = option(
        None, "sample from tokens at least P times as probable as the most probable one", metavar="P"
    )
    seed: int = option(0, "random seed", least=0, most=MAX_SEED)

    accept: str | None = option(None, ACCEPT_HELP, choices=tuple(RULES))

    @property
    def repeats_plain(self) -> bool:
        """Whether the tokens must equal those of plain decoding with the same seed."""
        sampling = self.sampling()
        return self.accept in REPEATING or sampling is None or sampling.temperature == 0

    def sampling(self, **others: Any) -> Sampling | None:
        """The sampling parameters; None if none has an effect. others: further ones."""
        values = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        sampling = Sampling(**(values or {"temperature": 0.0}), **others)
        return None if sampling == Sampling(temperature=0.0) else sampling


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
SHAPE = {
    "depth": "drafts no tokens",
    "width": "drafts no trees",
    "num_nodes": "drafts no trees",
    "window": "has no window",
    "keep_first": "has no window",
}
"""Options of the draft's shape and window -> the reason why a drafter does not have them."""
SHAPE_GROUP = {"shape of the draft:\nThe defaults depend on the drafter.": tuple(SHAPE)}
SAMPLING_GROUP = {
    "sampling:\nDecoding is greedy unless --temperature, --top-k, --top-p or --min-p is given.": (
        *_SAMPLING,
        "seed",
        "accept",
    )
}


def check_data(data: int | None, batch: int) -> None:
    """Raises ValueError if there are more groups of devices than prompts in a batch."""
    if data is not None and data > batch:
        raise ValueError(f"--data {data}: must be at most --batch, the prompts that run together: {batch}")


_LOADING = ("adapter", "tensor", "data", "dtype", "exact", "weights", "kv")
"""Options passed on to `jspec.load`."""


def load_model(
    drafter: str,
    options: ModelOptions,
    *,
    names: Sequence[str] = (),
    loaded: dict[str | None, Model] | None = None,
    option: str = "--model",
) -> Model:
    """Load the model; a bundled one with its draft for this drafter.

    names: other drafters to be used.
    loaded: cache of models by draft.
    option: the name of the option with the model, for messages.
    """
    texts = read_corpus(options, (drafter, *names))
    # Bundled models have a draft for each drafter.
    draft = options.draft or bundled_draft(options.model, drafter) or bundled_draft(options.model)
    loaded = {} if loaded is None else loaded
    if draft not in loaded:
        with naming_models({"--draft": options.draft, "--adapter": options.adapter, option: options.model}):
            values = {name: getattr(options, name) for name in _LOADING}
            loaded[draft] = model = load(options.model, draft=draft, **values)
            if options.hot_tokens is not None:
                loaded[draft] = model = model.with_hot_tokens(options.hot_tokens)
        # Check whether the draft fits, unless it is bundled.
        if options.probe and draft == options.draft and model.draft is not None and model.placement is None:
            try:
                warning = probe_draft(model).warning(options.draft or options.model)
            except Exception as error:  # A check must not keep a model from running.
                warning = f"the draft could not be checked ({error}); --no-probe leaves the check out"
            if warning is not None:
                print(f"jspec: {warning}", file=sys.stderr, flush=True)
    return with_corpus(loaded[draft], texts) if texts and drafter == "suffix" else loaded[draft]


def read_corpus(options: ModelOptions, names: Sequence[str]) -> list[str]:
    """The texts of --corpus; empty without it. names: the drafters to be used."""
    if options.corpus and "suffix" not in names:
        raise ValueError(f"--corpus {options.corpus[0]}: requires --drafter suffix")
    texts: list[str] = []
    for path in options.corpus:
        try:
            texts.append(read_text(Path(path)))
        except ValueError as error:
            raise ValueError(f"--corpus {error}") from None
        if not texts[-1]:
            raise ValueError(f"--corpus {path}: must not be empty")
    return texts


def make_drafter(name: str, options: ModelOptions, model: Model) -> Drafter:
    """The drafter with the options of the command line."""
    drafter = choose_drafter(name, model)
    # Refuse options without a field in this drafter.
    fields = [field.name for field in dataclasses.fields(drafter)]  # pyright: ignore[reportArgumentType]
    values = {field: value for field in SHAPE if (value := getattr(options, field)) is not None}
    for field in values:
        if field not in fields:
            raise ValueError(f"{typed(options, field)}: the drafter {drafters.name_of(drafter)} {SHAPE[field]}")
    # Binding checks the shape against the models.
    shaped: Drafter = dataclasses.replace(drafter, **values)  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        shaped.bind(model.target, model.draft)
    except ValueError as error:
        raise ValueError(str(error) if name == "auto" else f"--drafter {name}: {error}") from None
    return shaped


def check_prompts(model: Model, names: Sequence[str], prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Checks every prompt before any is run. names: of the prompts, for errors."""
    for name, prompt in zip(names, prompts, strict=True):
        _, (ids,) = encode_prompts(model, prompt, name)
        try:
            check_fits(model.target, len(ids), max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def read_prompt_file(path: str, *, conversations: bool = False) -> list[dict[str, Any]]:
    """The records of a file of --prompts."""
    if path == "":
        raise ValueError("--prompts '': must be a file, or - for standard input")
    try:
        return read_records(path, conversations=conversations)
    except ValueError as error:
        raise ValueError(f"--prompts {error}") from None


def encode_record(model: Model, record: Mapping[str, Any], *, chat: bool = False) -> Prompt:
    """The prompt of a record: text; or ids, if a chat template has rendered it.

    chat: the text is a user's message.
    """
    # Encode rendered text without special tokens: the template has added them.
    text, rendered = record["prompt"], record.get("rendered") is True
    if not rendered:
        return chat_prompt(model, [{"role": "user", "content": text}]) if chat else text
    if chat:
        raise ValueError("--chat: the prompts are rendered by a chat template already; omit it")
    if model.tokenizer is None:
        raise ValueError(f"--prompts: {model.name} has no tokenizer")
    return model.tokenizer.encode(text, special=False)


def chat_prompt(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a conversation in the chat template of the model, with the beginning of its reply."""
    if model.tokenizer is None:
        raise ValueError(f"--chat: {model.name} has no tokenizer")
    try:
        return model.tokenizer.chat(messages)
    except ValueError as error:
        raise ValueError(f"--chat: {error}") from None


def why_slower(stats: GenerationStats, plain: GenerationStats) -> str | None:
    """A message with the measured cost of a round if drafts slow down generation; otherwise None."""
    if not 0 < stats.tokens_per_second < plain.tokens_per_second:
        return None
    cost = stats.seconds / stats.rounds.sum() / (plain.seconds / plain.rounds.sum())
    return (
        f"drafts do not pay on this {jax.devices()[0].platform.upper()}: a round takes {cost:.1f} times as long as a "
        f"plain step and brings {stats.accept_length:.1f} tokens"
    )


def ratio(speed: float, other: float) -> str:
    """The quotient of two speeds, as text."""
    return f"{speed / other:.2f}x" if other > 0 and speed > 0 else "no rounds, so not compared:"
