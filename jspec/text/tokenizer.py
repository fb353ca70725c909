"""Tokenizers, chat templates, and the bytes that each token adds to a text."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import ext, nodes, sandbox

from jspec.checkpoints.files import CheckpointError, read_json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer and chat templates.

    Args:
      backend: of the `tokenizers` library. Its truncation and padding are switched off.
      templates: chat templates by name; "default" is the usual one, "tool_use" the one for calls with tools.
      special: texts of special tokens by role, such as {"bos_token": "<s>"}, for the templates.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: Mapping[str, str] | None = None,
        special: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._templates, self._special = backend, dict(templates or {}), dict(special or {})

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint directory, or None if it has no tokenizer.json.

        Raises:
          CheckpointError: a damaged file, or a tokenizer in another format only.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            if (directory / "tokenizer.model").exists():
                raise CheckpointError(
                    f"{directory}: tokenizer.model alone is not supported, a tokenizer.json is needed; with "
                    "`transformers` and `sentencepiece`, AutoTokenizer.from_pretrained(directory)"
                    ".save_pretrained(directory) writes one"
                )
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(f"{path}: not readable as a tokenizer ({error})") from None
        # Where a role is in both files, the newer one, tokenizer_config.json, counts.
        files = [directory / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
        config = {key: value for file in files if file.exists() for key, value in read_json(file).items()}
        return cls(backend, _read_templates(directory, config), _read_special(config))

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this. A model's vocabulary may be larger, for padding."""
        return max(self.vocabulary().values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, as it is spelled in the file, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens, which add nothing to the text, by their content."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; `special` adds the tokens that frame it, such as the one that begins a text."""
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole sequences of ids, without special tokens. For a continuation, see `stream.full_text`."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt for the next turn of a chat, as ids; arguments are those of `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, **options), special=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt for the next turn of a chat, as text with all its special tokens.

        Args:
          messages: such as [{"role": "user", "content": "hello"}]; keys with the value None are left out.
          tools: JSON schemas of functions that the model may call.
          documents: what the model may cite, each with "title" and "text".
          add_generation_prompt: ends the prompt with the beginning of the assistant's turn.
          options: what else the template knows, such as enable_thinking.

        Raises:
          ValueError: no template, no messages, or messages that the template refuses.
          CheckpointError: a template that is no valid Jinja.
        """
        if not isinstance(messages, list | tuple) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise ValueError(f'messages={messages!r}: give a list such as [{{"role": "user", "content": "hello"}}]')
        source = self._template("tool_use" if tools is not None and "tool_use" in self._templates else "default")
        values = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        values |= {"messages": [{k: v for k, v in message.items() if v is not None} for message in messages]}
        try:
            return _environment().from_string(source).render({**self._special, **values, **options})
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is not valid, at its line {error.lineno}: {error}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id adds to a text that has already begun; none for special tokens and unused ids.

        Raises:
          ValueError: the tokenizer.json has a decoder of an unknown kind.
        """
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        spelled, special = [b""] * self.vocab_size, set(self.special_ids.values())
        for token, i in self.vocabulary().items():
            if i not in special:
                spelled[i] = _spell(token, self._decoder_steps)
        return spelled

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        return _check_decoder(json.loads(self._backend.to_str())["decoder"])

    def leading_spaces(self, token: int) -> int:
        """How many spaces in front of `token` are no part of a text that begins with it, but a mark of a word."""
        spelled = self.token_bytes()[token]
        spaces = len(spelled) - len(spelled.lstrip(b" "))
        kinds = {step["type"]: step for step in self._decoder_steps}
        if kinds.get("Metaspace", {}).get("prepend_scheme", "never") != "never":
            return spaces
        return min(spaces, kinds.get("Strip", {}).get("start", 0))

    def _template(self, name: str) -> str:
        if name not in self._templates:
            raise ValueError(
                "this checkpoint has no chat template: give a prompt as text or ids, or add a chat_template.jinja"
                + (f" (it has {sorted(self._templates)}, and no {name!r})" if self._templates else "")
            )
        return self._templates[name]


def _check_decoder(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a tokenizer.json's decoder, which `_spell` takes token by token.

    Raises:
      ValueError: a step that is unknown, or whose effect on a token depends on the tokens around it.
    """
    decoder = decoder or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = False
    for step in steps:
        name = step["type"]
        known = name in ("ByteLevel", "ByteFallback", "Metaspace", "Fuse")
        known |= name == "Replace" and "String" in step["pattern"]
        # Only at the beginning of the whole text, one space is dropped.
        known |= name == "Strip" and fused and (step["content"], step["stop"]) == (" ", 0) and step["start"] <= 1
        if not known:
            raise ValueError(
                f"tokenizer.json: the decoder step {json.dumps(step)} is not supported; there are ByteLevel, Metaspace "
                "and sequences of Replace (of a string), ByteFallback, Fuse and then Strip (of one leading space)"
            )
        fused |= name == "Fuse"
    return steps


def _spell(token: str, steps: Iterable[dict[str, Any]]) -> bytes:
    """The bytes that a token adds to the text."""
    for step in steps:
        if step["type"] == "ByteLevel":
            # As in the library, a token with any other character (an added one) stands for itself.
            return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
        if step["type"] == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
    return token.encode()


def _byte_characters() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE.

    Printable Latin-1 stands for itself, the other bytes in ascending order for the characters from U+0100 on (openai/
    gpt-2, src/encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(code): byte for code, byte in chain(zip(printable, printable, strict=True), enumerate(others, 256))}


_BYTE_OF = _byte_characters()


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of templates win over those in tokenizer_config.json."""
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    if (directory / "chat_template.jinja").exists():
        files["default"] = directory / "chat_template.jinja"
    try:
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{directory}: a chat template is not readable ({error})") from None
    stored = config.get("chat_template")
    if templates or stored is None:
        return templates
    if isinstance(stored, str):
        return {"default": stored}
    try:
        return {entry["name"]: entry["template"] for entry in stored}
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither a string nor a list of objects with "
            "name and template"
        ) from None


def _read_special(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens by role; a token is stored as a string or as an object with its content."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


class _Generation(ext.Extension):
    """The block {% generation %}, which marks what an assistant says for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    """Where chat templates run: what Hugging Face's documentation of them promises, and no access to the host."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
