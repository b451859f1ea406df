"""Copies between a pool and its tiers, and the thread that runs them."""

import errno
import math
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from services.kv.tiers.books import TierBooks
from services.kv.tiers.slot_spans import SlotSpan
from services.kv.tiers.tier_keys import ROOT
from services.tier import slab as slabs
from services.tier.copies import CopyPace, CopyPiece, HostStaging, LoadCopy, LoadEnd, Move, Store
from services.tier.slab import FileCalls, SlabInUse, SlabShape
from services.tier.thread import TierThread, while_it_answers
from services.values.kv import PageId, PoolMemory

PAGE, SLOT = 64, 128
SHAPE = SlabShape.fitting(b"layout-1", SLOT, 65_536)


class Rank:
    """A pool of 8 pages, and two tiers in memory."""

    def __init__(self, **calls):
        self.pool = np.arange(8 * PAGE, dtype=np.uint8).reshape(8, PAGE)
        self.pool[:] = np.arange(8)[:, None] + 1
        self.slabs = [slabs.open_memory(None, SHAPE, FileCalls(**calls)) for _ in range(2)]
        self.books = TierBooks([SHAPE.num_slots] * 2)
        self.staging = HostStaging(SLOT, [PAGE], [PoolMemory(self.pool.ctypes.data, 8)])
        self.now_s = 0.0

    def run(self, copy):
        copy.run(self.slabs, self.staging)
        return copy

    def store(self, number, pages, parent=ROOT):
        block = self.books.claim(bytes([number]) * 16, parent, number)
        copy = self.run(Store((block, spans(pages))))
        self.books.written(block, copy.digests[0])
        return block

    def load(self, wanted, tokens_per_s=0.0):
        pieces = [
            CopyPiece(block, block.place, block.digest, spans(pages, first)) for block, first, pages in wanted
        ]
        return LoadCopy(pieces, CopyPace(10, tokens_per_s, lambda: self.now_s))

    def close(self):
        for slab in self.slabs:
            slab.close()


def spans(pages, first=0):
    return tuple(SlotSpan(i * PAGE, 0, PageId(page), 0, PAGE) for i, page in enumerate(pages, start=first))


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.close()


def test_what_went_down_comes_up_into_other_pages(rank):
    first, second = rank.store(1, [0, 1]), rank.store(2, [2, 3], bytes([1]) * 16)
    load = rank.run(rank.load([(first, 1, [4]), (second, 0, [5, 6])]))  # page 0 of the first is here already
    assert (load.end, load.num_done, dict(load.read_bytes)) == (LoadEnd.WHOLE, 2, {0: 2 * SLOT})
    assert rank.pool[:, 0].tolist() == [1, 2, 3, 4, 2, 3, 4, 8]
    assert rank.books.begin_move(0) is second
    move = rank.run(Move(second))
    rank.books.moved(second, good=move.is_done)
    rank.pool[5:7] = 0
    assert rank.run(rank.load([(second, 0, [5, 6])])).end is LoadEnd.WHOLE
    assert (second.place.tier, rank.pool[:, 0].tolist()) == (1, [1, 2, 3, 4, 2, 3, 4, 8])


def test_nothing_of_a_slot_whose_digest_differs_comes_into_a_page(rank):
    first, second = rank.store(1, [0, 1]), rank.store(2, [2, 3], bytes([1]) * 16)
    os.pwrite(rank.slabs[0]._fd, b"\xff", SHAPE.slots_at + second.place.slot * SLOT + 70)
    load = rank.run(rank.load([(first, 0, [4, 5]), (second, 0, [6, 7])]))
    assert (load.end, load.num_done) == (LoadEnd.CORRUPT, 1)
    assert rank.pool[:, 0].tolist() == [1, 2, 3, 4, 1, 2, 7, 8]
    assert rank.books.begin_move(0) is second
    assert not rank.run(Move(second)).is_done, "what is corrupt would have been carried on"


