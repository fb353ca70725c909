"""Renders the measurements in `benchmarks/results` into README.md and the pages of docs.

A page holds marks, and what is between them is replaced:

    <!-- bench:NAME -->   the table `benchmarks/tables/NAME.md`, in which {ID:FORMAT} is a number;   <!-- /bench -->
    <!-- bench:all -->    all measurements, by machine and subject;                                  <!-- /bench -->
    <!-- bench:results/FILE -->   the measurements of one file;                                      <!-- /bench -->
    <!-- bench:checks -->   what was compiled and checked: a table by device, and what does not hold; <!-- /bench -->
    <!-- bench:sizes -->    how many GPUs models need, computed;                                      <!-- /bench -->
    <!-- n:ID FORMAT -->   one number   <!-- /n -->

ID is a measurement's id. It is the median; ID.floor, ID.min, ID.max, ID.values and so on are other fields. A superseded
measurement is replaced by the one that supersedes it. FORMAT is Python's, `.2f` for example, and may be left out.

`python benchmarks/render.py` writes the pages; with `--check` it only reports the pages that are out of date.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from jspec.bench import sizes
from jspec.bench.measurement import Measurement, read

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_INLINE = re.compile(r"(<!-- n:(\S+)(?: (\S+))? -->).*?(<!-- /n -->)", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{([^{}:\s]+)(?::([^{}\s]+))?\}")
_FIELD = re.compile(r"(.+)\.(floor|min|max|values|date|commit|jax|peer|expected|goal|share)")
_CHECKS, _PREFILL = "checks that fail", "compiling prefill"
"""Metrics: the number of checks that fail, which `note` names, and seconds."""
_RANK = ("peer", "mode", "batch", "context", "dtype", "settings")
"""What identifies a row of a table, from the left."""


class Results:
    """All measurements, by file and by id.

    Raises:
      ValueError: a file that is not valid, an id that occurs twice, a file whose lines are of several days or machines,
        or measurements superseded by an unknown one or in a circle.
    """

    def __init__(self, directory: Path):
        self.files = {path.stem: read(path) for path in sorted(directory.glob("*.jsonl"))}
        self.by_id: dict[str, Measurement] = {}
        for name, lines in self.files.items():
            if len({(line.date[:10], line.machine) for line in lines}) != 1:
                raise ValueError(f"{name}.jsonl: must hold measurements of one day and one machine")
            for line in lines:
                if line.id in self.by_id:
                    raise ValueError(f"{name}.jsonl: the id {line.id} occurs twice")
                self.by_id[line.id] = line
        for line in self.by_id.values():
            self.standing(line.id)

    def standing(self, name: str) -> Measurement:
        """The measurement with this id, or the one that supersedes it."""
        seen: list[str] = []
        while True:
            if name not in self.by_id:
                by = f", which supersedes {seen[-1]}" if seen else ""
                raise ValueError(f"{name}: no measurement has this id{by}")
            if name in seen:
                raise ValueError(f"{name}: supersedes itself by way of {', '.join(seen[1:]) or name}")
            line = self.by_id[name]
            if line.superseded_by is None:
                return line
            seen.append(name)
            name = line.superseded_by

    def number(self, reference: str, form: str | None) -> str:
        """The text of a reference ID or ID.FIELD."""
        match = _FIELD.fullmatch(reference) if reference not in self.by_id else None
        name, field = match.groups() if match else (reference, "median")
        line = self.standing(name)
        if field == "values":
            return " ".join(format(each, form or "") for each in line.values)
        if field == "share":
            value = line.floor and line.median and line.floor / line.median
        else:
            value = {"min": min, "max": max}[field](line.values) if field in ("min", "max") else getattr(line, field)
        if value is None or isinstance(value, list | tuple):
            raise ValueError(f"{reference}: must be one number or text, not {value!r}")
        return format(value, form or "")


def render(text: str, results: Results, tables: Path) -> str:
    """A page with all of its marks filled in.

    Args:
      tables: the directory of the tables that blocks name.

    Raises:
      ValueError: a mark that names no table or no measurement.
    """

    def block(match: re.Match) -> str:
        opening, name, closing = match.groups()
        if name == "all":
            content = _all(results)
        elif name == "checks":
            content = _checks(results)
        elif name == "sizes":
            content = sizes.table()
        elif name.startswith("results/") and name.removeprefix("results/") in results.files:
            content = _tables(results.files[name.removeprefix("results/")], 4)
        elif (tables / f"{name}.md").is_file():
            template = (tables / f"{name}.md").read_text(encoding="utf-8").strip()
            content = _PLACEHOLDER.sub(lambda found: results.number(*found.groups()), template)
        else:
            raise ValueError(f"bench:{name}: there is neither tables/{name}.md nor such a file of results")
        return f"{opening}\n{content}\n\n{closing}"

    def inline(match: re.Match) -> str:
        opening, reference, form, closing = match.groups()
        return f"{opening}{results.number(reference, form)}{closing}"

    return _INLINE.sub(inline, _BLOCK.sub(block, text))


def _all(results: Results) -> str:
    """All measurements that stand, by machine; the newest machine first."""
    lines = [line for line in results.by_id.values() if line.superseded_by is None and line.values]
    machines: dict[str, list[Measurement]] = {}
    for line in lines:
        machines.setdefault(line.machine, []).append(line)
    newest = sorted(machines, key=lambda machine: max(line.date for line in machines[machine]), reverse=True)
    return "\n\n".join(f"## {machine}\n\n{_tables(machines[machine], 3)}" for machine in newest)


def _checks(results: Results) -> str:
    """A row for each subject and drafter with a cell for each device: the modes that were checked, and prefill.

    A number after a mode leads to what does not hold, in a list after the table.
    """
    standing = [line for line in results.by_id.values() if line.superseded_by is None]
    checked = {(line.machine, line.subject, line.mode) for line in standing if line.metric == _CHECKS}
    lines = [line for line in standing if line.metric in (_CHECKS, _PREFILL)]
    lines = [line for line in lines if (line.machine, line.subject, line.mode) in checked]
    lines.sort(key=lambda line: line.device_count)
    devices = list(dict.fromkeys(line.device.partition(" (")[0] for line in lines))
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    problems: dict[str, list[str]] = {}
    for line in lines:
        device = line.device.partition(" (")[0]
        subject = line.subject + ("" if line.device_count == 1 else f", over {line.device_count} devices")
        *drafter, shape = (line.mode or "").split()
        cell = cells.setdefault((subject, " ".join(drafter)), {}).setdefault(device, [])
        if line.metric == _PREFILL:
            cell.insert(0, "prefill")
            continue
        if line.median:
            found = problems.setdefault(str(line.note), [])
            found.append(f"{subject}, {line.mode}, {device}")
            shape += f" ({list(problems).index(str(line.note)) + 1})"
        cell.append(shape)
    heads = ["target", "drafter", *devices]
    table = [[*row, *(", ".join(found.get(device, ())) for device in devices)] for row, found in cells.items()]
    text = "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *table])
    listed = [f"{i}. {note} ({'; '.join(where)})" for i, (note, where) in enumerate(problems.items(), 1)]
    return "\n\n".join([text, *(["\n".join(listed)] if listed else [])])


def _tables(lines: Sequence[Measurement], level: int) -> str:
    """A heading and a table for each subject."""
    subjects: dict[str, list[Measurement]] = {}
    for line in lines:
        if line.values:
            subjects.setdefault(line.subject, []).append(line)
    return "\n\n".join(
        f"{'#' * level} {subject}\n\n{_table(each)}"
        for subject, each in sorted(subjects.items(), key=lambda item: item[0].lower())
    )


def _table(lines: Sequence[Measurement]) -> str:
    """One row per configuration and commit, one column per metric; what all rows share is a line above it."""
    rows: dict[tuple[str, ...], list[Measurement]] = {}
    settings = _settings(lines)
    for line in lines:
        fields = [getattr(line, name) for name in _RANK[:-1]]
        key = (*("" if field is None else str(field) for field in fields), settings(line), _when(line))
        rows.setdefault(key, []).append(line)
    heads = [*_RANK, "measured"]
    constant = [i for i in range(len(heads)) if len(rows) > 1 and len({key[i] for key in rows}) == 1]
    shared = [_named(heads[i], next(iter(rows))[i]) for i in constant]
    shared += _shared_settings(lines)
    columns = _columns(lines)
    cells = [
        [*(key[i] for i in range(len(heads)) if i not in constant), *(write(row) for _, write in columns)]
        for key, row in rows.items()
    ]
    titles = [*(heads[i] for i in range(len(heads)) if i not in constant), *(title for title, _ in columns)]
    caption = ", ".join(text for text in shared if text)
    caption = f"{caption}.\n\n" if caption else ""
    table = [titles, ["---"] * len(titles), *cells]
    return caption + "\n".join(f"| {' | '.join(row)} |" for row in table)


def _named(head: str, value: str) -> str:
    """A value that all rows share, with its name where it does not explain itself."""
    if not value or head in ("peer", "mode", "dtype", "settings"):
        return value
    return f"{head} {value}"


def _when(line: Measurement) -> str:
    return f"{line.date[:10]}, {line.commit}" if line.commit else line.date[:10]


def _setting(name: str, value: object) -> str:
    return f"{name.replace('_', ' ')} {value}"


def _shared_settings(lines: Sequence[Measurement]) -> list[str]:
    common = set.intersection(*({_setting(*item) for item in line.settings.items()} for line in lines))
    first = [_setting(*item) for item in lines[0].settings.items()]
    return [each for each in first if each in common] if len(lines) > 1 else []


def _settings(lines: Sequence[Measurement]) -> Callable[[Measurement], str]:
    """A line's settings as text, without those that all lines share."""
    common = _shared_settings(lines)

    def text(line: Measurement) -> str:
        return ", ".join(each for each in (_setting(*item) for item in line.settings.items()) if each not in common)

    return text


