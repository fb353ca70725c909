"""Scores of a model on a small task, through the server, in formats of fewer bits and with and without drafts.

    pip install -e ".[gguf,serve]" "lm-eval[api]"
    python benchmarks/tasks.py MODEL.gguf --json benchmarks/results/DATE-MACHINE-tasks.jsonl

lm-eval (github.com/EleutherAI/lm-evaluation-harness) asks the server for the likelihood of four answers to each of 48
questions of general knowledge, and for a greedy answer of eight tokens. The questions are local; no hub is asked.
`--lm-eval` names the command if it is in an environment of its own. A format takes minutes on two cores. Drafted
answers equal plain ones, near-ties with kv="fp8" aside: on a CPU in float32, elsewhere and in bfloat16 with exact=True.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import recorded

import jspec
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.serve import server
from jspec.serve.app import Service
from jspec.serve.openai import Limits

ANSWERS = """
The capital of France is: Paris, Madrid, Berlin, Vienna
The capital of Japan is: Tokyo, Seoul, Beijing, Bangkok
The capital of Italy is: Rome, Athens, Lisbon, Oslo
The capital of Egypt is: Cairo, Tunis, Nairobi, Lagos
The capital of Germany is: Berlin, Prague, Warsaw, Paris
The capital of Spain is: Madrid, Rome, Dublin, London
The largest planet in the solar system is: Jupiter, Mars, Venus, Mercury
The planet closest to the Sun is: Mercury, Neptune, Saturn, Earth
The chemical symbol for gold is: Au, Fe, Pb, Hg
The chemical symbol for water is: H2O, CO2, NaCl, O3
Water freezes at a temperature of zero degrees: Celsius, Fahrenheit, Kelvin, North
The opposite of hot is: cold, warm, red, loud
The opposite of up is: down, left, over, near
The opposite of early is: late, soon, fast, new
The opposite of empty is: full, open, small, dry
A baby cat is called a: kitten, puppy, calf, foal
A baby dog is called a: puppy, kitten, lamb, chick
A baby cow is called a: calf, cub, piglet, duckling
The number of days in a week is: seven, five, nine, twelve
The number of months in a year is: twelve, ten, seven, thirty
The number of legs of a spider is: eight, four, six, ten
The number of sides of a triangle is: three, four, five, six
Two plus two equals: four, five, three, six
Ten minus three equals: seven, six, eight, two
Three times three equals: nine, six, twelve, three
The color of a ripe banana is: yellow, blue, purple, gray
The color of grass is: green, orange, pink, black
The color of snow is: white, brown, green, red
The day after Monday is: Tuesday, Sunday, Friday, Saturday
The month after March is: April, June, January, October
The season after winter is: spring, summer, autumn, night
The author of Romeo and Juliet is William: Shakespeare, Wordsworth, Blake, Faulkner
The first president of the United States was George: Washington, Lincoln, Orwell, Harrison
The theory of relativity was developed by Albert: Einstein, Newton, Camus, Schweitzer
The language spoken in Brazil is: Portuguese, Russian, Hindi, Swedish
The language spoken in Austria is: German, Greek, Arabic, Korean
The currency of Japan is the: yen, dollar, pound, peso
The currency of the United Kingdom is the: pound, euro, rupee, yen
The largest ocean on Earth is the: Pacific, Baltic, Black, Red
The longest river in Africa is the: Nile, Danube, Amazon, Rhine
The gas that plants take in is carbon: dioxide, steel, paper, dating
The organ that pumps blood is the: heart, liver, lung, skin
The tool used to drive nails is a: hammer, spoon, brush, ladder
People read books in a: library, bakery, garage, stable
Bread is baked in an: oven, attic, engine, office
Bees make: honey, milk, silk, wool
The frozen form of water is: ice, steam, sand, oil
A person who teaches is a: teacher, pilot, farmer, dentist
"""
"""Questions and answers; the first one is right."""
TASKS = {
    "likelihood": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "greedy": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [{"name": "first", "filter": [{"function": "regex", "regex_pattern": r"^\s*(\w+)"}]}],
        "metric_list": [{"metric": "exact_match"}],
    },
}

EQUAL = "texts equal to plain"


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the model is held and decoded. Plain decoding in the same format is what drafts are compared with."""

    dtype: str = "float32"
    weights: str | None = "wide"
    kv: str | None = None
    drafter: str = "plain"
    exact: bool = False

    def __str__(self) -> str:
        parts = [self.dtype if self.weights == "wide" else str(self.weights), self.kv and f"kv {self.kv}", self.drafter]
        return ", ".join(part for part in parts if part)


FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int4": {"weights": "int4"},
    "kv-fp8": {"kv": "fp8"},
    "int8": {"weights": "int8"},
    "fp8": {"weights": "fp8"},
    "bfloat16": {"dtype": "bfloat16", "exact": True},
}
DRAFTERS = ("plain", "ngram")
"""Likelihoods do not depend on the drafter, so only plain decoding is asked for them."""


@contextmanager
def serving(model: jspec.Model, setting: Setting) -> Iterator[int]:
    """The port of a server, while it runs."""
    with jspec.Engine(model, drafter=setting.drafter, slots=4, context=256) as engine:
        bound = server.bind("127.0.0.1", 0)
        running = server.make_server(Service(engine, name="model", limits=Limits(engine.context)), bound, grace=5.0)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        while not running.started:
            time.sleep(0.05)
        yield bound.getsockname()[1]
        running.should_exit = True
        thread.join()


def write_tasks(folder: Path) -> None:
    """The tasks as lm-eval reads them."""
    lines = [line.split(": ") for line in ANSWERS.strip().splitlines()]
    items = [{"question": question, "choices": answers.split(", ")} for question, answers in lines]
    (folder / "facts.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "facts.jsonl")}}}
        texts = {"test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": " "}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **texts, **task}))


def run(command: str, tasks: list[str], folder: Path, port: int) -> tuple[dict[str, float], list[str]]:
    """The scores of tasks, and the greedy texts."""
    out = Path(tempfile.mkdtemp(dir=folder))
    options = {
        "model": "model",
        "base_url": f"http://127.0.0.1:{port}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 4,
        "max_length": 256,
    }
    arguments = ["--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in options.items())]
    arguments += ["--tasks", ",".join(tasks), "--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run([command, *arguments], check=True, env={**os.environ, **offline}, stdout=subprocess.DEVNULL)
    (results,) = out.rglob("results_*.json")
    scores = {name: _score(values) for name, values in json.loads(results.read_text())["results"].items()}
    (samples,) = out.rglob("samples_greedy_*.jsonl")
    entries = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda entry: entry["doc_id"])
    return scores, [entry["resps"][0][0] for entry in entries]


def _score(values: dict[str, Any]) -> float:
    return next(value for key, value in values.items() if key.startswith(("acc,", "exact_match,")))


def measurements(setting: Setting, scores: dict[str, float], name: str) -> list[Measurement]:
    """A line per score."""
    here = environment()
    command = report.command("python benchmarks/tasks.py", sys.argv[1:], {"--lm-eval": "lm_eval"})
    return [
        report.measurement(
            here,
            *("tasks", name, setting),
            metric=metric,
            unit="",
            values=[round(value, 4)],
            command=command,
            subject=name,
            mode=setting.drafter,
            batch=4,
            context=None,
            dtype=setting.dtype,
            settings={
                "weights": setting.weights,
                "kv": setting.kv,
                "exact": setting.exact,
                "questions": len(ANSWERS.strip().splitlines()),
            },
        )
        for metric, value in scores.items()
    ]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lm-eval", default="lm_eval", help="the command")
    parser.add_argument("--json", type=Path, help="file to which the measurements are added")
    parser.add_argument("--format", nargs="+", choices=tuple(FORMATS), default=list(FORMATS))
    options = parser.parse_args()
    print(f"| | {' | '.join((*TASKS, EQUAL))} |\n|---|{'---|' * (len(TASKS) + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(Path(scratch))
        for name in options.format:
            setting = Setting(**FORMATS[name])
            model = jspec.load(
                options.model, dtype=setting.dtype, weights=setting.weights, kv=setting.kv, exact=setting.exact
            )
            expected: list[str] | None = None
            for drafter in DRAFTERS:
                setting = dataclasses.replace(setting, drafter=drafter)
                with serving(model, setting) as port:
                    tasks = list(TASKS) if expected is None else ["greedy"]
                    scores, texts = run(options.lm_eval, tasks, Path(scratch), port)
                expected = expected or texts
                scores[EQUAL] = sum(map(str.__eq__, texts, expected)) / len(texts)
                cells = [f"{scores[task]:.3f}" if task in scores else "" for task in (*TASKS, EQUAL)]
                print(f"| {setting} | {' | '.join(cells)} |", flush=True)
                if options.json is not None:
                    lines = measurements(setting, scores, Path(options.model).stem.lower())
                    recorded.add(options.json, lines)


if __name__ == "__main__":
    main()
