"""Measure the prefix index, alone and through a real etcd.

    python -m bench.index --json FILE [--minutes 10] [--only core,warm,64,1000] [--writes-per-s 2000]

Staleness is that of the oldest block which a delta or a snapshot is the first to tell, when a mirror applies
it, by stamps on this machine's one clock; "told" is what the mirror itself reckons without comparing clocks.
"""

import argparse
import asyncio
import logging
import os
from pathlib import Path

import numpy as np

from bench.index import cluster, core
from bench.index.goals import verdicts
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, table, write_json

_PARTS = ("core", "warm", "64", "1000")


def main() -> None:
    arguments = _parse()
    logging.disable(logging.INFO)
    rows: list[Row] = []
    judged: list[Row] = []
    for part in arguments.only.split(","):
        for name, of_part in _run(part, arguments.minutes, arguments.writes_per_s):
            print(f"\n{name}\n{table(of_part)}", flush=True)
            rows += [{"part": name, "load": os.getloadavg()[0], **row} for row in of_part]
            judged += verdicts(name, of_part)
            settings: Row = {"minutes": arguments.minutes, "writes_per_s": arguments.writes_per_s}
            write_json(arguments.json, "index", settings, rows, {"verdicts": judged})
    print(f"\n{table(judged)}")


def _run(part: str, minutes: float, writes_per_s: float) -> list[tuple[str, list[Row]]]:
    match part:
        case "core":
            return _core()
        case "warm":
            # Logs as long as they are on average: half of the most that a publisher lets them grow to.
            row = asyncio.run(cluster.warm_restart_row(2_300_000, 64, 256))
            many = asyncio.run(cluster.warm_restart_row(2_300_000, 1000, 12))
            return [("warm restart", [row, many])]
        case "64":
            row = asyncio.run(cluster.publishers_row(64, minutes, 16_000, writes_per_s))
            return [("64 publishers", [row])]
        case "1000":
            row = asyncio.run(cluster.publishers_row(1000, minutes, 2_300, writes_per_s))
            return [("1000 publishers", [row])]
    raise SystemExit(f"--only names {', '.join(_PARTS)}; got {part!r}")


def _core() -> list[tuple[str, list[Row]]]:
    rng = np.random.default_rng(0)
    return [
        ("memory", core.memory_rows(rng)),
        ("match", core.match_rows(rng)),
        ("hashing", [core.hashing_row()]),
        ("apply", core.apply_rows(rng)),
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--writes-per-s",
        type=float,
        default=cluster.WRITES_PER_S,
        help="the write budget of all publishers together, as --index-writes-per-s of ranks",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the publishers are measured")
    parser.add_argument("--only", default=",".join(_PARTS), help="parts to run, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