def _columns(lines: Sequence[Measurement]) -> list[tuple[str, Callable[[Iterable[Measurement]], str]]]:
    """For each metric its title and a function from the lines of a row to a cell; then floor, expectation and goal."""
    columns = []
    for metric, unit in dict.fromkeys((line.metric, line.unit) for line in lines):
        own = [line for line in lines if (line.metric, line.unit) == (metric, unit)]
        decimals = _decimals([value for line in own for value in (line.median, *line.values)])

        def value(line: Measurement, decimals: int = decimals) -> str:
            # Two values are recorded as a range; of more, the median counts.
            values = line.values if len(line.values) == 2 else [line.median]
            text = " to ".join(f"{each:,.{decimals}f}" for each in values)
            return f"~~{text}~~" if line.superseded_by else text

        title = f"{metric}, {unit}" if unit else metric
        columns.append((title, _cell(metric, unit, value)))
        for name in ("floor", "expected", "goal"):
            given = [getattr(line, name) for line in own if getattr(line, name) is not None]
            if given:
                columns.append((name, _cell(metric, unit, partial(_bound, name, decimals))))
            if given and name == "floor":
                columns.append(("of floor", _cell(metric, unit, _share)))
    return columns


def _cell(metric: str, unit: str, write: Callable[[Measurement], str]) -> Callable[[Iterable[Measurement]], str]:
    def cell(row: Iterable[Measurement]) -> str:
        return ", ".join(write(line) for line in row if (line.metric, line.unit) == (metric, unit))

    return cell


