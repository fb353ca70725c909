"""Grammars: what a JSON schema of ten fields costs to compile, and whether generated documents validate.

    python benchmarks/grammar.py --json benchmarks/results/DATE-MACHINE-grammar.jsonl

Schemas are compiled for a made-up vocabulary of 128,256 tokens, or for the one of `--tokenizer`. Then a bundled model
writes documents of five schemas, greedily and sampled, with one drafter after the other. `jsonschema` validates each
document, and its tokens are compared with those of plain decoding with the same grammar.
"""

import argparse
import json
import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import recorded
import tokenizers

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.core import grammar as grammar_tables
from jspec.core.automaton import SparseTable
from jspec.core.types import Drafter
from jspec.loading.model import Model
from jspec.text.grammar import Grammar, compile_grammar
from jspec.text.tokenizer import Tokenizer

VOCAB, SPECIAL = 128_256, 256
"""The sizes of the vocabulary of Llama 3: all tokens, and the special ones among them, which have the last ids."""
GOAL_SECONDS, GOAL_BYTES = 2.0, 1e6
NEW_TOKENS = 384
TO_BYTES, TO_TOKENS = "compiling a schema to bytes", "compiling bytes to tokens"
DRAFTERS: Mapping[str, Drafter] = {
    "ngram": jspec.Ngram(depth=4),
    "suffix": jspec.Suffix(depth=7, num_nodes=16),
    "eagle": jspec.Eagle(depth=4),
    "eagle tree": jspec.Eagle(depth=3, width=3, num_nodes=12),
}
SAMPLINGS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
)

Found: TypeAlias = dict[tuple[str, str], list[float]]
"""Metric and unit -> values."""


def _text(most: int | None = None) -> dict[str, Any]:
    return {"type": "string"} if most is None else {"type": "string", "maxLength": most}


def ten_fields(scale: float | None) -> dict[str, Any]:
    """A schema of ten fields. scale: of the bounds of its strings; None: without bounds."""

    def text(most: int) -> dict[str, Any]:
        return _text(None if scale is None else round(most * scale))

    address = {
        "type": "object",
        "properties": {"street": text(40), "city": text(24), "country": {"type": "string", "pattern": "^[A-Z]{2}$"}},
        "required": ["street", "city"],
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": text(32),
            "summary": text(64),
            "price": {"type": "number"},
            "active": {"type": "boolean"},
            "status": {"enum": ["new", "open", "closed", "rejected"]},
            "created": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": text(16), "maxItems": 4},
            "address": address,
            "note": {"anyOf": [text(16), {"type": "null"}]},
        },
        "required": ["id", "name", "status", "created", "address"],
        "additionalProperties": False,
    }


COMPILED = {
    "strings of 16 to 64 characters": ten_fields(1.0),
    "strings of 4 to 16 characters": ten_fields(0.25),
    "strings of any length": ten_fields(None),
}
WRITTEN: Mapping[str, Mapping[str, Any]] = {
    "ten fields": ten_fields(0.25),
    "scalars": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "ok": {"type": "boolean"},
            "none": {"type": "null"},
        },
        "required": ["n", "x"],
    },
    "list": {
        "type": "array",
        "items": {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}, "v": _text(6)}, "required": ["k", "v"]},
                {"type": "object", "properties": {"k": {"const": "b"}, "v": {"type": "boolean"}}, "required": ["k"]},
            ]
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"name": _text(5), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["name", "next"],
            }
        },
    },
    "formats": {
        "type": "object",
        "properties": {
            "at": {"type": "string", "format": "date-time"},
            "key": {"type": "string", "format": "uuid"},
            "code": {"type": "string", "pattern": r"^[a-z]{2,8}-\d{1,4}$"},
            "é\n": {"enum": [1, 2.5, None, "ü", {"a": []}]},
        },
        "required": ["at", "code", "é\n"],
    },
}


