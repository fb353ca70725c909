"""Tokens in color: HTML, ANSI and repr of `Generation` and `Generations`."""

import dataclasses
import html.parser
import re

import numpy as np
import pytest
import tokenizers

import jspec
from jspec.text import highlight
from jspec.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """One id per byte, and a special token: every character outside ASCII takes several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<eos>"])
    return Tokenizer(bpe)


def make(tokenizer, sequences, depth=2, prompt="p:"):
    """The generations of given sequences: (text or ids, origin, finish reason)."""
    counts = np.tile(np.array([[1, 0, 1]])[:, : depth + 1], (len(sequences), 1))
    stats = jspec.GenerationStats(np.full(len(sequences), 2), counts, 0.5, np.zeros(len(sequences), int))
    items = []
    for i, (text, origin, reason) in enumerate(sequences):
        ids = tokenizer.encode(text) if isinstance(text, str) else text
        origin = list(np.resize(origin, len(ids)))
        text, prompt_ids = tokenizer.decode(ids), tokenizer.encode(prompt)
        items.append(jspec.Generation(ids, text, reason, stats.of_sequence(i), origin, None, prompt_ids, tokenizer))
    return jspec.Generations(items, stats)


class Spans(html.parser.HTMLParser):
    """Collects the text and title of each span that has a title; asserts that every tag is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.titled, self.text = [], [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.open.append((tag, attrs))
        if attrs.get("title"):
            self.titled.append([attrs["title"], ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        if any(attrs.get("title") for _, attrs in self.open):
            self.titled[-1][1] += data


def plain(text):
    """The text without colors and line-end marks."""
    return re.sub("\x1b\\[[0-9;]*m|↵", "", text)


# The texts of tokens


def test_the_last_token_of_a_character_has_its_text(tokenizer):
    ids = tokenizer.encode("a漢é\n")
    assert highlight.token_texts(tokenizer, [], ids) == ["a", "", "", "漢", "", "é", "\n"]


def test_tokens_without_text_are_named(tokenizer):
    eos = tokenizer.special_ids["<eos>"]
    half = tokenizer.encode("é")[0]
    assert highlight.token_texts(tokenizer, [], [eos, 9999, half]) == ["<eos>", "<9999>", "\ufffd"]
    assert highlight.token_texts(tokenizer, [half], tokenizer.encode("é")[1:]) == ["é"]
    assert highlight.token_texts(None, [], [4, 50]) == ["4 ", "50 "]
    assert highlight.token_texts(tokenizer, [], []) == []


def test_token_texts_of_generations(tokenizer):
    out = make(tokenizer, [("ab", [0], "length"), ("é", [1, 0], "eos")])
    assert out.token_texts == [["a", "b"], ["", "é"]]
    assert out[0].token_texts == ["a", "b"]


def test_a_generation_is_a_sequence_of_tokens(tokenizer):
    (out,) = make(tokenizer, [("aé", [0, 1, 2], "length")])
    assert len(out) == 3 and [token.id for token in out] == out.tokens
    assert out[0] == jspec.GeneratedToken(out.tokens[0], "a", 0, None) and out[-1].text == "é"
    assert [token.origin for token in out[1:]] == [1, 2]
    scored = dataclasses.replace(out, logprobs=[-1.0, -2.0, -3.0])
    assert [token.logprob for token in scored] == [-1.0, -2.0, -3.0]
    with pytest.raises(IndexError):
        out[3]


# HTML


def test_html_has_each_token_with_its_origin(tokenizer):
    out = make(tokenizer, [("<b>&é", [1, 2, 0], "eos")])
    page = out[0]._repr_html_()
    spans = Spans(page).titled
    ids = out.tokens[0]
    assert [text for _, text in spans] == ["<", "b", ">", "&", "é"]
    assert spans[1][0] == f"draft 2, id {ids[1]}"
    assert spans[4][0] == f"target's own, id {ids[4]} {ids[5]}", "the origin of the token that completes it"
    assert "<b>" not in page and "6 new tokens in 2 rounds, accept length 2.50, finish: eos" in page
    assert "p:" in Spans(page).text


def test_html_keeps_lines_and_shows_control_characters(tokenizer):
    page = make(tokenizer, [("a\n\n  b\x1b[31m\r\t", [0], "length")])[0]._repr_html_()
    assert "font-family:monospace" in page, "pages may give <pre> another font"
    assert "white-space:pre-wrap" in page
    assert Spans(page).text.endswith("a↵\n↵\n  b␛[31m␍\t")


def test_html_of_a_batch_shows_a_limited_number_of_sequences(tokenizer):
    several = make(tokenizer, [("ab", [0], "length"), ("c", [1], "stop")])
    page = several._repr_html_()
    assert "sequence 0: 2 new tokens" in page and "sequence 1: 1 new tokens" in page and "more sequences" not in page
    many = make(tokenizer, [("ab", [0], "length")] * (highlight.MAX_SEQUENCES + 3))
    page = many._repr_html_()
    assert page.count("<pre") == highlight.MAX_SEQUENCES and "and 3 more sequences" in page


def test_the_legend_has_no_depths_without_drafts(tokenizer):
    assert "by depth" not in make(tokenizer, [("ab", [0], "length")], depth=0)._repr_html_()
    assert "by depth" in make(tokenizer, [("ab", [0], "length")])._repr_html_()


@pytest.mark.parametrize("depth", (1, 2, 4, 7, 15))
def test_colors_darken_with_depth_and_keep_text_readable(depth):
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in parts]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    shown = [highlight.token_colors(origin, depth) for origin in range(depth + 1)]
    for background, text in shown:
        high, low = sorted((luminance(background), luminance(text)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA
    blues = [luminance(background) for background, _ in shown[1:]]
    assert blues == sorted(blues, reverse=True)
    assert len(set(shown)) == min(depth, len(highlight.DRAFT_COLORS)) + 1


# The terminal


def test_ansi_is_the_text_in_color(tokenizer):
    out = make(tokenizer, [("a\n\n  é", [1, 0], "length")])[0]
    shown = out.to_ansi()
    text, legend = plain(shown).rsplit("\n", 1)
    assert text == "p:a\n\n  é" and legend == " target's own token  accepted draft, by depth:  1  2 "
    for line in shown.split("\n"):
        assert line.count("\x1b[0m") == line.count("\x1b[48;5;"), "no color crosses the end of a line"
    assert shown.index("\x1b[48;5;195") < shown.index("\x1b[48;5;214"), "draft, then the target's own"


def test_ansi_of_a_batch_has_headings(tokenizer):
    shown = plain(make(tokenizer, [("ab", [0], "length"), ("c", [1], "stop")]).to_ansi())
    assert shown.startswith("sequence 0: 2 new tokens in 2 rounds") and "finish: stop\np:c\n" in shown


def test_control_characters_do_not_reach_the_terminal(tokenizer):
    shown = make(tokenizer, [("\x1b]0;x\x07\x9b", [0], "length")])[0].to_ansi()
    assert not set(plain(shown)) & {"\x1b", "\x07", "\x9b"}


# repr


def test_repr_is_short(tokenizer):
    shown = repr(make(tokenizer, [("x" * 200, [0], "length")])[0])
    assert shown.startswith("Generation('xxx") and len(shown) < 200 and "finish: length" in shown
    several = repr(make(tokenizer, [("a", [0], "length"), ("b", [0], "eos"), ("c", [0], "eos"), ("d", [0], "eos")]))
    assert several.startswith("Generations(4 sequences: ['a', 'b', 'c', ...], ") and several.endswith(
        "1 length, 3 eos)"
    )


def test_ids_are_shown_without_a_tokenizer(tokenizer):
    out = dataclasses.replace(make(tokenizer, [("abc", [0], "length")])[0], tokenizer=None, text=None)
    ids = " ".join(map(str, out.tokens))
    assert ids in Spans(out._repr_html_()).text and ids in plain(out.to_ansi())
    assert repr(out).startswith(f"Generation({out.tokens}, ")


# Rounds


@pytest.mark.parametrize(
    "origin, rounds",
    [([0, 1, 2, 0, 1, 0], [3, 2]), ([0, 1, 2], [2]), ([0, 1, 2, 0, 1], [3, 1]), ([0], []), ([0, 0, 0], [1, 1])],
)
def test_a_round_ends_with_the_targets_token(tokenizer, origin, rounds):
    """A round ends with the target's own token. The first token belongs to no round."""
    out = make(tokenizer, [("x" * len(origin), origin, "length"), ("ab", [0], "eos")])
    assert out.tokens_per_round == [rounds, [1]]
    assert out[0].tokens_per_round == rounds
