"""A directory as `jspec train data` writes it, for a made-up text, and commands."""

import json

import numpy as np
import pytest

from jspec.cli import train as cli
from jspec.core.options import kind_of, option_of, options_of
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


class Reached(Exception):
    """All input was accepted, and the training would begin. Its argument is the record of the training."""


def reach(task, *_, **__):
    """In place of the loop of a training."""
    raise Reached(task.record)


def lines(directory):
    """The metrics of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


COUNT, SIGNED, RATE = (0, -1, -(10**12)), (-1, 10**12), ("nan", "inf", -0.5, "1e300", "1e-46")
NO_INT = ("", "x", "2.5", "nan", "0x10", "9" * 5000)
COUNTS = (
    "batch", "batch_tokens", "length", "max_new_tokens", "rows", "stop_after", "log_every", "eval_every",
    "checkpoint_every", "heldout_prompts", "own_prompts", "prompts", "anchors", "intermediate_size", "num_heads",
    "num_kv_heads", "head_dim", "num_layers", "markov_rank", "draft_vocab_size", "max_length", "width",
    "conv_group_size",
)  # fmt: skip
BAD = {
    **dict.fromkeys(COUNTS, COUNT),
    **dict.fromkeys(("seed", "warmup", "mask_token", "capture_layers", "reads"), SIGNED[:1]),
    **dict.fromkeys(("learning_rate", "clip", "minutes", "reach"), (0, *RATE)),
    **dict.fromkeys(("rows_share", "sampled_share", "decay"), (1.5, *RATE)),
    **dict.fromkeys(("weight_decay", "temperature", "distance", "confidence", "cross_entropy"), RATE),
    **dict.fromkeys(("divergence", "selector"), RATE),
    **dict.fromkeys(("ttt_steps", "depth", "block_size", "selector_top_k"), (*COUNT, 65)),
    "conv_kernel_size": (-1, 65),
    "selector_rank": SIGNED,
    "sliding_window": (*COUNT, 63, 10**9),
    "hidden_size": (*COUNT, 10**9),
    "vocab_size": (*COUNT, 257, 10**9),
    "processes": (*COUNT, 10**6),
    "steps": (*COUNT, 1, 10**12),
    "heldout_share": (0, 0.6, *RATE),
}
"""For each number among the options of all commands: values out of bounds."""


def check_numbers(capsys, run, required, kinds, further=()):
    """Every number refuses what is out of its bounds or is none, before anything is read: no directory exists.

    run: runs a command. required: the options that each command needs. kinds: its dataclasses of options.
    further: a command, an option and a value, in addition.
    """
    rows = list(further)
    for command, owners in kinds.items():
        for name, (field, _) in (item for owner in owners for item in options_of(owner).items()):
            number = kind_of(field).type
            if number in (int, float):
                rows += [(command, name, value) for value in BAD[name] + (NO_INT if number is int else ("", "x"))]
    for command, name, value in rows:
        with pytest.raises(SystemExit) as raised:
            run(command, **required[command] | {name: value})
        message = capsys.readouterr().err
        assert raised.value.code == 2, (command, name, value)
        assert f"argument {option_of(name)}: '{str(value)[:70]}" in message and "must be" in message, message
    return len(rows)
