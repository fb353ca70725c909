"""A report as a dictionary that JSON holds, and as a table. Seconds and bytes; the table has ms and GB."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.bench.machine import Bandwidth
from jspec.bench.measure import Row

PHASES = {"draft": "draft", "verify": "verify", "accept_commit": "accept+commit", "extend": "extend", "rest": "rest"}
"""Key -> heading."""


def bandwidth(measured: Bandwidth) -> dict[str, Any]:
    """A measured bandwidth with all its repeats."""
    return {**dataclasses.asdict(measured), "gb_per_second": measured.gb_per_second}


def record(row: Row, copy_gb_per_second: float) -> dict[str, Any]:
    """A row with all its repeats, its medians, and its floor: the seconds a copy needs for the bytes of a round."""
    return {
        **dataclasses.asdict(row),
        "round": row.round,
        "tokens_per_second": row.tokens_per_second,
        "phases": row.phases,
        "floor": row.floor_bytes / copy_gb_per_second / 1e9,
    }


def table(report: Mapping[str, Any]) -> str:
    """The rows as aligned text, under a line on what they hang on; below them, why the others are missing."""
    names = ["mode", "batch", "context", "ms/round", "tokens/s", "accept length", *PHASES.values()]
    lines = [[*names, "floor ms", "of floor", "first token ms", "compile s"]]
    lines += [_cells(row) for row in report["rows"] if row["round"]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    missing = [
        f"{row['mode']} {row['batch']} x {row['context']}: {row['problem']}" for row in report["rows"] if row["problem"]
    ]
    return "\n".join([headline(report), *text, *missing, *_short_of(report)])


def headline(report: Mapping[str, Any]) -> str:
    """Model, machine and bandwidths."""
    where, sizes = report["environment"], report["parameters"]
    draft = f" + {report['settings']['drafter']} draft of {_count(sizes['draft'])}" if sizes["draft"] else ""
    speeds = ", ".join(f"{name} {report['bandwidth'][name]['gb_per_second']:.0f} GB/s" for name in ("copy", "gemv"))
    return (
        f"{report['model']}: {_count(sizes['target'])} parameters{draft}, {where['dtype']}, imposed acceptance; "
        f"{where['device']}, jax {where['jax']}; {speeds}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    first = sorted(row["first_token_seconds"])[len(row["first_token_seconds"]) // 2]
    return [
        row["mode"],
        str(row["batch"]),
        str(row["context"]),
        _ms(row["round"]),
        f"{row['tokens_per_second']:.1f}",
        f"{row['accept_length']:.2f}",
        *(_ms(row["phases"].get(name)) for name in PHASES),
        _ms(row["floor"]),
        f"{row['floor'] / row['round']:.0%}",
        _ms(first),
        f"{sum(row['compile_seconds'].values()):.1f}",
    ]


def _short_of(report: Mapping[str, Any]) -> list[str]:
    """Rows whose trees were not as deep as the imposed figure wants them."""
    wanted, rounds = report["settings"]["tokens_per_round"], report["settings"]["rounds"]
    return [
        f"{row['mode']} {row['batch']} x {row['context']}: {row['accept_length']:.2f} tokens a round, not {wanted:g}, "
        "as not all trees are so deep"
        for row in report["rows"]
        if row["mode"] != "plain" and row["round"] and row["accept_length"] < wanted * (1 - 1 / rounds)
    ]


def _ms(seconds: float | None) -> str:
    """To four digits, as rounds are of microseconds with a tiny model and of seconds with a full batch."""
    if seconds is None:
        return "-"
    milliseconds = seconds * 1e3
    digits = 3 - math.floor(math.log10(abs(milliseconds))) if milliseconds else 0
    return f"{milliseconds:.{min(max(digits, 0), 4)}f}"


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters:,}"
