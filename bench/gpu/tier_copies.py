"""Slots of a tier in memory go to and from a pool on the device, as a rank's tier thread moves them.

copied       between pages and pinned memory alone, each page by itself, neighbours nowhere
whole        between the device and pinned memory in one copy: what the bus does at most
stored       copied, its digest computed, written into the tier's slot
loaded       the slot read, its digest compared, copied
a product    of two matrices on the engine's stream, alone and beside slots that are copied
"""

import threading
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from bench.engine import seconds
from bench.gpu.captured import finish
from bench.report import Row
from services.engine.torch.pinned_staging import CopyQueue, CudaQueue, PinnedStaging
from services.kv.tiers.block import Block
from services.kv.tiers.books import TierBooks
from services.kv.tiers.slot_spans import SlotSpan
from services.kv.tiers.tier_keys import ROOT
from services.tier.copies import CopyPace, CopyPiece, LoadCopy, LoadEnd, Store
from services.tier.slab import FileCalls, Slab, SlabShape, open_memory
from services.values.kv import PageId

_TIMED, _WARM_UPS = 9, 2
_ON_CUDA = ((128 << 10, 8 << 20), (2 << 20, 8 << 20), (2 << 20, 64 << 20))  # a page's bytes, a slot's
_ON_CPU = ((4 << 10, 64 << 10),)


class AtOnce:
    """A CPU's copies are over when they have begun."""

    def begin(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait(self) -> None:
        """Wait for nothing."""


class Tier:
    """A pool of twice as many pages as a slot has, of which every second one is in it, and a tier."""

    def __init__(self, page_bytes: int, slot_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.num_pages = slot_bytes // page_bytes
        kind = {"dtype": torch.uint8, "device": device}
        self.pool = torch.randint(0, 256, (2 * self.num_pages, page_bytes), **kind)
        finish(device)
        queue: CopyQueue = CudaQueue(device) if on_cuda else AtOnce()
        self.queue, self.pinned = queue, torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self.staging = PinnedStaging(slot_bytes, [self.pool], queue, pinned=on_cuda)
        shape = SlabShape(b"layout-1", slot_bytes, 4)
        self.slab: Slab = open_memory(None, shape, FileCalls())
        self.spans = tuple(
            SlotSpan(i * page_bytes, 0, PageId(2 * i), 0, page_bytes) for i in range(self.num_pages)
        )
        block = TierBooks([4]).claim(bytes(16), ROOT, 1)
        assert block is not None
        self.block: Block = block

    def whole(self, *, up: bool) -> None:
        on_device = self.pool[: self.num_pages].view(-1)
        self.queue.begin(*((on_device, self.pinned) if up else (self.pinned, on_device)))
        self.queue.wait()

    def store(self) -> None:
        store = Store((self.block, self.spans))
        store.run([self.slab], self.staging)
        assert store.error is None, store.error
        [self.block.digest] = store.digests

    def load(self) -> None:
        load = LoadCopy(
            [CopyPiece(self.block, self.block.place, self.block.digest, self.spans)], CopyPace(1, 0.0)
        )
        load.run([self.slab], self.staging)
        assert load.end is LoadEnd.WHOLE, load.error


def tier_rows(device: torch.device) -> list[Row]:
    rows: list[Row] = []
    for page_bytes, slot_bytes in _ON_CUDA if device.type == "cuda" else _ON_CPU:
        tier = Tier(page_bytes, slot_bytes, device)
        ways: dict[str, Callable[[], object]] = {
            "down, whole": lambda tier=tier: tier.whole(up=False),  # type: ignore[misc]
            "down, copied": lambda tier=tier: tier.staging.take(tier.spans),  # type: ignore[misc]
            "down, stored": tier.store,
            "up, whole": lambda tier=tier: tier.whole(up=True),  # type: ignore[misc]
            "up, loaded": tier.load,
            "up, copied": lambda tier=tier: tier.staging.give(tier.spans),  # type: ignore[misc]
        }
        rows += [_row(what, page_bytes, slot_bytes, _median_s(way)) for what, way in ways.items()]
        rows += _beside(tier, device)
        tier.slab.close()
    return rows


def _beside(tier: Tier, device: torch.device) -> list[Row]:
    """Return how long a step's product takes alone, and while slots are copied one after another."""
    size = 4096 if device.type == "cuda" else 64
    factor = torch.ones(size, size, device=device)

    def product() -> None:
        for _ in range(20):
            torch.mm(factor, factor)
        finish(device)

    alone_s = _median_s(product)
    ended = threading.Event()

    def copying() -> None:
        while not ended.is_set():
            tier.staging.take(tier.spans)
            tier.staging.give(tier.spans)

    thread = threading.Thread(target=copying)
    thread.start()
    try:
        beside_s = _median_s(product)
    finally:
        ended.set()
        thread.join()
    sizes = tier.pool.shape[1], len(tier.staging.bytes)
    return [_row("a product, alone", *sizes, alone_s, moved=0), _row("beside", *sizes, beside_s, moved=0)]


def _median_s(way: Callable[[], object]) -> float:
    for _ in range(_WARM_UPS):
        way()
    return median(seconds(way) for _ in range(_TIMED))


def _row(what: str, page_bytes: int, slot_bytes: int, took_s: float, moved: int | None = None) -> Row:
    num_bytes = slot_bytes if moved is None else moved
    return {
        "what": what,
        "page KiB": page_bytes >> 10,
        "slot MiB": slot_bytes / 2**20,
        "ms": 1e3 * took_s,
        "GB/s": num_bytes / took_s / 1e9 if num_bytes else "",
    }
