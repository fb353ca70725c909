"""Compares the output of every drafter with plain decoding over many tokens of the bundled model.

    python benchmarks/lossless.py --state /tmp/lossless.jsonl
    python benchmarks/lossless.py --state /tmp/lossless.jsonl --json benchmarks/results/DATE-MACHINE-lossless.jsonl

Held-out prompts are continued greedily and with sampling, in which each sequence of a batch has options of its own, by
plain decoding and by every drafter, chains and trees. Each output goes to the state file, so a run that was interrupted
continues where it ended. With --json, the counts become measurements. The exit status is 1 if any sequence differs.
"""

import argparse
import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import measurement, report
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.core.types import Drafter
from jspec.drafters import DRAFTERS
from jspec.engine.model import BUNDLED, Model
from jspec.models import MtpHeads

ROOT = Path(__file__).parent.parent
MODEL, BATCH, PROMPT_TOKENS, NEW_TOKENS = "python-small", 16, 64, 128
SAMPLINGS = (
    jspec.Sampling(),
    jspec.Sampling(temperature=0.8, top_p=0.95),
    jspec.Sampling(temperature=1.1, top_k=40),
    jspec.Sampling(temperature=1.2, min_p=0.05),
    jspec.Sampling(temperature=0.7, repetition_penalty=1.2),
    jspec.Sampling(temperature=0.9, presence_penalty=0.4, frequency_penalty=0.2),
    jspec.Sampling(temperature=0.9, logit_bias={100: 2.0, 200: -np.inf}, min_new_tokens=48),
    jspec.Sampling(temperature=0.0, repetition_penalty=1.1),
)
MODES = {"greedy": None, "sampled": [SAMPLINGS[i % len(SAMPLINGS)] for i in range(BATCH)]}
DRAFTED: tuple[Drafter, ...] = (
    jspec.Ngram(depth=4),
    jspec.Standalone(depth=4),
    jspec.Standalone(depth=4, width=3, num_nodes=16),
    jspec.Eagle(depth=5),
    jspec.Eagle(depth=5, width=4, num_nodes=24),
    jspec.FrozenKvMtp(depth=4),
    jspec.FrozenKvMtp(depth=5, width=4, num_nodes=24),
    jspec.Mtp(depth=3),
    jspec.Mtp(depth=4, width=3, num_nodes=16, heads=1),
)
Outputs = dict[tuple[str, str, int], dict]
"""The state file: mode, drafter and index of a batch -> the line with its output."""


def read_state(path: Path) -> Outputs:
    """The outputs in the state file; a last line that was cut off is ignored."""
    found: Outputs = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[line["mode"], line["drafter"], line["batch"]] = line
    return found


def append(path: Path, line: dict) -> None:
    """Adds a line to the state file, after the end of one that was cut off."""
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def prompts(model: Model) -> Iterator[list[list[int]]]:
    """Batches of prompts: the last tokens of each held-out prompt."""
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(text)[-PROMPT_TOKENS:] for text in heldout_prompts()]
    for first in range(0, len(ids) - BATCH + 1, BATCH):
        yield ids[first : first + BATCH]


@functools.cache
def model_with(draft: str | None) -> Model:
    """The bundled target with one of its drafts."""
    return jspec.load(f"bundled:{MODEL}", draft=draft and f"bundled:{draft}", dtype="float32")


def model_for(drafter: Drafter, texts: Callable[[], list[list[int]]]) -> Model:
    """The bundled target with the draft that a drafter needs.

    texts: prompts with their continuations, for heads that no bundled checkpoint has.
    """
    if isinstance(drafter, jspec.Mtp):
        return model_with_heads(texts())
    drafts = BUNDLED[MODEL]
    name = next((name for name, kind in DRAFTERS.items() if kind is type(drafter)), "")
    return model_with(drafts.get(name, drafts["standalone"]))


HEADS: dict[int, Model] = {}


def model_with_heads(texts: list[list[int]]) -> Model:
    """The target with random MTP heads whose LM heads are fitted to its own continuations."""
    if not HEADS:
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
        import toy

        model = model_with(None)
        layer = dataclasses.replace(model.target, num_layers=1)
        heads = MtpHeads(layer, count=3)
        width = min(map(len, texts))
        both = dataclasses.replace(model.params, draft=toy.random_heads(layer, heads.count))
        params = toy.fit_heads(model.target, heads, both, np.array([row[:width] for row in texts], np.int32))
        HEADS[0] = dataclasses.replace(model, params=params, draft=heads)
    return HEADS[0]


