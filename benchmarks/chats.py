"""Accept length of a head for a chat model, before and after it is trained on 200 chats.

    python benchmarks/chats.py --work /tmp/chats --json benchmarks/results/DATE-MACHINE-chats.jsonl

The chat model is small and trained here, on made-up chats about people whose city, color, animal and job are always the
same, in sentences that vary. The head learns from 200 other chats of the same kind, with `jspec train data --chats` and
`jspec train eagle3`, and is measured on held-out chats. It takes 10 minutes on two cores of a CPU.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import recorded

from jspec.bench import report
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.checkpoints import llama
from jspec.cli import train as cli
from jspec.drafters import Ngram
from jspec.loading.model import load
from jspec.models import EagleHead, Llama
from jspec.models.llama import require_llama
from jspec.train import batches, data, distill
from jspec.train.head import HeadLearner
from jspec.train.recipe import DraftRecipe, HeadShape
from tools.pretrain import __main__ as pretrain

CHATS, HELDOUT_SHARE, MODEL_CHATS = 250, 0.2, 3000
"""Chats of the head, 200 of them to train on, and chats that the chat model is trained on."""
CAPTURE, DEPTH, STEPS = (1, 2, 3), 5, 300
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
NAMES = "Anna Boris Clara David Emma Felix Greta Hugo Irene Jonas Klara Lukas Maria Nils Olga Peter".split()
FACTS = {
    "city": ("lives in", "Rome Paris Oslo Cairo Lima Quito Turin Delhi Tokyo Accra Perth Sofia".split()),
    "color": ("prefers the color", "red green blue black white yellow brown gray orange purple".split()),
    "animal": ("keeps a", "cat dog horse goat parrot rabbit turtle hamster donkey pigeon".split()),
    "job": ("works as a", "baker pilot nurse farmer singer lawyer tailor painter miller dentist".split()),
}
BEGINNINGS = ("You ask about {}.", "Let me tell you about {}.", "Here is what I know:")
FORMS = ("{} {} {}.", "As far as I know, {} {} {}.")
ENDS = ("Shall I go on?", "Is there anything else?", "I hope that helps.")


def chat(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """A chat of one to three turns, about one person each."""
    messages = [{"role": "system", "content": "Answer in full sentences."}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        name, wanted = rng.choice(NAMES), rng.sample(sorted(FACTS), rng.randint(1, 3))
        asked = rng.choice(["Tell me the {} of {}.", "What is the {} of {}?"]).format(" and the ".join(wanted), name)
        told = [rng.choice(FORMS).format(name, FACTS[fact][0], value(name, fact)) for fact in wanted]
        reply = " ".join([rng.choice(BEGINNINGS).format(name), *told, rng.choice(ENDS)])
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    return {"messages": messages}


def value(name: str, fact: str) -> str:
    """What is true of a person, always."""
    return random.Random(f"{name} {fact}").choice(FACTS[fact][1])


def chats(seed: int, count: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Chats of a seed."""
    rng = random.Random(seed)
    return (chat(rng) for _ in range(count))


def train(command: str, main: Callable[[list[str]], int] = cli.main, **options: object) -> None:
    """Runs a command of `jspec train`, or of another `main`."""
    arguments = [command]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        arguments += ["--" + name.replace("_", "-"), *map(str, values)]
    if main(arguments):
        raise SystemExit(f"{command} failed")


