"""One suite for every transport, within one process and between two; and what NIXL does over TCP."""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import services
from services.kv.transfer_plan import PageMove
from services.transfer.base import Unsettled
from services.transfer.choose import open_transport
from services.values.errors import ConfigError, PeerFailed, ProtocolError

NUM_PAGES, PAGE_BYTES = 2500, 512
SLOW_NETWORK = Path(__file__).parent / "slow_network.py"


class SameProcess:
    """The receiving end beside the sending one."""

    def __init__(self, name, pool):
        self._pool, self._transport = pool, open_transport(name)
        self._transport.register(pool.memory, pool.page_bytes)
        self.metadata, self.memory = self._transport.metadata(), pool.memory

    def snapshot(self):
        return self._pool.snapshot()

    def close(self):
        self._transport.close()


@pytest.fixture(scope="module")
def source(make_pool):
    return make_pool(NUM_PAGES, PAGE_BYTES, seed=1)


@pytest.fixture(scope="module")
def senders(source):
    """One sending transport of each name, made when first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def sender(name):
            transport = open_transport(name)
            transport.register(source.memory, PAGE_BYTES)
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
def target(case, make_pool, spawn_passive_rank):
    name, place = case
    if place == "same process":
        target = SameProcess(name, make_pool(NUM_PAGES, PAGE_BYTES, seed=2))
    else:
        target = spawn_passive_rank(name, NUM_PAGES, PAGE_BYTES, seed=2)
    yield target
    target.close()


@pytest.fixture
def peer(transport, target):
    peer = transport.add_peer(target.metadata, target.memory)
    yield peer
    transport.remove_peer(peer)


def finish(write):
    deadline_s = time.monotonic() + 20
    while not write.poll():
        assert time.monotonic() < deadline_s, "the write never landed"
    write.release()


def copied(source, target_pages, moves):
    """What a dumb copy gives."""
    for move in moves:
        for i in range(move.num_pages):
            target_pages[move.target_page + i] = source.pages[move.source_page + i]
    return target_pages


def test_bytes_arrive_where_they_should_and_nowhere_else(transport, source, target, peer):
    moves = [PageMove(3, 7, 5), PageMove(NUM_PAGES - 1, 0, 1), PageMove(40, NUM_PAGES - 2, 2)]
    expected = copied(source, target.snapshot().copy(), moves)

    write = transport.write(peer, moves)

    assert write.size_bytes == 8 * PAGE_BYTES
    finish(write)
    assert (target.snapshot() == expected).all()


def test_more_descriptors_than_one_system_call_takes(transport, source, target, peer):
    rng = random.Random(5)
    sources, targets = rng.sample(range(NUM_PAGES), 2100), rng.sample(range(NUM_PAGES), 2100)
    moves = [PageMove(s, t, 1) for s, t in zip(sources, targets, strict=True)]
    expected = copied(source, target.snapshot().copy(), moves)

    finish(transport.write(peer, moves))

    assert (target.snapshot() == expected).all()


def test_what_is_not_a_move_is_refused_and_changes_nothing(transport, target, peer):
    before = target.snapshot()
    for moves in (
        [],
        [PageMove(0, 0, 1), PageMove(NUM_PAGES - 1, 0, 2)],
        [PageMove(0, NUM_PAGES, 1)],
        [PageMove(0, -1, 1)],
        [PageMove(0, 0, 0)],
    ):
        with pytest.raises(ProtocolError):
            transport.write(peer, moves)
    assert (target.snapshot() == before).all()


def test_adding_a_peer_again_is_free_and_a_removed_one_is_unknown(transport, target, peer):
    assert transport.add_peer(target.metadata, target.memory) == peer
    transport.remove_peer(peer)
    transport.remove_peer(peer)
    with pytest.raises(PeerFailed):
        transport.write(peer, [PageMove(0, 0, 1)])

    again = transport.add_peer(target.metadata, target.memory)
    finish(transport.write(again, [PageMove(0, 0, 1)]))


def test_metadata_of_nobody_is_refused(transport, source):
    for metadata in (b"", b"junk", b"[1]", b'{"pid": "x"}'):
        with pytest.raises(PeerFailed):
            transport.add_peer(metadata, source.memory)


@pytest.mark.parametrize("case", OTHER_PROCESS, indirect=True, ids=" ".join)
def test_a_killed_peer_fails_the_write(transport, target):
    """The last one to use the other process."""
    peer = transport.add_peer(target.metadata, target.memory)
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
def test_nixl_over_tcp_neither_leaks_a_write_nor_hangs_on_a_dead_peer():
    env = {**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": str(Path(services.__file__).parents[1])}
    command = [sys.executable, str(SLOW_NETWORK)]

    output = subprocess.run(command, env=env, capture_output=True, timeout=60, check=True).stdout

    seen = json.loads(output.splitlines()[-1])
    assert seen["under_way"], "the write was over at once: this test shows nothing"
    assert seen["landed"]
    assert seen["failure"]
