"""Figures, drawn with matplotlib in the colours of `show`: on the axes `ax`, or on a new figure where it is None.

All functions return the axes, and raise ModuleNotFoundError where matplotlib is not installed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jspec.analysis.inspect_round import Round
from jspec.engine.result import Generation, GenerationStats
from jspec.text import highlight
from jspec.text.tokenizer import Tokenizer

_NAMED = ("#2171b5", "#e69f00", "#009e73", "#cc79a7", "#999999", "#56b4e9")
"""Colours that the colour-blind tell apart (Okabe and Ito, Color Universal Design)."""
_GREY = "#9a9a9a"


def acceptance_by_position(
    given: Generation | GenerationStats | Mapping[str, Generation | GenerationStats], ax: Any = None
) -> Any:
    """How often the draft token at each position stands, as bars.

    Args:
      given: a generation or its statistics; or several by name, to be compared.

    Raises:
      ValueError: nothing was drafted.
    """
    named = dict(given) if isinstance(given, Mapping) else {"": given}
    stats = {name: one.stats if isinstance(one, Generation) else one for name, one in named.items()}
    drafted = {name: one for name, one in stats.items() if len(one.acceptance_by_position)}
    if not drafted:
        raise ValueError("nothing was drafted: give a generation with a drafter")
    depth = max(len(one.acceptance_by_position) for one in drafted.values())
    ax = _axes(ax, (max(5.0, 0.3 * depth * len(drafted)), 3.2))
    width = 0.8 / len(drafted)
    for i, (name, one) in enumerate(drafted.items()):
        share = one.acceptance_by_position
        at = np.arange(1, len(share) + 1) + (i - (len(drafted) - 1) / 2) * width
        ax.bar(at, share, width, color=_NAMED[i % len(_NAMED)], label=f"{name}: accept length {one.accept_length:.2f}")
    ax.set(xlabel="position in the draft", ylabel="share of rounds", ylim=(0, 1), xticks=range(1, depth + 1))
    if isinstance(given, Mapping):
        ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def tokens_per_round(generation: Generation, row: int = 0, ax: Any = None) -> Any:
    """The tokens that each round appended to a row, one upon the other in the order of the text, and their mean.

    The first token comes of no round; the last round may have been cut by the end of the text.

    Args:
      row: where the generation has several.

    Raises:
      ValueError: a row that its first token ended.
    """
    rounds, depth = generation.rounds_of(row), generation.stats.accept_counts.shape[1] - 1
    if not rounds:
        raise ValueError(f"row={row}: its first token ended it, before any round")
    ax = _axes(ax, (min(12.0, max(5.0, 0.12 * len(rounds))), 2.8))
    above, level = (np.concatenate([part(count) for count in rounds]) for part in (np.ones, np.arange))
    at = np.repeat(np.arange(len(rounds)), rounds)
    origin = np.array(generation.origin[row] if isinstance(generation.finish_reason, list) else generation.origin)[1:]
    for source in range(depth + 1):
        of, label = origin == source, f"draft {source}" if source else "target's own"
        if of.any():
            ax.bar(at[of], above[of], 0.9, bottom=level[of], color=highlight.colours(source, depth)[0], label=label)
    mean = len(origin) / len(rounds)
    ax.axhline(mean, color=_GREY, linestyle="--", label=f"mean {mean:.2f}")
    ax.set(xlabel="round", ylabel="tokens", xlim=(-0.7, len(rounds) - 0.3), yticks=range(0, depth + 2))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def draft_tree(round: Round, tokenizer: Tokenizer | None = None, ax: Any = None) -> Any:
    """The tree of a round, from the root at the left; what the round appended is in colour, the rest is grey.

    Args:
      round: from `jspec.inspect_round`.
      tokenizer: the model's, for the texts of the tokens; None: their ids.
    """
    tokens, parents, depths = round.tokens.tolist(), round.parents.tolist(), round.depths.tolist()
    drafts = len(round.accepted) - 1
    if len(round.appended) > drafts:
        tokens.append(round.appended[-1])
        parents.append(round.accepted[-1])
        depths.append(drafts + 1)
    heights = _heights(parents)
    deepest, longest = int(round.depths.max()), max(depths)
    ax = _axes(ax, (1.4 * (longest + 1) + 0.6, 0.34 * (max(heights) + 1) + 0.7))
    kept = [*round.accepted, *range(len(round.tokens), len(tokens))]
    for node in range(1, len(tokens)):
        ends = (depths[parents[node]], depths[node]), (heights[parents[node]], heights[node])
        style = {"color": "black", "linewidth": 2.2} if node in kept else {"color": _GREY, "linewidth": 0.8}
        ax.plot(*ends, zorder=1, **style)
    for node, token in enumerate(tokens):
        fill, colour, edge = "white", "#5a5a5a", _GREY
        if node in kept:
            origin = 0 if node == len(round.tokens) else depths[node]
            fill, colour = highlight.colours(origin, deepest) if node else ("#e8e8e8", "black")
            edge = "black"
        box = {"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": edge}
        style = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 9, "zorder": 2}
        label = _label(tokenizer, round.before, token)
        ax.text(depths[node], heights[node], label, color=colour, bbox=box, parse_math=False, **style)
    ax.set(xlim=(-0.6, longest + 0.6), ylim=(max(heights) + 0.7, -0.7), xticks=range(longest + 1), yticks=[])
    count = f"round {round.round_index}: {drafts} of {len(round.tokens) - 1} drafts accepted (blue)"
    own = ", then the target's own token (orange)" if len(tokens) > len(round.tokens) else ""
    ax.set_title(count + own, fontsize=10, loc="left")
    ax.set(xlabel="depth")
    ax.spines[["left", "right", "top"]].set_visible(False)
    return ax


_PHASES = {
    "draft": ("#e69f00", ""),
    "verify": ("#2171b5", ""),
    "accept_commit": ("#009e73", ""),
    "extend": ("#cc79a7", ""),
    "rest": ("none", "////"),
}
"""Phases of a round, from the bottom up: colour and hatching."""


def bench_report(report: Mapping[str, Any], ax: Any = None) -> Any:
    """A round of each measured row as a bar of its phases, with its floor as a line.

    Args:
      report: what `jspec bench --json` wrote. The phases were measured alone; hatched is what they leave of the round,
        or where they are more than the round, what is too much.

    Raises:
      ValueError: no row was measured.
    """
    rows = [row for row in report["rows"] if row["round"]]
    if not rows:
        raise ValueError("no row was measured: " + "; ".join(row["problem"] for row in report["rows"]))
    ax = _axes(ax, (min(16.0, max(5.0, 0.6 * len(rows) + 2)), 4.0))
    at, bottom = np.arange(len(rows)), 0.0
    split = [row["phases"] or {"rest": row["round"]} for row in rows]
    for name, (colour, hatch) in _PHASES.items():
        height = np.array([1e3 * phases.get(name, 0.0) for phases in split])
        style = {"color": colour, "hatch": hatch, "edgecolor": "#5a5a5a", "label": name.replace("_", "+")}
        ax.bar(at, height, 0.8, bottom=bottom, **style)
        bottom = bottom + height
    ax.hlines([1e3 * row["floor"] for row in rows], at - 0.45, at + 0.45, color="black", linewidth=2, label="floor")
    ax.set(ylabel="ms a round", xticks=at, xlim=(-0.6, len(rows) - 0.4))
    ax.set_xticklabels([f"{row['mode']}\n{row['batch']} x {row['context']}" for row in rows], fontsize=8)
    ax.set_title(f"{report['model']}, {report['environment']['device']}", fontsize=10, loc="left")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'jspec.analysis.plots needs {error.name}: pip install "jspec[notebooks]"') from None
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def _heights(parents: Sequence[int]) -> list[float]:
    """Each leaf on a line of its own, in the order of the children, and a parent in the middle of its children."""
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


def _label(tokenizer: Tokenizer | None, before: Sequence[int], token: int, most: int = 12) -> str:
    """A token's text on one line, spaces made visible."""
    (text,) = highlight.token_texts(tokenizer, before, [token])
    if tokenizer is not None:
        text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    return text if len(text) <= most else text[: most - 1] + "…"
