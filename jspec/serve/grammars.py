"""Fields that ask for a text of a grammar, in the spellings of OpenAI and of vLLM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.core.checks import check_flag, check_text
from jspec.core.grammar import TokenGrammar
from jspec.serve.fields import REQUIRED, ApiError, Fields, read_object, row
from jspec.text.grammar import Grammar
from jspec.text.grammar.masks import OnlyTokens, WithoutTexts

KINDS = {
    **{"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice"},
    **{"allowed_token_ids": "only", "bad_words": "without"},
}
"""Fields with the text of a grammar, or its tokens -> `GrammarRequest.kind`."""
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


def find_grammar(fields: Mapping[str, Any]) -> GrammarRequest | None:
    """The grammar that a request asks for; None if it asks for none.

    Raises:
      ApiError: several fields ask for one.
    """
    requests = [fields[name] for name in ("response_format", "structured_outputs") if fields[name] is not None]
    whitespace, of_json = fields["guided_whitespace_pattern"], fields["guided_json"] is not None
    for name, kind in KINDS.items():
        if fields[name] not in (None, []):
            requests.append(GrammarRequest(name, kind, fields[name], whitespace if kind == "json_schema" else None))
    if whitespace is not None and not of_json:
        name = "guided_whitespace_pattern"
        raise ApiError(f"{name}: requires guided_json", param=name)
    # A text has one grammar.
    if len(requests) > 1:
        first, second = requests[0].param, requests[1].param
        raise ApiError(f"{second}: must be omitted beside {first}; a text has one grammar", param=second)
    return requests[0] if requests else None


def check_response_format(name: str, value: object) -> GrammarRequest | None:
    """OpenAI's field."""
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
    table = {"name": row(check_text), "description": row(check_text), "strict": row(check_flag)}
    return read_object(name, value, {**table, "schema": row(check_schema, REQUIRED)})["schema"]


def check_structured_outputs(name: str, value: object) -> GrammarRequest:
    """vLLM's field."""
    # Read the fields.
    table = {"json": row(check_schema), "regex": row(check_text), "choice": row(check_choices)}
    table |= {"json_object": row(check_flag), "whitespace_pattern": row(check_text)}
    kinds = read_object(name, value, table, _REFUSED)
    # Exactly one grammar.
    whitespace = kinds.pop("whitespace_pattern")
    kinds["json_object"] = {"type": "object"} if kinds["json_object"] else None
    requested = [kind for kind, value in kinds.items() if value is not None]
    if len(requested) != 1:
        names = ", ".join(requested) or "none"
        raise ApiError(f"{name}: must have one of {', '.join(kinds)}, but has {names}", param=name)
    (kind,) = requested
    if whitespace is not None and not kind.startswith("json"):
        raise ApiError(f"{name}.whitespace_pattern: requires json", param=f"{name}.whitespace_pattern")
    return GrammarRequest(name, "json_schema" if kind.startswith("json") else kind, kinds[kind], whitespace)


def check_schema(name: str, value: object) -> object:
    """A JSON schema that is still to be read."""
    if not isinstance(value, dict | str):
        raise TypeError(f"{name}: must be a JSON schema, as an object or as text")
    return value


def check_choices(name: str, value: object) -> list[str]:
    """Texts of which one is the answer."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{name}: must be a list of texts that are not empty")
    return value
