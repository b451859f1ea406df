"""This benchmark runs cells of sessions on real ranks, and compares them with what the simulation predicts.

    OMP_NUM_THREADS=1 python -m bench.placement.real --json FILE

etcd, two routers, and ranks with engine fake are processes of their own, and time is real. All lengths and
speeds are an eighth of those of the other benchmarks of placement, as engine fake holds contexts of 16,384
tokens; a page is a block. They are so in what predicts, too: a rank gives each answer one token in a step,
whatever a token stands for. Those sessions are run to their end that begin within --seconds, and the first
third of the requests is not counted. TTFT is the client's. Processes that share few cores make each step
some milliseconds longer: with --stretch 2 all else takes twice as long.

What is predicted is the median of simulations that differ in ties and in the router of each request. Their
least and greatest p50 say how far that is known: where short prompts wait behind long ones, half of the
requests do or do not by such chances.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from bench.checkpoint import Size, write
from bench.placement.cells import TIMING, Cell, Fleet
from bench.placement.simulation import Simulation
from bench.report import Row, parser_of, table, write_json
from services.cli.local.local_cluster import LocalCluster, Shape
from services.router.replay.planner import quantile
from services.router.replay.setting import Setting, Timing
from services.router.replay.workload import BLOCK_TOKENS, TraceRequest
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_PART = 8
_PAGE = BLOCK_TOKENS // _PART
_LONGEST = 16_000  # of engine fake's tokens
_STEP_S, _TOKEN_S = TIMING.step_s, _PART / TIMING.tokens_per_s
_CHUNK = TIMING.chunk_tokens // _PART
_BLOCKS = 2_000
_IDS = 500
_CELLS = "agents:0+4,mixed:0+4,agents:2+2"
_LOAD = 0.8
_ROUTERS = 2
_DRAWS = 9
_COMMON_FLAGS = ("--model-name=bench", "--log-level=warning", f"--index-block={_PAGE}")
_RANK_FLAGS = (
    "--engine=fake",
    "--transport=local",
    f"--page-size={_PAGE}",
    f"--kv-pages={_BLOCKS}",
    f"--chunk-size={_CHUNK}",
    "--max-running-requests=128",
    "--kv-digest-share=0",
)


class Replay:
    """Sends the requests as the simulation does: at their time, or after those that they follow."""

    def __init__(
        self, stubs: Sequence[generation_pb2_grpc.GenerationStub], requests: Sequence[TraceRequest]
    ) -> None:
        self._stubs = stubs
        self._requests = requests
        self._ended = [asyncio.Event() for _ in requests]
        self._said: dict[str, list[int]] = {}  # by session
        self._random = random.Random(1)
        self.sent_s: dict[int, float] = {}
        self.ttft_s: dict[int, float] = {}
        self.computed_tokens = self.prompt_tokens = 0

    async def run(self) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for request in self._requests:
                tasks.create_task(self._serve(request, began))

    async def _serve(self, request: TraceRequest, began: float) -> None:
        if request.after:
            for number in request.after:
                await self._ended[number].wait()
            await asyncio.sleep(request.wait_s)
        else:
            await asyncio.sleep(began + request.arrival_s - time.monotonic())
        prompt = self._prompt(request)
        self._said[request.session] = prompt + await self._answer(request, prompt)
        self._ended[request.number].set()

    async def _answer(self, request: TraceRequest, prompt: list[int]) -> list[int]:
        asked = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(
                temperature=0, max_tokens=request.output_tokens, ignore_eos=True
            ),
            conversation_id=request.session,
        )
        ids: list[int] = []
        sent_s = self.sent_s[request.number] = time.monotonic()
        async for response in self._stubs[request.number % len(self._stubs)].Generate(asked, timeout=600):
            if response.token_ids and not ids:
                self.ttft_s[request.number] = time.monotonic() - sent_s
            ids += response.token_ids
            if response.HasField("finish"):
                self.computed_tokens += response.finish.usage.computed_tokens
        self.prompt_tokens += len(prompt)
        return ids

    def _prompt(self, request: TraceRequest) -> list[int]:
        """Return what the session has said, or a prefix that it shares, and what is new."""
        said = self._said.get(request.session)
        if said is None:
            shared = (request.prompt_tokens - request.new_tokens) // _PAGE
            said = [each for block in request.blocks[:shared] for each in _block(block)]
        wanted = request.prompt_tokens - len(said)
        return said + self._random.choices(range(_IDS), k=max(1, wanted))


def _block(number: int) -> list[int]:
    return random.Random(number).choices(range(_IDS), k=_PAGE)


def _timing(stretch: float) -> Timing:
    """Return that of engine fake. A token has the KV of those for which it stands."""
    return replace(
        TIMING,
        block_tokens=_PAGE,
        tokens_per_s=1 / _TOKEN_S / stretch,
        chunk_tokens=_CHUNK,
        kv_bytes_per_token=TIMING.kv_bytes_per_token * _PART,
        chunk_step_s=_STEP_S * stretch,
        step_s=_STEP_S * stretch,
        step_s_per_sequence=0.0,
    )


def _requests(cell: Cell, seconds: float, stretch: float) -> list[TraceRequest]:
    """Return those that begin in so many seconds of the cell, or follow such, in tokens of engine fake."""
    kept: dict[int, int] = {}
    requests: list[TraceRequest] = []
    for request in cell.requests():
        is_early = request.arrival_s <= seconds and all(number in kept for number in request.after)
        if is_early and request.prompt_tokens + request.output_tokens <= _LONGEST * _PART:
            after = tuple(kept[number] for number in request.after)
            kept[request.number] = len(requests)
            requests.append(replace(scaled(request, stretch), number=len(requests), after=after))
    return requests


def scaled(request: TraceRequest, stretch: float = 1.0) -> TraceRequest:
    """Return the request in tokens of engine fake; each time is so many times as long."""
    return replace(
        request,
        arrival_s=stretch * request.arrival_s,
        prompt_tokens=request.prompt_tokens // _PART,
        output_tokens=max(2, request.output_tokens // _PART),
        wait_s=stretch * request.wait_s,
        new_tokens=request.new_tokens // _PART,
    )


async def measure(
    directory: Path, prefill: int, decode: int, requests: Sequence[TraceRequest], stretch: float = 1.0
) -> Replay:
    write(model := directory / "model", Size(layers=1, hidden=64))
    speed_flags = f"--fake-step-s={stretch * _STEP_S}", f"--fake-prompt-token-s={stretch * _TOKEN_S}"
    shape = Shape(
        model=model,
        data_dir=directory / "data",
        routers=_ROUTERS,
        prefill_workers=1 if prefill else 0,
        prefill_dp_size=max(1, prefill),
        decode_dp_size=decode,
        common_flags=_COMMON_FLAGS,
        rank_flags=(*_RANK_FLAGS, *speed_flags),
        router_flags=(f"--plans={'remote,local' if prefill else 'local'}",),
    )
    async with LocalCluster(shape, partial(print, file=sys.stderr)) as cluster, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(cluster.open_channel(i)) for i in range(_ROUTERS)]
        replay = Replay([generation_pb2_grpc.GenerationStub(channel) for channel in channels], requests)
        await replay.run()
        return replay


def predict(
    prefill: int, decode: int, requests: Sequence[TraceRequest], stretch: float = 1.0
) -> list[Simulation]:
    """Return served simulations that differ by chance alone."""
    setting = Setting(prefill, decode, blocks=_BLOCKS, timing=_timing(stretch), routers=_ROUTERS)
    simulations = [Simulation(replace(setting, draw=draw), "ours", requests) for draw in range(_DRAWS)]
    for simulation in simulations:
        simulation.serve()
    return simulations


def _counted(ttft_s: dict[int, float]) -> list[float]:
    return sorted(seconds for number, seconds in ttft_s.items() if number >= len(ttft_s) // 3)


def compare(replay: Replay, simulations: Sequence[Simulation]) -> Row:
    predicted = [
        _counted({job.request.number: job.first_token_s - job.request.arrival_s for job in simulation.jobs})
        for simulation in simulations
    ]
    measured = _counted(replay.ttft_s)
    row: Row = {"requests": len(simulations[0].jobs)}
    figures: dict[str, Callable[[list[float]], float]] = {
        "mean": mean,
        "p50": lambda ordered: quantile(ordered, 0.5),
        "p90": lambda ordered: quantile(ordered, 0.9),
    }
    for figure, of in figures.items():
        draws, value = [of(ordered) for ordered in predicted], of(measured)
        row |= {f"predicted_{figure}_s": median(draws), f"measured_{figure}_s": value}
        row[f"{figure}_ratio"] = value / median(draws)
        if figure == "p50":
            row |= {"least_p50_s": min(draws), "greatest_p50_s": max(draws)}
    row["predicted_hits"] = median(map(_hits, simulations))
    row["measured_hits"] = 1 - replay.computed_tokens / replay.prompt_tokens
    return row


def _hits(simulation: Simulation) -> float:
    prompt_tokens = sum(job.request.prompt_tokens for job in simulation.jobs)
    return 1 - sum(job.computed_tokens for job in simulation.jobs) / prompt_tokens


def _row(name: str, seconds: float, stretch: float) -> Row:
    workload, layout = name.split(":")
    prefill, decode = map(int, layout.split("+"))
    cell = Cell(Fleet(workload, "8"), "open", _LOAD * (prefill or decode) / 8)
    requests = _requests(cell, seconds, stretch)
    with TemporaryDirectory(prefix="isthmus-bench-") as directory:
        replay = asyncio.run(measure(Path(directory), prefill, decode, requests, stretch))
    predicted = predict(prefill, decode, requests, stretch)
    return {"workload": workload, "layout": layout} | compare(replay, predicted)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", default=_CELLS, help="WORKLOAD:PREFILL+DECODE,...")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--stretch", type=float, default=1.0)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.cells.split(","):
        rows.append(_row(name, arguments.seconds, arguments.stretch))
        print(table(rows[-1:]), flush=True)
    if arguments.json is not None:
        constants: Row = {"seconds": arguments.seconds, "stretch": arguments.stretch}
        constants |= {"load": _LOAD, "routers": _ROUTERS}
        write_json(arguments.json, "placement-real", constants, rows)


if __name__ == "__main__":
    main()
