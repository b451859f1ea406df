"""A cluster of real processes, found through their log lines, watched through /metrics, ended by signals.

The fake engine computes, so that every token is known beforehand.
"""

import asyncio
import contextlib
import inspect
import os
import random
import re
import secrets
import signal
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle

import grpc
from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.left_behind import marked_processes, signal_all
from cluster.harness import BLOCK, ids_request
from net.fault_proxy import FaultProxy
from services.cli.local.local_cluster import LocalCluster, Shape
from services.engine.fake import continuation
from services.etcd.connection import EtcdSettings
from services.etcd.etcd_client import Etcd
from services.index.joining import decode_registration
from services.index.keys import ClusterKeys, RegistrationKey
from services.net import channels
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

LONG_S = 60.0  # a deadline for conditions, never waited out
KV_PAGES = 512
COMMON_FLAGS = (f"--index-block={BLOCK}", "--model-name=fake", "--grace-s=20")
RANK_FLAGS = (
    "--engine=fake",
    "--transport=local",
    f"--page-size={BLOCK}",
    "--chunk-size=32",
    "--max-running-requests=16",
    "--fake-step-s=0.02",
    "--lease-ttl-s=3",
    "--kv-digest-share=1",
)
# With plan local a dead prefill rank would hardly be noticed.
ROUTER_FLAGS = ("--plans=remote", "--chunk-size=32")
MARK = "ISTHMUS_TEST_MARK"
PROXY_HOST = "127.0.0.2"  # where proxies have the ports that the ranks have at 127.0.0.1


def prompt_of(number, length=21):
    return random.Random(number).choices(range(500), k=length)


