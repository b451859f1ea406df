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
    dp_aware                   sglang-router --dp-aware, with one decode worker of 2 DP ranks: one request.
                               0.3.2 fails it in P/D mode: it posts to the URL HOST:PORT@RANK as it stands

All engines get the same arguments, but for those that only our plugin needs. SGLang on a CPU computes tens
of tokens a second, and other programs share this machine's cores: what counts is hits, bytes and ratios.
The router's policies look at a request's text, SGLang computes its token ids: requests carry both.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from bench.report import Row, table
from bench.sglang_load import Client, Load, TokenIds, Turn, drive, run_turn, warm_up
from bench.sglang_stock import Router, StockSglang
from bench.sglang_summary import PAGE_SIZE, all_ratios, differing, rows, summary
from services import rpc
from services.cli.client import responses
from services.cli.local_cluster import LocalCluster, Shape
from services.cli.make_model import make_model
from services.engine.sglang.settings import SglangSettings
from services.errors import ConfigError, PeerFailed
from services.kv.types import Role
from services.wire.isthmus.v1 import common_pb2, generation_pb2

POLICIES = ("power_of_two", "cache_aware")
# Name, decode workers, ranks of each.
STOCK_SYSTEMS = (("sglang_router", 1, 2), ("sglang_router_two_workers", 2, 1))
SYSTEMS = ("ours", *(name for name, _, _ in STOCK_SYSTEMS), "dp_aware")
MAX_RUNNING, CHUNK, RESERVED = 8, 512, 64
_WARM_UPS = 6
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What all systems have in common."""

    model: Path
    folder: Path
    kv_pages: int  # of each rank
    load: Load
    router_path: str

    def stock_settings(self, dp_size: int) -> SglangSettings:
        """As `_rank_flags` are for ours."""
        return SglangSettings(
            role=Role.DECODE,
            worker="decode",
            model_path=str(self.model),
            model_name="bench",
            dp_size=dp_size,
            device="cpu",
            dtype="float32",
            num_pages=self.kv_pages,
            page_size=PAGE_SIZE,
            index_block=PAGE_SIZE,
            cache_enabled=True,
            max_running_requests=MAX_RUNNING,
            chunk_size=CHUNK,
            num_threads=1,
            host="127.0.0.1",
            advertise_host="127.0.0.1",
            engine_args=(f"--num-reserved-decode-tokens={RESERVED}",),
        )

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


async def run_ours(bench: Bench) -> tuple[list[Turn], float]:
    shape = Shape(
        model=bench.model,
        data_dir=bench.folder / "etcd",
        decode_dp_size=2,
        rank_flags=bench.rank_flags(),
        common_flags=(f"--index-block={PAGE_SIZE}",),
        router_flags=("--plans=remote",),
        ready_timeout_s=400.0,
    )
    with (bench.folder / "isthmus.log").open("w") as log:

        def show_line(name: str, line: str) -> None:
            print(f"{name:<8}| {line}", file=log, flush=True)

        async with (
            LocalCluster(shape, show_line) as cluster,
            rpc.open_channel(cluster.router_endpoint()) as channel,
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


async def measure(client: Client, load: Load) -> tuple[list[Turn], float]:
    for turn in warm_up(load, _WARM_UPS):
        await run_turn(client, turn)
    return await drive(client, load)


async def run_stock(bench: Bench, system: StockSglang, policy: str) -> tuple[list[Turn], float]:
    async with system.routed((f"--policy={policy}",), bench.router_path, policy) as router:
        turns, elapsed_s = await measure(_router_client(bench, router), bench.load)
        router.settle(turns)
    return turns, elapsed_s


def _router_client(bench: Bench, router: Router) -> Client:
    tokenizer = AutoTokenizer.from_pretrained(bench.model)

    async def client(turn: Turn) -> AsyncIterator[TokenIds]:
        async for ids in router.stream(turn, bench.load.max_tokens, tokenizer.decode(turn.prompt)):
            yield ids

    return client


async def try_dp_aware(bench: Bench, system: StockSglang) -> Row:
    """Whether sglang-router can choose the DP rank in P/D mode, or what it says instead."""
    flags = ("--policy=cache_aware", "--dp-aware", "--disable-retries")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async with system.routed(flags, bench.router_path, "dp_aware") as router:
                (turn,) = warm_up(bench.load, 1)
                try:
                    async for _ in _router_client(bench, router)(turn):
                        pass
                except PeerFailed as error:
                    return {"works": False, "error": f"{error}; its log: {router.last_errors()}"}
    except (ConfigError, TimeoutError) as error:
        return {"works": False, "error": str(error) or repr(error)}
    return {"works": True, "error": ""}


@dataclass(slots=True)
class Results:
    ours: Row | None = None
    policies_of: dict[str, dict[str, Row]] = field(default_factory=dict)  # by system
    dp_aware: Row | None = None

    def report(self) -> dict[str, object]:
        report: dict[str, object] = {"ours": self.ours, **self.policies_of, "dp_aware": self.dp_aware}
        if self.ours is not None:
            report["ratios"] = all_ratios(self.ours, self.policies_of)
        return report


async def run(bench: Bench, systems: Sequence[str]) -> Results:
    results, reference = Results(), None
    if "ours" in systems:
        reference, elapsed_s = await run_ours(bench)
        results.ours = _shown("ours", summary(reference, elapsed_s))
    for name, workers, dp_size in STOCK_SYSTEMS:
        if name not in systems:
            continue
        async with StockSglang(bench.stock_settings(dp_size), workers, bench.folder / name) as system:
            rows_of = results.policies_of[name] = {}
            for policy in POLICIES:
                turns, elapsed_s = await run_stock(bench, system, policy)
                row = summary(turns, elapsed_s)
                if reference is not None:
                    row["answers_unlike_ours"] = differing(reference, turns)
                rows_of[policy] = _shown(f"{name}/{policy}", row)
            if dp_size > 1 and "dp_aware" in systems:
                results.dp_aware = _shown("dp_aware", await try_dp_aware(bench, system))
    return results


def _shown(name: str, row: Row) -> Row:
    print(f"{name}: {json.dumps(row)}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4, help="turns that run at once")
    parser.add_argument("--system-tokens", type=int, default=64, help="shared by all conversations")
    parser.add_argument("--first-tokens", type=int, default=192, help="of each first question")
    parser.add_argument("--next-tokens", type=int, default=64, help="of each later question")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--kv-pages", type=int, default=1024, help="of each rank: all that is sent fits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which of them, with commas")
    parser.add_argument("--router-path", default="", help="where sglang-router is, if not installed")
    parser.add_argument("--folder", type=Path, help="keep logs here; must not exist")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in Load.__dataclass_fields__}
    load = Load(**sizes)
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as temporary:
        folder = arguments.folder or Path(temporary) / "run"
        folder.mkdir(parents=True)
        make_model(folder / "model")
        bench = Bench(folder / "model", folder, arguments.kv_pages, load, arguments.router_path)
        results = asyncio.run(run(bench, arguments.systems.split(",")))
    print("\n" + table(rows(results.ours, results.policies_of)))
    if arguments.json is not None:
        settings = asdict(load) | {"kv_pages": arguments.kv_pages, "page_size": PAGE_SIZE}
        host = {"cpus": os.cpu_count(), "load_average": os.getloadavg()}  # others' programs too
        report = {"benchmark": "sglang", "host": host, "settings": settings, **results.report()}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
