"""Slots between pools on the device and a tier in memory: each byte comes back, and no other."""

import random
import time

import pytest
import torch

from engine.torch.copy_queue import Shuffled
from services.engine.torch.pinned_staging import CudaQueue, PinnedStaging
from services.kv.page_digest import digest_of
from services.kv.tiers.books import TierBooks
from services.kv.tiers.slot_spans import SlotSpan, block_spans, part_spans, slot_bytes
from services.kv.tiers.tier_keys import ROOT
from services.tier.copies import CopyPace, CopyPiece, LoadCopy, LoadEnd, Store
from services.tier.slab import FileCalls, SlabShape, open_memory
from services.tier.thread import TierThread
from services.values.kv import DraftKv, GroupKind, KvGroup, KvLayout, PageId

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PAGE, BLOCK, NUM_UNITS = 16, 64, 40
PAGE_BYTES = 256 << 10


def group(kind, unit_bytes, window=0):
    return KvGroup(kind, (0,), 1, 4, "bfloat16", window=window, unit_bytes=unit_bytes)


LAYOUT = KvLayout(
    PAGE,
    PAGE_BYTES,
    1,
    groups=(
        group(GroupKind.FULL_ATTENTION, 0),
        group(GroupKind.SLIDING_WINDOW, 96 << 10, 40),
        group(GroupKind.RECURRENT, (5 << 20) + 192),
    ),
    draft=DraftKv(2, group(GroupKind.FULL_ATTENTION, 20 << 10)),
)


def staging(device, size, pools):
    queue = CudaQueue(torch.device(device, 0)) if device == "cuda" else Shuffled()
    return PinnedStaging(size, pools, queue, pinned=device == "cuda")


def pools(device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    kind = {"dtype": torch.uint8, "device": device, "generator": generator}
    made = [torch.randint(0, 256, (NUM_UNITS, size), **kind) for size in LAYOUT.unit_bytes]
    wait_for(device)
    return made


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def test_pages_drafts_tails_and_states_come_back_and_nothing_else_changes(device):
    size = slot_bytes(LAYOUT, BLOCK)
    sources, targets = pools(device, 1), pools(device, 2)
    expected = [pool.cpu() for pool in targets]
    slab, books = open_memory(None, SlabShape(b"layout-1", size, 64), FileCalls()), TierBooks([64])
    down, up = staging(device, size, sources), staging(device, size, targets)
    chance, pieces, key = random.Random(3), [], ROOT
    units = [chance.sample(range(NUM_UNITS), count) for count in (24, 3, 1)]
    slots = [block_spans(LAYOUT, BLOCK, units[0][at : at + 4]) for at in range(0, 24, 4)]
    for number, spans in enumerate([*slots, *part_spans(LAYOUT, units[1:], size)], start=1):
        block = books.claim(bytes([number]) * 16, key, number)
        store = Store((block, spans))
        store.run([slab], down)
        assert store.error is None
        books.written(block, store.digests[0])
        pieces.append(CopyPiece(block, block.place, block.digest, spans))
        key = block.key
    load = LoadCopy(pieces, CopyPace(1, 0.0))
    load.run([slab], up)
    assert (load.end, load.num_done) == (LoadEnd.WHOLE, len(pieces))
    for pool, chosen in enumerate([*units, units[0]]):
        expected[pool][chosen] = sources[pool].cpu()[chosen]
    assert [torch.equal(pool.cpu(), want) for pool, want in zip(targets, expected, strict=True)] == [True] * 4
    slab.close()


def test_no_byte_of_a_pages_next_owner_gets_into_a_slot(device):
    """Pages get new content from the compute stream at any moment of their copies down."""
    num_pages, rounds = (32, 60) if device == "cuda" else (8, 30)
    size = num_pages * PAGE_BYTES
    pool = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    slab, books = open_memory(None, SlabShape(b"layout-1", size, 2), FileCalls()), TierBooks([2])
    ended, chance = [], random.Random(4)
    thread = TierThread([slab], staging(device, size, [pool]), ended.append)
    spans = tuple(SlotSpan(i * PAGE_BYTES, 0, PageId(i), 0, PAGE_BYTES) for i in range(num_pages))
    num_stored, content = 0, bytearray(size)
    for number in range(rounds):
        pool.fill_(number)
        wait_for(device)
        block = books.claim(bytes([number]) * 16, ROOT, number + 1)
        store = Store((block, spans))
        thread.submit(store)
        time.sleep(chance.uniform(0, 0.02))
        store.discard()
        pool.fill_(255)
        wait_for(device)
        while len(ended) <= number:
            time.sleep(0.001)
        if store.digests:
            num_stored += 1
            slab.read(block.place.slot, memoryview(content))
            assert store.digests == [digest_of(memoryview(content))] and set(content) == {number}
            books.written(block, store.digests[0])
            books.drop(block)
        else:
            books.write_failed(block)
    thread.stop(10)
    print(f"{num_stored} of {rounds} were stored before their pages changed")