async def until(condition, what, timeout_s=LONG_S):
    """Wait for a function, async or not, to return something true; returns that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                found = condition()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@dataclass(frozen=True)
class LogLine:
    child: str  # of the LocalCluster
    service: str  # a worker, a router, or a rank as WORKER/RANK
    event: str
    fields: dict[str, str]
    text: str


def parse_line(child, line):
    """None for what is no log line of ours."""
    match = re.fullmatch(r"\d{4}-\S+Z [A-Z]+ (\S+) \S+ (\S+)(.*)", line)
    if match is None:
        return None
    service, event, rest = match.groups()
    fields = dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)', rest))
    return LogLine(child, service, event, fields, line)


@dataclass(frozen=True)
class RankProcess:
    """The newest life of a rank."""

    name: str
    pid: int
    endpoint: str
    metrics_port: int
    lives: int  # so far, this one included


class ProcessCluster:
    """`async with ProcessCluster(data_dir, model_dir, ...) as cluster`; later flags win.

    With `behind_proxies` every rank is reached through `proxies[name]` only.
    """

    def __init__(
        self,
        data_dir,
        model_dir,
        *,
        kv_pages=KV_PAGES,
        rank_flags=(),
        router_flags=(),
        behind_proxies=False,
        local=LocalCluster,
        **shape,
    ):
        self._kv_pages = kv_pages
        self._behind_proxies = behind_proxies
        self.proxies: dict[str, FaultProxy] = {}
        if behind_proxies:
            rank_flags = (*rank_flags, f"--advertise-host={PROXY_HOST}")
        self.shape = Shape(
            model=model_dir,
            data_dir=data_dir,
            common_flags=COMMON_FLAGS,
            rank_flags=(*RANK_FLAGS, f"--kv-pages={kv_pages}", *rank_flags),
            router_flags=(*ROUTER_FLAGS, *router_flags),
            **shape,
        )
        self.local = local(self.shape, self._note)
        self.lines: list[LogLine] = []
        self.other_lines: list[str] = []
        self.stubs = []
        self._mark = secrets.token_hex(8)
        self._openings: list[asyncio.Task] = []

    async def __aenter__(self):
        os.environ[MARK] = self._mark
        self._stack = await contextlib.AsyncExitStack().__aenter__()
        try:
            await self._stack.enter_async_context(self.local)
            settings = EtcdSettings(self.local.etcd_endpoints, timeout_s=1.0)
            self.etcd = await self._stack.enter_async_context(Etcd(settings, rng=random.Random()))
            for index in range(self.shape.routers):
                channel = channels.open_channel(self.local.router_endpoint(index))
                await self._stack.enter_async_context(channel)
                self.stubs.append(generation_pb2_grpc.GenerationStub(channel))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc):
        await self._stack.aclose()
        os.environ.pop(MARK, None)
        left = marked_processes(MARK, self._mark)
        signal_all(left, signal.SIGKILL)
        assert not left, f"these outlived their cluster: {left}"

    def _note(self, name, line):
        print(f"{name}| {line}")  # shown by pytest with a test that fails
        parsed = parse_line(name, line)
        if parsed is not None:
            self.lines.append(parsed)
            if self._behind_proxies and parsed.event == "rank_ready":
                self._openings.append(asyncio.create_task(self._open_proxy(parsed)))
        else:
            self.other_lines.append(f"{name}| {line}")

    async def _open_proxy(self, ready):
        if ready.service not in self.proxies:
            port = int(ready.fields["endpoint"].rpartition(":")[2])
            proxy = self.proxies[ready.service] = FaultProxy(PROXY_HOST, port, "127.0.0.1", port)
            await self._stack.enter_async_context(proxy)

    async def play(self, *scenarios):
        """One after the other; after each, nothing is held."""
        for scenario in scenarios:
            print(f"--- {scenario.__name__}")
            await scenario(self)
            await self.assert_nothing_held()

    # -- processes --------------------------------------------------------------------------------

    def events(self, event, service=None):
        return [line for line in self.lines if line.event == event and service in (None, line.service)]

    @property
    def rank_names(self):
        return sorted({line.service for line in self.events("rank_ready")})

    def rank(self, name):
        worker, index = name.split("/")
        starts = [line for line in self.events("rank_started", worker) if line.fields["rank"] == index]
        ready = self.events("rank_ready", name)
        newest = ready[-1].fields
        pid, port = int(starts[-1].fields["pid"]), int(newest["metrics_port"])
        return RankProcess(name, pid, newest["endpoint"], port, len(ready))

    def signal_rank(self, name, number):
        """To the rank's own process, not to its supervisor."""
        os.kill(self.rank(name).pid, number)

    async def restarted(self, before):
        """The rank's next life, once every router that lives sees it."""
        await until(lambda: self.rank(before.name).lives > before.lives, f"{before.name} is ready again")
        await self.until_whole()
        return self.rank(before.name)

    async def until_whole(self, routers=None):
        """The routers see every rank of the shape and could use each."""
        for index in routers or [i for i in range(self.shape.routers) if self._router_lives(i)]:
            await until(lambda i=index: self._whole(i), f"router {index} sees every rank")

    async def _whole(self, router):
        try:
            (model,) = (await self.stubs[router].ListModels(generation_pb2.ListModelsRequest())).models
            explanation = await self.explain([0], router)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        seen = model.decode_ranks, model.prefill_ranks
        wanted = self.shape.decode_ranks, self.shape.prefill_ranks
        return seen == wanted and not any(c.excluded for c in explanation.candidates)

    def router_name(self, index):
        return "router" if self.shape.routers == 1 else f"router-{index}"

    def _router_lives(self, index):
        return self.local.children[self.router_name(index)].process.returncode is None

    async def registrations(self):
        """What etcd says of the ranks: Registration by name."""
        keys = ClusterKeys("default")
        _, values = await self.etcd.snapshot(keys.prefix)
        ranks = [(keys.parse(kv.key), kv.value) for kv in values]
        return {str(key.rank): decode_registration(v) for key, v in ranks if isinstance(key, RegistrationKey)}

    async def generation(self, name):
        return (await self.registrations())[name].id.generation

    # -- requests ---------------------------------------------------------------------------------

    async def explain(self, ids, router=0, **fields):
        request = generation_pb2.ExplainRequest(request=ids_request(ids, **fields))
        return await self.stubs[router].Explain(request)

    def open(self, ids, max_tokens=8, router=0, **fields):
        """A request, read in the background."""
        return Stream(ids, max_tokens, self.stubs[router].Generate(ids_request(ids, max_tokens, **fields)))

    async def converse(self, first, num):
        """Have so many conversations of two turns at once, all exact; return what second turns computed."""

        async def conversation(number):
            prompt, name = prompt_of(number, 400), f"c{number}"
            await self.generate(prompt, conversation_id=name)
            again = [*prompt, *continuation(prompt, 8), 1, 2]
            return (await self.generate(again, conversation_id=name)).usage.computed_tokens

        return await asyncio.gather(*(conversation(first + i) for i in range(num)))

    async def generate(self, ids, max_tokens=8, router=0, **fields):
        """The Finish; the tokens are asserted."""
        return await self.open(ids, max_tokens, router, **fields).exact()

    async def until_used(self, name, generation):
        """Send batches until one request has gone through this life of the rank.

        Their prompts take longer to compute than the calls between two ranks, so no rank does all of it.
        """

        async def used():
            self._batch += 1
            prompts = [prompt_of(1000 + 10 * self._batch + i, 400) for i in range(4)]
            # Each router prefers ranks of its own share.
            asked = zip(prompts, cycle(range(len(self.stubs))), strict=False)
            finishes = await asyncio.gather(*(self.generate(p, router=router) for p, router in asked))
            placements = [side for f in finishes for side in (f.placement.decode, f.placement.prefill)]
            return any((f"{p.worker}/{p.rank}", p.generation) == (name, generation) for p in placements)

        await until(used, f"a request goes through {name}")

    _batch = 0

    # -- metrics ----------------------------------------------------------------------------------

    async def running(self, names: Iterable[str]):
        """Those of the ranks that have a sequence with pages."""
        loads = {name: await self.metrics(name) for name in names}
        return [name for name, load in loads.items() if load["isthmus_running_requests"]]

    async def quarantined(self, names: Iterable[str]):
        """Pages, over these ranks."""
        return sum([(await self.books(name))["quarantined"] for name in names])

    async def metrics(self, rank):
        return await scrape(self.rank(rank).metrics_port)

    async def books(self, rank):
        """Pages by state. They add up whenever one looks."""
        metrics = await self.metrics(rank)
        states = ("free", "cached", "locked", "private", "quarantined")
        books = {state: metrics[f"isthmus_kv_pages{{{state}}}"] for state in states}
        assert sum(books.values()) == self._kv_pages, (rank, books)
        return books

    async def assert_nothing_held(self, ranks=None):
        """No page is held, no router has a request in flight, nobody has failed in a way unforeseen."""
        for rank in ranks or self.rank_names:
            await until(lambda r=rank: self._holds_nothing(r), f"{rank} holds nothing")
        for index in range(self.shape.routers):
            if self._router_lives(index):
                newest = self.events("router_ready", self.router_name(index))[-1]
                port = int(newest.fields["metrics_port"])
                await until(lambda p=port: _idle(p), f"router {index} has nothing in flight")
        assert not self.events("kv_digest_mismatch")
        tracebacks = [line for line in self.other_lines if "Traceback" in line]
        assert not tracebacks, "\n".join(self.other_lines)

    async def _holds_nothing(self, rank):
        books = await self.books(rank)
        load = await self.metrics(rank)
        held = books["locked"] + books["private"] + books["quarantined"]
        return held + load["isthmus_running_requests"] + load["isthmus_waiting_requests"] == 0


