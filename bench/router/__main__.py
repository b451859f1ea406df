"""This benchmark measures what the router costs.

    python -m bench.router --json FILE [--seconds 14] [--only decisions,served]
    python -m bench.router --only saturated [--peer sglang-router] [--streams 1 32 256 1000]

One decision by its parts, for fleets of 8, 72 and 1,000 ranks (decisions.py); what a request costs the
router's process on its whole way, over gRPC and over HTTP, by prompt and by streamed token (served.py); and
when as much is asked as can be answered, by process, beside SGLang's router (saturated.py).
llm-d sizes its router at 0.5 to 1.0 core per request a second for prompts of 100,000 tokens and answers of
1,000; here at most 0.05 is wanted.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from bench.report import Row, parser_of, table, write_json
from bench.router import decisions, served
from bench.router.peers.sglang_router import saturated_peer
from bench.router.saturated import ANSWERS, PROMPTS, STREAMS, Grid, added, parts, saturated

_PARTS = ("decisions", "served", "saturated")
_PEER_PYTHON = Path(".venv-sglang/bin/python")


def main() -> None:
    arguments = _parse()
    report: dict[str, list[Row]] = {}
    goals: list[Row] = []
    if "decisions" in arguments.only:
        report["decisions"] = list(decisions.rows())
        report["below"] = list(decisions.below_rows())
        goals += decisions.goals(report["decisions"]) + decisions.below_goals(report["below"])
    if "served" in arguments.only:
        measured = asyncio.run(served.served(arguments.seconds))
        report["requests"], report["process"] = measured.requests, [measured.process]
        report["parts"] = served.parts(measured.requests)
        goals += served.goals(report["parts"])
    if "saturated" in arguments.only:
        report |= asyncio.run(_saturated(arguments))
    for name, rows in (report | {"goals": goals}).items():
        if rows:
            print(f"\n{name}\n{table(rows)}")
    if arguments.json is not None:
        rows = [{"part": name, **row} for name, of_part in report.items() for row in of_part]
        write_json(arguments.json, "router", {"seconds": arguments.seconds}, rows, {"goals": goals})


async def _saturated(arguments: argparse.Namespace) -> dict[str, list[Row]]:
    grid = Grid(
        fronts=arguments.fronts,
        streams=arguments.streams,
        prompts=arguments.prompts,
        answers=arguments.answers,
        seconds=arguments.seconds,
        decode_ranks=arguments.decode_ranks,
        routers=arguments.routers,
        router_flags=arguments.router_flag,
        ranks=arguments.ranks,
        step_s=arguments.step_ms / 1000,
        bare="bare" in arguments.peer,
    )
    rows = await saturated(grid)
    report = {"saturated": rows, "added ms": added(rows)}
    if "sglang-router" in arguments.peer:
        report["sglang-router"] = await saturated_peer(grid, arguments.peer_python)
    every = [*rows, *report.get("sglang-router", ())]
    return report | {"cost": parts(every, ("router", "decode"))}


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=14.0, help="of load for each kind of request")
    parser.add_argument(
        "--only", type=_names, default=_PARTS[:2], help=f"parts to run, with commas, of {', '.join(_PARTS)}"
    )
    group = parser.add_argument_group("saturated")
    group.add_argument("--fronts", nargs="+", choices=("grpc", "http", "text"), default=["grpc", "http"])
    group.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="asked at once")
    group.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens")
    group.add_argument("--answers", type=int, nargs="+", default=ANSWERS, help="tokens")
    group.add_argument("--decode-ranks", type=int, default=8)
    group.add_argument(
        "--ranks",
        choices=("rank", "stand_in"),
        default="rank",
        help="stand_in: they only answer, and cost little",
    )
    group.add_argument(
        "--step-ms", type=float, default=10.0, help="of a rank; with 0 stand-ins answer at once"
    )
    group.add_argument("--routers", type=int, default=1, help="asked in turn")
    group.add_argument("--router-flag", action="append", default=[], help="--router-flag=--coalesce-ms=0")
    group.add_argument(
        "--peer",
        nargs="+",
        choices=("sglang-router", "bare"),
        default=[],
        help="run them in the same run; bare: a router that does nothing",
    )
    group.add_argument("--peer-python", type=Path, default=_PEER_PYTHON, help="has sglang_router")
    return parser.parse_args()


def _names(text: str) -> Sequence[str]:
    if unknown := set(text.split(",")) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(_PARTS)}")
    return text.split(",")


if __name__ == "__main__":
    main()