def _share(line: Measurement) -> str:
    return f"{line.floor / line.median:.0%}" if line.floor and line.median else ""


def _bound(name: str, decimals: int, line: Measurement) -> str:
    """A number or a range, written like the values."""
    value = getattr(line, name)
    if value is None:
        return ""
    return " to ".join(f"{each:,.{decimals}f}" for each in (value if isinstance(value, list | tuple) else [value]))


def _decimals(values: Sequence[float | None]) -> int:
    """Digits after the point: as many as were recorded, up to four significant digits."""
    numbers = [abs(value) for value in values if value]
    if not numbers:
        return 0
    recorded = max(len(str(round(number, 6)).partition(".")[2].rstrip("0")) for number in map(float, numbers))
    return min(recorded, max(0, 3 - math.floor(math.log10(min(numbers)))))


def pages(root: Path) -> list[Path]:
    """The pages that may hold marks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes or checks all pages; returns the exit status."""
    parser = argparse.ArgumentParser(description="Renders measurements into README.md and docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    options = parser.parse_args(arguments)
    try:
        results = Results(root / "benchmarks" / "results")
        rendered = {
            page: render(page.read_text(encoding="utf-8"), results, root / "benchmarks" / "tables")
            for page in pages(root)
        }
    except ValueError as error:
        print(f"benchmarks/render.py: {error}", file=sys.stderr)
        return 2
    stale = [page for page, text in rendered.items() if text != page.read_text(encoding="utf-8")]
    for page in stale:
        if options.check:
            print(f"{page.relative_to(root)} is out of date: run python benchmarks/render.py")
        else:
            page.write_text(rendered[page], encoding="utf-8")
            print(page.relative_to(root))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
