"""These tests show what only the local transport does: it knows processes, and resumes system calls cut
short."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.transfer_plan import PageMove
from services.transfer import local
from services.transfer.local import LocalTransport
from services.values.errors import ConfigError, PeerFailed
from services.values.kv import PoolMemory


@pytest.fixture
def pair(make_pool):
    source, target = make_pool(8, 64, seed=1), make_pool(8, 64, seed=2)
    sender, receiver = LocalTransport(), LocalTransport()
    sender.register([source.memory], [64])
    receiver.register([target.memory], [64])
    return sender, receiver, source, target


def altered(metadata, **fields):
    return json.dumps(json.loads(metadata) | fields).encode()


def test_a_peer_that_is_not_the_process_it_was_is_refused(subtests, pair):
    for fields, reason in [
        ({"start_ticks": 1}, "is gone"),  # the pid belongs to another process now
        ({"pid": 2**22 + 1}, "is gone"),
        ({"boot_id": "another"}, "another host"),
        ({"pid_namespace": "pid:[1]"}, "another container"),
    ]:
        with subtests.test("a peer that is not the process it was is refused", fields=fields, reason=reason):
            sender, receiver, _, target = pair
            with pytest.raises(PeerFailed, match=reason):
                sender.add_peer(altered(receiver.metadata(), **fields), [target.memory])

    with subtests.test("a pid recycled since is refused"), pytest.MonkeyPatch.context() as monkeypatch:
        sender, receiver, _, target = pair
        peer = sender.add_peer(receiver.metadata(), [target.memory])
        before = target.snapshot()
        monkeypatch.setattr(local, "_start_ticks", lambda pid: 1)

        with pytest.raises(PeerFailed, match="is gone"):
            sender.write(peer, [PageMove(0, 0, 1)])

        assert (target.snapshot() == before).all()


def test_which_memory_is_written(subtests, pair, make_pool):
    with subtests.test("memory that is not there is a peer failure"):
        sender, receiver, _, _ = pair
        peer = sender.add_peer(receiver.metadata(), [PoolMemory(base_address=4096, num_pages=8)])
        with pytest.raises(PeerFailed, match="not mapped"):
            sender.write(peer, [PageMove(0, 0, 1)])

    with subtests.test("vram is refused on either side"):
        sender, receiver, _, target = pair
        vram = PoolMemory(target.memory.base_address, 8, kind="VRAM")
        with pytest.raises(ConfigError, match="VRAM"):
            LocalTransport().register([vram], [64])
        with pytest.raises(PeerFailed, match="VRAM"):
            sender.add_peer(receiver.metadata(), [vram])

    with subtests.test("two pools of one process are two peers"):
        sender, receiver, source, target = pair
        third_pool, third = make_pool(8, 64, seed=3), LocalTransport()
        third.register([third_pool.memory], [64])
        peers = [
            sender.add_peer(r.metadata(), [p.memory]) for r, p in ((receiver, target), (third, third_pool))
        ]
        before = target.snapshot()

        sender.write(peers[1], [PageMove(1, 2, 1)])

        assert (third_pool.pages[2] == source.pages[1]).all()
        assert (target.snapshot() == before).all()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), data=st.data())
def test_a_call_cut_short_goes_on_where_it_stopped(sizes, data):
    """_copy over a kernel that takes as many bytes as it likes, never none."""
    total = sum(sizes)
    source, target = np.arange(total, dtype=np.uint8), np.zeros(total, dtype=np.uint8)
    ends = np.cumsum(sizes)
    rows = np.stack((ends - sizes, sizes), axis=1).astype(np.uint64)  # offsets for addresses

    def write_some(pid, from_rows, to_rows):
        wanted = int(from_rows[:, 1].sum())
        taken = data.draw(st.integers(1, wanted))
        left = taken
        for (read_at, size), (write_at, _) in zip(from_rows.tolist(), to_rows.tolist(), strict=True):
            count = min(size, left)
            target[write_at : write_at + count] = source[read_at : read_at + count]
            left -= count
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_write_once", write_some)
        patch.setattr(local, "_IOV_MAX", 3)
        patch.setattr(local, "_MAX_CALL_BYTES", 50)
        local._copy(0, rows.copy(), rows.copy())

    assert (target == source).all()