class Stream:
    """One request that runs; `tokens` grow."""

    def __init__(self, ids, max_tokens, call):
        self.tokens, self.finish = [], None
        self._expected = continuation(ids, max_tokens)
        self._call = call
        self._task = asyncio.create_task(self._read())

    async def _read(self):
        async for response in self._call:
            self.tokens.extend(response.token_ids)
            if response.HasField("finish"):
                self.finish = response.finish

    async def has(self, num_tokens):
        await until(lambda: len(self.tokens) >= num_tokens or self._task.done(), f"{num_tokens} tokens")
        if len(self.tokens) < num_tokens:
            self._task.result()
            raise AssertionError(f"the stream ended after {len(self.tokens)} tokens")

    async def exact(self):
        """The Finish of a stream that ends as it should."""
        async with asyncio.timeout(LONG_S):
            await self._task
        assert self.tokens == self._expected
        assert self.finish is not None
        return self.finish

    async def ended(self):
        """None, or the error; what came up to it was right."""
        async with asyncio.timeout(LONG_S):
            await asyncio.wait([self._task])
        error = self._task.exception()
        assert self.tokens == self._expected[: len(self.tokens)]
        assert error is not None or self.tokens == self._expected
        return error


async def scrape(port):
    """Values by name, or by name{label value}; without the labels that say whose they are."""
    url = f"http://127.0.0.1:{port}/metrics"
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    samples = [s for family in text_string_to_metric_families(body) for s in family.samples]
    return {sample.name + _label_values(sample): sample.value for sample in samples}


def _label_values(sample):
    whose = ("isthmus_cluster", "role", "worker", "rank", "model")
    values = [value for name, value in sample.labels.items() if name not in whose]
    return f"{{{','.join(values)}}}" if values else ""


async def _idle(port):
    return (await scrape(port))["isthmus_router_running_requests"] == 0
