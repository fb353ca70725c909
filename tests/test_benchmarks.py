"""Measurements as data: the schema of their lines, and the pages rendered from them."""

import csv
import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import recorded

from jspec.bench import measurement
from jspec.bench.measurement import Measurement

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
assert _SPEC and _SPEC.loader
render = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(render)

ROUND = "h100/llama-3.1-8b/chain/b1/c512/round/2026-11-22-372f3f7"
"""The id of a round in the README's table, 7.01 ms."""
EXAMPLE = Measurement(
    id="h100/m/plain/2026-01-02",
    date="2026-01-02",
    device="H100",
    subject="m",
    mode="plain",
    metric="round",
    unit="ms",
    values=[5.25, 5.5, 6.0],
    floor=4.4,
)


@pytest.fixture
def tree(tmp_path):
    """A copy of the pages and their data."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def texts(tree):
    return {page.relative_to(tree): page.read_text(encoding="utf-8") for page in render.pages(tree)}


def replace_line(tree, name, **changes):
    """Changes fields of the line with this id."""
    for path in (tree / "benchmarks" / "results").glob("*.jsonl"):
        lines = [dataclasses.replace(line, **changes) if line.id == name else line for line in recorded.read(path)]
        measurement.write(path, lines)


TABLE = render.sizes.table


@pytest.fixture(autouse=True)
def written_sizes(monkeypatch):
    """The table of sizes as the page has it: its computation takes longer than all else here."""
    page = (ROOT / "docs" / "sizes.md").read_text(encoding="utf-8")
    written = page.split("<!-- bench:sizes -->")[1].split("<!-- /bench -->")[0].strip()
    monkeypatch.setattr(render.sizes, "table", lambda: written)


def test_every_page_is_up_to_date(capsys):
    assert render.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_table_of_sizes_is_up_to_date():
    assert TABLE() == render.sizes.table()


def test_every_line_is_valid():
    """Fields and types, unique ids, one day and machine per file, and superseding lines that exist."""
    results = render.Results(ROOT / "benchmarks" / "results")
    assert len(results.by_id) > 700
    for name, lines in results.files.items():
        assert name.startswith(lines[0].date[:10]), name
        for line in lines:
            assert recorded.parse(line.to_json()) == line


def test_measurements_are_added_to_a_file(tmp_path):
    path, other = tmp_path / "new.jsonl", dataclasses.replace(EXAMPLE, id="other")
    for line in (EXAMPLE, other):
        recorded.add(path, [line])
    assert recorded.read(path) == [EXAMPLE, other]


def test_rendering_is_idempotent(tree, capsys):
    before = texts(tree)
    assert render.main([], tree) == 0
    assert texts(tree) == before and not capsys.readouterr().out


def test_a_changed_line_changes_the_pages(tree, capsys):
    """The README and the page of results."""
    replace_line(tree, ROUND, values=[6.87], median=None)
    assert render.main(["--check"], tree) == 1
    assert "README.md is out of date" in capsys.readouterr().out
    before = texts(tree)
    assert render.main([], tree) == 0
    after = texts(tree)
    changed = {str(page) for page in after if after[page] != before[page]}
    assert {"README.md", "docs/benchmarks.md"} <= changed
    counts = [text[Path("README.md")].count(number) for text, number in ((before, "7.01"), (after, "6.87"))]
    assert counts[0] == counts[1] > 0
    assert render.main(["--check"], tree) == 0


@pytest.mark.slow
def test_a_superseded_line_is_replaced_everywhere(tree):
    line = render.Results(tree / "benchmarks" / "results").by_id[ROUND]
    later = dataclasses.replace(
        line, id="h100/llama-3.1-8b/chain/b1/c512/round/2027-01-01", date="2027-01-01", values=[6.543], median=None
    )
    measurement.write(tree / "benchmarks" / "results" / "2027-01-01-h100-llama-3.1-8b.jsonl", [later])
    replace_line(tree, ROUND, superseded_by=later.id)
    assert render.main([], tree) == 0
    pages = texts(tree)
    assert "6.54" in pages[Path("README.md")] and "7.01" not in pages[Path("README.md")]
    assert "6.54" in pages[Path("docs/benchmarks.md")]


def test_csv_has_a_file_per_machine(tree, tmp_path):
    results = tree / "benchmarks" / "results"
    for path in results.glob("*"):
        path.unlink()
    old = dataclasses.replace(EXAMPLE, id="old", superseded_by=EXAMPLE.id)
    measurement.write(results / "2026-01-02-h100-m.jsonl", [EXAMPLE, old])
    line = dataclasses.replace(EXAMPLE, id="h200/m", device="H200", device_count=2, settings={"a": 1})
    measurement.write(results / "2026-01-02-h200-x2-m.jsonl", [line])
    assert render.main(["--csv", str(tmp_path / "csv")], tree) == 0
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == ["2-x-h200.csv", "h100.csv"]
    (row,) = csv.DictReader((tmp_path / "csv" / "h100.csv").read_text().splitlines())
    assert (row["id"], row["mode"], row["values"], row["median"]) == (EXAMPLE.id, "plain", "5.25 5.5 6.0", "5.5")


def test_tables_name_fields_and_formats(tmp_path):
    later = dataclasses.replace(EXAMPLE, id="h100/m/later", values=[1.0, 3.0], median=None, floor=None)
    old = dataclasses.replace(EXAMPLE, id="old", values=[9.0], median=None, superseded_by=later.id)
    measurement.write(tmp_path / "2026-01-02-h100-m.jsonl", [EXAMPLE, later, old])
    results = render.Results(tmp_path)

    def rendered(reference, name="t"):
        (tmp_path / "t.md").write_text(f"| {{{reference}}} |\n")
        return render.render(f"a\n<!-- bench:{name} -->\nx\n<!-- /bench -->", results, tmp_path)

    for reference, expected in (
        ("old:.1f", "2.0"),
        ("old.min", "1.0"),
        ("h100/m/plain/2026-01-02", "5.5"),
        ("h100/m/plain/2026-01-02:.3f", "5.500"),
        ("h100/m/plain/2026-01-02.floor:.2f", "4.40"),
        ("h100/m/plain/2026-01-02.share:.0%", "80%"),
        ("h100/m/plain/2026-01-02.max", "6.0"),
        ("h100/m/plain/2026-01-02.date", "2026-01-02"),
    ):
        assert rendered(reference) == f"a\n<!-- bench:t -->\n\n| {expected} |\n\n<!-- /bench -->"
    for reference, name, message in (
        ("old", "other", "bench:other: there is no tables/other.md"),
        ("other", "t", "other: no measurement has this id"),
        ("h100/m/later.floor", "t", "h100/m/later.floor: must be one number or text, not None"),
    ):
        with pytest.raises(ValueError, match=message):
            rendered(reference, name)


def test_checks_are_a_table_of_what_holds_and_a_list_of_what_does_not(tmp_path):
    def line(name, device, mode, note, metric="checks that fail", **fields):
        failed = 0 if note is None else 1
        given = dict(id=name, device=device, mode=mode, note=note, metric=metric, unit="", floor=None)
        return dataclasses.replace(EXAMPLE, **given, values=[failed], median=None, **fields)

    one = [
        line("a/1", "A (not run)", "plain", None),
        line("a/2", "A (not run)", "eagle chain", "no copy: 3 copies"),
        line("a/3", "A (not run)", "eagle tree", "no copy: 3 copies", superseded_by="a/4"),
        line("a/4", "A (not run)", "eagle tree", None),
        line("a/5", "A (not run)", "eagle tree", None, "compiling prefill"),
    ]
    measurement.write(tmp_path / "2026-01-02-c-m.jsonl", [line("c/1", "C", "plain", None, "compiling prefill")])
    two = [line("b/1", "B (not run)", "eagle chain", "no copy: 3 copies", device_count=4)]
    measurement.write(tmp_path / "2026-01-02-a-m.jsonl", one)
    measurement.write(tmp_path / "2026-01-02-b-m.jsonl", two)
    text = render.render("<!-- bench:checks -->\n<!-- /bench -->", render.Results(tmp_path), tmp_path)
    assert text.splitlines()[1:-1] == [
        "",
        "| target | drafter | A | B |",
        "| --- | --- | --- | --- |",
        "| m |  | plain |  |",
        "| m | eagle | prefill, chain (1), tree |  |",
        "| m, over 4 devices | eagle |  | chain (1) |",
        "",
        "1. no copy: 3 copies (m, eagle chain, A; m, over 4 devices, eagle chain, B)",
        "",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"id": "A b"}, "id='A b': must be lowercase words"),
        ({"date": "yesterday"}, "Invalid isoformat"),
        ({"commit": "main"}, "commit='main': must be a hash"),
        ({"batch": 1.5}, "batch=1.5: must be int or NoneType"),
        ({"batch": True}, "batch=True: must be int or NoneType"),
        ({"device_count": 0}, "device_count=0: must be at least 1"),
        ({"values": ["5"], "median": None}, r"values=\[.5.\]: must be finite numbers"),
        ({"values": [], "median": None}, "values is empty: note must say why"),
        ({"median": 4.0}, "median=4.0: the median of values is 5.5"),
        ({"expected": [1]}, r"expected=\[1\]: must be a number or \[lowest, highest\]"),
        ({"settings": {"a": []}}, r"settings\['a'\]=\[\]: must be a string"),
        ({"color": "blue"}, "missing or unknown fields: color"),
        ({"note": ...}, "missing or unknown fields: note"),
    ),
)
def test_an_invalid_line_is_refused(changes, message, tmp_path):
    raw = {key: value for key, value in (json.loads(EXAMPLE.to_json()) | changes).items() if value is not ...}
    path = tmp_path / "2026-01-02-h100-m.jsonl"
    path.write_text(json.dumps(raw) + "\n")
    with pytest.raises(ValueError, match=f"2026-01-02-h100-m.jsonl, line 1: {message}"):
        recorded.read(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    (
        ([EXAMPLE, EXAMPLE], "the id h100/m/plain/2026-01-02 occurs twice"),
        ([dataclasses.replace(EXAMPLE, superseded_by="x")], "x: no measurement has this id, which supersedes h100/m"),
        ([dataclasses.replace(EXAMPLE, superseded_by=EXAMPLE.id)], "supersedes itself"),
        ([EXAMPLE, dataclasses.replace(EXAMPLE, id="b", device="H200")], "must hold measurements of one day and one"),
        ([EXAMPLE, dataclasses.replace(EXAMPLE, id="b", date="2026-01-03")], "must hold measurements of one day"),
    ),
)
def test_inconsistent_files_are_refused(lines, message, tmp_path):
    measurement.write(tmp_path / "2026-01-02-h100-m.jsonl", lines)
    with pytest.raises(ValueError, match=message):
        render.Results(tmp_path)


@pytest.mark.slow
def test_the_links_of_notes_and_decisions_lead_somewhere():
    """And every note decided something."""
    notes = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
    decisions = ROOT / "docs" / "decisions.md"
    links = {
        page: re.findall(r"\]\(([^)#:]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        for page in [decisions, *(ROOT / "benchmarks").glob("*.md"), *notes]
    }
    assert [link for page, targets in links.items() for link in targets if not (page.parent / link).exists()] == []
    assert {f"../benchmarks/notes/{note.name}" for note in notes} <= set(links[decisions])