def test_a_read_that_fails_is_noted_and_one_that_got_slow_ends():
    calls = iter([None, None, OSError(errno.EIO, "I/O error")])

    def failing(fd, buffers, at):
        if len(buffers[0]) == SLOT:
            if (error := next(calls)) is not None:
                raise error
            rank.now_s += 1.0
        return os.preadv(fd, buffers, at)

    rank = Rank(pread=failing)
    blocks = [rank.store(1, [0, 1]), rank.store(2, [2, 3], bytes([1]) * 16)]
    wanted = [(blocks[0], 0, [4, 5]), (blocks[1], 0, [6, 7])]
    slow = rank.run(rank.load(wanted, tokens_per_s=11.0))  # 10 tokens a second are read
    assert (slow.end, slow.num_done) == (LoadEnd.SLOW, 1)
    failed = rank.run(rank.load(wanted, tokens_per_s=9.0))
    assert (failed.end, failed.num_done, failed.error.errno) == (LoadEnd.FAILED, 1, errno.EIO)
    rank.close()


def test_a_copy_that_was_stopped_touches_no_page(rank):
    block = rank.store(1, [0, 1])
    load = rank.load([(block, 0, [4, 5])])
    load.stop()
    assert (rank.run(load).end, load.num_done) == (LoadEnd.STOPPED, 0)
    claimed = rank.books.claim(bytes([2]) * 16, ROOT, 2)
    store = Store((claimed, spans([2, 3])))
    store.stop()
    assert rank.run(store).digests == []
    assert rank.pool[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_disk_that_never_answers_holds_up_nobody():
    answers, asked = threading.Event(), threading.Event()

    def hanging(fd, buffers, at):
        if len(buffers[0]) == SLOT:
            asked.set()
            answers.wait()
        return os.preadv(fd, buffers, at)

    rank = Rank(pread=hanging)
    block = rank.store(1, [0, 1])
    ended = []
    thread = TierThread(rank.slabs, rank.staging, ended.append)
    load, behind = rank.load([(block, 0, [4, 5])]), rank.load([(block, 0, [6, 7])])
    assert thread.submit(load) and thread.submit(behind)
    asked.wait()
    load.stop()
    thread.stop(patience_s=0.01)
    assert "hanging" in thread.stack() and not thread.submit(behind)
    rank.pool[4:6] = 99  # somebody else's by now
    answers.set()
    thread._thread.join()
    assert (ended, load.end, rank.pool[4:6, 0].tolist()) == ([load], LoadEnd.STOPPED, [99, 99])
    rank.close()


def test_reads_go_before_writes_and_the_queue_is_bounded():
    rank = Rank()
    block, ended, go = rank.store(1, [0, 1]), [], threading.Event()

    def done(copy):
        ended.append(copy)
        go.wait()

    thread = TierThread(rank.slabs, rank.staging, done)
    stores = [Store((rank.books.claim(bytes([9, n]) * 8, ROOT, 0), spans([0, 1]))) for n in range(80)]
    taken = [store for store in stores if thread.submit(store)]
    assert 64 <= len(taken) <= 65  # one may be running
    load = rank.load([(block, 0, [4, 5])])
    assert thread.submit(load)
    go.set()
    thread.submit(load)
    while thread.num_writes:
        pass
    thread.stop(patience_s=5)
    assert ended.index(load) <= 2


def test_work_may_take_as_long_as_the_system_answers(tmp_path):
    shape = SlabShape(b"layout-1", SLOT, 8)

    def slowly(fd, start, size):
        for at in range(0, size, 400):
            calls.pread(fd, [bytearray(1)], at)
            time.sleep(0.02)

    def opened(noted):
        nonlocal calls
        calls = noted
        return slabs.open_file(tmp_path, "d.0", shape, replace(noted, allocate=slowly))

    calls = None
    began = time.monotonic()
    while_it_answers(opened, FileCalls(), 0.3, None).close()
    assert time.monotonic() - began > 0.3

    def refusing(calls):
        raise SlabInUse("by another")

    with pytest.raises(SlabInUse):
        while_it_answers(refusing, FileCalls(), math.inf, None)
