"""Real SGLang behind Isthmus and behind SGLang's own router: who finds a conversation's KV again.

    .venv-sglang/bin/python -m bench.sglang --json FILE

Needs the environment of `make test-sglang`, which has SGLang's router too (sglang-router==0.3.2, installed
without dependencies; a copy elsewhere: `--router-path`). Everything runs on the CPU.

The same conversations, one system after the other, in this order:

    ours                       1 prefill rank, 1 decode worker of 2 DP ranks, behind Isthmus's router
    sglang_router              the same behind sglang-router, for each policy. It knows one decode worker;
                               which DP rank serves a request is up to SGLang's DP controller (round robin)
    sglang_router_two_workers  its best shot: each decode rank is a worker of its own, so that a policy has
                               a choice to make: the same ranks, cores and KV. (In 0.3.2 cache_aware is
                               blind in P/D mode all the same: sgl-project/sglang#23573)
    sglang_router_waiting      as sglang_router, but SGLang waits where it spins, as our plugin has it do:
                               so the difference to ours is that of the routers and what they ask for

All engines get the same arguments, but for those that only our plugin needs. The load is the same; engines
have computed some short requests before, and caches are empty. Other programs may share this machine's cores:
what counts is hits, bytes, ratios, and the CPU time that all processes of a system took: of a turn, of a
token, and by what they are. With `--repeat` every system runs that often, every other round in the opposite
order; the figures are then medians.
The router's policies look at a request's text, SGLang computes its token ids: requests carry both.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, table
from bench.sglang_load import Client, Load, TokenIds, Turn, drive, run_turn, warm_up
from bench.sglang_stock import Router, StockSglang
from bench.sglang_summary import (
    PAGE_SIZE,
    PARTS,
    Measured,
    differing,
    medians,
    nested,
    part_of,
    ranges,
    ratios,
    spent,
    summary,
    table_rows,
)
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.model.make_model import make_model
from services.cli.router_client import responses
from services.engine.engine_config import EngineConfig
from services.engine.sglang.service.sglang_settings import SglangSettings
from services.net import channels
from services.router.text.tokenizer import Tokenizer
from services.values.rank import Role
from services.wire.isthmus.v1 import common_pb2, generation_pb2

POLICIES = ("power_of_two", "cache_aware")
MAX_RUNNING, CHUNK, RESERVED = 8, 512, 64
_WARM_UPS = 6
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class StockSystem:
    name: str
    workers: int  # of decode
    dp_size: int  # of each
    waits: bool = False


STOCK_SYSTEMS = (
    StockSystem("sglang_router", 1, 2),
    StockSystem("sglang_router_two_workers", 2, 1),
    StockSystem("sglang_router_waiting", 1, 2, waits=True),
)
SYSTEMS = ("ours", *(system.name for system in STOCK_SYSTEMS))


@dataclass(frozen=True, slots=True)
class Bench:
    model: Path
    folder: Path
    kv_pages: int  # of each rank
    load: Load
    router_path: str

    def stock_settings(self, dp_size: int) -> SglangSettings:
        engine = EngineConfig(
            engine="sglang",
            model=str(self.model),
            model_name="bench",
            dp_size=dp_size,
            dtype="float32",
            kv_pages=self.kv_pages,
            page_size=PAGE_SIZE,
            index_block=PAGE_SIZE,
            max_running_requests=MAX_RUNNING,
            chunk_size=CHUNK,
            num_threads=1,
            engine_arg=(f"--num-reserved-decode-tokens={RESERVED}",),
        )
        return SglangSettings(engine, Role.DECODE, "decode")

    def rank_flags(self) -> tuple[str, ...]:
        return (
            "--engine=sglang",
            "--device=cpu",
            "--dtype=float32",
            f"--kv-pages={self.kv_pages}",
            f"--page-size={PAGE_SIZE}",
            f"--max-running-requests={MAX_RUNNING}",
            f"--chunk-size={CHUNK}",
            "--num-threads=1",
            f"--engine-arg=--num-reserved-decode-tokens={RESERVED}",
        )


async def run_ours(bench: Bench) -> Measured:
    shape = Shape(
        model=bench.model,
        data_dir=bench.folder / "etcd",
        decode_dp_size=2,
        rank_flags=bench.rank_flags(),
        common_flags=(f"--index-block={PAGE_SIZE}",),
        router_flags=("--plans=remote",),
        ready_timeout_s=900.0,
    )
    with (bench.folder / "isthmus.log").open("w") as log:

        def show_line(name: str, line: str) -> None:
            print(f"{name:<8}| {line}", file=log, flush=True)

        async with (
            LocalCluster(shape, show_line) as cluster,
            channels.open_channel(cluster.router_endpoint()) as channel,
        ):

            async def client(turn: Turn) -> AsyncIterator[TokenIds]:
                request = _request(turn, bench.load.max_tokens)
                async for response in responses(channel, request, timeout_s=_TIMEOUT_S):
                    yield list(response.token_ids)
                    if response.HasField("finish"):
                        _note_finish(turn, response.finish)

            return await measure(client, bench.load)


def _request(turn: Turn, max_tokens: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=turn.prompt),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        conversation_id=str(turn.conversation),
    )


def _note_finish(turn: Turn, finish: generation_pb2.Finish) -> None:
    turn.rank = f"{finish.placement.decode.worker}/{finish.placement.decode.rank}"
    turn.decode_prefix_len = finish.usage.decode_prefix_len
    turn.kv_bytes_moved = finish.usage.kv_bytes_moved


async def measure(client: Client, load: Load) -> Measured:
    for turn in warm_up(load, _WARM_UPS):
        await run_turn(client, turn)
    before_s = _cpu_s_by_part()
    turns, elapsed_s = await drive(client, load)
    return Measured(turns, elapsed_s, spent(before_s, _cpu_s_by_part()), os.getloadavg()[0])


def _cpu_s_by_part() -> dict[str, float]:
    seconds = dict.fromkeys(PARTS, 0.0)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times, part = process.cpu_times(), part_of(" ".join(process.cmdline()))
            if part is not None:
                seconds[part] += times.user + times.system
    return seconds


async def run_stock(bench: Bench, system: StockSglang, policy: str) -> Measured:
    async with system.routed((f"--policy={policy}",), bench.router_path, policy) as router:
        measured = await measure(_router_client(bench, router), bench.load)
        router.settle(measured.turns)
    return measured


def _router_client(bench: Bench, router: Router) -> Client:
    tokenizer = Tokenizer(str(bench.model))

    async def client(turn: Turn) -> AsyncIterator[TokenIds]:
        async for ids in router.stream(turn, bench.load.max_tokens, tokenizer.text_of(turn.prompt)):
            yield ids

    return client


async def run_round(bench: Bench, systems: Sequence[str], backwards: bool) -> dict[str, Row]:
    """The row of every system, and of every policy of it: SYSTEM/POLICY."""
    measured: dict[str, Measured] = {}
    for name in reversed(systems) if backwards else systems:
        if name == "ours":
            measured["ours"] = _shown("ours", await run_ours(bench))
        for stock in STOCK_SYSTEMS:
            if stock.name == name:
                measured |= await run_policies(bench, stock)
    rows = {name: summary(one) for name, one in measured.items()}
    if "ours" in measured:
        for name, one in measured.items():
            rows[name]["answers_unlike_ours"] = differing(measured["ours"].turns, one.turns)
    return rows


async def run_policies(bench: Bench, stock: StockSystem) -> dict[str, Measured]:
    settings = bench.stock_settings(stock.dp_size)
    measured: dict[str, Measured] = {}
    async with StockSglang(settings, stock.workers, bench.folder / stock.name, stock.waits) as system:
        for policy in POLICIES:
            name = f"{stock.name}/{policy}"
            measured[name] = _shown(name, await run_stock(bench, system, policy))
    return measured


def _shown(name: str, measured: Measured) -> Measured:
    print(f"{name}: {json.dumps(summary(measured))}", flush=True)
    return measured


async def run(bench: Bench, systems: Sequence[str], repeat: int) -> dict[str, object]:
    """The report but for what was asked: medians, their ranges, ratios, and every round."""
    rounds: list[dict[str, Row]] = []
    report: dict[str, object] = {}
    for number in range(repeat):
        folder = bench.folder / f"round-{number}"
        folder.mkdir()
        rounds.append(await run_round(replace(bench, folder=folder), systems, backwards=number % 2 == 1))
    rows = {name: medians([one[name] for one in rounds]) for name in rounds[0]}
    report |= nested(rows)
    if "ours" in rows:
        others = {name: ratios(rows["ours"], row) for name, row in rows.items() if name != "ours"}
        report["ratios"] = nested(others)
    if repeat > 1:
        report["ranges"] = {name: ranges([one[name] for one in rounds]) for name in rounds[0]}
        report["rounds"] = rounds
    if rows:
        print("\n" + table(table_rows(rows)))
    return report


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4, help="turns that run at once")
    parser.add_argument("--system-tokens", type=int, default=64, help="shared by all conversations")
    parser.add_argument("--first-tokens", type=int, default=192, help="of each first question")
    parser.add_argument("--next-tokens", type=int, default=64, help="of each later question")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--kv-pages", type=int, default=1024, help="of each rank: all that is sent fits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1, help="rounds; the figures are their medians")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which of them, with commas")
    parser.add_argument("--router-path", default="", help="where sglang-router is, if not installed")
    parser.add_argument("--folder", type=Path, help="keep logs here; must not exist")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in Load.__dataclass_fields__}
    load = Load(**sizes)
    systems = arguments.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} not among {', '.join(SYSTEMS)}")
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as temporary:
        folder = arguments.folder or Path(temporary) / "run"
        folder.mkdir(parents=True)
        make_model(folder / "model")
        bench = Bench(folder / "model", folder, arguments.kv_pages, load, arguments.router_path)
        host = {"cpus": os.cpu_count(), "load_average": os.getloadavg()}  # others' programs too
        report = asyncio.run(run(bench, systems, arguments.repeat))
    if arguments.json is not None:
        settings = asdict(load) | {
            "kv_pages": arguments.kv_pages,
            "page_size": PAGE_SIZE,
            "rounds": arguments.repeat,
        }
        report = {"benchmark": "sglang", "host": host, "settings": settings, **report}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
