"""The router's ear at a prefill rank, and the rank's mouth."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from services.net import servers
from services.prefill import prefill_service as prefill_server
from services.prefill.prefill_service import PrefillService
from services.router.connections import rank_health
from services.router.connections.rank_health import PrefillWatch
from services.values.rank import Generation, RankAddress, RankId
from services.values.rank_reports import RankLoad
from services.wire.isthmus.v1 import prefill_pb2_grpc

RANK = RankId("prefill", 0, Generation(7))
BUSY = RankLoad(pending_tokens=500, waiting=2)


class Engine:
    """All that WatchLoad asks of one."""

    def __init__(self):
        self.now = BUSY

    def load(self):
        return self.now


class Heard:
    def __init__(self):
        self.loads, self.losses, self.silences = [], 0, 0
        self._news = asyncio.Event()

    def load(self, load):
        self.loads.append(load)
        self._news.set()

    def lost(self):
        self.losses += 1
        self._news.set()

    def silent(self):
        self.silences += 1
        self._news.set()

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def watched(servicer, incarnation=RANK):
    def register(server):
        if servicer is not None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)

    server = await servers.open_server("127.0.0.1:0", register, [])
    heard = Heard()
    address = RankAddress(incarnation, f"127.0.0.1:{server.port}")
    watch = PrefillWatch(address, None, heard.load, heard.lost, heard.silent)
    try:
        yield heard, server
    finally:
        await watch.close()
        await server.stop(0)


async def test_a_router_hears_every_change_and_silence_is_broken():
    engine = Engine()
    service = PrefillService(engine, RANK, None)
    async with watched(service) as (heard, _):
        await heard.until(lambda: len(heard.loads) >= 2)  # nothing has changed, and it reports all the same
        assert {load.pending_tokens for load in heard.loads} == {500}
        engine.now = replace(BUSY, pending_tokens=9, waiting=0)
        await heard.until(lambda: heard.loads[-1].pending_tokens == 9)
        service.intake.draining = True
        await heard.until(lambda: heard.loads[-1].draining)
        assert heard.losses == 0


async def test_another_life_is_not_listened_to():
    async with watched(PrefillService(Engine(), RANK, None), RankId("prefill", 0, Generation(8))) as (
        heard,
        _,
    ):
        await heard.until(lambda: heard.losses >= 2)
        assert heard.loads == [] and heard.silences == 0


async def test_a_rank_that_comes_back_is_heard_again(monkeypatch):
    monkeypatch.setattr(rank_health, "_LONGEST_RETRY_S", 0.2)
    service = PrefillService(Engine(), RANK, None)
    async with watched(service) as (heard, server):
        await heard.until(lambda: heard.loads)
        await server.stop(0)
        await heard.until(lambda: heard.losses >= 1)
        assert heard.silences == 0  # it is gone, which shows in a request at once
        again = await servers.open_server(
            f"127.0.0.1:{server.port}",
            lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server),
            [],
        )
        heard.loads.clear()
        await heard.until(lambda: heard.loads)
        await again.stop(0)


class Muted(PrefillService):
    """Reports while it `speaks`."""

    def __init__(self):
        super().__init__(Engine(), RANK, None)
        self.speaks = asyncio.Event()

    async def WatchLoad(self, request, context):
        async for response in super().WatchLoad(request, context):
            await self.speaks.wait()
            yield response


SILENCE_S = 0.4  # 20 ticks


@pytest.fixture
def soon_silent(monkeypatch):
    monkeypatch.setattr(rank_health, "_TICK_S", 0.02)
    monkeypatch.setattr(rank_health, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(rank_health, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(rank_health, "_SILENT_RETRY_S", 0.02)
    monkeypatch.setattr(rank_health, "_LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(prefill_server, "_TICK_S", 0.02)


@pytest.mark.long
async def test_a_rank_that_falls_silent_is_told_of_once_until_it_speaks_again(soon_silent, caplog):
    service = Muted()
    service.speaks.set()
    async with watched(service) as (heard, _):
        for silence in (1, 2):
            heard.loads.clear()
            await heard.until(lambda: heard.loads)
            service.speaks.clear()
            losses = heard.losses
            await heard.until(lambda before=losses: heard.losses >= before + 2)
            assert heard.silences == silence
            service.speaks.set()
    assert "prefill_rank_silent rank=prefill/0" in caplog.text


@pytest.mark.long
async def test_who_never_speaks_is_not_called_silent(soon_silent, subtests):
    with subtests.test("a rank that never spoke is not called silent"):
        async with watched(Muted()) as (heard, _):
            await heard.until(lambda: heard.losses >= 2)
            assert (heard.loads, heard.silences) == ([], 0)
    with subtests.test("an older rank that does not know the call is no error"):
        async with watched(None) as (heard, _):
            await heard.until(lambda: heard.losses >= 2)
            assert heard.loads == []


async def test_a_router_that_did_not_run_has_not_listened(soon_silent):
    async with watched(PrefillService(Engine(), RANK, None)) as (heard, _):
        await heard.until(lambda: heard.loads)
        time.sleep(1.2 * SILENCE_S)  # the loop stands still
        heard.loads.clear()
        await heard.until(lambda: heard.loads)
        assert (heard.losses, heard.silences) == (0, 0)
