"""Mixed load above capacity on a real cluster for minutes: what breaks, what grows, how pages lie at the end.

    python -m bench.soak --minutes 10 --json FILE

Router, prefill rank, two decode ranks and etcd are processes of their own; the fake engine computes, so that
every token of every answer is known and checked. Conversations, groups that share a system prompt, long
prompts that come once, short ones; one in twelve is aborted by its client.

    closed loop, 96 clients --> capacity (requests/s) --> open loop at 1.2 times that, each with a deadline

Past its capacity a cluster must say no. Clean are RESOURCE_EXHAUSTED and DEADLINE_EXCEEDED; any other error
counts as one, as does a wrong token. In the end nothing is held, and some requests are aborted one by one in
the quiet cluster, to see how long both ranks take to have everything back.

`run length`: pages per run of neighbours in which pages were lent to prompts, at the start and at the end;
`free length`: the same of those that are free then.
`bench.transfer` then moves a delta whose pages lie so on both sides, beside one in a fresh pool.
"""

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from bench import transfer
from bench.report import Row, table, verdict, write_json
from services import rpc
from services.cli.local_cluster import LocalCluster, Shape
from services.cli.make_model import make_model
from services.engine.fake import continuation
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

PAGE_SIZE = 16
NUM_PAGES = 240  # some eight sequences beside each other
RANK_FLAGS = (
    "--engine=fake",
    "--transport=local",
    f"--page-size={PAGE_SIZE}",
    f"--kv-pages={NUM_PAGES}",
    "--chunk-size=256",
    "--max-running-requests=24",
    "--fake-step-s=0.02",
    "--fake-prompt-token-s=0.0001",
)
COMMON_FLAGS = (f"--index-block={PAGE_SIZE}", "--model-name=fake")
CLIENTS = 96
OVERLOAD = 1.2
DEADLINE_S = 20.0
ABORTED_SHARE = 1 / 12
SAMPLE_EVERY_S = 5.0
QUIET_ABORTS = 20
CLEAN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
MAX_CONVERSATION = 900  # tokens; then its place is taken by a new one
LET_GO_S = 60.0  # the deadline, a lease and its fence are over long before
GOALS = (
    ("errors", "<=", 0.0),
    ("books_balanced", ">=", 1.0),
    ("memory_growth", "<=", 1.1),
    ("abort_max_s", "<=", 2.0),
)


class Mix:
    """Draws the next request."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._systems = [self._ids(256) for _ in range(6)]
        self._conversations = [self._ids(40) for _ in range(24)]

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(500) for _ in range(length)]

    def draw(self) -> "Asked":
        kind = self._rng.choices(["turn", "group", "scan", "short"], [40, 30, 20, 10])[0]
        max_tokens = self._rng.randint(4, 64)
        if kind == "turn":
            index = self._rng.randrange(len(self._conversations))
            ids = [*self._conversations[index], *self._ids(self._rng.randint(8, 24))]
            return Asked(kind, ids, max_tokens, index)
        if kind == "group":
            return Asked(kind, [*self._rng.choice(self._systems), *self._ids(32)], max_tokens)
        return Asked(
            kind, self._ids(self._rng.randint(*((100, 500) if kind == "scan" else (5, 20)))), max_tokens
        )

    def answered(self, asked: "Asked", tokens: list[int]) -> None:
        if asked.conversation is not None:
            history = [*asked.ids, *tokens]
            self._conversations[asked.conversation] = (
                history if len(history) < MAX_CONVERSATION else self._ids(40)
            )


@dataclass(frozen=True)
class Asked:
    kind: str
    ids: list[int]
    max_tokens: int
    conversation: int | None = None

    @property
    def request(self) -> generation_pb2.GenerateRequest:
        name = f"soak-{self.conversation}" if self.conversation is not None else ""
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=self.ids),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True),
            conversation_id=name,
        )


@dataclass
class Outcomes:
    counts: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.errors


class Ranks:
    """The processes of a LocalCluster, as their log lines tell of them."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.metrics_ports: dict[str, int] = {}
        self.tracebacks: Counter[str] = Counter()  # by their last line
        self._in_traceback: set[str] = set()

    def note(self, name: str, line: str) -> None:
        if "Traceback" in line:
            self._in_traceback.add(name)
        elif name in self._in_traceback and not line.startswith((" ", "\t")):
            self._in_traceback.remove(name)
            self.tracebacks[f"{name}: {line.strip()}"] += 1
        if started := re.search(r"rank_started rank=(\d+) pid=(\d+)", line):
            self.pids[f"{name}/{started[1]}"] = int(started[2])
        if ready := re.search(r"rank_ready rank=(\S+) .*metrics_port=(\d+)", line):
            self.metrics_ports[ready[1]] = int(ready[2])

    async def metrics(self, rank: str) -> dict[str, float]:
        url = f"http://127.0.0.1:{self.metrics_ports[rank]}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        samples = [s for family in text_string_to_metric_families(body) for s in family.samples]
        return {f"{s.name} {s.labels.get('state', '')}".rstrip(): s.value for s in samples}

    async def held(self) -> float:
        """Pages and requests that any rank holds."""
        held = 0.0
        for rank in self.metrics_ports:
            metrics = await self.metrics(rank)
            held += sum(metrics[f"isthmus_kv_pages {s}"] for s in ("locked", "private", "quarantined"))
            held += metrics["isthmus_running_requests"] + metrics["isthmus_waiting_requests"]
        return held

    async def let_go(self) -> float:
        """Seconds until no rank holds anything.

        Raises:
            TimeoutError: one still does after LET_GO_S.
        """
        began = time.monotonic()
        while held := await self.held():
            if time.monotonic() - began > LET_GO_S:
                raise TimeoutError(f"ranks still hold {held:.0f} pages and requests after {LET_GO_S:.0f} s")
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    async def balanced(self) -> bool:
        states = ("free", "cached", "locked", "private", "quarantined")
        books = [await self.metrics(rank) for rank in self.metrics_ports]
        return all(sum(m[f"isthmus_kv_pages {state}"] for state in states) == NUM_PAGES for m in books)

    async def lent(self) -> tuple[float, float]:
        """Pages and runs lent since the start, over all ranks."""
        loads = [await self.metrics(rank) for rank in self.metrics_ports]
        names = "isthmus_lent_pages_total", "isthmus_lent_page_runs_total"
        pages, runs = (sum(load[name] for load in loads) for name in names)
        return pages, runs

    async def free_run_length(self) -> float:
        """Free pages per run of neighbours, over all ranks."""
        pages = await self.total("isthmus_kv_pages free")
        return pages / max(1.0, await self.total("isthmus_free_page_runs"))

    async def total(self, name: str) -> float:
        return sum([(await self.metrics(rank))[name] for rank in self.metrics_ports])


