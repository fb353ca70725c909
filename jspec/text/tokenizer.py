"""Tokenizers and their chat templates, and the bytes of each token."""

import json
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from jspec.checkpoints.fields import MOST_SIZE
from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.gguf_file import is_gguf
from jspec.checkpoints.tokenizer_files import TokenizerFiles, read_tokenizer_files
from jspec.core.checks import check_int, check_text
from jspec.text.chat_template import ChatTemplate
from jspec.text.gguf_tokenizer import read_gguf_tokenizer
from jspec.text.length import LengthBound, length_bound

_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Roles of special tokens in all models; those of others are often of no text."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer and chat templates.

    Args:
      backend: tokenizer of the `tokenizers` library. Truncation and padding are turned off.
      templates: chat templates by name: "default", and "tool_use" for chats with tools.
      special: text of each special token by role, such as {"bos_token": "<s>"}, for the templates.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: Mapping[str, str | ChatTemplate] | None = None,
        special: Mapping[str, str] | None = None,
    ):
        # Prompts are never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._special = backend, dict(special or {})
        self._templates = {
            name: template
            if isinstance(template, ChatTemplate)
            else ChatTemplate(template, f"the chat template {name!r}")
            for name, template in (templates or {}).items()
        }

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer | None":
        """Load the tokenizer of a checkpoint directory, or of a GGUF file; None if it has none.

        Raises:
          CheckpointError: a damaged file, or a tokenizer in an unsupported format.
        """
        path = Path(directory)
        if is_gguf(path):
            parts = read_gguf_tokenizer(path)
        else:
            files = read_tokenizer_files(path)
            parts = files and (_parse_backend(files), files.templates, files.special)
        if parts is None:
            return None
        backend, templates, special = parts
        return cls(backend, {name: ChatTemplate(*source) for name, source in templates.items()}, special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. The vocabulary of a model may be padded to a larger size."""
        return max(self.vocabulary().values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        """Token, as spelled in the file -> id; includes added tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    def id_of(self, token: str) -> int | None:
        """The id of a token, as spelled in the file; None: there is none."""
        return self._backend.token_to_id(token)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Content of a special token -> id. Special tokens add nothing to the text."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @property
    def special_roles(self) -> Mapping[str, str]:
        """Role, such as "eos_token" -> content of the special token."""
        return self._special

    @property
    def templates(self) -> Mapping[str, str]:
        """Chat templates by name."""
        return {name: template.source for name, template in self._templates.items()}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenize a text. `special`: whether to add special tokens, such as BOS, unless the text begins with it.

        Raises:
          TypeError, ValueError: not a str, or one with lone surrogates.
        """
        ids = self._ids(check_text("text", text), special)
        frame = self._ids("", special)
        for count in range(len(frame), 0, -1):
            # A second BOS, as in a rendered chat, of one or several tokens; both may also be in the text.
            if ids[:count] == ids[count : 2 * count] == frame[:count]:
                plain = self._ids(text, False)
                return ids[count:] if plain[:count] == ids[:count] and len(plain) < len(ids) else ids
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        """Tokenize without offsets, which take half of the time and of the memory."""
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def least_tokens(self, text: str, most: int) -> int:
        """A lower bound of the tokens of a text, without tokenizing it, up to `most`; 0 if none is known."""
        return 0 if self._length_bound is None else self._length_bound.least_tokens(text, most)

    @cached_property
    def _length_bound(self) -> LengthBound | None:
        return length_bound(json.loads(self._backend.to_str()), _BYTE_OF)

    def decode(self, ids: Iterable[int]) -> str:
        """Detokenize a complete sequence, without special tokens. For a continuation, use `stream.full_text`."""
        checked = [check_int("id", i, least=0, most=2**32 - 1) for i in ids]
        return self._backend.decode(checked, skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> list[int]:
        """Render and tokenize a chat. Arguments are those of `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, **options), special=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: object,
    ) -> str:
        """Render a chat as text, special tokens included.

        Args:
          messages: for example [{"role": "user", "content": "hello"}]; keys whose value is None are omitted. The role
            developer is written as system for a template that does not know it.
          tools: JSON schemas of functions for the model to call.
          documents: documents for the model to cite, each with "title" and "text".
          add_generation_prompt: whether the prompt ends with the beginning of the assistant's turn.
          continue_final_message: whether it ends within the last message instead, for the model to continue.
          options: other variables of the template, such as enable_thinking.

        Raises:
          ValueError: no template, no messages, or messages that the template rejects, drops or fails for.
          CheckpointError: the template is not valid Jinja, or exceeds a bound.
        """
        if not isinstance(messages, list | tuple) or not messages or not all(isinstance(m, Mapping) for m in messages):
            raise ValueError(f'messages={messages!r}: must be a list such as [{{"role": "user", "content": "hello"}}]')
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(
                "this checkpoint has no chat template: use a prompt of text or ids, or add a chat_template.jinja"
                + (f" (it has {sorted(self._templates)}, but not {name!r})" if self._templates else "")
            )
        template = self._templates[name]
        values = {"tools": tools, "documents": documents}
        values |= {"add_generation_prompt": add_generation_prompt and not continue_final_message}
        written = [{k: v for k, v in message.items() if v is not None} for message in messages]
        render = template.render_open if continue_final_message else template.render_whole
        return render(written, {**self._special, **values, **options})

    def token_bytes(self, shown: Collection[str] = ()) -> list[bytes]:
        """The bytes of each id after other text; empty for special tokens and unused ids. ValueError if not known.

        shown: special tokens whose bytes are their names.
        """
        if not shown:
            return self._token_bytes
        spelled = list(self._token_bytes)
        for name in self.special_ids.keys() & set(shown):
            spelled[self.special_ids[name]] = name.encode()
        return spelled

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
        """Leading word-boundary spaces of a token, which are dropped at the beginning of a text."""
        spelled = self.token_bytes()[token]
        spaces = len(spelled) - len(spelled.lstrip(b" "))
        kinds = {step["type"]: step for step in self._decoder_steps}
        if kinds.get("Metaspace", {}).get("prepend_scheme", "never") != "never":
            return spaces
        return min(spaces, kinds.get("Strip", {}).get("start", 0))


def _check_decoder(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of the decoder in tokenizer.json; ValueError if one is unknown or depends on other tokens."""
    # One step or several.
    decoder = decoder or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = False
    for step in steps:
        name = step["type"]
        supported = name in ("ByteLevel", "ByteFallback", "Metaspace", "Fuse")
        supported |= name == "Replace" and "String" in step["pattern"]
        # Supported only if it drops at most one space, at the beginning of the whole text.
        supported |= name == "Strip" and fused and (step["content"], step["stop"]) == (" ", 0) and step["start"] <= 1
        if not supported:
            raise ValueError(
                f"tokenizer.json: unsupported decoder step {json.dumps(step)}; supported are ByteLevel, Metaspace, and "
                "sequences of Replace (of a string), ByteFallback, Fuse and then Strip (of one leading space)"
            )
        fused |= name == "Fuse"
    return steps


def _spell(token: str, steps: Iterable[dict[str, Any]]) -> bytes:
    """Apply the decoder's steps to one token."""
    for step in steps:
        if step["type"] == "ByteLevel":
            # As in the library: a token with any other character is an added token, spelled literally.
            return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
        if step["type"] == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
    return token.encode()


def _byte_characters() -> dict[str, int]:
    """Character -> byte in byte-level BPE.

    Printable Latin-1 characters represent themselves; the remaining bytes, in ascending order, are represented by the
    characters from U+0100 on (openai/gpt-2, src/encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(code): byte for code, byte in chain(zip(printable, printable, strict=True), enumerate(others, 256))}


_BYTE_OF = _byte_characters()


def _parse_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """Parse a tokenizer.json, and add the tokens of other files."""
    # Parse.
    path = files.path
    try:
        backend = tokenizers.Tokenizer.from_buffer(files.data)
    except BaseException as error:  # the library raises no narrower class, and a Rust panic is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(f"{path}: not a valid tokenizer ({error})") from None
    # Bound the vocabulary, since tables have a row for each id.
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_SIZE:
        raise CheckpointError(f"{path}: has the token id {largest}: must be below {MOST_SIZE}")
    # Tokens that it lacks get the next id, those of its vocabulary their own.
    known = backend.get_added_tokens_decoder()
    texts = {token.content for token in known.values()}
    missing = [(text, i, flags) for text, (i, flags) in files.added.items() if text and text not in texts]
    following = max(backend.get_vocab_size(with_added_tokens=False), max(known, default=-1) + 1)
    added, unnamed = [], {text for role, text in files.special.items() if role not in _ROLES}
    for text, i, flags in sorted(missing, key=lambda token: -1 if token[1] is None else token[1]):
        index = backend.token_to_id(text)
        if i is None and index is None:
            if text not in unnamed:
                warnings.warn(f"{path}: lacks the special token {text!r}: texts split it into pieces", stacklevel=2)
        elif i is not None and i != (following if index is None else index):
            problem = f"lacks the token {text!r} with id {i}, which cannot be added: texts split it into pieces"
            warnings.warn(f"{path}: {problem}", stacklevel=2)
        else:
            added.append(tokenizers.AddedToken(text, **flags))
            following += index is None
    backend.add_tokens(added)
    return backend


def check_same_tokens(target: Tokenizer | None, draft: Tokenizer | None, source: object, draft_source: object) -> None:
    """Raises ValueError if an id means different tokens in a target and its draft, and both have a tokenizer.

    source, draft_source: where they are from, for the message.
    """
    if target is not None and draft is not None and target.vocabulary() != draft.vocabulary():
        raise ValueError(
            f"draft={str(draft_source)!r} has a different tokenizer than {str(source)!r}: "
            "each token id must mean the same token in the draft and the target"
        )
