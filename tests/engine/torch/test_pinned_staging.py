"""Slots go through staging memory to pools that lie in host memory here: CUDA's stream is a stand-in."""

import errno
import threading
import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.copy_queue import Held, Shuffled
from services.engine.torch.model.kv_groups import State
from services.engine.torch.pinned_staging import PinnedStaging
from services.engine.torch.pools import KvPool, SlotPool
from services.kv.tiers.books import TierBooks
from services.kv.tiers.slot_spans import SlotSpan, block_spans, part_spans, slot_bytes
from services.kv.tiers.tier_keys import ROOT
from services.tier import copies
from services.tier import slab as slabs
from services.tier.copies import CopyPace, CopyPiece, HostStaging, LoadCopy, LoadEnd, Store
from services.tier.slab import FileCalls, SlabShape
from services.tier.thread import TierThread
from services.values.kv import DraftKv, GroupKind, KvGroup, KvLayout, PageId, PoolMemory

NUM_UNITS, PAGE, BLOCK = 12, 4, 8
SHAPE = SlabShape.fitting(b"layout-1", 2 * 64, 65_536)


def content(unit_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(256, (NUM_UNITS, size), dtype=torch.uint8, generator=generator) for size in unit_bytes
    ]


def host_view(layout, size, pools):
    return HostStaging(size, layout.unit_bytes, [PoolMemory(pool.data_ptr(), NUM_UNITS) for pool in pools])


def group(kind, unit_bytes, window=0):
    return KvGroup(kind, (0,), 1, 4, "float32", window=window, unit_bytes=unit_bytes)


@st.composite
def layouts(draw):
    sizes = st.integers(1, 90)
    full = group(GroupKind.FULL_ATTENTION, 0)
    windows = [group(GroupKind.SLIDING_WINDOW, size, 9) for size in draw(st.lists(sizes, max_size=2))]
    states = [group(GroupKind.RECURRENT, size) for size in draw(st.lists(sizes, max_size=1))]
    draft = DraftKv(2, group(GroupKind.FULL_ATTENTION, draw(sizes))) if draw(st.booleans()) else None
    return KvLayout(PAGE, draw(sizes), 1, groups=(full, *windows, *states), draft=draft)


@settings(max_examples=60)
@given(layout=layouts(), data=st.data())
def test_staged_copies_are_those_of_the_host_view(layout, data):
    """Pages and drafts, tails and states: what goes down, and where it comes up again."""
    size = slot_bytes(layout, BLOCK)
    units = st.lists(st.integers(0, NUM_UNITS - 1), unique=True, min_size=2, max_size=6)
    pages = data.draw(units)[:2]
    slots = [block_spans(layout, BLOCK, pages), block_spans(layout, BLOCK, pages[1:], first=1)]
    slots += part_spans(layout, [data.draw(units) for _ in layout.carried], size)
    pools = content(layout.unit_bytes, 1)
    staged = PinnedStaging(size, pools, Shuffled(), pinned=False)
    host = host_view(layout, size, pools)
    for spans in slots:
        staged.bytes[:] = host.bytes[:] = bytes(size)
        staged.take(spans)
        host.take(spans)
        assert staged.bytes == host.bytes
    target, expected = content(layout.unit_bytes, 2), content(layout.unit_bytes, 2)
    staged_to = PinnedStaging(size, target, Shuffled(), pinned=False)
    host_to = host_view(layout, size, expected)
    for spans in slots:
        staged_to.bytes[:] = host_to.bytes[:] = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
        staged_to.give(spans)
        host_to.give(spans)
        assert all(map(torch.equal, target, expected))


def test_a_pools_units_are_its_bytes(subtests):
    """Attention in 8-bit floats, a latent without values, and states."""
    cpu = torch.device("cpu")
    for dtype, v_head_dim in [("float8_e4m3fn", None), ("bfloat16", 0)]:
        kept = KvGroup(GroupKind.FULL_ATTENTION, (0, 1), 1, 4, dtype, v_head_dim=v_head_dim)
        pool = KvPool(kept, num_pages=5, page_size=8, device=cpu)
        with subtests.test("of attention", dtype=dtype):
            assert pool.units.shape == (5, pool.unit_bytes) and pool.units.dtype is torch.uint8
            assert pool.units.data_ptr() == pool.memory.base_address and pool.units.is_contiguous()
    states = SlotPool([State((0, "conv"), (3, 2), torch.float32)], num_slots=4, device=cpu)
    with subtests.test("of states"):
        assert states.units.shape == (4, states.slot_bytes)
        assert states.units.data_ptr() == states.memory.base_address and states.units.is_contiguous()


