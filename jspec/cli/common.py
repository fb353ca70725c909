"""What the commands that load a model share: their options, and the values that these give."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jspec import drafters
from jspec.analysis.records import read_records, read_text
from jspec.core import accept
from jspec.core.sampling import Sampling
from jspec.core.types import Drafter
from jspec.engine.arguments import MAX_TOKENS, Parser, add_kv, add_window, integer, naming_models, number, option_of
from jspec.engine.corpus import with_corpus
from jspec.engine.hub import bundled_draft
from jspec.engine.model import Model, load
from jspec.engine.options import check_fits, choose_drafter
from jspec.engine.run import Prompt, encode_prompts
from jspec.models.quantized import FORMATS, WIDE

_SHAPE_OPTIONS = {
    "depth": "drafts no tokens",
    "width": "drafts no trees",
    "num_nodes": "drafts no trees",
    "window": "has no window",
    "keep_first": "has no window",
}
"""Options of the draft's shape and window -> the error message for drafters that do not have them."""
_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_model(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Adds the options of the commands that generate; returns the group of the sampling options."""
    parser.add_argument(
        "--model",
        default="bundled:python-small",
        help="bundled:NAME, a Hugging Face directory or a hub id (default: %(default)s)",
    )
    add_weights(parser, "--model")
    parser.add_argument(
        "--max-new-tokens",
        type=integer(1, MAX_TOKENS),
        default=128,
        metavar="N",
        help="maximum number of new tokens per prompt (default: %(default)s)",
    )
    add_shape(parser)
    choice = parser.add_argument_group(
        "sampling", "Decoding is greedy unless --temperature, --top-k, --top-p or --min-p is given."
    )
    choice.add_argument(
        "--temperature", type=number, metavar="T", help="divides the logits; 0 is greedy (default when sampling: 1)"
    )
    choice.add_argument(
        "--top-k", type=integer(1, MAX_TOKENS), metavar="K", help="sample from the K most probable tokens"
    )
    choice.add_argument(
        "--top-p", type=number, metavar="P", help="sample from the most probable tokens whose total probability is P"
    )
    choice.add_argument(
        "--min-p",
        type=number,
        metavar="P",
        help="sample from tokens at least P times as probable as the most probable one",
    )
    choice.add_argument(
        "--seed", type=integer(0, 2**32 - 1), default=0, metavar="N", help="random seed (default: %(default)s)"
    )
    add_accept(choice)
    return choice


def add_weights(parser: argparse.ArgumentParser, model: str) -> None:
    """Adds the options that say what is loaded besides the model, which `model` names in the help."""
    parser.add_argument(
        "--draft", help=f"the draft model, given like {model} (default: the draft of a bundled model, or none)"
    )
    parser.add_argument(
        "--corpus",
        nargs="+",
        metavar="FILE",
        help="text files that --drafter suffix copies from, such as earlier outputs; the last ones win ties",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: float32 on a CPU, otherwise bfloat16)",
    )
    add_format(parser)
    add_kv(parser)
    parser.add_argument(
        "--exact",
        action="store_true",
        help="drafts and the rest of the batch change no bit of the logits, in half precision too; slower",
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """Adds the option for weights of fewer bits."""
    parser.add_argument(
        "--weights",
        choices=(*FORMATS, WIDE),
        help="quantize the linear layers of model and draft, with a scale for each column (int4: each 128 rows of it); "
        "wide: all weights are those of --dtype (default: as stored in 8 or 4 bits, otherwise those of --dtype)",
    )


def add_tensor(parser: argparse.ArgumentParser) -> None:
    """Adds the option for several devices."""
    parser.add_argument(
        "--tensor",
        type=integer(1, MAX_TOKENS),
        metavar="N",
        help="split the model over N devices: heads, MLPs and vocabulary (default: one device)",
    )


def add_data(
    parser: argparse.ArgumentParser, use: str = "split the prompts of a batch over N groups of devices, each with"
) -> None:
    """Adds the option for groups of devices. use: the beginning of its help."""
    parser.add_argument(
        "--data",
        type=integer(1, MAX_TOKENS),
        metavar="N",
        help=f"{use} the whole model (default: one group)",
    )


def check_data(data: int | None, batch: int) -> None:
    """Raises ValueError if there are more groups of devices than prompts in a batch."""
    if data is not None and data > batch:
        raise ValueError(f"--data {data}: must be at most --batch, the prompts that run together: {batch}")


def add_drafter(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Adds the option for a single drafter. note: what its help adds about n-grams."""
    parser.add_argument(
        "--drafter",
        default="auto",
        choices=("auto", *sorted(drafters.DRAFTERS)),
        help=f"how tokens are drafted; auto: as the loaded draft model requires, or ngram without one{note}; plain: "
        "not at all (default: %(default)s)",
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the draft's shape and of its window."""
    shape = parser.add_argument_group("shape of the draft", "The defaults depend on the drafter.")
    shape.add_argument("--depth", type=integer(1, MAX_TOKENS), metavar="N", help="length of the longest drafted chain")
    shape.add_argument(
        "--width",
        type=integer(1, MAX_TOKENS),
        metavar="N",
        help="maximum number of children per node; 1 drafts a chain",
    )
    shape.add_argument(
        "--num-nodes", type=integer(1, MAX_TOKENS), metavar="N", help="nodes of the drafted tree, root included"
    )
    add_window(shape)


def add_accept(group: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Adds the option for the acceptance rule."""
    group.add_argument(
        "--accept",
        choices=tuple(accept.RULES),
        help="acceptance rule (default: coupled, whose output is that of plain sampling with the same seed)",
    )


def load_model(
    drafter: str, arguments: argparse.Namespace, loaded: dict[str | None, Model] | None = None, option: str = "--model"
) -> Model:
    """The model; a bundled one with its draft for this drafter.

    loaded: models by draft; avoids loading one twice.
    option: the argument that names the model, for messages.
    """
    for name, given in ((option, arguments.model), ("--draft", arguments.draft)):
        if given == "":
            raise ValueError(f"{name} '': must be bundled:NAME, a directory or a hub id")
    corpus = read_corpus(arguments)
    draft = arguments.draft or bundled_draft(arguments.model, drafter) or bundled_draft(arguments.model)
    loaded = {} if loaded is None else loaded
    if draft not in loaded:
        with naming_models({"--draft": arguments.draft, option: arguments.model}):
            split = {name: getattr(arguments, name, None) for name in ("tensor", "data")}
            options = {name: getattr(arguments, name) for name in ("dtype", "exact", "weights", "kv")}
            loaded[draft] = load(arguments.model, draft=draft, **split, **options)
    return with_corpus(loaded[draft], corpus) if corpus and drafter == "suffix" else loaded[draft]


def read_corpus(arguments: argparse.Namespace) -> list[str]:
    """The texts of --corpus; none without it.

    Raises:
      ValueError: a file cannot be read, is empty or is not text; or no drafter copies from it.
    """
    if arguments.corpus is None:
        return []
    drafter: str | list[str] | None = arguments.drafter
    if "suffix" not in ([drafter] if isinstance(drafter, str) else drafter or []):
        raise ValueError(f"--corpus {arguments.corpus[0]}: requires --drafter suffix")
    texts: list[str] = []
    for path in arguments.corpus:
        try:
            texts.append(read_text(Path(path)))
        except ValueError as error:
            raise ValueError(f"--corpus {error}") from None
        if not texts[-1]:
            raise ValueError(f"--corpus {path}: must not be empty")
    return texts


def make_drafter(name: str, arguments: argparse.Namespace, model: Model) -> Drafter:
    """The drafter with the options of the command line.

    Raises:
      ValueError: an option that this drafter does not have, or one that does not suit the model.
    """
    drafter = choose_drafter(name, model)
    fields = [field.name for field in dataclasses.fields(drafter)]  # pyright: ignore[reportArgumentType]
    given = {field: getattr(arguments, field) for field in _SHAPE_OPTIONS if getattr(arguments, field) is not None}
    for field, value in given.items():
        if field not in fields:
            raise ValueError(
                f"{option_of(field)} {value}: the drafter {drafters.name_of(drafter)} {_SHAPE_OPTIONS[field]}"
            )
    made: Drafter = dataclasses.replace(drafter, **given)  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        made.bind(model.target, model.draft)
    except ValueError as error:
        raise ValueError(str(error) if name == "auto" else f"--drafter {name}: {error}") from None
    return made


def read_sampling(arguments: argparse.Namespace) -> Sampling | None:
    """The sampling parameters; None if none of them has an effect."""
    given = {name: getattr(arguments, name) for name in _SAMPLING_OPTIONS if getattr(arguments, name) is not None}
    if not given:
        given["temperature"] = 0.0
    if getattr(arguments, "repetition_penalty", None) is not None:
        given["repetition_penalty"] = arguments.repetition_penalty
    sampling = Sampling(**given)
    return None if sampling == Sampling(temperature=0.0) else sampling


def repeats_plain(arguments: argparse.Namespace) -> bool:
    """Whether the tokens must be those of plain decoding with the same seed."""
    sampling = read_sampling(arguments)
    return arguments.accept in (None, "greedy", "coupled") or sampling is None or sampling.temperature == 0


def check_prompts(model: Model, names: Sequence[str], prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Checks every prompt before the first of them runs.

    names: what an error calls each of them.

    Raises:
      ValueError, TypeError: an empty prompt, or one that is too long for the model.
    """
    for name, prompt in zip(names, prompts, strict=True):
        _, (ids,) = encode_prompts(model, prompt, name)
        try:
            check_fits(model.target, len(ids), max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def read_prompt_file(path: str, *, conversations: bool = False) -> list[dict[str, Any]]:
    """The records of a file of --prompts.

    Raises:
      ValueError: the file cannot be read, or holds something else.
    """
    if path == "":
        raise ValueError("--prompts '': must be a file, or - for standard input")
    try:
        return read_records(path, conversations=conversations)
    except ValueError as error:
        raise ValueError(f"--prompts {error}") from None


def encode_record(model: Model, record: Mapping[str, Any], *, chat: bool = False) -> Prompt:
    """The prompt of a record: its text, or the ids of what a chat template has rendered, which gets no special tokens.

    chat: the text is a user's message.

    Raises:
      ValueError: as `chat_prompt`, or a text that is rendered already.
    """
    text, rendered = record["prompt"], record.get("rendered") is True
    if not rendered:
        return chat_prompt(model, [{"role": "user", "content": text}]) if chat else text
    if chat:
        raise ValueError("--chat: the prompts are rendered by a chat template already; omit it")
    if model.tokenizer is None:
        raise ValueError(f"--prompts: {model.name} has no tokenizer")
    return model.tokenizer.encode(text, special=False)


def chat_prompt(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a conversation in the chat template of the model, up to the beginning of its reply.

    Raises:
      ValueError: the model has no tokenizer or no template, or the template fails.
    """
    if model.tokenizer is None:
        raise ValueError(f"--chat: {model.name} has no tokenizer")
    try:
        return model.tokenizer.chat(messages)
    except ValueError as error:
        raise ValueError(f"--chat: {error}") from None


def ratio(speed: float, other: float) -> str:
    """How many times as fast, as text."""
    return f"{speed / other:.2f}x" if other > 0 and speed > 0 else "no rounds, so not compared:"
