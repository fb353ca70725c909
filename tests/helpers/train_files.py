"""A directory as `jspec train data` writes it, for a made-up text, and commands."""

import json

import numpy as np

from jspec.cli import train as cli
from jspec.train import tokenizer as files
from tools.pretrain import __main__ as tools_cli
from tools.pretrain import tokenizer

VOCABULARY = 280
PROMPTS = [f"def f{i}(a, b):" for i in range(4)]
TRAIN_PROMPTS = [f"def f{i}(a, b):" for i in range(4, 8)]
_SOURCE = "".join(f"def f{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(60))


def write(directory):
    """Fills a directory, including the `rows.npy` of `jspec train text`. Returns the tokenizer."""
    bpe = tokenizer.train([_SOURCE], VOCABULARY)
    files.save(bpe, directory, 64)
    tokens = files.encode_documents(bpe, [_SOURCE, _SOURCE])
    np.save(directory / "train.npy", tokens)
    np.save(directory / "heldout.npy", tokens[:200])
    np.save(directory / "rows.npy", tokens[:400].reshape(25, 16))
    side = {"files": 2, "bytes": 2 * len(_SOURCE), "tokens": len(tokens)}
    card = {
        "front": "",
        "tags": "python",
        "summary": "made-up text",
        "section": "## Packages\n\n| free | 1 | MIT |\n| apart | 1 | MIT |",
    }
    card["command"] = "jspec train data --out data --tokenizer small --text made-up.txt"
    manifest = {"train": side, "heldout": side, "vocab_size": VOCABULARY, "skipped": {"empty file": 3}}
    (directory / "data.json").write_text(json.dumps({**manifest, "kind": "text", "card": card}))
    for name, prompts in (("train_prompts.json", TRAIN_PROMPTS), ("heldout_prompts.json", PROMPTS)):
        (directory / name).write_text(json.dumps([{"prompt": prompt} for prompt in prompts]))
    return bpe


def run(command, **options):
    """Runs a command of `jspec train`. A tuple is an option with several values, True one without a value."""
    return cli.main(arguments(command, options))


def pretrain(command, **options):
    """Runs a command of `tools.pretrain`, as `run`."""
    return tools_cli.main(arguments(command, options))


def arguments(command, options):
    """The words of a command."""
    words = [command]
    for name, value in options.items():
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words


def lines(directory):
    """The metrics of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
