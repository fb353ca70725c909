"""Schemas of clients: the share that compiles, and whether random documents of them validate.

    python benchmarks/schemas.py --clients SCHEMAS
    python benchmarks/schemas.py SCHEMAS --json benchmarks/results/DATE-MACHINE-schemas.jsonl
    python benchmarks/schemas.py JSONSCHEMABENCH/data --most 100 --json ...

SCHEMAS is a directory with a folder of .json files for each kind. `--clients` writes the schemas of pydantic's types
and those of 60 models as instructor, openai, LangChain and pydantic-ai send them. All must be installed.
"""

import argparse
import importlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import recorded
from jsonschema.validators import Draft202012Validator, validator_for

from jspec.bench import report
from jspec.bench.machine import environment
from jspec.text.grammar import Grammar

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

LENGTHS = (0, 40, 160)
"""Bytes after which a document ends as soon as it can."""
Schema: TypeAlias = dict[str, Any]


def write_clients(folder: Path) -> None:
    """Write the schemas of clients."""
    library = importlib.import_module
    client_models, pydantic = library("client_models"), library("pydantic")
    generate_openai_schema = library("instructor.processing.schema").generate_openai_schema
    convert_to_openai_tool = library("langchain_core.utils.function_calling").convert_to_openai_tool
    to_strict_json_schema = library("openai.lib._pydantic").to_strict_json_schema
    transformer = library("pydantic_ai.profiles.openai").OpenAIJsonSchemaTransformer

    clients: Mapping[str, Callable[[Any], Schema]] = {
        "instructor": lambda model: generate_openai_schema(model)["parameters"],
        "openai": to_strict_json_schema,
        "langchain": lambda model: convert_to_openai_tool(model)["function"]["parameters"],
        "langchain strict": lambda model: convert_to_openai_tool(model, strict=True)["function"]["parameters"],
        "pydantic-ai": lambda model: transformer(model.model_json_schema()).walk(),
        "pydantic-ai strict": lambda model: transformer(model.model_json_schema(), strict=True).walk(),
    }
    written = {
        "pydantic": {name: pydantic.TypeAdapter(kind).json_schema() for name, kind in client_models.TYPES.items()}
    }
    models = client_models.models()
    written |= {
        client: {name: schema_of(model) for name, model in models.items()} for client, schema_of in clients.items()
    }
    for kind, schemas in written.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, schema in schemas.items():
            (folder / kind / f"{name}.json").write_text(json.dumps(schema), encoding="utf-8")


def measure(paths: list[Path]) -> tuple[dict[str, list[float]], Counter[str]]:
    """Metrics of some schemas, and the messages of those that do not compile."""
    sample_text = importlib.import_module("grammars").sample_text
    rng, counts, seconds, messages = np.random.default_rng(0), Counter(), [], Counter()
    for path in paths:
        schema = json.loads(path.read_text(encoding="utf-8"))
        began = time.perf_counter()
        try:
            dfa = Grammar.json_schema(schema).dfa
        except (TypeError, ValueError) as error:
            messages[str(error).rpartition(": ")[2]] += 1
            continue
        finally:
            seconds.append(time.perf_counter() - began)
        counts["compiled"] += 1
        validator = validator_for(schema, default=Draft202012Validator)(schema)
        for most in LENGTHS:
            text = sample_text(dfa, rng, most)
            counts["documents"] += 1
            if validator.is_valid(json.loads(text)):
                counts["valid"] += 1
            else:
                print(f"invalid: {path.name}: {text}")
    metrics = {
        "schemas": [len(paths)],
        "compiled schemas": [counts["compiled"]],
        "documents": [counts["documents"]],
        "valid documents": [counts["valid"]],
        "slowest schema": [max(seconds)],
    }
    return metrics, messages


def main() -> None:
    """Measures, prints and records."""
    parser = argparse.ArgumentParser(description="Measures which schemas compile, and validates documents.")
    parser.add_argument("folder", type=Path, help="a directory with a folder of .json files for each kind")
    parser.add_argument("--clients", action="store_true", help="write the schemas of clients to it, and nothing else")
    parser.add_argument("--most", type=int, help="random schemas of each kind (default: all)")
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    if options.clients:
        write_clients(options.folder)
        return
    arguments = [options.folder.name if text == str(options.folder) else text for text in sys.argv[1:]]
    command = report.command("python benchmarks/schemas.py", arguments)
    machine, lines, messages = environment(), [], Counter()
    for folder in sorted(options.folder.iterdir()):
        paths = sorted(folder.glob("*.json"))
        if options.most is not None and len(paths) > options.most:
            paths = random.Random(0).sample(paths, options.most)
        metrics, refused = measure(paths)
        messages += refused
        print(folder.name, *(f"{name} {values[0]:.3g}" for name, values in metrics.items()), sep="; ", flush=True)
        for metric, values in metrics.items():
            unit = "s" if metric == "slowest schema" else ""
            fields = {"metric": metric, "unit": unit, "values": values, "command": command, "subject": folder.name}
            lines.append(report.measurement(machine, "schemas", folder.name, **fields))
    for message, count in messages.most_common(20):
        print(f"{count} x {message}")
    if options.json is not None:
        recorded.add(options.json, lines)


if __name__ == "__main__":
    main()
