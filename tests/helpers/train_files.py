"""A directory as `jspec train data` writes it, for a made-up text, and the commands that read it."""

import json

import numpy as np

from jspec.cli import train as cli
from jspec.train import tokenizer

VOCABULARY = 280
PROMPTS = [f"def f{i}(a, b):" for i in range(4)]
TRAIN_PROMPTS = [f"def f{i}(a, b):" for i in range(4, 8)]
_SOURCE = "".join(f"def f{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(60))


def write(directory):
    """Fills a directory, including the `rows.npy` of `jspec train text`. Returns the tokenizer."""
    bpe = tokenizer.train([_SOURCE], VOCABULARY)
    tokenizer.save(bpe, directory, 64)
    tokens = tokenizer.encode_documents(bpe, [_SOURCE, _SOURCE])
    np.save(directory / "train.npy", tokens)
    np.save(directory / "heldout.npy", tokens[:200])
    np.save(directory / "rows.npy", tokens[:400].reshape(25, 16))
    side = {"packages": 1, "files": 2, "bytes": 2 * len(_SOURCE), "tokens": len(tokens)}
    package = {"version": "1", "license": "MIT", "files": 1, "bytes": len(_SOURCE)}
    packages = [{"name": "free", "heldout": False, **package}, {"name": "apart", "heldout": True, **package}]
    manifest = {"train": side, "heldout": side, "vocab_size": VOCABULARY, "skipped": {"empty file": 3}}
    (directory / "data.json").write_text(json.dumps({**manifest, "packages": packages, "tokenizer": "small"}))
    for name, prompts in (("train_prompts.json", TRAIN_PROMPTS), ("heldout_prompts.json", PROMPTS)):
        (directory / name).write_text(json.dumps([{"prompt": prompt} for prompt in prompts]))
    return bpe


def run(command, **options):
    """Runs a command of `jspec train`. A tuple is an option with several values, True one without a value."""
    arguments = [command]
    for name, value in options.items():
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        arguments += ["--" + name.replace("_", "-"), *map(str, values)]
    return cli.main(arguments)


def lines(directory):
    """The metrics of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
