"""Plots of generations, draft trees and benchmark reports, with matplotlib.

Tokens have the colors of `jspec.text.highlight`. Plots draw on the axes `ax`, or on a new figure without them.
They return their axes, and raise ModuleNotFoundError without matplotlib.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from jspec.analysis.evaluate import Evaluation
from jspec.analysis.inspect_round import Round
from jspec.core import package
from jspec.generation.result import Generation, Generations, GenerationStats
from jspec.text import highlight
from jspec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SERIES_COLORS = ("#2171b5", "#e69f00", "#009e73", "#cc79a7", "#999999", "#56b4e9")
"""Colors that the color-blind can distinguish (Okabe and Ito, Color Universal Design)."""
_GRAY = "#9a9a9a"
_DARK_GRAY = "#5a5a5a"


def acceptance_by_position(
    generations: Generation | Generations | GenerationStats | Mapping[str, Generation | Generations | GenerationStats],
    ax: "Axes | None" = None,
) -> "Axes":
    """Plot the share of rounds in which the draft at each position is accepted, as bars.

    Args:
      generations: a result of `generate` or its statistics, or several by name.

    Raises:
      ValueError: nothing was drafted.
    """
    named = dict(generations) if isinstance(generations, Mapping) else {"": generations}
    stats = {name: one if isinstance(one, GenerationStats) else one.stats for name, one in named.items()}
    drafted = {name: one for name, one in stats.items() if one.depth}
    if not drafted:
        raise ValueError("nothing was drafted: give a generation with a drafter")
    depth = max(one.depth for one in drafted.values())
    ax = _axes(ax, (max(5.0, 0.3 * depth * len(drafted)), 3.2))
    width = 0.8 / len(drafted)
    for i, (name, one) in enumerate(drafted.items()):
        share = one.acceptance_by_position
        at = np.arange(1, len(share) + 1) + (i - (len(drafted) - 1) / 2) * width
        ax.bar(
            at,
            share,
            width,
            color=_SERIES_COLORS[i % len(_SERIES_COLORS)],
            label=f"{name}: accept length {one.accept_length:.2f}",
        )
    ax.set(xlabel="position in the draft", ylabel="share of rounds", ylim=(0, 1), xticks=range(1, depth + 1))
    if isinstance(generations, Mapping):
        ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def evaluations(results: Mapping[str, Mapping[str, Evaluation]]) -> "Axes":
    """Plot accept length by category, and conditional acceptance by position over all categories, of several drafters.

    Args:
      results: drafter -> category -> evaluation. Drafters without drafts are not shown.

    Returns:
      The axes of the accept lengths, the first of the figure.

    Raises:
      ValueError: nothing was drafted.
    """
    drafted = {
        name: parts
        for name, parts in results.items()
        if len(Evaluation.total([*parts.values()]).conditional_acceptance)
    }
    if not drafted:
        raise ValueError("nothing was drafted: give an evaluation with a drafter")
    categories = list(next(iter(drafted.values())))
    lengths_ax = _axes(None, (4.5 + min(9.0, 0.25 * len(categories) * len(drafted)), 3.4))
    figure: Any = lengths_ax.figure
    lengths_ax.remove()
    lengths_ax, acceptance_ax = figure.subplots(1, 2)
    at, width = np.arange(len(categories)), 0.8 / len(drafted)
    for i, (name, parts) in enumerate(drafted.items()):
        color = _SERIES_COLORS[i % len(_SERIES_COLORS)]
        whole = Evaluation.total([*parts.values()])
        means = [parts[category].accept_length for category in categories]
        lengths_ax.bar(at + (i - (len(drafted) - 1) / 2) * width, means, width, color=color, label=name)
        share = whole.conditional_acceptance
        acceptance_ax.plot(np.arange(1, len(share) + 1), share, marker="o", color=color, label=name)
    lengths_ax.set(ylabel="accept length", ylim=(0, None), xticks=at)
    lengths_ax.set_xticklabels(
        [category or "all" for category in categories], rotation=30 if len(categories) > 3 else 0
    )
    acceptance_ax.set(xlabel="position in the draft", ylabel="conditional acceptance", ylim=(0, 1.05))
    acceptance_ax.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*lengths_ax.get_legend_handles_labels(), frameon=False, loc="outside upper left", ncols=len(drafted))
    return lengths_ax


def tokens_per_round(generation: Generation, ax: "Axes | None" = None) -> "Axes":
    """Plot the tokens of each round, stacked in the order of the text and colored by origin, and their mean.

    The first token comes from prefill and is not shown; the end of the text may cut off the last round.

    Raises:
      ValueError: the first token ended the text.
      TypeError: a list of generations, or anything else.
    """
    if not isinstance(generation, Generation):
        raise TypeError(f"generation is of type {type(generation).__name__}: must be one Generation, such as out[0]")
    rounds, depth = generation.tokens_per_round, generation.stats.depth
    if not rounds:
        raise ValueError("the generation has no rounds: its first token ended the text")
    ax = _axes(ax, (min(12.0, max(5.0, 0.12 * len(rounds))), 2.8))
    # One bar of height 1 per token: at its round, on top of the tokens before it.
    at = np.repeat(np.arange(len(rounds)), rounds)
    level = np.concatenate([np.arange(count) for count in rounds])
    origin = np.array(generation.origin)[1:]
    for depth_of_token in range(depth + 1):
        shown = origin == depth_of_token
        if shown.any():
            color = highlight.token_colors(depth_of_token, depth)[0]
            label = f"draft {depth_of_token}" if depth_of_token else "target's own"
            ax.bar(at[shown], 1.0, 0.9, bottom=level[shown], color=color, label=label)
    mean = len(origin) / len(rounds)
    ax.axhline(mean, color=_GRAY, linestyle="--", label=f"mean {mean:.2f}")
    ax.set(xlabel="round", ylabel="tokens", xlim=(-0.7, len(rounds) - 0.3), yticks=range(0, depth + 2))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def draft_tree(inspected: Round, tokenizer: Tokenizer | None = None, ax: "Axes | None" = None) -> "Axes":
    """Plot the tree of a round, with the root on the left. Appended tokens are colored, the others gray.

    Args:
      inspected: from `jspec.inspect_round`.
      tokenizer: shows the texts of the tokens; None: their ids.
    """
    # The target's own token becomes one more node.
    tokens, parents, depths = inspected.tokens.tolist(), inspected.parents.tolist(), inspected.depths.tolist()
    num_nodes, num_accepted = len(tokens), len(inspected.accepted) - 1
    has_own_token = len(inspected.appended) > num_accepted
    if has_own_token:
        tokens.append(inspected.appended[-1])
        parents.append(inspected.accepted[-1])
        depths.append(num_accepted + 1)
    heights = _heights(parents)
    deepest, longest = int(inspected.depths.max()), max(depths)
    ax = _axes(ax, (1.4 * (longest + 1) + 0.6, 0.34 * (max(heights) + 1) + 0.7))

    # Edges, then nodes; appended ones are highlighted.
    appended = [*inspected.accepted, *range(num_nodes, len(tokens))]
    for node in range(1, len(tokens)):
        ends = (depths[parents[node]], depths[node]), (heights[parents[node]], heights[node])
        color, width = ("black", 2.2) if node in appended else (_GRAY, 0.8)
        ax.plot(*ends, zorder=1, color=color, linewidth=width)

    for node, token in enumerate(tokens):
        fill, color, edge = "white", _DARK_GRAY, _GRAY
        if node in appended:
            origin = 0 if node == num_nodes else depths[node]
            fill, color = highlight.token_colors(origin, deepest) if node else ("#e8e8e8", "black")
            edge = "black"
        box = {"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": edge}
        style: dict[str, Any] = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 9, "zorder": 2}
        label = _label(tokenizer, inspected.before, token)
        ax.text(depths[node], heights[node], label, color=color, bbox=box, parse_math=False, **style)

    ax.set(xlim=(-0.6, longest + 0.6), ylim=(max(heights) + 0.7, -0.7), xticks=range(longest + 1), yticks=[])
    title = f"round {inspected.round_index}: {num_accepted} of {num_nodes - 1} drafts accepted (blue)"
    ax.set_title(title + (", then the target's own token (orange)" if has_own_token else ""), fontsize=10, loc="left")
    ax.set(xlabel="depth")
    ax.spines[["left", "right", "top"]].set_visible(False)
    return ax


_PHASES = {
    "draft": ("#e69f00", ""),
    "verify": ("#2171b5", ""),
    "accept+commit": ("#009e73", ""),
    "extend": ("#cc79a7", ""),
    "rest": ("none", "////"),
}
"""Phases of a round, bottom to top: color and hatching."""


def bench_report(lines: Sequence[Mapping[str, Any]], ax: "Axes | None" = None) -> "Axes":
    """Plot the time of a round in each measured case: a bar of its phases, and a line at its floor.

    Args:
      lines: the parsed lines of `jspec bench --json`. Phases are measured separately; the hatched part is the remainder
        of the round, or their excess.

    Raises:
      ValueError: nothing was measured.
    """
    cases = [line for line in lines if line["metric"] == "round"]
    rounds = [line for line in cases if line["values"]]
    if not rounds:
        raise ValueError("nothing was measured: " + "; ".join(line["note"] for line in cases))
    ax = _axes(ax, (min(16.0, max(5.0, 0.6 * len(rounds) + 2)), 4.0))
    at, bottom = np.arange(len(rounds)), 0.0
    # Stacked phases.
    split = [_split(line, lines) for line in rounds]
    for name, (color, hatch) in _PHASES.items():
        height = np.array([phases.get(name, 0.0) for phases in split])
        ax.bar(at, height, 0.8, bottom=bottom, color=color, hatch=hatch, edgecolor=_DARK_GRAY, label=name)
        bottom = bottom + height
    ax.hlines([line["floor"] for line in rounds], at - 0.45, at + 0.45, color="black", linewidth=2, label="floor")
    ax.set(ylabel="ms per round", xticks=at, xlim=(-0.6, len(rounds) - 0.4))
    ax.set_xticklabels([f"{line['mode']}\n{line['batch']} x {line['context']}" for line in rounds], fontsize=8)
    ax.set_title(f"{rounds[0]['subject']}, {rounds[0]['device']}", fontsize=10, loc="left")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def save(ax: "Axes", path: str | PathLike[str]) -> None:
    """Write the figure of the axes to a file. Its suffix, such as .png, chooses the format."""
    figure: Any = ax.figure
    figure.savefig(path, dpi=150)


def _split(measured: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of each phase of a round, and the remainder, negative if the phases exceed the round."""
    case = ("subject", "mode", "batch", "context", "date")
    same = [line for line in lines if all(line[name] == measured[name] for name in case)]
    phases = {line["metric"]: line["median"] for line in same if line["metric"] in _PHASES}
    return {**phases, "rest": measured["median"] - sum(phases.values())}


def _axes(ax: "Axes | None", size: tuple[float, float]) -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"jspec.analysis.plots requires {error.name}: {package.install('notebooks')}"
        ) from None
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def _heights(parents: Sequence[int]) -> list[float]:
    """The height of each node: every leaf on its own line, and every parent centered between its children."""
    children = [[n for n in range(1, len(parents)) if parents[n] == node] for node in range(len(parents))]
    heights, lines = [0.0] * len(parents), 0

    def place(node: int) -> None:
        nonlocal lines
        for child in children[node]:
            place(child)
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
        else:
            heights[node], lines = float(lines), lines + 1

    place(0)
    return heights


def _label(tokenizer: Tokenizer | None, before: Sequence[int], token: int) -> str:
    """The text of a token on one line of at most 12 characters, with visible spaces."""
    (text,) = highlight.token_texts(tokenizer, before, [token])
    if tokenizer is not None:
        text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    return text if len(text) <= 12 else text[:11] + "…"
