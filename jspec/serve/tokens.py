"""The endpoints of the tokenizer, as vLLM serves them: /tokenize, /detokenize and /tokenizer_info."""

import dataclasses
from typing import Any

from jspec.serve import openai, prompts
from jspec.serve.answer import TokenNames
from jspec.serve.openai import Limits
from jspec.serve.tools import Dialect
from jspec.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenService:
    """A tokenizer for clients. Bodies are those of requests, and results are answers."""

    tokenizer: Tokenizer
    names: TokenNames
    dialect: Dialect
    limits: Limits
    vocab_size: int

    def encode(self, body: dict[str, Any]) -> dict[str, object]:
        """The tokens of a chat or of a text.

        Raises:
          ApiError: a field is unknown or invalid, or there are more tokens than the context has.
        """
        fields = openai.read_tokenize(body, vocab_size=self.vocab_size, limits=self.limits)
        most = self.limits.context
        # A text or a chat.
        if (messages := fields["messages"]) is None:
            prompts.check_length("prompt", self.tokenizer, fields["prompt"], most)
            ids = self.tokenizer.encode(fields["prompt"], special=fields["add_special_tokens"])
        else:
            template, messages = openai.make_template(fields), self.dialect.spelled(messages)
            ids = prompts.chat_ids(self.tokenizer, messages, template, most)
        # The ids, and how they are written.
        strings = [self.names.text(i) for i in ids] if fields["return_token_strs"] else None
        return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings}

    def decode(self, body: dict[str, Any]) -> dict[str, object]:
        """The text of tokens; as `encode`."""
        ids = openai.read_detokenize(body, vocab_size=self.vocab_size, limits=self.limits)
        return {"prompt": self.tokenizer.decode(ids)}

    def info(self) -> dict[str, object]:
        """The special tokens by role, and the chat template."""
        # Roles that the tokenizer has not are null.
        roles = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")) | dict(self.tokenizer.special_roles)
        return {**roles, "chat_template": self.tokenizer.templates.get("default")}