class Soak:
    def __init__(self, stub: generation_pb2_grpc.GenerationStub, ranks: Ranks, rng: random.Random) -> None:
        self.stub, self.ranks, self.rng = stub, ranks, rng
        self.mix = Mix(rng)

    async def ask(self, asked: Asked, outcomes: Outcomes, abort_after_s: float | None) -> None:
        call = self.stub.Generate(asked.request, timeout=DEADLINE_S)
        tokens: list[int] = []
        began = time.monotonic()
        try:
            async with asyncio.timeout(abort_after_s):
                async for response in call:
                    if not tokens and response.token_ids:
                        outcomes.ttft_s.append(time.monotonic() - began)
                    tokens.extend(response.token_ids)
        except TimeoutError:
            call.cancel()
            outcomes.counts["aborted"] += 1
        except grpc.aio.AioRpcError as error:
            outcomes.counts[error.code().name.lower()] += 1
            if error.code() not in CLEAN:
                outcomes.errors.append(f"{error.code().name}: {error.details()}")
        else:
            outcomes.counts["answered"] += 1
            self.mix.answered(asked, tokens)
            if len(tokens) != asked.max_tokens:
                outcomes.errors.append(f"{len(tokens)} tokens of {asked.max_tokens}")
        if tokens != continuation(asked.ids, len(tokens)):
            outcomes.errors.append(f"wrong tokens after a {asked.kind} prompt of {len(asked.ids)}")

    def _abort_after_s(self) -> float | None:
        return self.rng.uniform(0.0, 2.0) if self.rng.random() < ABORTED_SHARE else None

    async def closed_loop(self, seconds: float, outcomes: Outcomes) -> float:
        """Requests answered per second, with CLIENTS at a time."""
        began = time.monotonic()

        async def client() -> None:
            while time.monotonic() < began + seconds:
                await self.ask(self.mix.draw(), outcomes, None)

        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(client())
        return outcomes.counts["answered"] / (time.monotonic() - began)

    async def open_loop(self, seconds: float, rate: float, outcomes: Outcomes) -> None:
        """Poisson arrivals; those that are late because we were are made up for."""
        due = time.monotonic()
        end = due + seconds
        async with asyncio.TaskGroup() as requests:
            while (due := due + self.rng.expovariate(rate)) < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                requests.create_task(self.ask(self.mix.draw(), outcomes, self._abort_after_s()))

    async def quiet_aborts(self, outcomes: Outcomes) -> list[float]:
        """Seconds from each abort until no rank holds anything."""
        seconds = []
        for _ in range(QUIET_ABORTS):
            asked = Asked("scan", [self.rng.randrange(500) for _ in range(400)], 64)
            await self.ask(asked, outcomes, self.rng.uniform(0.0, 1.2))
            seconds.append(await self.ranks.let_go())
        return seconds


