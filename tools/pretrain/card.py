"""The model card of a language model: what it is, how it was trained, how good it is, and how to reproduce it."""

from typing import TYPE_CHECKING

from jspec.train import card
from jspec.train.card import FinalMetrics, Inputs
from jspec.train.options import describe
from tools.pretrain.objective import LmSetup

if TYPE_CHECKING:
    from tools.pretrain.lm import LmRun

_USE = """## Use and limits

{limits}Its context is {context} tokens; it was trained on sequences of {length}. Text it writes may resemble what is
listed below{licenses}."""
_OF_PACKAGES = """A small model to demonstrate and test speculative decoding with: it completes Python functions in
form, seldom in substance. It is not an assistant, follows no instructions, and repeats itself in long greedy text. """

EXAMPLE: FinalMetrics = dict.fromkeys(
    ("seconds", "heldout_bits_per_byte", "heldout_nats_per_token", "heldout_agreement", "heldout_divergence"), 0.0
)
"""Metrics to try a card with before the run."""


def write(setup: LmSetup, inputs: Inputs, final: FinalMetrics, run: "LmRun", *, steps: int, weights: int) -> str:
    """The card in Markdown, from what the run read, its last metrics and its options.

    Args:
      steps: steps that were trained.
      weights: number of weights.
    """
    packaged, length = inputs.manifest["kind"] == "packages", inputs.length or setup.recipe.length
    licenses = "; the packages' licenses apply to what is copied from them" if packaged else ""
    limits = _OF_PACKAGES if packaged else ""
    use = _USE.format(limits=limits, context=setup.config.max_length, length=length, licenses=licenses)
    return card.assemble(
        run.out.name,
        pipeline="text-generation",
        architecture=_architecture(setup, inputs, weights),
        training=_training(setup, inputs, final, run, steps),
        sections=[use],
        commands=_commands(setup, inputs, run),
        texts=inputs.manifest["card"],
    )


def _architecture(setup: LmSetup, inputs: Inputs, weights: int) -> str:
    config, kind = setup.config, "Qwen3" if setup.config.qk_norm else "Llama"
    text = "Python source" if inputs.manifest["kind"] == "packages" else "own text"
    role = "A draft model, distilled from its target" if setup.teacher else f"A language model of {text}"
    return (
        f"{role}: {kind}-shaped, {weights:,} parameters ({config.num_layers} layers of width "
        f"{config.hidden_size}, {config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} key heads, MLP of "
        f"{config.intermediate_size}, {'tied' if config.tie_embeddings else 'separate'} embeddings), "
        f"a byte-level BPE of {config.vocab_size} tokens, weights in bfloat16."
    )


def _training(setup: LmSetup, inputs: Inputs, final: FinalMetrics, run: "LmRun", steps: int) -> list[str]:
    # The data and the run.
    recipe, heldout = setup.recipe, inputs.manifest["heldout"]
    teacher = "" if run.teacher is None else run.teacher.name
    lines = [
        f"data: {inputs.manifest['card']['summary']}",
        f"held out: {heldout['tokens']:,} tokens ({heldout['bytes']:,} bytes) of {heldout['files']:,} texts or chats",
        card.optimization(recipe, steps, inputs.length),
    ]
    if setup.teacher is not None:
        loss = f"loss: KL divergence to {teacher}"
        if recipe.cross_entropy:
            loss += f", {recipe.cross_entropy:g} of it replaced by cross-entropy"
        if inputs.rows:
            loss += f"; {inputs.describe_rows()}"
        lines.append(loss)
    elif inputs.rows:
        files = " and ".join(f"{rows.name}, {rows.count:,} texts of {rows.width} tokens" for rows in inputs.rows)
        lines.append(f"{inputs.rows_share:.0%} of the batches are from {files}")
    lines.append(card.hardware(final))
    # The result.
    lines.append(
        f"**{final['heldout_bits_per_byte']:.4f} bits per byte** on all held-out text "
        f"({final['heldout_nats_per_token']:.4f} nats per token), in windows of {recipe.length} tokens"
    )
    if "heldout_agreement" in final:
        lines.append(
            f"on held-out text it chooses the target's token at {final['heldout_agreement']:.1%} of positions "
            f"(KL {final['heldout_divergence']:.4f} nats per token)"
        )
    return lines


def _commands(setup: LmSetup, inputs: Inputs, run: "LmRun") -> list[str]:
    """The commands that make this model again, with relative paths."""
    lines = [inputs.manifest["card"]["command"]]
    teacher = "" if run.teacher is None else run.teacher.name
    train = f"python -m tools.pretrain lm --data data --work runs/{run.out.name} --out {run.out.name}"
    train += f" --shape {run.shape}" if run.shape else " --config CONFIG"
    if inputs.rows:
        # Without a teacher it is unknown which model wrote the rows, if any did.
        written, options = inputs.rows_commands(teacher)
        lines += [] if run.teacher is None else written
        train += options
    if run.teacher is not None:
        train += f" --teacher {teacher}"
    return [*lines, train + describe(setup.recipe)]
