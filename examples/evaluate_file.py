"""Answers the prompts of a file with a draft, and measures accuracy and speed.

A line of the file is an object with "prompt" and, to be graded, "answer". The results go to another file, in order.

python examples/evaluate_file.py questions.jsonl results.jsonl --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --chat
"""

import argparse
import json
import time
from pathlib import Path

import jspec


def main() -> None:
    """Reads the file, generates all answers in one engine, and grades them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--draft", help="default: the draft that comes with the model, or n-grams")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=32, help="sequences at the same time")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the longest prompt with its answer")
    options = parser.parse_args()

    lines = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    model = jspec.load(options.model, draft=options.draft)
    prompts = [line["prompt"] for line in lines]
    if options.chat:
        prompts = [model.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]

    with jspec.Engine(model, slots=min(options.slots, len(prompts)), context=options.context) as engine:
        engine.warm_up()  # compiles, so that the time below has no compilation
        start = time.perf_counter()
        answers = engine.generate(prompts, max_new_tokens=options.max_new_tokens, stop=["\n\n"])
        seconds = time.perf_counter() - start

    graded = [line["answer"] in text for line, text in zip(lines, answers.text, strict=True) if "answer" in line]
    with options.results.open("w", encoding="utf-8") as file:
        for line, answer in zip(lines, answers, strict=True):
            file.write(json.dumps({**line, "text": answer.text, "finish_reason": answer.finish_reason}) + "\n")

    stats = answers.stats
    print(
        f"{len(lines)} prompts, {stats.new_tokens} tokens in {seconds:.1f} s: {stats.new_tokens / seconds:.0f} tokens/s"
    )
    print(f"accept length {stats.accept_length:.2f}")
    if graded:
        print(f"accuracy {sum(graded) / len(graded):.1%} of {len(graded)}")


if __name__ == "__main__":
    main()
