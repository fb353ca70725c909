"""Compares the output of every drafter with plain decoding over many tokens of the bundled model.

    python benchmarks/lossless.py --state /tmp/lossless.jsonl
    python benchmarks/lossless.py --state /tmp/lossless.jsonl --json benchmarks/results/DATE-MACHINE-lossless.jsonl

Held-out prompts are continued greedily and with sampling, each sequence with options of its own, by every
drafter, chains and trees, in batches, and each of them alone by plain decoding. Each output goes to the state file, so
an interrupted run continues where it ended. With --json, the counts become measurements. The exit status is 1
if any sequence differs.

Several processes can share the work: start them with --part 0/4 to 3/4, then report without --part.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import recorded

import jspec
from jspec.analysis.contract import difference
from jspec.analysis.evaluate import heldout_prompts
from jspec.bench import report
from jspec.bench.machine import environment
from jspec.bench.measurement import Measurement
from jspec.core.types import Drafter
from jspec.drafters import DRAFTERS
from jspec.loading.hub import BUNDLED
from jspec.loading.model import Model
from jspec.models import MtpHeads

ROOT = Path(__file__).parent.parent
MODEL, PROMPT_TOKENS, NEW_TOKENS = "python-small", 64, 128
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
MODES = ("greedy", "sampled")
DRAFTED: tuple[Drafter, ...] = (
    jspec.Ngram(depth=4),
    jspec.Suffix(depth=6),
    jspec.Suffix(depth=6, width=3, num_nodes=16),
    jspec.Standalone(depth=4),
    jspec.Standalone(depth=4, width=3, num_nodes=16),
    jspec.Eagle(depth=5),
    jspec.Eagle(depth=5, width=4, num_nodes=24),
    jspec.Block(depth=7),
    jspec.Block(depth=7, width=4, num_nodes=24),
    jspec.FrozenKvMtp(depth=4),
    jspec.FrozenKvMtp(depth=5, width=4, num_nodes=24),
    jspec.Mtp(depth=3),
    jspec.Mtp(depth=4, width=3, num_nodes=16, heads=1),
)
Outputs = dict[tuple[str, str, int, int], dict]
"""What the state files hold: mode, drafter, batch size and number of the first prompt -> the line with its output."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How all sequences are generated. part: index and number of processes for the drafters together."""

    dtype: str
    exact: bool
    batches: tuple[int, ...]
    part: tuple[int, int]

    @property
    def prompts(self) -> int:
        """Prompts to continue at every batch size before the next ones."""
        return math.lcm(*self.batches)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Those of this process."""
        index, parts = self.part
        return DRAFTED[index::parts]


def read_state(path: Path) -> Outputs:
    """The outputs in a state file and in those of parts; an incomplete last line is ignored."""
    outputs: Outputs = {}
    for file in (path, *sorted(path.parent.glob(f"{path.name}.*"))):
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            outputs[line["mode"], line["drafter"], line["batch"], line["first"]] = line
    return outputs


def append(path: Path, line: dict) -> None:
    """Adds a line to the state file, after the end of an incomplete one."""
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def prompts(model: Model, setting: Setting) -> Iterator[list[list[int]]]:
    """Groups of prompts: the last tokens of each held-out prompt."""
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode(text)[-PROMPT_TOKENS:] for text in heldout_prompts()]
    for first in range(0, len(ids) - setting.prompts + 1, setting.prompts):
        yield ids[first : first + setting.prompts]


@functools.cache
def model_with(draft: str | None, setting: Setting) -> Model:
    """The bundled target with one of its drafts."""
    draft = draft and f"bundled:{draft}"
    return jspec.load(f"bundled:{MODEL}", draft=draft, dtype=setting.dtype, exact=setting.exact)


def model_for(drafter: Drafter, setting: Setting, texts: Callable[[], list[list[int]]]) -> Model:
    """The bundled target with the draft of a drafter.

    texts: prompts with their continuations, for heads without a bundled checkpoint.
    """
    if isinstance(drafter, jspec.Mtp):
        return model_with_heads(setting, texts())
    drafts = BUNDLED[MODEL]
    name = next((name for name, kind in DRAFTERS.items() if kind is type(drafter)), "")
    return model_with(drafts.get(name), setting)


HEADS: dict[Setting, Model] = {}


def model_with_heads(setting: Setting, texts: list[list[int]]) -> Model:
    """The target with random MTP heads whose LM heads are fitted to its own continuations."""
    if setting not in HEADS:
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
        import toy

        model = model_with(None, setting)
        layer = dataclasses.replace(model.target, num_layers=1, exact=False)
        heads = MtpHeads(layer, count=3)
        width = min(map(len, texts))
        both = dataclasses.replace(model.params, draft=toy.random_heads(layer, heads.count))
        params = toy.fit_heads(model.target, heads, both, np.array([row[:width] for row in texts], np.int32))
        HEADS[setting] = dataclasses.replace(model, params=params, draft=heads)
    return HEADS[setting]


def run(path: Path, token_goal: int, setting: Setting) -> None:
    """Continues prompt after prompt until this process has generated `token_goal` drafted tokens."""
    index, parts = setting.part
    state_path = path if parts == 1 else path.with_name(f"{path.name}.{index}")
    outputs = read_state(state_path)
    target, names = model_with(None, setting), set(map(str, setting.drafters))
    for number, group in enumerate(prompts(target, setting)):
        if count_tokens({key: line for key, line in outputs.items() if key[1] in names}) >= token_goal:
            break
        start = number * setting.prompts
        texts = functools.partial(texts_of, group, outputs, start)
        drafted = ((drafter, size) for drafter in setting.drafters for size in setting.batches)
        for mode, (drafter, size) in itertools.product(MODES, [(jspec.Plain(), 1), *drafted]):
            for first in range(0, len(group), size):
                key = mode, str(drafter), size, start + first
                if key in outputs:
                    continue
                model = target if isinstance(drafter, jspec.Plain) else model_for(drafter, setting, texts)
                out = generate(model, group[first : first + size], drafter, mode, start + first)
                line = {"mode": mode, "drafter": key[1], "batch": size, "first": key[3]}
                outputs[key] = line | {"rounds": [int(n) for n in out.stats.rounds], "tokens": out.tokens}
                append(state_path, outputs[key])
            print(f"{mode}, {drafter}, batches of {size}: {count_tokens(outputs):,} tokens", flush=True)


def generate(model: Model, group: list[list[int]], drafter: Drafter, mode: str, first: int) -> jspec.Generations:
    """Continues prompts; the number of a prompt decides on its options and its seed."""
    samplings = [SAMPLINGS[(first + i) % len(SAMPLINGS)] for i in range(len(group))] if mode == "sampled" else None
    return jspec.generate(model, group, drafter=drafter, max_new_tokens=NEW_TOKENS, sampling=samplings, seed=first)


def texts_of(group: Sequence[list[int]], outputs: Outputs, start: int) -> list[list[int]]:
    """Prompts with their greedy continuations."""
    tokens = [outputs["greedy", str(jspec.Plain()), 1, start + i]["tokens"][0] for i in range(len(group))]
    both = [prompt + new for prompt, new in zip(group, tokens, strict=True)]
    return [text for text in both if len(text) >= NEW_TOKENS // 2]


def drafted(outputs: Outputs) -> Outputs:
    """The outputs of drafters."""
    return {key: line for key, line in outputs.items() if key[1] != str(jspec.Plain())}


def count_tokens(outputs: Outputs) -> int:
    """Tokens of all drafted outputs."""
    return sum(len(tokens) for line in drafted(outputs).values() for tokens in line["tokens"])


def tokens_by_batch(outputs: Outputs, setting: Setting) -> dict[str, str]:
    """The tokens of each mode, for each batch size."""
    return {
        f"{mode} tokens by batch": " ".join(
            str(count_tokens({key: line for key, line in outputs.items() if (key[0], key[2]) == (mode, size)}))
            for size in setting.batches
        )
        for mode in sorted({key[0] for key in outputs})
    }


def differences(outputs: Outputs, key: tuple[str, str, int, int]) -> list[tuple[int, int]]:
    """Number of the prompt and first differing position of each sequence unlike its prompt's plain one."""
    mode, _, _, first = key
    different = []
    for number, ours in enumerate(outputs[key]["tokens"], start=first):
        theirs = outputs[mode, str(jspec.Plain()), 1, number]["tokens"][0]
        at = difference(ours, theirs)
        if at is not None:
            different.append((number, at))
    return different