class Rank:
    """A pool of 8 pages, and a tier in memory whose thread waits for the queue's copies."""

    def __init__(self, queue):
        self.pool = torch.arange(1, 9, dtype=torch.uint8).repeat_interleave(64).view(8, 64)
        self.slab = slabs.open_memory(None, SHAPE, FileCalls())
        self.books = TierBooks([SHAPE.num_slots])
        self.staging = PinnedStaging(128, [self.pool], queue, pinned=False)
        self.ended = []
        self.thread = TierThread([self.slab], self.staging, self.ended.append)

    def store(self, number, pages):
        return Store((self.books.claim(bytes([number]) * 16, ROOT, number), spans(pages)))

    def stored(self, number, pages):
        """Return a block that is in the slab."""
        copy = self.store(number, pages)
        copy.run([self.slab], HostStaging(128, [64], [PoolMemory(self.pool.data_ptr(), 8)]))
        self.books.written(copy.blocks[0], copy.digests[0])
        return copy.blocks[0]

    def load(self, block, pages):
        pieces = [CopyPiece(block, block.place, block.digest, spans(pages))]
        return LoadCopy(pieces, CopyPace(10, 0.0))

    def content(self):
        return self.pool[:, 0].tolist()


def spans(pages):
    return tuple(SlotSpan(i * 64, 0, PageId(page), 0, 64) for i, page in enumerate(pages))


def test_a_page_gets_a_new_owner_while_it_is_copied_out(subtests):
    with subtests.test("the copy is discarded, without waiting, and nothing of it is in the slab"):
        queue = Held()
        rank = Rank(queue)
        store = rank.store(1, [0, 1])
        rank.thread.submit(store)
        queue.asked.wait(30)
        store.discard()  # It returns, though the copy is pending.
        rank.pool[1] = 99
        queue.go.set()
        while not rank.ended:
            time.sleep(0.001)
        assert (store.digests, store.error, rank.slab.record(store.blocks[0].place.slot)) == ([], None, None)
        rank.thread.stop(30)
        assert rank.staging._pools == [], "it keeps the device's memory"
    with subtests.test("one that was copied before is in the slab as it was"):
        rank = Rank(Shuffled())
        write = rank.slab.write

        def late(slot, payload, record):
            store.discard()
            rank.pool[1] = 99
            return write(slot, payload, record)

        rank.slab.write = late
        store = rank.store(1, [0, 1])
        store.run([rank.slab], rank.staging)
        rank.books.written(store.blocks[0], store.digests[0])
        load = rank.load(store.blocks[0], [4, 5])
        load.run([rank.slab], rank.staging)
        assert (load.end, rank.content()) == (LoadEnd.WHOLE, [1, 99, 3, 4, 1, 2, 7, 8])
        rank.thread.stop(30)


def test_whoever_ends_a_read_or_the_rank_waits_for_the_piece_that_is_copied(subtests, monkeypatch):
    monkeypatch.setattr(copies, "_MOST_LOCKED", 64)
    for who, end in [
        ("a read", lambda rank, load: load.stop()),
        ("a rank", lambda rank, load: rank.thread.stop(30)),
    ]:
        with subtests.test(who):
            queue = Held()
            rank = Rank(queue)
            load = rank.load(rank.stored(1, [0, 1]), [4, 5])
            rank.thread.submit(load)
            queue.asked.wait(30)
            ending = threading.Thread(target=end, args=(rank, load))
            ending.start()
            ending.join(0.05)
            assert ending.is_alive(), "its pages would be lent while they are written"
            queue.go.set()
            ending.join(30)
            after = rank.content()
            if rank.thread._thread.is_alive():
                rank.thread.stop(30)
            assert rank.content() == after == [1, 2, 3, 4, 1, 6, 7, 8], "the second piece was copied, too"
            assert (load.end, load.num_done) == (LoadEnd.STOPPED, 0)


class Failing(Shuffled):
    def __init__(self, *, begins):
        super().__init__()
        self.begins = begins

    def begin(self, target, source):
        if len(self.pending) == self.begins:
            raise RuntimeError("an illegal memory access")
        super().begin(target, source)

    def wait(self):
        super().wait()
        if self.begins is None:
            raise RuntimeError("an illegal memory access")


def test_a_copy_that_the_device_fails_is_an_error_of_the_tier(subtests):
    for begins in (1, None):
        with subtests.test("down", begins=begins):
            rank = Rank(Failing(begins=begins))
            store = rank.store(1, [0, 2])
            store.run([rank.slab], rank.staging)
            assert (store.digests, store.error.errno) == ([], errno.EIO)
            assert rank.staging._queue.pending == [], "the first copy is still pending"
            rank.thread.stop(30)
        with subtests.test("up", begins=begins):
            rank = Rank(Failing(begins=begins))
            load = rank.load(rank.stored(1, [0, 1]), [4, 6])
            load.run([rank.slab], rank.staging)
            assert (load.end, load.num_done, load.error.errno) == (LoadEnd.FAILED, 0, errno.EIO)
            assert rank.staging._queue.pending == [], "the first copy is still pending"
            rank.thread.stop(30)
