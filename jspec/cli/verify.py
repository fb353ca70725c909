"""Verifies that a draft changes nothing but the speed, and writes a certificate.

A model is compared with its own plain decoding: chains and trees, ends of texts, rounds, pages, sampling, grammars,
log-probabilities, the engine, and distributions. With --endpoint, a server of OpenAI's API is compared with another
one, or with plain decoding of --model. The exit status is 1 if anything failed.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.analysis.verify import Certificate, verify
from jspec.analysis.verify_endpoint import Server, verify_endpoint
from jspec.cli.arguments import check_output
from jspec.cli.common import ACCEPT_HELP, DRAFTER_HELP, DRAFTERS, ModelOptions, load_model, make_drafter
from jspec.core.accept import RULES
from jspec.core.options import option, typed
from jspec.generation.options import MAX_SEED

_KEY_VARIABLE = "OPENAI_API_KEY"
_ENDPOINT_OPTIONS = ("reference", "served", "fields")
_MODEL_OPTIONS = ("drafter", "accept", "seed", "draft", "corpus", "depth", "width", "num_nodes", "window", "keep_first")
"""Options with an effect only on servers, and only on a model here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of `jspec verify`; ValueError or TypeError if one is out of bounds or contradicts another."""

    drafter: str = option("auto", DRAFTER_HELP, choices=DRAFTERS)
    accept: str | None = option(None, ACCEPT_HELP, choices=tuple(RULES))
    max_new_tokens: int = option(48, "new tokens of each text", least=16, most=2**31 - 1)
    minutes: float = option(2.0, "time after which no further case begins", metavar="M", least=0.0)
    seed: int = option(0, "random seed", least=0, most=MAX_SEED)
    endpoint: str | None = option(
        None,
        f"address of a server to verify in place of a model; the environment variable {_KEY_VARIABLE} has its key",
        metavar="URL",
    )
    reference: str | None = option(
        None, "the server that it must equal (default: plain decoding of --model)", metavar="URL"
    )
    served: str | None = option(None, "name of the model in requests (default: the first that the server lists)")
    fields: str | None = option(
        None, """further fields of all requests, such as '{"repeat_penalty": 1}'""", metavar="JSON"
    )
    json: Path | None = option(None, "write the certificate to FILE as JSON", metavar="FILE")
    markdown: Path | None = option(None, "write it to FILE as a page", metavar="FILE.md")
    command: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name, path in {"--json": self.json, "--markdown": self.markdown}.items():
            if path is not None:
                check_output(name, path)
        _parse_fields(self.fields)
        # Refuse options without effect.
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        others = _ENDPOINT_OPTIONS if self.endpoint is None else _MODEL_OPTIONS
        if self.reference is not None:
            others = (*others, "model", "adapter", "dtype", "weights", "kv", "exact")
        for name in others:
            if getattr(self, name) != defaults[name]:
                needs = "requires --endpoint" if self.endpoint is None else "has no effect on a server; leave it out"
                raise ValueError(f"{typed(self, name)}: {needs}")


def _parse_fields(text: str | None) -> dict[str, Any]:
    try:
        fields = {} if text is None else json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"--fields {text}: must be an object of JSON")
    return fields


def run(options: Options) -> int:
    """Verifies, prints and writes; returns the exit status. ValueError, TypeError or OSError for invalid input."""
    certificate = _verified(options, os.environ)
    print(certificate)
    if options.json is not None:
        options.json.write_text(certificate.to_json(), encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(certificate.to_markdown(), encoding="utf-8")
    return 0 if certificate.passed else 1


def _verified(options: Options, environment: Mapping[str, str]) -> Certificate:
    limits = {"max_new_tokens": options.max_new_tokens, "minutes": options.minutes}
    if options.endpoint is None:
        model = load_model(options.drafter, options)
        drafter = make_drafter(options.drafter, options, model)
        certificate = verify(model, drafter, accept=options.accept, seed=options.seed, **limits)
    else:
        rest = options.served, environment.get(_KEY_VARIABLE), _parse_fields(options.fields)
        server = Server(options.endpoint, *rest)
        if options.reference is not None:
            reference = Server(options.reference, *rest)
        else:
            reference = load_model("plain", options)
        certificate = verify_endpoint(server, reference, **limits)
    subject = {**certificate.subject, "command": options.command or ""}
    return dataclasses.replace(certificate, subject=subject)
