"""A benchmark for a GPU is a row of cells: one that fails says why, and stops no other.

    run_cells -> each cell's rows, or the end of its traceback --> JSON, written after each

A fault that breaks the CUDA context breaks what comes after it. Such a process ends with AGAIN; who started
it starts it again with `CONTINUES` in its environment, and it goes on behind the cell that broke it, as does
one that a signal has ended.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu.outcomes import AGAIN, CONTINUES, PASSED, TABLES_FOLLOW
from bench.report import Row, table

_TAIL_LINES = 12
_LINE_LENGTH = 240
_BEGAN = "began"


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows of one `table` have the same columns."""

    name: str
    table: str
    measure: Callable[[], list[Row]]


@dataclass(slots=True)
class Report:
    """This is what is written: outcomes and seconds by cell, rows by table, what the engine logged."""

    benchmark: str
    settings: Row
    path: Path | None
    outcomes: dict[str, str]
    seconds: dict[str, float]
    tables: dict[str, list[Row]]
    log: list[str] = field(default_factory=list)

    def write(self) -> None:
        if self.path is not None:
            members = ("benchmark", "settings", "outcomes", "seconds", "tables", "log")
            content = {name: getattr(self, name) for name in members}
            self.path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def tail_of(error: BaseException, num_lines: int = _TAIL_LINES) -> str:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-num_lines:])


def run_cells(
    benchmark: str, cells: Sequence[Cell], path: Path | None, device: torch.device, settings: Row
) -> None:
    """Measure the cells, print the tables last, and end the process with 1 if one failed."""
    report = _begin(benchmark, path, device, settings)
    with _noted(report.log):
        _measure(cells, report, device)
    _tell(report)
    sys.exit(any(outcome != PASSED for outcome in report.outcomes.values()))


def _measure(cells: Sequence[Cell], report: Report, device: torch.device) -> None:
    for cell in cells:
        if cell.name in report.outcomes:
            continue
        report.outcomes[cell.name] = _BEGAN
        report.write()
        began_s = time.perf_counter()
        try:
            rows = cell.measure()
            report.tables.setdefault(cell.table, []).extend(rows)
            report.outcomes[cell.name] = PASSED
        except Exception as error:
            report.outcomes[cell.name] = tail_of(error)
            print(f"{cell.name} FAILED:\n{report.outcomes[cell.name]}", flush=True)
        report.seconds[cell.name] = round(time.perf_counter() - began_s, 2)
        report.write()
        print(f"{cell.name}: {report.seconds[cell.name]} s", flush=True)
        if report.outcomes[cell.name] != PASSED and _is_broken(device):
            sys.exit(AGAIN)


@contextmanager
def _noted(lines: list[str]) -> Iterator[None]:
    """Keep what the engine logs meanwhile."""
    logger, handler = logging.getLogger("services"), _Noting(lines)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Noting(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}"[:_LINE_LENGTH])


def _begin(benchmark: str, path: Path | None, device: torch.device, settings: Row) -> Report:
    report = Report(benchmark, {**settings, **_of_device(device)}, path, {}, {}, {})
    if path is None or CONTINUES not in os.environ or not path.exists():
        return report
    written: dict[str, Any] = json.loads(path.read_text())
    ended = {
        name: "the process ended in it" if outcome == _BEGAN else outcome
        for name, outcome in written["outcomes"].items()
    }
    report.outcomes, report.seconds, report.tables = ended, written["seconds"], written["tables"]
    report.log = written["log"]
    return report


def _of_device(device: torch.device) -> Row:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _is_broken(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.ones(8, device=device).sum().item()
    except Exception:
        return True
    return False


def _tell(report: Report) -> None:
    print(f"{TABLES_FOLLOW}\n{report.benchmark} on {report.settings['device']}")
    for name, rows in report.tables.items():
        print(f"\n{name}\n{table(rows)}" if rows else f"\n{name}: no rows")
    print("\n" + "\n".join(report.log))
    failed = [name for name, outcome in report.outcomes.items() if outcome != PASSED]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
