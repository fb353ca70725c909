"""Fields that ask for a text of a grammar, in the spellings of OpenAI and of vLLM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.core.checks import check_flag, check_text
from jspec.core.grammar import TokenGrammar
from jspec.serve.fields import REQUIRED, ApiError, hint, present, read_object, read_variant, refused, row
from jspec.text.grammar import Grammar
from jspec.text.grammar.masks import OnlyTokens, WithoutTexts

KINDS = {
    **{"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice"},
    **{"allowed_token_ids": "only", "bad_words": "without"},
}
"""Fields with the text of a grammar, or its tokens -> `GrammarRequest.kind`."""
_MASKS = {"only": OnlyTokens, "without": WithoutTexts}
_MOST_OF_MESSAGE = 200


@dataclasses.dataclass(frozen=True)
class GrammarRequest:
    """A grammar that is still to be compiled, which may take seconds.

    param: the field that asks for it.
    kind: "json_schema", "regex" or "choice", as `Grammar` makes it; "only" (tokens) or "without" (texts).
    value: the schema, the regex, the choices, the ids or the texts.
    whitespace: as in `Grammar.json_schema`; None: its default.
    """

    param: str
    kind: str
    value: Any
    whitespace: str | None = None

    def compile(self) -> TokenGrammar:
        """The grammar; ApiError if it is invalid, or not supported."""
        options = {} if self.whitespace is None else {"whitespace": self.whitespace}
        try:
            if self.kind in _MASKS:
                return _MASKS[self.kind](tuple(self.value))
            return getattr(Grammar, self.kind)(self.value, **options)
        # Name the field, and cut long messages.
        except (ValueError, TypeError) as error:
            message = str(error)
            shown = message if len(message) <= _MOST_OF_MESSAGE else f"{message[:_MOST_OF_MESSAGE]}..."
            raise ApiError(f"{self.param}: {shown}", param=self.param) from None


def find_grammar(fields: Mapping[str, Any]) -> GrammarRequest | None:
    """The grammar that a request asks for; None if it asks for none. ApiError if several fields ask for one."""
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
    kind, fields = read_variant(name, value, _FORMATS)
    if kind == "text":
        return None
    schema = {"type": "object"} if kind == "json_object" else fields["json_schema"]["schema"]
    return GrammarRequest(name, "json_schema", schema)


def check_structured_outputs(name: str, value: object) -> GrammarRequest:
    """vLLM's field."""
    fields = read_object(name, value, _STRUCTURED)
    whitespace = fields["whitespace_pattern"]
    # Exactly one grammar.
    grammars = {kind: fields[kind] for kind in ("json", "regex", "choice")}
    grammars["json_object"] = {"type": "object"} if fields["json_object"] else None
    kinds = list(present(grammars))
    if len(kinds) != 1:
        message = f"{name}: must have one of {', '.join(grammars)}, but has {', '.join(kinds) or 'none'}"
        raise ApiError(message, param=name)
    (kind,) = kinds
    if not kind.startswith("json"):
        if whitespace is not None:
            raise ApiError(f"{name}.whitespace_pattern: requires json", param=f"{name}.whitespace_pattern")
        return GrammarRequest(name, kind, grammars[kind])
    return GrammarRequest(name, "json_schema", grammars[kind], whitespace)


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


_SCHEMA = {
    # For people; and the schema always holds strictly.
    **{"name": hint(check_text), "description": hint(check_text), "strict": hint(check_flag)},
    "schema": row(check_schema, REQUIRED),
}
_UNSUPPORTED = {"grammar": refused(), "structural_tag": refused()}
_FORMATS = {
    **{"text": _UNSUPPORTED, "json_object": _UNSUPPORTED},
    "json_schema": {"json_schema": row(_SCHEMA, REQUIRED), **_UNSUPPORTED},
}
"""Type of a response format -> its fields."""
_STRUCTURED = {
    **{"json": row(check_schema), "regex": row(check_text), "choice": row(check_choices)},
    **{"json_object": row(check_flag), "whitespace_pattern": row(check_text)},
    **{"disable_fallback": refused(False), "disable_any_whitespace": refused(False), **_UNSUPPORTED},
}