def measurements(outputs: Outputs, setting: Setting, command: str) -> list[Measurement]:
    """The counts: tokens, sequences, and different ones."""
    here, lines = environment(), drafted(outputs)
    differing = {key: differences(outputs, key) for key in lines}
    counts = (
        ("tokens compared with plain decoding", "tokens", count_tokens(outputs)),
        ("sequences compared with plain decoding", "sequences", sum(len(line["tokens"]) for line in lines.values())),
        ("sequences that differ from plain decoding", "sequences", sum(map(len, differing.values()))),
    )
    where = [f"{key}, prompt {at[0]}, token {at[1]}" for key, places in differing.items() for at in places]
    return [
        report.measurement(
            here,
            *(MODEL, "lossless", setting.dtype, "exact" if setting.exact else "inexact"),
            metric=metric,
            unit=unit,
            values=[value],
            command=command,
            subject=MODEL,
            mode=" and ".join(sorted({key[0] for key in lines})),
            dtype=setting.dtype,
            settings={
                "settings of drafters": len({key[1] for key in lines}),
                "settings of sampling": len(SAMPLINGS),
                "batches": " ".join(map(str, setting.batches)),
                "exact": setting.exact,
                **tokens_by_batch(lines, setting),
            },
            note="; ".join(where[:20]) or None,
        )
        for metric, unit, value in counts
    ]


