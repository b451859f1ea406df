"""A rank that is to stop, or whose engine dies, before it has ever served."""

import asyncio
import math
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import grpc
import pytest

from services.decode.decode_service import decode_roles
from services.engine.choose import decode_engine
from services.net import channels
from services.prefill.prefill_service import prefill_roles
from services.process import signals
from services.rank import intake
from services.rank import main as rank
from services.rank.intake import Intake
from services.rank.leaving import Leaving
from services.rank.main import RankFailed, own_rank_id, run_ranks
from services.rank.rank_config import RankConfig
from services.rank.rank_metrics import DigestMetrics
from services.rank.rank_role import RankRole, Services
from services.values.errors import ConfigError, Unavailable
from services.values.rank import Role
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

WITHIN_S = 60.0
CONFIG = RankConfig(
    worker="w", engine="fake", model_name="fake", rank_index=0, transport="local", etcd=("127.0.0.1:1",)
)


class Engine:
    """What a fake engine has, but for how it starts and what it comes to."""

    def __init__(self, own_id, loading=None, crash=None):
        self.own_id = own_id
        self.real = decode_engine(CONFIG, own_id)
        self.loading, self.crash, self.hangs = loading, crash or asyncio.Event(), False
        self.life = []

    def __getattr__(self, name):
        return getattr(self.real, name)

    async def start(self):
        self.life.append("starting")
        try:
            if self.loading is not None:
                await self.loading.wait()
            await self.real.start()
        except asyncio.CancelledError:
            self.life.append("undone")
            raise
        self.life.append("started")

    async def stop(self):
        await self.real.stop()
        self.life.append("stopped")

    async def crashed(self):
        await self.crash.wait()
        return self.hangs


async def no_requests(): ...


def role_of(engine):
    def services(registry):
        digests = DigestMetrics(registry)
        return Services(lambda server: None, [], Intake(engine.own_id), digests, no_requests)

    return RankRole(Role.DECODE, engine, services)


def run(own_id, engine, **options):
    return run_ranks([CONFIG], [own_id], [role_of(engine)], **options)


@pytest.fixture
def stopping(monkeypatch):
    """In place of SIGTERM."""
    event = asyncio.Event()
    monkeypatch.setattr(signals, "stop_on_signals", lambda: event)
    return event


async def until(condition):
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_signal_ends_a_start_that_takes_for_ever(stopping):
    own_id = own_rank_id(CONFIG)
    engine = Engine(own_id, loading=asyncio.Event())
    running = asyncio.create_task(run(own_id, engine))
    await until(lambda: engine.life)
    stopping.set()
    async with asyncio.timeout(WITHIN_S):
        await running
    assert engine.life == ["starting", "undone"]


async def die_without_etcd(moment, monkeypatch):
    joining, join = asyncio.Event(), rank._join

    async def note_join(*args):
        joining.set()
        return await join(*args)

    monkeypatch.setattr(rank, "_join", note_join)
    own_id = own_rank_id(CONFIG)
    engine = Engine(own_id)
    running = asyncio.create_task(run(own_id, engine))
    await until(lambda: "started" in engine.life if moment == "started" else joining.is_set())
    engine.crash.set()
    with pytest.raises(RankFailed):
        async with asyncio.timeout(WITHIN_S):
            await running
    assert engine.life == ["starting", "started", "stopped"]


async def test_an_engine_that_dies_while_etcd_is_away_ends_the_rank(stopping, monkeypatch, subtests):
    for moment in ("started", "joining"):
        with subtests.test(moment), monkeypatch.context() as patching:
            stopping.clear()
            await die_without_etcd(moment, patching)


async def end_soon(hangs):
    own_id, told = own_rank_id(CONFIG), []
    engine = Engine(own_id)
    engine.hangs = hangs
    running = asyncio.create_task(run(own_id, engine, end_soon=lambda: told.append(True)))
    await until(lambda: "started" in engine.life)
    engine.crash.set()
    with pytest.raises(RankFailed):
        async with asyncio.timeout(WITHIN_S):
            await running
    assert told == [True] * hangs


async def test_a_rank_with_a_thread_that_hangs_is_to_end_soon(stopping, subtests):
    for hangs in (False, True):
        with subtests.test(hangs=hangs):
            stopping.clear()
            await end_soon(hangs)


