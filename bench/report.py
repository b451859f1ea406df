"""Benchmarks print a table for a person and write JSON with `rows` for a machine."""

import argparse
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median

Row = dict[str, object]


def spread(samples: Sequence[float]) -> float:
    """The middle half of the samples, as a share of their median."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / median(ordered)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def number(value: object) -> float:
    """Return a figure of a row, which must be a number."""
    assert isinstance(value, int | float)
    return float(value)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json` whose help is the benchmark's docstring as it stands."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def table(rows: Sequence[Row]) -> str:
    """Columns in the order of the first row's keys; floats with three digits that count."""
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def write_json(
    path: Path, benchmark: str, settings: Row, rows: list[Row], summary: Row | None = None
) -> None:
    """`summary` becomes keys of the top level."""
    host = {"cpus": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()}
    report = {
        "benchmark": benchmark,
        "host": host,
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    } | (summary or {})
    path.write_text(json.dumps(report, indent=2) + "\n")


def verdict(goal: str, sign: str, wanted: float, got: object) -> Row:
    """Return whether a figure is what was wanted (`>=`, `<=`, or `~`, within a tenth), or None where nothing
    was measured."""
    if got is None:
        return {"goal": goal, "wanted": f"{sign} {wanted:.3g}", "got": None, "met": False}
    assert isinstance(got, int | float)
    met = {">=": got >= wanted, "<=": got <= wanted, "~": abs(got - wanted) <= 0.1 * abs(wanted)}
    return {"goal": goal, "wanted": f"{sign} {wanted:.3g}", "got": got, "met": met[sign]}


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
