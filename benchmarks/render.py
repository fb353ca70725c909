"""Renders tables from the measurements in `benchmarks/results` into README.md and the pages of docs and benchmarks.

A page holds blocks, and what is between their marks is replaced:

    <!-- bench:NAME -->     the table `benchmarks/tables/NAME.md`, with {ID:FORMAT} for a number;   <!-- /bench -->
    <!-- bench:checks -->   what was compiled for TPUs and checked, and what does not hold;           <!-- /bench -->
    <!-- bench:sizes -->    how many GPUs models need, computed;                                      <!-- /bench -->

ID is the id of a measurement and stands for its median; ID.floor, ID.min, ID.max, ID.share and so on are other fields.
A superseded measurement is replaced by its successor. FORMAT is Python's, `.2f` for example, and may be
left out.

`python benchmarks/render.py` writes the pages; with `--check` it only reports outdated pages. `--csv
DIRECTORY` writes all current measurements instead, one file per machine.
"""

import argparse
import csv
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import sizes
from recorded import read

from jspec.bench.measurement import Measurement

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{([^{}:\s]+)(?::([^{}\s]+))?\}")
_FIELD = re.compile(r"(.+)\.(floor|min|max|date|commit|jax|peer|expected|goal|share)")
_CHECKS, _PREFILL = "checks that fail", "compiling prefill"
"""Metrics: the number of failed checks, named in `note`, and seconds."""


class Results:
    """All measurements, by file and by id.

    Raises:
      ValueError: an invalid file, an id that occurs twice, a file whose lines are of several days or machines,
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
            self.latest(line.id)

    @property
    def current(self) -> list[Measurement]:
        """The current measurements: not superseded."""
        return [line for line in self.by_id.values() if line.superseded_by is None]

    def latest(self, name: str) -> Measurement:
        """The measurement with this id, or its successor."""
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
        line = self.latest(name)
        if field == "share":
            value = line.floor and line.median and line.floor / line.median
        else:
            value = {"min": min, "max": max}[field](line.values) if field in ("min", "max") else getattr(line, field)
        if value is None or isinstance(value, list | tuple):
            raise ValueError(f"{reference}: must be one number or text, not {value!r}")
        return format(value, form or "")


def render(text: str, results: Results, tables: Path) -> str:
    """A page with all of its blocks filled in.

    Args:
      tables: the directory of the tables of blocks.

    Raises:
      ValueError: a block without its table, or a table without its measurement.
    """

    def block(match: re.Match) -> str:
        opening, name, closing = match.groups()
        if name == "checks":
            content = _checks(results)
        elif name == "sizes":
            content = sizes.table()
        elif (tables / f"{name}.md").is_file():
            template = (tables / f"{name}.md").read_text(encoding="utf-8").strip()
            content = _PLACEHOLDER.sub(lambda placeholder: results.number(*placeholder.groups()), template)
        else:
            raise ValueError(f"bench:{name}: there is no tables/{name}.md")
        return f"{opening}\n{content}\n\n{closing}"

    return _BLOCK.sub(block, text)


def _checks(results: Results) -> str:
    """A row for each subject and drafter with a cell for each device: the checked modes, and prefill.

    A number after a mode leads to what does not hold, in a list after the table.
    """
    checked = {(line.machine, line.subject, line.mode) for line in results.current if line.metric == _CHECKS}
    lines = [line for line in results.current if line.metric in (_CHECKS, _PREFILL)]
    lines = [line for line in lines if (line.machine, line.subject, line.mode) in checked]
    lines.sort(key=lambda line: line.device_count)
    devices = list(dict.fromkeys(line.device.partition(" (")[0] for line in lines))
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    problems: dict[str, list[str]] = {}
    for line in lines:
        device = line.device.partition(" (")[0]
        subject = line.subject + ("" if line.device_count == 1 else f", over {line.device_count} devices")
        *drafter, shape = (line.mode or "").split()
        cell = rows.setdefault((subject, " ".join(drafter)), {}).setdefault(device, [])
        if line.metric == _PREFILL:
            cell.insert(0, "prefill")
            continue
        if line.median:
            problems.setdefault(str(line.note), []).append(f"{subject}, {line.mode}, {device}")
            shape += f" ({list(problems).index(str(line.note)) + 1})"
        cell.append(shape)
    heads = ["target", "drafter", *devices]
    table = [[*row, *(", ".join(cells.get(device, ())) for device in devices)] for row, cells in rows.items()]
    text = "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *table])
    listed = [f"{i}. {note} ({'; '.join(where)})" for i, (note, where) in enumerate(problems.items(), 1)]
    return "\n\n".join([text, *(["\n".join(listed)] if listed else [])])


def write_csv(results: Results, directory: Path) -> None:
    """Writes the current measurements, one file per machine."""
    directory.mkdir(parents=True, exist_ok=True)
    machines: dict[str, list[Measurement]] = {}
    for line in results.current:
        machines.setdefault(line.machine, []).append(line)
    for machine, lines in machines.items():
        name = re.sub(r"\W+", "-", machine.lower()).strip("-")
        with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, [field.name for field in dataclasses.fields(Measurement)])
            rows.writeheader()
            rows.writerows({**json.loads(line.to_json()), "values": " ".join(map(str, line.values))} for line in lines)


def pages(root: Path) -> list[Path]:
    """The pages with blocks, if any."""
    return [root / "README.md", *sorted((root / "benchmarks").glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes or checks all pages; returns the exit status."""
    parser = argparse.ArgumentParser(description="Renders measurements into README.md, docs and benchmarks.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    parser.add_argument("--csv", type=Path, metavar="DIRECTORY", help="write one CSV file per machine instead")
    options = parser.parse_args(arguments)
    try:
        results = Results(root / "benchmarks" / "results")
        if options.csv:
            write_csv(results, options.csv)
            return 0
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
    raise SystemExit(main())
