"""This benchmark compares what `isthmus plan` predicts with what is measured, and lets a loop follow it.

    OMP_NUM_THREADS=1 python -m bench.plan --json FILE
    python -m bench.plan --parts loop --json FILE

It takes twelve minutes for each of the layouts, and some for the loop.

**Predicted and measured.** Sessions are served by processes (etcd, two routers, ranks with engine fake; see
bench.placement.real) on the first of the layouts. Its routers are then asked as `isthmus plan` asks them, and
what they saw tells the TTFT that each layout would give. Each of these then serves the same sessions. The
first tenth of the requests to come is not counted on either side. --load is of what eight ranks can serve.

A few long prompts decide a p99, and by which router each comes to and by a tie they wait for each other or
not: of 78 requests, served by the same ranks, p99 may be 37 s or 57 s. So each layout serves 538 requests in
each of --runs runs, at once; those of all are counted together, and the middle one of the predictions from
each is compared with them. `p99_low_s` to `p99_high_s` are the middle nine tenths of what p99 is in draws of
as many requests from the measured ones. `least_p99_s` and `most_p99_s` are of the predictions.

**A closed loop** (closed_loop.py) is in virtual time.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from bench import closed_loop
from bench.checkpoint import Size as ModelSize
from bench.checkpoint import write
from bench.placement.cells import Cell, Fleet
from bench.placement.real import (
    _CHUNK,
    _COMMON_FLAGS,
    _LONGEST,
    _PART,
    _RANK_FLAGS,
    _STEP_S,
    _TOKEN_S,
    Replay,
)
from bench.report import Row, parser_of, table, verdict, write_json
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.look.plan import PlanConfig, observations
from services.router.replay.observed import Observation, Observed
from services.router.replay.planner import Goals, Outlook, Size, Trial, quantile
from services.router.replay.workload import TraceRequest
from services.wire.isthmus.v1 import generation_pb2_grpc

_ROUTERS = 2
_UNCOUNTED = 0.1
_GOALS = Goals(ttft_s=2.0, itl_s=0.5)  # They decide nothing here.
_WORKLOAD, _LAYOUTS = "mixed", "2+2,1+2,0+4"
_SECONDS, _STRETCH, _LOAD, _RUNS = 200.0, 2.0, 0.2, 3
_FEW, _RESAMPLES = 400, 1_000


def sessions(seconds: float, stretch: float, load: float) -> list[TraceRequest]:
    """Return those that begin in so many seconds of a cell, or follow such ones, more slowly by `stretch`."""
    kept: dict[int, int] = {}
    requests: list[TraceRequest] = []
    for request in Cell(Fleet(_WORKLOAD, "8"), "open", load).requests():
        is_early = request.arrival_s <= seconds and all(number in kept for number in request.after)
        if is_early and request.prompt_tokens + request.output_tokens <= _LONGEST * _PART:
            number = kept[request.number] = len(requests)
            after = tuple(kept[each] for each in request.after)
            arrival_s, wait_s = stretch * request.arrival_s, stretch * request.wait_s
            requests.append(replace(request, number=number, after=after, arrival_s=arrival_s, wait_s=wait_s))
    return requests


async def serve(
    directory: Path, size: Size, requests: Sequence[TraceRequest], stretch: float
) -> tuple[Replay, Observation]:
    """Return what the clients measured, and what the routers saw."""
    write(model := directory / "model", ModelSize(layers=1, hidden=64))
    speed_flags = f"--fake-step-s={stretch * _STEP_S}", f"--fake-prompt-token-s={stretch * _TOKEN_S}"
    shape = Shape(
        model=model,
        data_dir=directory / "data",
        routers=_ROUTERS,
        prefill_workers=1 if size.prefill else 0,
        prefill_dp_size=max(1, size.prefill),
        decode_dp_size=size.decode,
        common_flags=_COMMON_FLAGS,
        rank_flags=(*_RANK_FLAGS, *speed_flags),
        router_flags=(
            "--pull=off",
            f"--chunk-size={_CHUNK}",
            "--plan-window-s=86400",
            f"--plans={'remote,local' if size.prefill else 'local'}",
        ),
    )
    async with LocalCluster(shape, partial(print, file=sys.stderr)) as cluster, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(cluster.open_channel(i)) for i in range(_ROUTERS)]
        replay = Replay([generation_pb2_grpc.GenerationStub(channel) for channel in channels], requests)
        await replay.run()
        routers = tuple(cluster.router_endpoint(index) for index in range(_ROUTERS))
        (seen,) = await observations(PlanConfig(routers=routers, window_s=86_400.0))
        return replay, seen


async def serve_all(
    size: Size, requests: Sequence[TraceRequest], stretch: float, runs: int
) -> list[tuple[Replay, Observation]]:
    """Serve the same requests on so many clusters at once, which mostly sleep."""
    with ExitStack() as stack:
        directories = [
            Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-"))) for _ in range(runs)
        ]
        return await asyncio.gather(*(serve(each, size, requests, stretch) for each in directories))


def measured(runs: Sequence[tuple[Replay, Observation]]) -> Row:
    counted: list[Observed] = []
    ttft: list[float] = []
    for replay, seen in runs:
        first = int(_UNCOUNTED * len(replay.ttft_s))
        counted += sorted(seen.requests, key=lambda each: each.arrival_s)[first:]
        by_time = sorted(replay.ttft_s, key=replay.sent_s.__getitem__)
        ttft += [replay.ttft_s[number] for number in by_time[first:]]
    computed_tokens = sum(each.computed_tokens for each in counted)
    prompt_tokens = sum(each.prompt_tokens for each in counted)
    low_s, high_s = spread(ttft, 0.99)
    return {
        "counted": len(ttft),
        "measured_p50_s": quantile(sorted(ttft), 0.5),
        "measured_p99_s": quantile(sorted(ttft), 0.99),
        "p99_low_s": low_s,
        "p99_high_s": high_s,
        "measured_hits": 1 - computed_tokens / prompt_tokens,
    }


def predicted(each: Sequence[Outlook]) -> Row:
    """Return the middle one of the predictions, each figure by itself."""
    p99 = [outlook.ttft_p99_s for outlook in each]
    return {
        "predicted_p50_s": median(outlook.ttft_p50_s for outlook in each),
        "predicted_p99_s": median(p99),
        "least_p99_s": min(p99),
        "most_p99_s": max(p99),
        "predicted_hits": median(outlook.reused for outlook in each),
    }


def spread(values: Sequence[float], share: float) -> tuple[float, float]:
    """Return between what the quantile is in nine tenths of draws of as many values, with replacement."""
    random = Random(1)
    drawn = sorted(quantile(sorted(random.choices(values, k=len(values))), share) for _ in range(_RESAMPLES))
    return quantile(drawn, 0.05), quantile(drawn, 0.95)


def compare(layouts: Sequence[Size], seconds: float, stretch: float, load: float, runs: int) -> list[Row]:
    requests = sessions(seconds, stretch, load)
    if (counted := len(requests) - int(_UNCOUNTED * len(requests))) < _FEW:
        print(f"a p99 of {counted} requests is that of a few: {_FEW} are wanted", file=sys.stderr)
    rows: list[Row] = []
    trials: list[Trial] = []
    for size in layouts:
        served = asyncio.run(serve_all(size, requests, stretch, runs))
        trials = trials or [Trial(seen, _GOALS, 1.0, seed=1) for _, seen in served]
        began = time.process_time()
        row = {"layout": str(size), "requests": len(requests)} | measured(served)
        row |= predicted([trial.of(size) for trial in trials])
        row |= {"cpu_s": time.process_time() - began}
        for figure in ("p50", "p99"):
            row[f"{figure}_off"] = abs(row[f"predicted_{figure}_s"] / row[f"measured_{figure}_s"] - 1)  # type: ignore[operator]
        rows.append(row)
        print(table(rows), flush=True)
    return rows


def goals_of(rows: Sequence[Row]) -> list[Row]:
    found: list[Row] = []
    for row in rows:
        for figure, wanted in (("p50", 0.15), ("p99", 0.25)):
            goal = f"TTFT {figure} predicted, off by"
            found.append({"at": row["layout"]} | verdict(goal, "<=", wanted, row[f"{figure}_off"]))
    return found


def _size(text: str) -> Size:
    prefill, decode = text.split("+")
    return Size(int(prefill), int(decode))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="live,loop", help="live, loop or both")
    parser.add_argument("--layouts", default=_LAYOUTS, help="PREFILL+DECODE,...: the first one is observed")
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--stretch", type=float, default=_STRETCH)
    parser.add_argument("--load", type=float, default=_LOAD)
    parser.add_argument("--runs", type=int, default=_RUNS, help="of each layout, at once")
    parser.add_argument("--headrooms", default="0.9,1", help="of the one that knew the future")
    parser.add_argument("--seeds", default="1,2", help="of the closed loop")
    arguments = parser.parse_args()
    rows: list[Row] = []
    goals: list[Row] = []
    if "live" in arguments.parts:
        layouts = [_size(text) for text in arguments.layouts.split(",")]
        rows += compare(layouts, arguments.seconds, arguments.stretch, arguments.load, arguments.runs)
        goals += goals_of(rows)
    if "loop" in arguments.parts:
        of_loop, wanted = closed_loop.measure(
            closed_loop.Loop(),
            [float(each) for each in arguments.headrooms.split(",")],
            [int(each) for each in arguments.seeds.split(",")],
        )
        print(table(of_loop))
        rows, goals = rows + of_loop, goals + wanted
    print(table(goals))
    if arguments.json is not None:
        names = ("parts", "layouts", "seconds", "stretch", "load", "runs", "headrooms", "seeds")
        constants: Row = {name: getattr(arguments, name) for name in names}
        write_json(arguments.json, "plan", constants | {"goals": goals}, rows)


if __name__ == "__main__":
    main()
