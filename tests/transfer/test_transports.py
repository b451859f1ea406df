"""One suite for every transport, within one process and between two; and what NIXL does over TCP."""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import services
from services.kv.transfer_plan import PageMove
from services.transfer.open_transport import open_transport
from services.transfer.transport import Unsettled
from services.values.errors import ConfigError, PeerFailed, ProtocolError

NUM_PAGES, PAGE_BYTES = 2500, 512
UNIT_BYTES = (PAGE_BYTES, 384, 5000)
SHAPES = tuple(zip((NUM_PAGES, 300, 9), UNIT_BYTES, strict=True))  # pages, pages of a window, slots
SLOW_NETWORK = Path(__file__).parent / "slow_network.py"


class SameProcess:
    """The receiving end beside the sending one."""

    def __init__(self, name, pools):
        self._pools, self._transport = pools, open_transport(name)
        self.memories = [pool.memory for pool in pools]
        self._transport.register(self.memories, UNIT_BYTES)
        self.metadata = self._transport.metadata()

    def snapshot(self):
        return [pool.snapshot() for pool in self._pools]

    def close(self):
        self._transport.close()


@pytest.fixture(scope="module")
def make_pools(make_pool):
    return lambda seed: [make_pool(*shape, seed=seed + i) for i, shape in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def source(make_pools):
    return make_pools(seed=1)


@pytest.fixture(scope="module")
def senders(source):
    """One sending transport of each name, made when first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def sender(name):
            transport = open_transport(name)
            transport.register([pool.memory for pool in source], UNIT_BYTES)
            stack.callback(transport.close)
            return transport

        yield sender


def with_nixl(place):
    return pytest.param(("nixl", place), marks=pytest.mark.nixl)


OTHER_PROCESS = [("local", "other process"), with_nixl("other process")]
CASES = [("local", "same process"), with_nixl("same process"), *OTHER_PROCESS]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request):
    return request.param


@pytest.fixture
def transport(senders, case):
    return senders(case[0])


@pytest.fixture(scope="module")
def target(case, make_pools, spawn_passive_rank):
    name, place = case
    if place == "same process":
        target = SameProcess(name, make_pools(seed=11))
    else:
        target = spawn_passive_rank(name, *SHAPES, seed=2)
    yield target
    target.close()


@pytest.fixture
def peer(transport, target):
    peer = transport.add_peer(target.metadata, target.memories)
    yield peer
    transport.remove_peer(peer)


def finish(write):
    deadline_s = time.monotonic() + 20
    while not write.poll():
        assert time.monotonic() < deadline_s, "the write never landed"
    write.release()


def copied(source, pools, moves):
    """What a dumb copy gives."""
    expected = [pool.copy() for pool in pools]
    for move in moves:
        for i in range(move.num_pages):
            expected[move.group][move.target_page + i] = source[move.group].pages[move.source_page + i]
    return expected


def same(pools, others):
    return all((pool == other).all() for pool, other in zip(pools, others, strict=True))


def test_bytes_arrive_where_they_should_and_nowhere_else(transport, source, target, peer):
    moves = [PageMove(3, 7, 5), PageMove(NUM_PAGES - 1, 0, 1), PageMove(40, NUM_PAGES - 2, 2)]
    expected = copied(source, target.snapshot(), moves)

    write = transport.write(peer, moves)

    assert write.group_bytes == (8 * PAGE_BYTES, 0, 0)
    finish(write)
    assert same(target.snapshot(), expected)


def test_moves_of_several_groups_are_one_write(transport, source, target, peer):
    moves = [
        PageMove(8, 2, 1, group=2),
        PageMove(11, 2400, 4),
        PageMove(290, 0, 10, group=1),
        PageMove(0, 8, 1, group=2),
        PageMove(3, 200, 1, group=1),
    ]
    expected = copied(source, target.snapshot(), moves)

    write = transport.write(peer, moves)

    assert write.group_bytes == (4 * 512, 11 * 384, 2 * 5000)
    finish(write)
    assert same(target.snapshot(), expected)


def test_a_peer_may_lack_the_last_pools(transport, source, target):
    """As one without a draft model does; nothing is written that it lacks."""
    peer = transport.add_peer(target.metadata, target.memories[:2])
    expected = copied(source, target.snapshot(), moves := [PageMove(5, 6, 1), PageMove(2, 9, 3, group=1)])
    write = transport.write(peer, moves)
    assert write.group_bytes == (512, 3 * 384)
    finish(write)
    with pytest.raises(ProtocolError, match="no group of the 2 that both have"):
        transport.write(peer, [*moves, PageMove(0, 1, 1, group=2)])
    assert same(target.snapshot(), expected)
    transport.remove_peer(peer)


def test_peers_are_refused(transport, source, target, subtests):
    first, second, third = target.memories
    for what, memories in (("more pools", [first, second, third, first]), ("no pools", [])):
        with subtests.test(what), pytest.raises(PeerFailed, match="we have 3"):
            transport.add_peer(target.metadata, memories)
    with subtests.test("pools in memory of different kinds"), pytest.raises(PeerFailed, match="DRAM, VRAM"):
        transport.add_peer(target.metadata, [first, replace(second, kind="VRAM"), third])
    for metadata in (b"", b"junk", b"[1]", b'{"pid": "x"}'):
        with subtests.test("metadata of nobody", metadata=metadata), pytest.raises(PeerFailed):
            transport.add_peer(metadata, [pool.memory for pool in source])


@pytest.mark.parametrize("name", ["local", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_own_pools_in_memory_of_different_kinds_are_refused(name, source):
    transport = open_transport(name)
    memories = [pool.memory for pool in source]
    with pytest.raises(ConfigError, match="DRAM, VRAM"):
        transport.register([*memories[:2], replace(memories[2], kind="VRAM")], UNIT_BYTES)
    transport.close()


def test_more_descriptors_than_one_system_call_takes(transport, source, target, peer):
    rng = random.Random(5)
    sources, targets = rng.sample(range(NUM_PAGES), 2100), rng.sample(range(NUM_PAGES), 2100)
    moves = [PageMove(s, t, 1) for s, t in zip(sources, targets, strict=True)]
    expected = copied(source, target.snapshot(), moves)

    finish(transport.write(peer, moves))

    assert same(target.snapshot(), expected)


def test_what_is_not_a_move_is_refused_and_changes_nothing(transport, target, peer):
    before = target.snapshot()
    for moves in (
        [],
        [PageMove(0, 0, 1), PageMove(NUM_PAGES - 1, 0, 2)],
        [PageMove(0, NUM_PAGES, 1)],
        [PageMove(0, -1, 1)],
        [PageMove(0, 0, 0)],
        [PageMove(0, 0, 1), PageMove(0, 0, 1, group=3)],
        [PageMove(0, 0, 1, group=-1)],
        [PageMove(9, 0, 1, group=2)],  # a page of group 0, and none of the slots
        [PageMove(0, 8, 2, group=2)],
        [PageMove(0, 300, 1, group=1), PageMove(0, 300, 1)],
    ):
        with pytest.raises(ProtocolError):
            transport.write(peer, moves)
    assert same(target.snapshot(), before)


def test_adding_a_peer_again_is_free_and_a_removed_one_is_unknown(transport, target, peer):
    assert transport.add_peer(target.metadata, target.memories) == peer
    transport.remove_peer(peer)
    transport.remove_peer(peer)
    with pytest.raises(PeerFailed):
        transport.write(peer, [PageMove(0, 0, 1)])

    again = transport.add_peer(target.metadata, target.memories)
    finish(transport.write(again, [PageMove(0, 0, 1)]))


@pytest.mark.parametrize("case", OTHER_PROCESS, indirect=True, ids=" ".join)
def test_a_killed_peer_fails_the_write(transport, target):
    """The last one to use the other process."""
    peer = transport.add_peer(target.metadata, target.memories)
    finish(transport.write(peer, [PageMove(0, 0, 1)]))
    target.kill()

    with pytest.raises(PeerFailed) as failure:
        finish(transport.write(peer, [PageMove(0, 0, 16)]))

    assert isinstance(failure.value, Unsettled) == (transport.name == "nixl")
    transport.remove_peer(peer)


def test_an_unknown_transport_is_a_config_error():
    with pytest.raises(ConfigError, match="carrier pigeon"):
        open_transport("carrier pigeon")


@pytest.mark.nixl
def test_an_idle_nixl_agent_sleeps(senders):
    """Its progress thread takes a whole core unless told to pause; a busy machine hides that at worst."""
    senders("nixl")
    began_s = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - began_s < 0.05


@pytest.mark.nixl
@pytest.mark.long
def test_nixl_over_tcp_neither_leaks_a_write_nor_hangs_on_a_dead_peer():
    env = {**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": str(Path(services.__file__).parents[1])}
    command = [sys.executable, str(SLOW_NETWORK)]

    output = subprocess.run(command, env=env, capture_output=True, timeout=60, check=True).stdout

    seen = json.loads(output.splitlines()[-1])
    assert seen["under_way"], "the write was over at once: this test shows nothing"
    assert seen["landed"]
    assert seen["failure"]
