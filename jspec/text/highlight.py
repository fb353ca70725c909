"""Tokens colored by origin, as HTML for notebooks and as ANSI escapes for terminals.

The target's own tokens are orange. Accepted drafts are blue: the deeper, the darker. Each background comes with a text
color of sufficient contrast, for light and dark pages. Orange and blues differ in lightness, too, for the color-blind.
"""

import dataclasses
import html
import os
from collections.abc import Iterator, Sequence

from jspec.text.stream import TextStream
from jspec.text.tokenizer import Tokenizer

TARGET_COLOR = "#e69f00"
DRAFT_COLORS = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b")
"""ColorBrewer's sequential scale of seven blues (Brewer, colorbrewer2.org)."""
_XTERM_COLORS = {
    TARGET_COLOR: 214,
    **dict(zip(DRAFT_COLORS, (195, 153, 111, 69, 27, 20, 17), strict=True)),
    "#000000": 16,
    "#ffffff": 231,
}
MAX_SEQUENCES = 16
"""Bound of the sequences of a batch that are displayed."""

# Terminals execute control characters; Unicode has pictures of those in ASCII.
_CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
_RESET = "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class DisplayedSequence:
    """A sequence to display.

    tokens: new ids.
    texts: the text of each token, from `token_texts`.
    origin: for each token its depth in the draft, or 0 for the target's own.
    heading: a line above the text.
    prompt: text before the tokens.
    """

    tokens: Sequence[int]
    texts: Sequence[str]
    origin: Sequence[int]
    heading: str = ""
    prompt: str = ""


def token_texts(tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text that each token adds to a prompt, for display.

    A character of several tokens is the text of the last one; the others are "". Special tokens and tokens without text
    are shown by name. Without a tokenizer the texts are the ids.
    """
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    # Tokens without text of their own get a name.
    names = {token: content for content, token in tokenizer.special_ids.items()}
    spelled, stream = tokenizer.token_bytes(), TextStream(tokenizer, prompt)
    texts = []
    for token in tokens:
        text = stream.push([token])
        has_text = token < len(spelled) and spelled[token]
        texts.append(text if has_text else text + names.get(token, f"<{token}>"))
    # An incomplete character at the end belongs to the last token.
    rest = stream.finish()
    if rest:
        texts[-1] += rest
    return texts


def token_colors(origin: int, depth: int) -> tuple[str, str]:
    """Background and text color of a token, as #rrggbb; `depth` is the length of the longest draft."""
    if not origin:
        return TARGET_COLOR, "#000000"
    step = round((origin - 1) / max(depth - 1, 1) * (len(DRAFT_COLORS) - 1))
    return DRAFT_COLORS[step], "#000000" if step < 4 else "#ffffff"


def to_html(sequences: Sequence[DisplayedSequence], depth: int) -> str:
    """A legend and a block per sequence, as HTML, of the first MAX_SEQUENCES. depth: of the longest, darkest draft."""
    blocks = [_html_block(sequence, depth) for sequence in sequences[:MAX_SEQUENCES]]
    if len(sequences) > MAX_SEQUENCES:
        blocks.append(f"<div>and {len(sequences) - MAX_SEQUENCES} more sequences</div>")
    swatches = [_span("target's own token", 0, depth), *(_span(f" {i} ", i, depth) for i in range(1, depth + 1))]
    legend = swatches[0] + (" accepted draft, by depth: " + "".join(swatches[1:]) if depth else "")
    return f'<div style="font-size:smaller">{legend}</div>' + "".join(blocks)


def to_ansi(sequence: DisplayedSequence, depth: int) -> str:
    """The prompt and tokens of a sequence, for a terminal with 256 colors."""
    parts = [_visible(sequence.prompt)]
    for text, origin, _ in _characters(sequence):
        # Reset the color before each line ends; otherwise some terminals fill the next line with it.
        *lines, last = _visible(text).split("\n")
        parts += [_paint(line + "↵", origin, depth) + "\n" for line in lines]
        parts.append(_paint(last, origin, depth))
    return "".join(parts)


def ansi_legend(depth: int) -> str:
    """The legend of `to_ansi`, on one line."""
    target = _paint(" target's own token ", 0, depth)
    drafts = "".join(_paint(f" {i} ", i, depth) for i in range(1, depth + 1))
    return f"{target} accepted draft, by depth: {drafts}" if depth else target


def _characters(sequence: DisplayedSequence) -> Iterator[tuple[str, int, list[int]]]:
    """Text, origin and ids of each token; tokens that together spell one character are merged."""
    ids: list[int] = []
    for token, text, origin in zip(sequence.tokens, sequence.texts, sequence.origin, strict=True):
        ids.append(token)
        if text:
            yield text, origin, ids
            ids = []


def _html_block(sequence: DisplayedSequence, depth: int) -> str:
    tokens = "".join(_span(text, origin, depth, ids) for text, origin, ids in _characters(sequence))
    prompt = f'<span style="opacity:0.6">{html.escape(_visible(sequence.prompt))}</span>'
    return (
        f'<div style="margin-top:1em;font-size:smaller;opacity:0.8">{html.escape(sequence.heading)}</div>'
        f'<pre style="font-family:monospace;white-space:pre-wrap;margin:0;line-height:1.4">{prompt}{tokens}</pre>'
    )


def _span(text: str, origin: int, depth: int, ids: Sequence[int] = ()) -> str:
    background, color = token_colors(origin, depth)
    title = f"draft {origin}" if origin else "target's own"
    title = html.escape(f"{title}, id {' '.join(map(str, ids))}") if ids else ""
    body = html.escape(_visible(text)).replace("\n", '<span style="opacity:0.5;user-select:none">↵</span>\n')
    # A thin right border separates adjacent tokens of the same color.
    style = f"background:{background};color:{color};box-shadow:inset -1px 0 rgba(0,0,0,0.3)"
    return f'<span style="{style}" title="{title}">{body}</span>'


def _paint(text: str, origin: int, depth: int) -> str:
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        return text
    background, color = token_colors(origin, depth)
    return f"\x1b[48;5;{_XTERM_COLORS[background]};38;5;{_XTERM_COLORS[color]}m{text}{_RESET}" if text else ""


def _visible(text: str) -> str:
    return text.translate(_CONTROL_PICTURES)
