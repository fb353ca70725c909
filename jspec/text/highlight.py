"""Tokens coloured by where they came from, for a notebook and for a terminal. Plain data in, HTML or ANSI out.

Orange is the target's own token; the blues, light to dark, are drafts that were accepted, by their depth. Each colour
comes with its text colour, so that it reads on light and dark backgrounds, and the two hues and the lightness tell them
apart without red and green.
"""

import dataclasses
import html
from collections.abc import Iterator, Sequence

from jspec.text.stream import TextStream
from jspec.text.tokenizer import Tokenizer

OWN = "#e69f00"
BLUES = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b")
"""ColorBrewer's sequential scale of seven blues (Brewer, colorbrewer2.org)."""
_XTERM = {OWN: 214, **dict(zip(BLUES, (195, 153, 111, 69, 27, 20, 17), strict=True)), "#000000": 16, "#ffffff": 231}
MOST_ROWS = 16
"""Rows of a batch that are shown."""

# Control characters would act on a terminal; those of ASCII have pictures.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_RESET = "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row to be shown.

    tokens: new ids.
    texts: for each of them what `token_texts` gives.
    origin: for each of them the depth of the draft that was accepted, or 0.
    heading: a line above it.
    prompt: text in front of it.
    """

    tokens: Sequence[int]
    texts: Sequence[str]
    origin: Sequence[int]
    heading: str = ""
    prompt: str = ""


def token_texts(tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text that each of `tokens` adds behind a prompt, for a reader.

    A character that several tokens spell stands with the last of them, and the others are "". Special tokens and
    tokens without text are named. Without a tokenizer each text is the id.
    """
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    names = {token: content for content, token in tokenizer.special_ids.items()}
    spelled, stream = tokenizer.token_bytes(), TextStream(tokenizer, prompt)
    texts = []
    for token in tokens:
        text = stream.push([token])
        silent = token >= len(spelled) or not spelled[token]
        texts.append(text + names.get(token, f"<{token}>") if silent else text)
    rest = stream.finish()
    if rest:
        texts[-1] += rest
    return texts


def colours(origin: int, depth: int) -> tuple[str, str]:
    """Background and text colour of a token, as #rrggbb, where drafts have at most `depth` tokens."""
    if not origin:
        return OWN, "#000000"
    step = round((origin - 1) / max(depth - 1, 1) * (len(BLUES) - 1))
    return BLUES[step], "#000000" if step < 4 else "#ffffff"


def to_html(rows: Sequence[Row], depth: int) -> str:
    """A legend and one block for each row, as HTML; of more than MOST_ROWS rows, the first ones.

    Args:
      depth: tokens of the longest draft, which has the darkest blue.
    """
    blocks = [_html_block(row, depth) for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        blocks.append(f"<div>and {len(rows) - MOST_ROWS} more rows</div>")
    swatches = [_span("target's own token", 0, depth), *(_span(f" {i} ", i, depth) for i in range(1, depth + 1))]
    legend = swatches[0] + (" accepted draft, by depth: " + "".join(swatches[1:]) if depth else "")
    return f'<div style="font-size:smaller">{legend}</div>' + "".join(blocks)


def to_ansi(row: Row, depth: int) -> str:
    """A row's prompt and tokens for a terminal of 256 colours."""
    parts = [_visible(row.prompt)]
    for text, origin, _ in _grouped(row):
        *ended, last = _visible(text).split("\n")
        # A background that is on while a line ends fills the next line in some terminals.
        parts += [_paint(line + "↵", origin, depth) + "\n" for line in ended]
        parts.append(_paint(last, origin, depth))
    return "".join(parts)


def ansi_legend(depth: int) -> str:
    """One line that says what the colours of `to_ansi` mean."""
    own = _paint(" target's own token ", 0, depth)
    drafts = "".join(_paint(f" {i} ", i, depth) for i in range(1, depth + 1))
    return f"{own} accepted draft, by depth: {drafts}" if depth else own


def _grouped(row: Row) -> Iterator[tuple[str, int, list[int]]]:
    """Text, origin and ids of each token, where tokens that spell one character together are one."""
    ids: list[int] = []
    for token, text, origin in zip(row.tokens, row.texts, row.origin, strict=True):
        ids.append(token)
        if text:
            yield text, origin, ids
            ids = []


def _html_block(row: Row, depth: int) -> str:
    tokens = "".join(_span(text, origin, depth, ids) for text, origin, ids in _grouped(row))
    prompt = f'<span style="opacity:0.6">{html.escape(_visible(row.prompt))}</span>'
    return (
        f'<div style="margin-top:1em;font-size:smaller;opacity:0.8">{html.escape(row.heading)}</div>'
        f'<pre style="white-space:pre-wrap;margin:0;line-height:1.4">{prompt}{tokens}</pre>'
    )


def _span(text: str, origin: int, depth: int, ids: Sequence[int] = ()) -> str:
    background, colour = colours(origin, depth)
    title = f"draft {origin}" if origin else "target's own"
    title = html.escape(f"{title}, id {' '.join(map(str, ids))}") if ids else ""
    body = html.escape(_visible(text)).replace("\n", '<span style="opacity:0.5;user-select:none">↵</span>\n')
    # The shade at the right end tells tokens of one colour apart.
    style = f"background:{background};color:{colour};box-shadow:inset -1px 0 rgba(0,0,0,0.3)"
    return f'<span style="{style}" title="{title}">{body}</span>'


def _paint(text: str, origin: int, depth: int) -> str:
    background, colour = colours(origin, depth)
    return f"\x1b[48;5;{_XTERM[background]};38;5;{_XTERM[colour]}m{text}{_RESET}" if text else ""


def _visible(text: str) -> str:
    return text.translate(_PICTURES)
