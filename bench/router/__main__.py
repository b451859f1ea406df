"""What the router costs.

    python -m bench.router --json FILE [--seconds 14] [--only decisions,served]

One decision by its parts, for fleets of 8, 72 and 1,000 ranks (decisions.py); and what a request costs the
router's process on its whole way, over gRPC and over HTTP, by prompt and by streamed token (served.py).
llm-d sizes its router at 0.5 to 1.0 core per request a second for prompts of 100,000 tokens and answers of
1,000; here at most 0.05 is wanted.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from bench.report import Row, table, write_json
from bench.router import decisions, served

_PARTS = ("decisions", "served")


def main() -> None:
    arguments = _parse()
    report: dict[str, list[Row]] = {}
    goals: list[Row] = []
    if "decisions" in arguments.only:
        report["decisions"] = list(decisions.rows())
        goals += decisions.goals(report["decisions"])
    if "served" in arguments.only:
        measured = asyncio.run(served.served(arguments.seconds))
        report["requests"], report["process"] = measured.requests, [measured.process]
        report["parts"] = served.parts(measured.requests)
        goals += served.goals(report["parts"])
    for name, rows in (report | {"goals": goals}).items():
        print(f"\n{name}\n{table(rows)}")
    if arguments.json is not None:
        rows = [{"part": name, **row} for name, of_part in report.items() for row in of_part]
        write_json(arguments.json, "router", {"seconds": arguments.seconds}, rows, {"goals": goals})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seconds", type=float, default=14.0, help="of load for each kind of request")
    parser.add_argument("--only", type=_names, default=_PARTS, help="parts to run, with commas")
    return parser.parse_args()


def _names(text: str) -> Sequence[str]:
    if unknown := set(text.split(",")) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(_PARTS)}")
    return text.split(",")


if __name__ == "__main__":
    main()