def made_up_tokenizer() -> Tokenizer:
    """A tokenizer with 128,256 tokens: what a byte-level vocabulary of that size contains, with made-up words.

    Single bytes, numbers of up to three digits, runs of spaces and line breaks, runs of punctuation, words with and
    without a space or a mark before them, and characters of two to four bytes, whole and in part. The last 256 tokens
    are special. It has no merges, and so can spell tokens, but not read text.
    """
    rng = random.Random(0)
    found = dict.fromkeys([bytes([byte]) for byte in range(256)])
    found.update(dict.fromkeys(text.encode() for text in _regular()))
    while len(found) < 10_000:
        run = "".join(rng.choices(string.punctuation, k=rng.randint(2, 5)))
        found[(rng.choice(["", " "]) + run + rng.choice(["", "\n"])).encode()] = None
    others = [*range(0xC0, 0x250), *range(0x391, 0x450), *range(0x4E00, 0x5E00), *range(0x1F300, 0x1F650)]
    while len(found) < 26_000:
        encoded = "".join(map(chr, rng.choices(others, k=rng.randint(1, 4)))).encode()
        # Some are cut, mostly within a character.
        begin, cut = (rng.randint(0, 1), rng.randint(0, 2)) if rng.random() < 0.25 else (0, 0)
        found[encoded[begin : max(len(encoded) - cut, begin + 1)]] = None
    befores = ["", " ", " ", " ", *"_.(\"'/-"]
    while len(found) < VOCAB - SPECIAL:
        syllables = (
            rng.choice("bcdfghjklmnprstvwxyz") + rng.choice("aeiou") + rng.choice(["", "", "n"])
            for _ in range(rng.randint(1, 5))
        )
        word, shape = "".join(syllables), rng.random()
        word = word.upper() if shape < 0.08 else word.capitalize() if shape < 0.3 else word
        found[(rng.choice(befores) + word).encode()] = None
    character = _spelling()
    vocabulary = {"".join(character[byte] for byte in token): i for i, token in enumerate(found)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([f"<special {i}>" for i in range(SPECIAL)])
    return Tokenizer(backend)


def _spelling() -> list[str]:
    """The character of each byte in a byte-level vocabulary: printable Latin-1 as itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _regular() -> Iterator[str]:
    """Numbers, whitespace, pairs of marks, and what JSON has between its values."""
    for digits in (2, 3):
        yield from (f"{i:0{digits}}" for i in range(10**digits))
    for count in range(2, 129):
        yield " " * count
    for count in range(2, 17):
        yield from ("\n" * count, "\t" * count, "\n" + " " * count)
    yield from (one + other for one in string.punctuation for other in string.punctuation)
    yield from (
        '{"',
        '"}',
        '":',
        '": ',
        '": "',
        '", "',
        '","',
        '"]',
        '"},',
        "],",
        "}\n",
        "true",
        "false",
        "null",
        ": {",
    )


def compile_times(schema: Mapping[str, Any], tokenizer: Tokenizer, repeats: int) -> Found:
    """What a schema costs for the vocabulary of a tokenizer."""
    found: Found = {}
    spelled, size, end = tokenizer.token_bytes(), max(VOCAB, tokenizer.vocab_size), (tokenizer.vocab_size - 1,)

    def timed(metric: str, run: Callable[[], object]) -> None:
        began = time.perf_counter()
        run()
        found.setdefault((metric, "s"), []).append(time.perf_counter() - began)

    grammar = Grammar.json_schema(schema)
    for _ in range(repeats):
        timed(TO_BYTES, lambda: Grammar.json_schema(schema))
        timed(TO_TOKENS, lambda: grammar.compile(spelled, size, end))
    found["compiling", "s"] = [a + b for a, b in zip(found[TO_BYTES, "s"], found[TO_TOKENS, "s"], strict=True)]
    table = compile_grammar(grammar, tokenizer, size, end)
    assert table is not None
    for _ in range(repeats):
        timed("compiling a grammar again", lambda: compile_grammar(grammar, tokenizer, size, end))
    states, classes = table.table.shape
    found["states", ""], found["token classes", ""] = [states], [classes]
    # As the device has it, alone in a batch: sizes are rounded up.
    stored = grammar_tables.init([table], size)
    assert isinstance(stored.table, SparseTable)
    found["table", "bytes"], found["classes of tokens", "bytes"] = [stored.table.nbytes], [table.token_class.nbytes]
    found["dense table", "bytes"] = [table.table.nbytes]
    return found


def requests(model: Model, begin: int, count: int) -> list[tuple[list[int], str, jspec.Sampling, int]]:
    """Prompt, name of the schema, sampling and seed of each document."""
    assert model.tokenizer is not None
    names, held = list(WRITTEN), heldout_prompts()
    grammars = {name: Grammar.json_schema(schema) for name, schema in WRITTEN.items()}
    given = []
    for i in range(begin, begin + count):
        name, prompt = names[i % len(names)], held[i % len(held)]
        ids = model.tokenizer.encode(f"{prompt[:80]}\n\nEXAMPLE = ")
        sampling = jspec.Sampling(**SAMPLINGS[i // len(names) % len(SAMPLINGS)], grammar=grammars[name])
        given.append((ids, name, sampling, i))
    return given


def write_documents(model: Model, drafter: Drafter, begin: int, count: int) -> Found:
    """Documents of one drafter: how many there are of each kind, and the accept length.

    A few invalid documents, or with other tokens than those of plain decoding, are printed.
    """
    prompts, names, samplings, seeds = zip(*requests(model, begin, count), strict=True)
    options = {"max_new_tokens": NEW_TOKENS, "sampling": list(samplings), "seed": list(seeds)}
    plain = jspec.generate(model, list(prompts), drafter=None, **options)
    drafted = jspec.generate(model, list(prompts), drafter=drafter, **options)
    kind = jsonschema.Draft202012Validator
    validators = {name: kind(schema, format_checker=kind.FORMAT_CHECKER) for name, schema in WRITTEN.items()}
    whole = [i for i, out in enumerate(drafted) if out.finish_reason == "eos"]
    wrong = [i for i in whole if (text := drafted[i].text) is None or not _valid(validators[names[i]], text)]
    other = [i for i in range(count) if drafted[i].tokens != plain[i].tokens]
    for i in (*wrong[:3], *other[:3]):
        print(f"{names[i]}, seed {seeds[i]}: {drafted[i].text!r}; plain decoding: {plain[i].text!r}")
    return {
        ("documents", ""): [count],
        ("whole documents", ""): [len(whole)],
        ("valid documents", ""): [len(whole) - len(wrong)],
        ("different documents", ""): [len({drafted[i].text for i in whole})],
        ("documents of plain decoding", ""): [count - len(other)],
        ("tokens", ""): [drafted.stats.new_tokens],
        ("accept length", ""): [round(drafted.stats.accept_length, 3)],
    }


def _valid(validator: jsonschema.Draft202012Validator, text: str) -> bool:
    """Whether a text is a valid document of JSON."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return validator.is_valid(document)


def measurements(
    options: argparse.Namespace, subject: str, mode: str, found: Found, **fields: Any
) -> list[Measurement]:
    """A line per metric."""
    command = report.command("python benchmarks/grammar.py", sys.argv[1:], {"--tokenizer": "TOKENIZER.json"})
    goals = {"compiling": GOAL_SECONDS, "table": GOAL_BYTES}
    return [
        report.measurement(
            options.environment,
            *("grammar", subject, mode),
            metric=metric,
            unit=unit,
            values=values,
            goal=goals.get(metric),
            command=command,
            subject=subject,
            mode=mode,
            **fields,
        )
        for (metric, unit), values in found.items()
    ]


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Measures grammars on the host, and validates documents.")
    parser.add_argument("--part", choices=("compile", "documents"), help="only this part (default: both)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json with the vocabulary (default: made up)")
    parser.add_argument("--repeats", type=int, default=5, help="how often each schema is compiled")
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--drafter", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--documents", type=int, default=250, help="documents of each drafter")
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    options.environment = environment()
    lines = []

    def report_on(subject: str, mode: str, found: Found, **fields: Any) -> None:
        for (metric, unit), values in found.items():
            print(f"{subject}, {mode}: {metric} {statistics.median(values):g} {unit}", flush=True)
        lines.extend(measurements(options, subject, mode, found, **fields))

    if options.part != "documents":
        tokenizer = made_up_tokenizer() if options.tokenizer is None else _load(options.tokenizer)
        began = time.perf_counter()
        spelled = tokenizer.token_bytes()
        seconds, lengths = time.perf_counter() - began, [len(token) for token in spelled if token]
        vocabulary = {
            "vocabulary": "made up" if options.tokenizer is None else options.tokenizer.name,
            "tokens": max(VOCAB, len(spelled)),
            "mean bytes of a token": round(statistics.mean(lengths), 2),
        }
        report_on("vocabulary", "any", {("reading the bytes of all tokens", "s"): [seconds]}, settings=vocabulary)
        for mode, schema in COMPILED.items():
            found = compile_times(schema, tokenizer, options.repeats)
            report_on("ten fields", mode, found, settings=vocabulary)
    if options.part != "compile":
        model, count = jspec.load(options.model, exact=False), options.documents
        settings = {"schemas": ", ".join(WRITTEN), "most new tokens": NEW_TOKENS, "samplings": len(SAMPLINGS)}
        for name in options.drafter:
            begin = list(DRAFTERS).index(name) * count
            found = write_documents(model, DRAFTERS[name], begin, count)
            report_on(options.model.removeprefix("bundled:"), name, found, settings=settings)
    if options.json is not None:
        recorded.add(options.json, lines)


def _load(path: Path) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))


if __name__ == "__main__":
    main()
