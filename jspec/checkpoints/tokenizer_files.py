"""The files of a tokenizer and its chat templates in a checkpoint directory."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from jspec.checkpoints.fields import Fields, read_fields
from jspec.checkpoints.files import CheckpointError, find_file, read_bytes

_MOST_BYTES = 2**27
"""Bound of tokenizer.json, four times the largest known."""
_MOST_TEMPLATE_BYTES = 400_000
"""Bound of a chat template in a file of its own."""


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What is read.

    path, data: tokenizer.json and its bytes.
    templates: chat templates by name, each with the place that errors name.
    special: text of each special token by role, such as {"bos_token": "<s>"}.
    added: text of each token that other files than tokenizer.json add -> its id, None if it is not stated, and flags
      of `tokenizers.AddedToken`.
    """

    path: Path
    data: bytes
    templates: dict[str, tuple[str, str]]
    special: dict[str, str]
    added: dict[str, tuple[int | None, dict[str, bool]]]


def read_tokenizer_files(directory: Path) -> TokenizerFiles | None:
    """Read the files of a directory; None if it has no tokenizer."""
    path = find_file(directory, "tokenizer.json")
    if path is None:
        if find_file(directory, "tokenizer.model") is not None:
            raise CheckpointError(
                f"{directory}: has a tokenizer.model but no tokenizer.json, which is required; with `transformers` "
                "and `sentencepiece` installed, AutoTokenizer.from_pretrained(directory)"
                ".save_pretrained(directory) writes one"
            )
        return None
    # tokenizer_config.json, the newer format, takes precedence.
    files = [find_file(directory, name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    config = Fields({}, str(directory / "tokenizer_config.json"))
    for file in files:
        config = config if file is None else config.merged(read_fields(file))
    special = {
        key: text for key in config.keys() if key.endswith("_token") if (text := config.token_text(key)) is not None
    }
    added = _read_added(directory, config, special.values())
    return TokenizerFiles(path, read_bytes(path, _MOST_BYTES), _read_templates(directory, config), special, added)


_FLAGS = "lstrip", "rstrip", "single_word", "normalized", "special"


def _read_added(
    directory: Path, config: Fields, special: Iterable[str]
) -> dict[str, tuple[int | None, dict[str, bool]]]:
    """Read the tokens of older formats, in which tokenizer.json lacks some; as `TokenizerFiles.added`."""
    plain = {"special": True, "normalized": False}
    added: dict[str, tuple[int | None, dict[str, bool]]] = {text: (None, plain) for text in special}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        added |= {text: (None, plain) for text in config.texts_or_objects(key)}
    file, decoder = find_file(directory, "added_tokens.json"), config.section("added_tokens_decoder")
    ids = Fields({}, "") if file is None else read_fields(file)
    if not config.has("added_tokens_decoder"):
        # As `transformers`, which reads the older file only without the newer list.
        other = {"special": False, "normalized": True}
        added |= {text: (ids.read_int(text, least=0), plain if text in added else other) for text in ids.keys()}
    for key in decoder.keys():
        token = decoder.section(key)
        if not key.isdecimal() or len(key) > 9:
            raise CheckpointError(f"{config.where}: {token.path}: must be the id of a token")
        flags = {name: token.read_flag(name, False) for name in _FLAGS}
        added[token.read_text("content")] = int(key), flags
    return added


def _read_templates(directory: Path, config: Fields) -> dict[str, tuple[str, str]]:
    """Read chat templates by name. Template files take precedence over tokenizer_config.json."""
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    default = find_file(directory, "chat_template.jinja")
    if default is not None:
        files["default"] = default
    templates = {}
    for name, path in files.items():
        try:
            templates[name] = read_bytes(path, _MOST_TEMPLATE_BYTES).decode("utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: the chat template is not valid UTF-8 ({error})") from None
    # tokenizer_config.json has one template, or a list of named ones.
    if templates or not config.has("chat_template"):
        return templates
    entries = config.optional_sections("chat_template")
    if entries is None:
        return {"default": (config.read_text("chat_template"), f"{config.where}: chat_template")}
    return {
        entry.read_text("name"): (entry.read_text("template"), f"{config.where}: {entry.path}template")
        for entry in entries
    }