def run(path: Path, wanted: int) -> Outputs:
    """Continues batch after batch until `wanted` drafted tokens are in the state file."""
    found = read_state(path)
    target = model_with(None)
    texts = functools.partial(texts_of, next(prompts(target)), found, 0)
    for index, batch in enumerate(prompts(target)):
        if count_tokens(found) >= wanted:
            break
        for mode, drafter in ((mode, drafter) for mode in MODES for drafter in (jspec.Plain(), *DRAFTED)):
            key = mode, str(drafter), index
            if key in found:
                continue
            model = target if isinstance(drafter, jspec.Plain) else model_for(drafter, texts)
            options = dict(max_new_tokens=NEW_TOKENS, sampling=MODES[mode], seed=index * BATCH)
            out = jspec.generate(model, batch, drafter=drafter, **options)
            accepted = [int(rounds) for rounds in out.stats.rounds]
            found[key] = dict(mode=mode, drafter=key[1], batch=index, rounds=accepted, tokens=out.tokens)
            append(path, found[key])
            differing = len(differences(found, key))
            print(f"batch {index}, {mode}, {drafter}: {differing} differ, {count_tokens(found):,} tokens", flush=True)
    return found


def texts_of(batch: Sequence[list[int]], found: Outputs, index: int) -> list[list[int]]:
    """The prompts of a batch with their greedy continuations."""
    tokens = found["greedy", str(jspec.Plain()), index]["tokens"]
    both = [prompt + new for prompt, new in zip(batch, tokens, strict=True)]
    return [text for text in both if len(text) >= NEW_TOKENS // 2]


def drafted(found: Outputs) -> Outputs:
    """The outputs of drafters."""
    return {key: line for key, line in found.items() if key[1] != str(jspec.Plain())}


def count_tokens(found: Outputs) -> int:
    """Tokens of all drafted outputs."""
    return sum(len(tokens) for line in drafted(found).values() for tokens in line["tokens"])


def differences(found: Outputs, key: tuple[str, str, int]) -> list[tuple[int, int]]:
    """Sequence and first differing position of each sequence that is not the one of plain decoding."""
    mode, _, index = key
    different = []
    plain = found[mode, str(jspec.Plain()), index]["tokens"]
    for sequence, (ours, theirs) in enumerate(zip(found[key]["tokens"], plain, strict=True)):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            different.append((sequence, at))
    return different


def measurements(found: Outputs, command: str) -> list[Measurement]:
    """The counts: tokens, sequences, and those that differ."""
    here, lines = environment(), drafted(found)
    differing = {key: differences(found, key) for key in lines}
    counts = (
        ("tokens compared with plain decoding", "tokens", count_tokens(found)),
        ("sequences compared with plain decoding", "sequences", sum(len(line["tokens"]) for line in lines.values())),
        ("sequences that differ from plain decoding", "sequences", sum(map(len, differing.values()))),
    )
    where = [f"{key}, sequence {at[0]}, token {at[1]}" for key, found in differing.items() for at in found]
    return [
        report.measurement(
            here,
            *(MODEL, "lossless"),
            metric=metric,
            unit=unit,
            values=[value],
            command=command,
            subject=MODEL,
            mode="all drafters, greedy and sampled",
            batch=BATCH,
            dtype="float32",
            settings={"settings of drafters": len(DRAFTED), "settings of sampling": len(SAMPLINGS)},
            note="; ".join(where) or None,
        )
        for metric, unit, value in counts
    ]


def main() -> int:
    """Runs, and reports the sequences that differ; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compares every drafter with plain decoding.")
    parser.add_argument("--state", type=Path, required=True, help="file of all outputs; an existing one is continued")
    parser.add_argument("--tokens", type=int, default=200_000, help="drafted tokens to generate (default: 200,000)")
    parser.add_argument("--json", type=Path, help="file of measurements to which the counts are added")
    options = parser.parse_args()
    found = run(options.state, options.tokens)
    keys = sorted(drafted(found))
    for drafter in map(str, DRAFTED):
        own = [key for key in keys if key[1] == drafter]
        tokens = sum(len(row) for key in own for row in found[key]["tokens"])
        rounds = sum(sum(found[key]["rounds"]) for key in own)
        print(f"{drafter}: {tokens:,} tokens, {tokens / max(rounds, 1):.2f} per round")
    different = [(key, at) for key in keys for at in differences(found, key)]
    for key, (sequence, at) in different:
        print(f"{key}: sequence {sequence} differs from token {at} on")
    print(f"{count_tokens(found):,} tokens, {len(different)} sequences differ")
    if options.json is not None:
        old = measurement.read(options.json) if options.json.exists() else []
        command = f"python benchmarks/lossless.py --state FILE {shlex.join(['--tokens', str(options.tokens)])}"
        measurement.write(options.json, [*old, *measurements(found, command)])
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