def main() -> int:
    """Runs, and reports different sequences; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compares every drafter with plain decoding.")
    parser.add_argument("--state", type=Path, required=True, help="file of all outputs; an existing one is continued")
    parser.add_argument("--tokens", type=int, default=200_000, help="drafted tokens to generate (default: 200,000)")
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="batch sizes (default: 16)")
    parser.add_argument("--dtype", default="float32", help="precision of the weights (default: float32)")
    parser.add_argument("--exact", action="store_true", help="use the exact forward, see jspec.load")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th drafter, from the I-th on")
    parser.add_argument("--json", type=Path, help="file of measurements to which the counts are added")
    options = parser.parse_args()
    index, parts = map(int, options.part.split("/"))
    setting = Setting(options.dtype, options.exact, tuple(options.batch), (index, parts))
    run(options.state, options.tokens, setting)
    outputs = read_state(options.state)
    keys = sorted(drafted(outputs))
    for drafter in map(str, DRAFTED):
        drafter_keys = [key for key in keys if key[1] == drafter]
        tokens = sum(len(row) for key in drafter_keys for row in outputs[key]["tokens"])
        rounds = sum(sum(outputs[key]["rounds"]) for key in drafter_keys)
        print(f"{drafter}: {tokens:,} tokens, {tokens / max(rounds, 1):.2f} per round")
    different = [(key, at) for key in keys for at in differences(outputs, key)]
    for key, (prompt, at) in different:
        print(f"{key}: prompt {prompt} differs from token {at} on")
    sequences = sum(len(line["tokens"]) for line in drafted(outputs).values())
    print(f"{count_tokens(outputs):,} tokens, {sequences:,} sequences, of which {len(different)} differ")
    if options.json is not None:
        # Without --tokens and --part: the state may come from several processes.
        batches = " ".join(map(str, setting.batches))
        command = f"python benchmarks/lossless.py --state FILE --dtype {setting.dtype} --batch {batches}"
        command += " --exact" if setting.exact else ""
        recorded.add(options.json, measurements(outputs, setting, command))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
