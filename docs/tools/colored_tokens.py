"""Draws docs/images/colored_tokens.svg: a generation of the bundled model, each token colored by its origin.

Run in the root of the repository: python docs/tools/colored_tokens.py
"""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import jspec

PROMPT = "class Point:\n    def __init__(self, x, y):"
NEW_TOKENS = 89
CELL_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 20, 14, 14
"""Pixels. A cell is one character."""
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
PAGE, TEXT, PROMPT_TEXT = "#ffffff", "#1f2328", "#656d76"


class Spans(HTMLParser):
    """The texts of a highlighted generation, as (text, background, color); background is None in the prompt.

    legend: the target's own color, then those of drafts by position.
    spans: prompt and tokens.
    """

    def __init__(self, page: str):
        super().__init__()
        self.legend: list[tuple[str, str | None, str]] = []
        self.spans: list[tuple[str, str | None, str]] = []
        self._styles: list[str] = []
        self._in_text = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs) -> None:
        """Enters an element."""
        self._in_text |= tag == "pre"
        if tag == "span":
            self._styles.append(dict(attrs).get("style") or "")

    def handle_endtag(self, tag: str) -> None:
        """Leaves an element."""
        self._in_text &= tag != "pre"
        if tag == "span":
            self._styles.pop()

    def handle_data(self, data: str) -> None:
        """Text of a token, or of the prompt."""
        colors = re.search(r"background:(#\w+);color:(#\w+)", ";".join(self._styles))
        if colors:
            (self.spans if self._in_text else self.legend).append((data, colors[1], colors[2]))
        elif self._in_text:
            self.spans.append((data, None, PROMPT_TEXT))


def draw_text(text: str, column: float, line: float, background: str | None, color: str) -> str:
    """A piece of one line at a position counted in characters."""
    x, y, width = MARGIN + column * CELL_WIDTH, MARGIN + line * LINE_HEIGHT, len(text) * CELL_WIDTH
    box = f'<rect x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="{LINE_HEIGHT - 2}" rx="2" fill="{background}"/>'
    # With a fixed length, tokens fit their boxes in any monospace font. Spaces take part in it only if preserved.
    label = (
        f'<text x="{x:.1f}" y="{y + FONT_SIZE - 1}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" '
        f'fill="{color}" xml:space="preserve">{html.escape(text, quote=False)}</text>'
    )
    return (box if background else "") + (label if text.strip() else "")


def draw(out: jspec.Generation) -> str:
    """The prompt and its continuation, above a legend."""
    page = Spans(out._repr_html_())
    parts, line, column, widest = [], 0, 0, 0
    for text, background, color in page.spans:
        for i, piece in enumerate(text.split("\n")):
            if i:
                line, column = line + 1, 0
            if piece:
                parts.append(draw_text(piece, column, line, background, color))
            column += len(piece)
            widest = max(widest, column)
    line, column = line + 2, 0
    (own, *own_colors), *drafts = page.legend
    legend = [(f" {own} ", *own_colors), ("  accepted draft, by position: ", None, TEXT), *drafts]
    for text, background, color in legend:
        parts.append(draw_text(text, column, line, background, color))
        column += len(text)
    stats = out.stats
    summary = f"{stats.new_tokens} tokens in {stats.rounds.sum()} rounds: {stats.accept_length:.2f} tokens per round"
    parts.append(draw_text(summary, 0, line + 1.2, None, TEXT))
    width, height = 2 * MARGIN + max(widest, column) * CELL_WIDTH, 2 * MARGIN + (line + 2.2) * LINE_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" font-size="{FONT_SIZE}">\n'
        f'<rect width="100%" height="100%" rx="6" fill="{PAGE}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    model = jspec.load("bundled:python-small")
    drafter = jspec.Eagle(depth=5, width=8, num_nodes=32)
    out = jspec.generate(model, PROMPT, drafter=drafter, max_new_tokens=NEW_TOKENS, stop="\n\n\n")
    (Path(__file__).parents[1] / "images" / "colored_tokens.svg").write_text(draw(out), encoding="utf-8")
    print(out)