class Memory:
    """Resident bytes of every process, sampled while the load lasts."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[int]] = {name: [] for name in pids}

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for name, pid in self._pids.items():
                self.samples[name].append(resident_bytes(pid))
            await asyncio.sleep(SAMPLE_EVERY_S)

    def growth(self) -> dict[str, float]:
        """Median of the last quarter over that of the second one: the first fills caches."""
        return {name: _last_over_second_quarter(samples) for name, samples in self.samples.items()}


def _last_over_second_quarter(samples: list[int]) -> float:
    quarter = max(1, len(samples) // 4)
    second = samples[quarter : 2 * quarter] or samples
    return statistics.median(samples[-quarter:]) / statistics.median(second)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="isthmus-soak-") as folder:
        yield Path(folder)


async def soak(minutes: float, seed: int) -> Row:
    ranks, rng = Ranks(), random.Random(seed)
    with _folder() as folder:
        make_model(folder / "model")
        shape = Shape(
            model=folder / "model",
            data_dir=folder / "data",
            common_flags=COMMON_FLAGS,
            rank_flags=RANK_FLAGS,
            router_flags=("--chunk-size=256",),
        )
        async with LocalCluster(shape, ranks.note) as cluster:
            pids = ranks.pids | {"router": cluster.children["router"].process.pid}
            async with rpc.open_channel(cluster.router_endpoint()) as channel:
                driver = Soak(generation_pb2_grpc.GenerationStub(channel), ranks, rng)
                return await _measure(driver, Memory(pids), 60.0 * minutes)


async def _measure(driver: Soak, memory: Memory, seconds: float) -> Row:
    ranks, warm, load, quiet = driver.ranks, Outcomes(), Outcomes(), Outcomes()
    capacity = await driver.closed_loop(min(30.0, seconds / 6), warm)
    early, free_early = await ranks.lent(), await ranks.free_run_length()
    middle = early
    async with memory.watched():
        await driver.open_loop(seconds * 0.75, OVERLOAD * capacity, load)
        middle = await ranks.lent()
        await driver.open_loop(seconds * 0.25, OVERLOAD * capacity, load)
    late, free_late = await ranks.lent(), await ranks.free_run_length()
    await ranks.let_go()
    abort_s = await driver.quiet_aborts(quiet)
    errors = warm.errors + load.errors + quiet.errors
    for error in sorted(set(errors)):
        print(f"error: {error}")
    for last_line, count in ranks.tracebacks.most_common():
        print(f"traceback, {count} times: {last_line}")
    growth = memory.growth()
    return {
        "capacity_per_s": capacity,
        "offered_per_s": sum(load.counts.values()) / seconds,
        **{f"num_{name}": count for name, count in sorted(load.counts.items())},
        "ttft_p50_s": statistics.median(load.ttft_s),
        "errors": len(errors) + ranks.tracebacks.total(),
        "retractions": await ranks.total("isthmus_retractions_total"),
        "overtakes": await ranks.total("isthmus_overtakes_total"),
        "memory_growth": max(growth.values()),
        "memory_growth_of": max(growth, key=growth.__getitem__),
        "books_balanced": await ranks.balanced(),
        "abort_max_s": max(abort_s),
        "run_length_early": early[0] / max(1.0, early[1]),
        "run_length_late": (late[0] - middle[0]) / max(1.0, late[1] - middle[1]),
        "free_length_early": free_early,
        "free_length_late": free_late,
    }


def verdicts(row: Row) -> list[Row]:
    return [verdict(goal, sign, wanted, row[goal]) for goal, sign, wanted in GOALS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load above capacity")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    row = asyncio.run(soak(arguments.minutes, arguments.seed))
    print("\n".join(f"{name:>20}  {value}" for name, value in row.items()))
    judged = verdicts(row)
    print(f"\n{table(judged)}\n")
    moved = transfer.run_soaked(float(str(row["run_length_late"])), arguments.seed)
    print(table(moved))
    if arguments.json is not None:
        settings: Row = {"minutes": arguments.minutes, "seed": arguments.seed, "transfer": moved}
        write_json(arguments.json, "soak", settings, [row])
    if missed := [str(each["goal"]) for each in judged if not each["met"]]:
        raise SystemExit(f"the soak missed its goals: {', '.join(missed)}")


if __name__ == "__main__":
    main()