async def test_a_start_that_fails_says_why(stopping):
    own_id = own_rank_id(CONFIG)
    engine = Engine(own_id)

    async def fail():
        raise RankFailed("no such model")

    engine.real.start = fail
    with pytest.raises(RankFailed, match="no such model"):
        await run(own_id, engine)


async def test_the_spans_of_all_ranks_of_a_process_go_out_together(stopping, monkeypatch):
    """OpenTelemetry takes one provider: spans of a second rank would go out as those of the first."""
    set_up, shut_down = [], []

    def setup_tracing(process, *settings):
        set_up.append((process.service, process.instance, process.cluster))
        return lambda: shut_down.append(threading.get_ident())

    monkeypatch.setattr(rank.traces, "setup_tracing", setup_tracing)
    configs = [replace(CONFIG, rank_index=index) for index in range(2)]
    own_ids = [own_rank_id(config) for config in configs]
    roles = [role_of(Engine(own_id)) for own_id in own_ids]
    stopping.set()
    await run_ranks(configs, own_ids, roles)
    assert set_up == [("decode", "w", CONFIG.cluster)]
    assert len(shut_down) == 1 and shut_down[0] != threading.get_ident()


async def test_what_a_process_starts_with_is_kept_from_the_garbage_collector(stopping, monkeypatch):
    """Before anybody knows of it, for looking through it once more holds up whoever asks."""
    said, own_id = [], own_rank_id(CONFIG)
    collector = SimpleNamespace(
        collect=partial(said.append, "collect"),
        freeze=partial(said.append, "freeze"),
        get_freeze_count=lambda: said.count("freeze"),
    )

    async def say_draining(draining):
        return True

    async def join(*_):
        said.append("join")
        stopping.set()
        return SimpleNamespace(
            say_draining=say_draining, say_adapters=say_draining, successors=None, others_of_role=None
        )

    monkeypatch.setattr(rank, "gc", collector)
    monkeypatch.setattr(rank, "_join", join)
    await run(own_id, Engine(own_id))
    assert said == ["collect", "freeze", "join"]
    stopping.clear()
    await run(own_id, Engine(own_id))  # As in another role: what is left of the first one is garbage.
    assert said == ["collect", "freeze", "join", "collect", "join"]


class Lives:
    """A rank's lives, of which each joins a cluster that is none."""

    def __init__(self, monkeypatch):
        self.joined, self.successors_asked, self.said = asyncio.Queue(), [], []
        monkeypatch.setattr(rank, "_join", self._join)
        monkeypatch.setattr(intake, "_be_noticed", self._yes)
        self.own_id = own_rank_id(CONFIG)
        notifier = SimpleNamespace(
            beat_until=lambda event: event.wait(),
            waits=lambda: self.said.append("waits"),
            serves=lambda: self.said.append("serves"),
        )
        makers = {Role.DECODE: decode_roles, Role.PREFILL: prefill_roles}
        roles = decode_roles(CONFIG, [self.own_id])
        self.running = asyncio.create_task(run_ranks([CONFIG], [self.own_id], roles, notifier, makers=makers))

    async def _join(self, stack, config, role, address, *_):
        async def successors():
            self.successors_asked.append(role.role)
            return []

        self.joined.put_nowait((role, address))
        return SimpleNamespace(
            say_draining=self._yes,
            say_adapters=self._yes,
            successors=successors,
            others_of_role=self._others,
        )

    async def _yes(self, *_):
        return True

    async def _others(self):
        return ["another"]

    async def turn(self, role, address):
        request = rank_pb2.SetRoleRequest(generation=address.id.generation, role=role, wait_s=0)
        async with channels.open_channel(address.endpoint) as channel:
            await rank_pb2_grpc.RankStub(channel).SetRole(request, timeout=WITHIN_S)