def make_target(work: Path, steps: int) -> Path:
    """Trains the chat model: a tokenizer of its own, a template, and weights."""
    text = [message["content"] for conversation in chats(0, 500) for message in conversation["messages"]]
    (work / "text.txt").write_text("user: assistant: system:\n" + "\n".join(text))
    train("tokenizer", pretrain.main, out=work / "tokenizer", text=work / "text.txt", vocab_size=512)
    (work / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    write(work / "model_chats.jsonl", chats(1, MODEL_CHATS))
    train("data", out=work / "model_data", tokenizer=work / "tokenizer", chats=work / "model_chats.jsonl")
    vocab_size = data.read_manifest(work / "model_data")["vocab_size"]
    config = Llama(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        max_length=512,
        tie_embeddings=True,
    )
    (work / "shape").mkdir(exist_ok=True)
    (work / "shape" / "config.json").write_text(json.dumps(llama.describe(config)))
    common = {"data": work / "model_data", "work": work / "model_run", "out": work / "target", "config": work / "shape"}
    train("lm", pretrain.main, **common, steps=steps, batch_tokens=4096, warmup=20, learning_rate=3e-3)
    return work / "target"


def write(path: Path, values: Iterator[object]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def untrained(target: Path, data_path: Path, prompts: list[list[int]]) -> float:
    """The accept length of the head before its first step."""
    model = load(target, exact=False)
    shape = require_llama(model.target, "this benchmark")
    recipe, dtype = DraftRecipe(steps=STEPS, length=shape.max_length), str(model.params.target.embed.dtype)
    learner = HeadLearner.make(shape, HeadShape(capture_layers=CAPTURE), recipe, dtype)
    sources = (batches.open_source(data_path / "train.npy", vocab_size=shape.vocab_size),)
    params = distill.init(learner, model.params.target, learner.vocabulary(sources)).serve("float32")
    return accept_length(distill.accept_length(model, learner.config, params, prompts, depth=DEPTH))


def accept_length(metrics: distill.Metrics) -> float:
    """That of the metrics."""
    length = metrics["accept_length"]
    assert isinstance(length, float)
    return length


def main() -> None:
    """Trains the model and its head, and prints and records the accept lengths."""
    parser = argparse.ArgumentParser(description="Accept length of a head before and after training on 200 chats.")
    parser.add_argument("--work", type=Path, required=True, help="empty directory for data, models and runs")
    parser.add_argument("--model-steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="file of measurements to which those of this run are added")
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    target = make_target(work, options.model_steps)
    write(work / "chats.jsonl", chats(2, CHATS))
    data_path = work / "data"
    train("data", out=data_path, tokenizer=target, chats=work / "chats.jsonl", heldout_share=HELDOUT_SHARE)
    common = {"data": data_path, "target": target, "capture_layers": CAPTURE, "depth": DEPTH, "prompts": 32}
    train(
        "eagle3",
        **common,
        **{"work": work / "run", "out": work / "head", "steps": STEPS, "batch_tokens": 2048, "warmup": 20},
        **{"ttt_steps": DEPTH, "eval_every": STEPS},
    )
    model = load(target, exact=False)
    assert model.tokenizer is not None
    texts = data.read_heldout_prompts(data_path, 32, 32)
    prompts = [model.tokenizer.encode(text, special=False) for text in texts]
    trained = load(target, draft=work / "head", exact=False)
    assert isinstance(trained.draft, EagleHead)
    lengths = {
        "ngram": distill.evaluate(model, prompts, Ngram(depth=DEPTH), batch=32).accept_length,
        "untrained head": untrained(target, data_path, prompts),
        "trained head": accept_length(
            distill.accept_length(model, trained.draft, trained.params.draft, prompts, depth=DEPTH)
        ),
    }
    for name, length in lengths.items():
        print(f"{name}: accept length {length:.3f}")
    if options.json is not None:
        recorded.add(options.json, measurements(lengths, len(prompts)))


def measurements(lengths: dict[str, float], prompts: int) -> list[Measurement]:
    """A line per drafter."""
    here = environment()
    settings = {
        "chats": round(CHATS * (1 - HELDOUT_SHARE)),
        "held-out prompts": prompts,
        "depth": DEPTH,
        "steps": STEPS,
    }
    return [
        report.measurement(
            here,
            *("chats", name),
            metric="accept length",
            unit="",
            values=[round(length, 4)],
            command=report.command("python benchmarks/chats.py", sys.argv[1:], {"--work": "WORK"}),
            subject="made-up chats",
            mode=name,
            batch=None,
            context=None,
            dtype="float32",
            settings=settings,
        )
        for name, length in lengths.items()
    ]


if __name__ == "__main__":
    main()
