"""A cluster of real processes under random kills and stops, with every token of every answer checked.

    python -m bench.chaos --minutes 5 --seed 1 --json FILE

Two prefill workers, two decode workers of two ranks each, two routers and three etcd members, each a process
of its own, the ranks under their supervisors, each with a small tier in memory and one in a file, which all
may read. Clients hold conversations over gRPC and HTTP, greedy and sampled; some leave before the end. Who
computes pulls whatever another rank holds more of a prompt. Meanwhile processes are killed, stopped, drained
and told to end, and files of tiers are spoilt, in waves (bench/chaos/schedule.py): after each the cluster
must mend itself, and has some quiet. Who was killed is started again, as Kubernetes would.

A request whose router was killed has lost its connection: its client asks another router, which counts as
retried. Any other error is an answer lost, for in every wave a rank of each role and a router are left alone.
Every token is checked by what transformers chooses after those before it; what was sampled is asked for again
elsewhere, and must come out the same. (`--engine fake`: a rank starts in a tenth of the time, and a token is
a function of all before it, read from the pages.) In the end nobody is at work: ranks hold free and cached
pages alone, and when all was told to stop nothing of a rank is left in etcd, no process and no shared memory.

The schedule and what is asked for follow from the seed; what meets what does not.
"""

import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.chaos.run import Settings, judged_run
from bench.chaos.verdict import errors_by_status, faults_by_kind, longest_waits, summary, verdicts, waits
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, table, write_json


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--log", type=Path, help="keep the services' log lines, and the faults, in this file")
    parser.add_argument("--minutes", type=float, default=5.0, help="of load and faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    parser.add_argument("--transport", choices=("local", "nixl"), default="local")
    arguments = parser.parse_args()
    settings = Settings(arguments.minutes, arguments.seed, arguments.engine, arguments.transport)
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as folder:
        run = asyncio.run(judged_run(settings, Path(folder), arguments.log, _say))
    row = summary(run)
    tables: dict[str, list[Row]] = {
        "faults": faults_by_kind(run.played),
        "errors": errors_by_status(run.failures),
        "waits": waits(run),
        "longest waits": longest_waits(run),
        "verdict": verdicts(row),
    }
    print("\n".join(f"{name:>20}  {value}" for name, value in row.items()))
    for name, rows in tables.items():
        print(f"\n{name}\n{table(rows) if rows else 'none'}")
    sentences = run.sentences()
    print("\n".join(["", *sentences]))
    if arguments.json is not None:
        write_json(arguments.json, "chaos", asdict(settings), [row], tables | {"what": sentences})
    if missed := [str(each["goal"]) for each in tables["verdict"] if not each["met"]]:
        raise SystemExit(f"the chaos run missed its goals: {', '.join(missed)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
