"""Code, messages and pages are in plain American English: words that CONTRIBUTING.md replaces do not occur."""

import bisect
import itertools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UK_STEMS = (
    "anal|author|central|character|custom|emphas|equal|final|formal|general|initial|local|material|maxim|minim|modern|normal"
    "|optim|organ|parallel|penal|quant|random|recogn|serial|special|summar|symbol|synchron|token|util|vector|visual"
)
WORDS = {
    "law": r"laws?",
    "rule of acceptance": r"rules? of acceptance",
    "behind": r"behind",
    "drawn": r"drawn",
    "stands": r"stands|stood",
    "so many": r"so many(th)?",
    "no multiple of": r"no multiple of",
    "a round": r"(tokens|forwards?|passes|kernels|launches|m?s|us|rows|drafts|bytes|times?|once|twice) a round",
    "figures": r"figures?",
    "says": r"says",
    "numbers": r"numbers",
    "Of": r'(?<=""")Of',
    "else": r"(and|or|but|where) else(?=[ ,.]|$)|(?-i:Else)",
    "what is left of": r"(what is|what was) left of",
    "to its like": r"(its|their) like\b(?! \w)",
    "who sees which": r"who sees",
    "a turn ahead": r"a turn ahead",
    "thinks": r"thinks",
    "colour": r"\w*(colour|favour|behaviour|honour|neighbour)\w*",
    "licence": r"licen[c]es?",
    "centre": r"centre[sd]?|grey|artefacts?|programmes?|analyse[sd]?|catalogues?|(mode|labe|trave)ll(ed|ing)",
    "normalise": rf"\w*({UK_STEMS})is(e|ed|es|er|ers|ing|ation|ations)",
    "em dash": r"\u2014",
}
"""What a word is called here -> a pattern of it, in any case where it begins with a lower-case letter."""
ALLOWED = {
    "stands": [r"stands? for"],
    "numbers": [r"(random|line|page|finite|subnormal) numbers", r"numbers, strings", r"^(tests|benchmarks)/.*"],
    # Of plots.
    "figures": [
        r"^(jspec/analysis/plots|tests/analysis/test_plots|tests/.*_?notebooks)\.py: .*",
        r"^jspec/bench/cli\.py: figure.*",
    ],
    "drawn": [r"^tests/analysis/test_plots\.py: .*"],
    # Text that a test reads.
    "em dash": [r"^tests/tools/test_pretrain_data\.py: .*"],
}
"""Legitimate uses: patterns of a part of "file: line" that has the word inside."""
EXEMPT = ("tests/test_words.py", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/notes/")
"""Files that list the words or old names, and notes, which are not edited."""


def read(path):
    """The words of a file: all of it, but for notebooks what a person wrote."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def lines():
    """(file, line number, line) of everything that is searched."""
    patterns = [
        "*.md",
        "*.toml",
        "*.yml",
        ".ci/*",
        ".github/**/*.yml",
        "docs/**/*.md",
        "docs/**/*.py",
        "benchmarks/*.md",
        "notebooks/*.ipynb",
    ]
    patterns += [f"{folder}/**/*.py" for folder in ("jspec", "pallas_kernels", "tests", "benchmarks", "examples")]
    patterns += ["jspec/assets/*/README.md"]
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(EXEMPT):
            yield from ((name, i, line) for i, line in enumerate(read(path).splitlines(), 1))


LINES = [(name, number, f": {line.strip()}") for name, number, line in lines()]
TEXT = "\n".join(line for *_, line in LINES)
STARTS = list(itertools.accumulate((len(line) + 1 for *_, line in LINES), initial=0))
"""Where each line begins in `TEXT`."""


def candidates(pattern):
    """The lines that a match in the whole text touches, which is found sooner than one in each line."""
    touched = set()
    for match in pattern.finditer(TEXT):
        first, last = (
            bisect.bisect_right(STARTS, at) - 1 for at in (match.start(), max(match.start(), match.end() - 1))
        )
        touched.update(range(first, last + 1))
    return [LINES[index] for index in sorted(touched)]


def find(word):
    """Where a word is used, as "file:line: text"."""
    flags = re.MULTILINE | (re.IGNORECASE if word[0].islower() else 0)
    pattern = re.compile(rf"(?<![A-Za-z])(?:{WORDS[word]})(?![A-Za-z])", flags)
    allowed = [re.compile(expression, re.IGNORECASE) for expression in ALLOWED.get(word, [])]
    found = []
    for name, number, line in candidates(pattern):
        text = name + line
        for match in pattern.finditer(text, len(name)):
            spans = [span for expression in allowed for span in expression.finditer(text)]
            if not any(span.start() <= match.start() and match.end() <= span.end() for span in spans):
                found.append(f"{name}:{number}{line}")
    return found


@pytest.mark.parametrize("word", WORDS)
def test_word_does_not_occur(word):
    found = find(word)
    assert not found, f"{len(found)} lines use {word!r} (see CONTRIBUTING.md):\n" + "\n".join(found)