async def test_a_rank_goes_on_in_its_other_role_with_its_core_and_what_etcd_knows_of_it(
    stopping, monkeypatch
):
    rank_lives = Lives(monkeypatch)
    first, address = await rank_lives.joined.get()
    with pytest.raises(grpc.aio.AioRpcError, match="must be prefill or decode; got 'both'"):
        await rank_lives.turn("both", address)
    await rank_lives.turn("prefill", address)
    second, address = await rank_lives.joined.get()
    await rank_lives.turn("decode", address)
    third, address = await rank_lives.joined.get()
    lives = (first, second, third)
    assert [life.role for life in lives] == [Role.DECODE, Role.PREFILL, Role.DECODE]
    assert len({id(life.engine._core) for life in lives}) == len({life.ledgers for life in lives}) == 1
    assert (await third.engine.books()).free == CONFIG.pool_pages
    assert address.id.key == rank_lives.own_id.key and address.id != rank_lives.own_id
    stopping.set()
    async with asyncio.timeout(WITHIN_S):
        await rank_lives.running
    assert rank_lives.said == ["waits", "serves", *["waits", "waits", "serves"] * 2]


async def test_a_rank_that_is_stopped_while_its_role_changes_hands_over_in_its_next_life(
    stopping, monkeypatch
):
    rank_lives = Lives(monkeypatch)
    _, address = await rank_lives.joined.get()
    handed_over = []
    monkeypatch.setattr(Leaving, "begin", lambda leaving: handed_over.append(leaving.address.id.generation))
    await rank_lives.turn("prefill", address)
    stopping.set()
    async with asyncio.timeout(WITHIN_S):
        await rank_lives.running
    second, address = rank_lives.joined.get_nowait()
    assert second.role is Role.PREFILL and handed_over == [address.id.generation]
    assert not second.engine._thread._thread.is_alive()


def test_a_rank_keeps_its_role_where_the_other_one_needs_another_core(subtests):
    for changes, why in [
        ({"engine": "sglang", "model": "m"}, "SGLang's processes start with one"),
        ({"prefill_cache": "off"}, "where --decode-cache and --prefill-cache differ"),
    ]:
        with subtests.test(why), pytest.raises(ConfigError, match=why):
            replace(CONFIG, **changes).check_role_changes()


def test_a_supervisor_is_told_for_how_long_a_rank_may_be_away(subtests, monkeypatch):
    for flag, told in [(None, math.inf), (900.0, 900.0)]:
        with subtests.test(flag=flag, told=told):
            calls = []
            monkeypatch.setattr(rank.log_lines, "log_service", lambda *_: None)
            monkeypatch.setattr(
                rank.supervisor, "run", lambda *arguments, calls=calls: calls.append(arguments) or 0
            )
            with ExitStack() as held:
                rank.supervise(
                    replace(CONFIG, rank_index=None, restart_timeout_s=flag), "services.decode", held
                )
            ((_, _, _, _, timeout_s, *_),) = calls
            assert timeout_s == told


def test_a_supervisor_holds_the_memory_of_each_ranks_tier(monkeypatch):
    calls = []
    monkeypatch.setattr(rank.log_lines, "log_service", lambda *_: None)
    monkeypatch.setattr(rank.supervisor, "run", lambda *arguments: calls.append(arguments) or 0)
    config = replace(CONFIG, rank_index=None, dp_size=2, kv_tier=("memory:1MiB", "/tmp/tier:1GiB"))
    with ExitStack() as held:
        rank.supervise(config, "services.decode", held)
        ((commands, *_, inherited),) = calls
        for command, (fd,) in zip(commands, inherited, strict=True):
            assert f"--kv-tier-fd={fd}" in command
            assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:isthmus-tier")
    assert len({fd for (fd,) in inherited}) == 2
    with pytest.raises(OSError):
        os.fstat(inherited[0][0])


def test_a_tier_that_memory_has_no_room_for_is_refused_before_it_is_taken(monkeypatch):
    ranks = SimpleNamespace(count=2, page_bytes=1, kv_pages=10)
    monkeypatch.setattr(rank, "read_config", lambda model: {})
    monkeypatch.setattr(rank, "ranks_memory", lambda config, model: ranks)
    monkeypatch.setattr(rank.memory, "available_bytes", lambda: 3 << 30)
    monkeypatch.setattr(rank.memory, "total_bytes", lambda: 9 << 30)
    monkeypatch.setattr(rank, "pool_pages", lambda ranks, free_bytes, total_bytes: 10)
    for size, error in (("1GiB", None), ("2GiB", Unavailable), ("5GiB", ConfigError)):
        config = replace(CONFIG, dp_size=2, kv_tier=(f"memory:{size}",))
        if error is None:
            assert rank.with_pool(config).kv_pages == 10
        else:
            with pytest.raises(error, match="--kv-tier"):
                rank.with_pool(config)
