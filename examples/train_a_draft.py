"""Trains a draft for a chat model, from nothing but the model, and measures its accept length.

The model writes its training text itself: questions, and answers to them. Writing them takes some minutes of a GPU
before the training does (benchmarks/notes/2026-11-26-a-draft-for-a-real-model.md).

pip install "jspec-decoding[train]"
python examples/train_a_draft.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out head --minutes 30
"""

import argparse
import subprocess
import sys
from pathlib import Path


def jspec(*words: object) -> None:
    """Runs a command, after printing it."""
    command = ["jspec", *map(str, words)]
    print("$", *command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)


def main() -> None:
    """Writes the text, trains on it, and decodes held-out prompts with the draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory or a hub id, with a chat template")
    parser.add_argument("--out", type=Path, required=True, help="directory of the draft; data is written beside it")
    parser.add_argument("--kind", choices=("eagle3", "dspark"), default="eagle3")
    parser.add_argument("--minutes", type=float, default=30, help="of training")
    parser.add_argument("--prompts", type=int, default=40000, help="questions, before duplicates are dropped")
    parser.add_argument("--max-new-tokens", type=int, default=384, help="of an answer")
    parser.add_argument("--width", type=int, default=640, help="tokens of the longest chat")
    parser.add_argument("--draft-vocab", type=int, default=16384, help="for eagle3: tokens that it can propose")
    parser.add_argument("--heldout", type=int, default=64, help="prompts to evaluate on")
    options, rest = parser.parse_known_args()  # the rest is for `jspec train eagle3` or `dspark`

    work = options.out.with_name(options.out.name + "-work")
    replies, data = work / "replies.jsonl", work / "data"
    if not data.exists():
        # Half of the answers are sampled, for a draft that serves greedy and sampled requests.
        own = ["--own-prompts", options.prompts, "--temperature", 1, "--sampled-share", 0.5]
        jspec("train", "replies", "--model", options.model, *own, "--max-new-tokens", options.max_new_tokens,
              "--out", replies)  # fmt: skip
        share = min(0.5, max(0.02, 4 * options.heldout / options.prompts))
        jspec("train", "data", "--tokenizer", options.model, "--chats", replies, "--width", options.width,
              "--heldout-share", share, "--heldout-prompts", options.heldout, "--out", data)  # fmt: skip
    shape = ["--draft-vocab-size", options.draft_vocab] if options.kind == "eagle3" else []
    jspec("train", options.kind, "--data", data, "--target", options.model, "--minutes", options.minutes, *shape,
          "--work", work / options.kind, "--out", options.out, *rest)  # fmt: skip
    drafter, most = "eagle" if options.kind == "eagle3" else "block", min(256, options.max_new_tokens)
    jspec("evaluate", "--model", options.model, "--draft", options.out, "--drafter", drafter,
          "--prompts", data / "heldout_prompts.json", "--batch", 8, "--max-new-tokens", most)  # fmt: skip


if __name__ == "__main__":
    main()
