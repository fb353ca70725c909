"""Fields that ask for a text of a grammar, in the spellings of OpenAI and of vLLM."""

import dataclasses
from typing import Any

from jspec.core.checks import check_flag, check_text
from jspec.core.grammar import TokenGrammar
from jspec.serve.fields import ApiError, Fields
from jspec.serve.sampling import check_ids, check_stop
from jspec.text.grammar import Grammar
from jspec.text.grammar.masks import OnlyTokens, WithoutTexts

_REFUSED = {"grammar": (), "structural_tag": (), "disable_fallback": (False,), "disable_any_whitespace": (False,)}
_REFUSED_OF_FORMAT: dict[str, tuple[object, ...]] = {"grammar": (), "structural_tag": ()}
_MOST_OF_MESSAGE = 200


@dataclasses.dataclass(frozen=True)
class GrammarRequest:
    """A grammar that is still to be compiled, which may take seconds.

    param: the field that asks for it.
    kind: "json_schema", "regex", "choice", "only" (tokens) or "without" (texts).
    value: the schema, the regex, the choices, the ids or the texts.
    whitespace: as in `Grammar.json_schema`; None: its default.
    """

    param: str
    kind: str
    value: Any
    whitespace: str | None = None

    def compile(self) -> TokenGrammar:
        """The grammar.

        Raises:
          ApiError: it is invalid, or not supported.
        """
        # Compile by kind.
        try:
            if self.kind == "regex":
                return Grammar.regex(self.value)
            if self.kind == "choice":
                return Grammar.choice(self.value)
            if self.kind in ("only", "without"):
                return (OnlyTokens if self.kind == "only" else WithoutTexts)(tuple(self.value))
            if self.whitespace is None:
                return Grammar.json_schema(self.value)
            return Grammar.json_schema(self.value, whitespace=self.whitespace)
        # Name the field, and cut long messages.
        except (ValueError, TypeError) as error:
            message = str(error)
            shown = message if len(message) <= _MOST_OF_MESSAGE else f"{message[:_MOST_OF_MESSAGE]}..."
            raise ApiError(f"{self.param}: {shown}", param=self.param) from None


def take_grammar(fields: Fields, vocab_size: int) -> GrammarRequest | None:
    """The grammar that a request asks for; None if it asks for none.

    Raises:
      ApiError: a field is invalid or not supported, or several ask for a grammar.
    """
    # Fields of OpenAI, of vLLM, and older ones of vLLM.
    formatted = fields.take("response_format", _response_format)
    outputs = fields.take("structured_outputs", _structured_outputs)
    schema = fields.take("guided_json", _check_schema)
    regex, choice = fields.take("guided_regex", check_text), fields.take("guided_choice", _check_choices)
    whitespace = fields.take("guided_whitespace_pattern", check_text)
    only = fields.take("allowed_token_ids", check_ids, vocab_size=vocab_size, least=1)
    without = fields.take("bad_words", check_stop, listed=True) or None
    # The grammars of the request.
    requests = [request for request in (formatted, outputs) if request is not None]
    for param, kind, value in (
        ("guided_json", "json_schema", schema),
        ("guided_regex", "regex", regex),
        ("guided_choice", "choice", choice),
        ("allowed_token_ids", "only", only),
        ("bad_words", "without", without),
    ):
        if value is not None:
            requests.append(GrammarRequest(param, kind, value, whitespace if kind == "json_schema" else None))
    if whitespace is not None and schema is None:
        name = "guided_whitespace_pattern"
        raise ApiError(f"{name}: requires guided_json", param=name)
    # A text has one grammar.
    if len(requests) > 1:
        first, second = requests[0].param, requests[1].param
        raise ApiError(f"{second}: must be omitted beside {first}; a text has one grammar", param=second)
    return requests[0] if requests else None


def _response_format(name: str, value: object) -> GrammarRequest | None:
    fields = Fields(value, name)
    kind = fields.require("type", check_text)
    # The kind of format.
    if kind not in ("text", "json_object", "json_schema"):
        message = f"{name}.type={kind[:40]!r}: must be 'text', 'json_object' or 'json_schema'"
        raise ApiError(message, param=f"{name}.type")
    schema = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        schema = fields.require("json_schema", _named_schema)
    fields.end(_REFUSED_OF_FORMAT)
    return None if schema is None else GrammarRequest(name, "json_schema", schema)


def _named_schema(name: str, value: object) -> object:
    """The schema of OpenAI's object; its name and description are only for people, and it always holds strictly."""
    fields = Fields(value, name)
    fields.take("name", check_text)
    fields.take("description", check_text)
    fields.take("strict", check_flag)
    schema = fields.require("schema", _check_schema)
    fields.end()
    return schema


def _structured_outputs(name: str, value: object) -> GrammarRequest:
    # Read the fields.
    fields = Fields(value, name)
    schema, regex = fields.take("json", _check_schema), fields.take("regex", check_text)
    choice, anything = fields.take("choice", _check_choices), fields.take("json_object", check_flag, False)
    whitespace = fields.take("whitespace_pattern", check_text)
    fields.end(_REFUSED)
    # Exactly one grammar.
    kinds = {"json": schema, "regex": regex, "choice": choice, "json_object": {"type": "object"} if anything else None}
    requested = [kind for kind, value in kinds.items() if value is not None]
    if len(requested) != 1:
        names = ", ".join(requested) or "none"
        raise ApiError(f"{name}: must have one of {', '.join(kinds)}, but has {names}", param=name)
    (kind,) = requested
    if whitespace is not None and not kind.startswith("json"):
        raise ApiError(f"{name}.whitespace_pattern: requires json", param=f"{name}.whitespace_pattern")
    return GrammarRequest(name, "json_schema" if kind.startswith("json") else kind, kinds[kind], whitespace)


def _check_schema(name: str, value: object) -> object:
    if not isinstance(value, dict | str):
        raise TypeError(f"{name}: must be a JSON schema, as an object or as text")
    return value


def _check_choices(name: str, value: object) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{name}: must be a list of texts that are not empty")
    return value
