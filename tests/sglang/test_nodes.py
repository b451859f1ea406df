"""The services of a worker's nodes talk; test_tensor_parallel.py has two nodes with real SGLang."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import pytest_asyncio

from engine.pair import FAKE
from engine.sglang.settings import sglang_settings
from services.engine.sglang import reports
from services.engine.sglang.reports import ORDERS, Abort, Beat, Incarnation, Joining
from services.engine.sglang.service import nodes
from services.engine.sglang.service.nodes import NodeDoor, _Joined, _relay
from services.engine.sglang.service.process_connections import Process
from services.engine.sglang.service.sglang_settings import Nodes
from services.host.ports import free_ports, host_port
from services.net import channels
from services.values.errors import ConfigError, Unavailable

INCARNATION = Incarnation("w", [1 << 63], 7)


class First:
    """The first node of two, and what its worker hears."""

    def __init__(self):
        self.heard, self.sends, self.unreadable, self.ends = asyncio.Queue(), [], [], 0
        self.nodes = Nodes(2, 0, "127.0.0.1", free_ports("127.0.0.1", 1)[0])
        process = partial(Process, self.take, self.unreadable.append, self.ended)
        self.door = NodeDoor(self.nodes, INCARNATION, process, self.ended)

    def take(self, report, send):
        self.sends.append(send)
        self.heard.put_nowait(report)

    def ended(self):
        self.ends += 1

    async def until_ended(self, times):
        async with asyncio.timeout(10):
            while self.ends < times:
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def first():
    first = First()
    await first.door.open(FAKE)
    yield first
    await first.door.close()


@pytest_asyncio.fixture
async def channel(first):
    async with channels.open_channel(host_port("127.0.0.1", first.nodes.port)) as channel:
        yield channel


async def joined(channel, rank=1, fingerprint=7):
    """A node that asks to follow, once it is answered, and its call."""
    joining = reports.encode(Joining(rank, fingerprint))
    call = channel.unary_stream("/isthmus.sglang.Nodes/Join")(joining)
    node = _Joined(call)
    async with asyncio.timeout(10):
        await asyncio.wait(
            [asyncio.create_task(event.wait()) for event in (node.known, node.left)],
            return_when=asyncio.FIRST_COMPLETED,
        )
    return node, call


async def test_who_follows_learns_the_worker_and_its_end_is_the_workers(first, channel):
    node, call = await joined(channel)
    assert node.incarnation == INCARNATION and not first.ends
    call.cancel()
    await first.until_ended(1)


async def test_who_cannot_follow_is_told_why(first, channel):
    await joined(channel)
    for rank, fingerprint, error, why in [
        (1, 8, ConfigError, "node 1 has another checkpoint"),
        (2, 7, ConfigError, "there is no node 2"),
        (0, 7, ConfigError, "there is no node 0"),
        (1, 7, Unavailable, "node 1 is here already"),
    ]:
        node, _ = await joined(channel, rank, fingerprint)
        assert type(node.error) is error and why in str(node.error)
    assert not first.ends


async def test_an_end_in_order_is_known_as_one(first, channel):
    node, _ = await joined(channel)
    await first.door.close()
    async with asyncio.timeout(10):
        await node.left.wait()
    assert node.is_done and not first.ends


class Part:
    """Another node's part of SGLang, of which nothing runs."""

    def __init__(self, settings):
        self.fingerprint, self.ended, self.started, self.stops = 7, asyncio.Event(), asyncio.Event(), []

    async def command(self, folder, port, incarnation, reports_path):
        assert incarnation == INCARNATION
        return (self,)

    async def start(self):
        self.started.set()

    async def stop(self, in_order):
        self.stops.append(in_order)

    def note_tree(self):
        pass


@pytest_asyncio.fixture
async def follower(first, checkpoint, monkeypatch):
    """One that follows, its part, and what tells it to stop."""
    monkeypatch.setattr(nodes, "Launch", Part)
    monkeypatch.setattr(nodes, "SglangProcess", lambda part: part)
    made = nodes.Follower(sglang_settings(checkpoint), replace(first.nodes, rank=1))
    stopping = asyncio.Event()
    running = asyncio.create_task(made.run(stopping, lambda: None, grace_s=20))
    async with asyncio.timeout(10):
        await made._launch.started.wait()
    yield running, made._launch, stopping
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_who_is_told_to_stop_first_waits_for_the_first_node(first, follower):
    """The first node drains meanwhile, for which it needs every part."""
    running, part, stopping = follower
    stopping.set()
    done, _ = await asyncio.wait([running], timeout=0.3)
    assert not done and not part.stops
    await first.door.close()
    await asyncio.wait_for(running, 10)
    assert part.stops == [True]


async def test_a_part_that_ends_ends_its_service_and_the_worker(first, follower):
    running, part, _ = follower
    part.ended.set()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(running, 10)
    assert part.stops == [False]
    await first.until_ended(1)


async def test_a_first_node_that_is_gone_takes_the_others_with_it(first, follower):
    running, part, _ = follower
    await first.door._server.stop()
    with pytest.raises(Unavailable, match="has ended: "):
        await asyncio.wait_for(running, 10)
    assert part.stops == [False]


async def test_a_process_elsewhere_is_heard_and_ordered_as_one_here(first, channel, tmp_path):
    path = str(tmp_path / "reports")
    relay = await asyncio.start_unix_server(partial(_relay, channel), path)
    reader, writer = await asyncio.open_unix_connection(path)
    long = "x" * (3 << 20)  # more than a piece
    for report in (Beat(5, "second"), Beat(6, long)):
        writer.write(reports.encode(report))
        assert await asyncio.wait_for(first.heard.get(), 10) == report
    first.sends[0](Abort(long))
    line = b""
    while not line.endswith(b"\n"):
        line += await asyncio.wait_for(reader.read(1 << 20), 10)
    assert reports.decode(line, ORDERS) == Abort(long)
    writer.close()
    await first.until_ended(1)
    assert not first.unreadable
    relay.close()


async def test_who_says_nothing_ends_nothing(first, channel):
    call = channel.stream_stream("/isthmus.sglang.Nodes/Report")()
    await call.done_writing()
    assert [piece async for piece in call] == []
    assert not first.ends
