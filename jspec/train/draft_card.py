"""The model card of a draft: what it is, how it was trained, its accept length, and how to reproduce it."""

import argparse

from jspec.train import card, data, options
from jspec.train.card import FinalMetrics, Inputs
from jspec.train.learner import DraftSetup

_USE = """## Use

A draft for {target}, useless without it: `jspec.load("{target}", draft="{name}")`, then
`jspec.generate(model, prompts, drafter="{drafter}")`. The output is the target's own; the {noun} only makes it
faster."""


EXAMPLE: FinalMetrics = {
    "seconds": 0.0,
    "heldout_agreement": [0.0],
    "heldout_chain": 0.0,
    "accept_length": 0.0,
    "acceptance_by_position": [0.0],
    "repeated": 0.0,
}
"""Metrics to try a card with before the run."""


def write(
    setup: DraftSetup,
    inputs: Inputs,
    final: FinalMetrics,
    args: argparse.Namespace,
    *,
    steps: int,
    command: str,
    noun: str,
    architecture: str,
    shape: str,
) -> str:
    """The card in Markdown, from what the run read, its last metrics and its options.

    Args:
      steps: steps that were trained.
      command: the command of `jspec train` that ran.
      noun: what such a draft is called.
      architecture: the sentence that describes it.
      shape: the options that give its shape, as `given` returns them.
    """
    target, name = data.public_name(args.target), args.out.name
    use = _USE.format(target=target, name=name, drafter=setup.learner.config.drafter, noun=noun)
    return card.assemble(
        name,
        tags=[command],
        architecture=architecture,
        training=_training(setup, inputs, final, steps),
        sections=[_results(setup.learner.test, final, inputs, args), use],
        commands=_commands(setup, command, shape, inputs, args),
        texts=inputs.manifest["card"],
    )


def given(args: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Those of the options `names` that have a value, each after a space."""
    found = ""
    for name in names:
        value, option = getattr(args, name), " --" + name.replace("_", "-")
        if value is True:
            found += option
        elif value is not None and value is not False:
            found += f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
    return found


def _training(setup: DraftSetup, inputs: Inputs, final: FinalMetrics, steps: int) -> list[str]:
    recipe, share = setup.recipe, inputs.rows_share
    texts = [card.describe_rows(inputs)] if share else []
    if share < 1:
        texts.append(f"{1 - share:.0%} are {inputs.manifest['card']['summary']}")
    return [
        f"data: {'; '.join(texts)}",
        f"loss: {setup.learner.describe_loss(recipe)}",
        card.optimization(recipe, steps, inputs.length),
        card.hardware(final),
    ]


def _results(test: str, final: FinalMetrics, inputs: Inputs, args: argparse.Namespace) -> str:
    shares = " ".join(f"{share:.3f}" for share in final["heldout_agreement"])
    lines = [
        f"- {test} on held-out text: agreement with the target's choice by step: {shares}; "
        f"{final['heldout_chain']:.2f} tokens per round on this text"
    ]
    if "accept_length" in final:
        positions = " ".join(f"{share:.3f}" for share in final["acceptance_by_position"])
        lines.append(
            f"- **accept length {final['accept_length']:.2f}**, bonus token included, in greedy decoding with chains "
            f"of {args.depth} drafts, on {inputs.num_prompts} held-out prompts; acceptance by draft position: "
            f"{positions}; {final['repeated']:.0%} of that text repeats earlier text"
        )
    return "## Results\n\n" + "\n".join(lines)


def _commands(setup: DraftSetup, command: str, shape: str, inputs: Inputs, args: argparse.Namespace) -> list[str]:
    """The commands that make this draft again, with relative paths."""
    name, lines = data.public_name(args.target), [inputs.manifest["card"]["command"]]
    train = f"jspec train {command} --data data --target {name} --work runs/{args.out.name} --out {args.out.name}"
    if inputs.rows_shape is not None:
        lines.append(card.text_command(inputs, name))
        train += f" --rows rows.npy --rows-share {inputs.rows_share}"
    return [*lines, train + shape + options.describe(setup.recipe)]
