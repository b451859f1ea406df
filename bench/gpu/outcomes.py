"""Processes of `make gpu` agree on this, and their figures are told so; no package is needed here."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import Row, table

PASSED = "passed"  # a cell's outcome; of one that failed it is the end of its traceback
AGAIN = 75  # the exit code of a process that asks to be started again
CONTINUES = "ISTHMUS_GPU_CONTINUES"  # in the environment of one that was
TABLES_FOLLOW = "--- tables"

# A device's lines go first where what is printed is cut: the last ones count.
_ORDER = (
    "starts",
    "sampling",
    "matmuls",
    "attention",
    "launches",
    "host",
    "draft",
    "compiled",
    "prompts",
    "decode",
)


def tables_of(figures: Mapping[str, Any]) -> str:
    """Return all tables as text, those that matter most last."""
    tables: dict[str, Sequence[Row]] = {}
    for part in figures.values():
        tables |= part.get("tables", {})
    names = sorted(tables, key=lambda name: _ORDER.index(name) if name in _ORDER else -1)
    told = ["\n".join(dict.fromkeys(part["log"])) for part in figures.values() if part.get("log")]
    told += [table(part["rows"]) for part in figures.values() if part.get("rows")]
    told += [f"{name}\n{table(tables[name])}" for name in names if tables[name]]
    outcomes = [item for part in figures.values() for item in part.get("outcomes", {}).items()]
    told += [f"{cell} FAILED: {said.splitlines()[-1]}" for cell, said in outcomes if said != PASSED]
    return "\n\n".join(told)


def headlines(figures: Mapping[str, Any]) -> list[Row]:
    """Return the ratios that the engine's goals are about."""
    rows: list[Row] = []
    steps = figures.get("bench.gpu.steps", {})
    device = steps.get("settings", {}).get("device", "")
    tables = steps.get("tables", {})
    default = next((row["beside"] for row in tables.get("decode", ())), None)
    for row in tables.get("decode", ()):
        if row["side"] in (default, "eager") and row["side"] == row["beside"]:
            what = f"decode, batch {row['batch']}, {row['side']}"
            rows.append(_headline(what, row["ms"], row["x transformers"], row["x loop"], device))
    for row in tables.get("prompts", ()):
        what = f"prompt {row['prompt']}, {row['way']}"
        rows.append(_headline(what, row["ms"], row["x transformers"], "", device))
    for row in figures.get("bench.gpu.pieces", {}).get("tables", {}).get("draft", ()):
        rows.append(_headline(f"draft round, {row['what']}", row["ms"], "", "", device))
    for part, said in (("bench.decode_cache", ""), ("bench.decode_cache.eager", " without graphs")):
        for row in figures.get(part, {}).get("rows", ()):
            what = f"decode_cache{said}, cache {row['cache']}, {row['throughput']:.0f} tokens/s, gap p50"
            rows.append(_headline(what, 1e3 * row["itl_p50"], "", "", device))
    return rows


def _headline(what: str, ms: float, over_transformers: object, over_loop: object, device: str) -> Row:
    return {
        "what": what,
        "ms": ms,
        "x transformers": over_transformers,
        "x loop": over_loop,
        "device": device,
    }
