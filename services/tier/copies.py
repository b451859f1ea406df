"""A copy moves blocks from the pool to a slab, back into the pool, or from one slab to the next.

One kind moves none: it has the kernel read blocks from a disk into its page cache, for a later copy.

The tier's thread runs it, and the engine may stop it at any time:

    engine's thread        stop() ......... returns once the copy touches no page of the pool any more
                           discard() ...... returns at once: what it still copies is used no more
    tier's thread    up:   read, compare digests, [lock: copy a piece into pages, unless stopped], and so on
                     down: [lock: copy a block out of its pages], write it unless discarded meanwhile

A copy between a slab and the pool goes through a buffer of the tier's own (Staging), and only the step
between buffer and pool holds the lock. So a disk that never answers blocks no page of the pool, the end of a
read waits at most for a piece, and an eviction for nothing.

Rule 1: bytes of a slot are written to a page only after their digest has been compared.
Rule 2: the copy of a page to a slab is discarded before the page is allocated to another request. Whether it
        was is looked at after the page has been copied, so what is written is what the page had before.
"""

import ctypes
import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol

from services.kv.page_digest import digest_of
from services.kv.tiers.block import Block, Place
from services.kv.tiers.records import Stored
from services.kv.tiers.slot_spans import SlotSpan
from services.kv.tiers.wait_or_cut import Left
from services.tier.shared import SharedFiles, SlotGone
from services.values.kv import PoolMemory

Clock = Callable[[], float]

_MOST_LOCKED = 4 << 20  # Whoever ends a read waits for no more bytes than these.


class TierSlots(Protocol):
    """This is a tier as copies see it: a slab, or the files of other ranks, which are only read."""

    def read(self, slot: int, buffer: memoryview) -> None: ...
    def read_ahead(self, slot: int) -> None: ...
    def write(self, slot: int, payload: memoryview, record: Stored) -> int: ...
    def has_changed(self, slot: int, digest: int) -> bool: ...
    def close(self) -> None: ...


class NoSlots:
    """It stands for a slab that could not be opened yet, of which nobody has a slot."""

    def read(self, slot: int, buffer: memoryview) -> None:
        raise OSError(errno.ENODEV, "the tier is not open")

    def read_ahead(self, slot: int) -> None:
        raise OSError(errno.ENODEV, "the tier is not open")

    def write(self, slot: int, payload: memoryview, record: Stored) -> int:
        raise OSError(errno.ENODEV, "the tier is not open")

    def has_changed(self, slot: int, digest: int) -> bool:
        return False

    def close(self) -> None:
        """Close nothing."""


class Staging(Protocol):
    """A slot's bytes are here on their way between a slab and the pools. Only the tier's thread calls it."""

    @property
    def bytes(self) -> memoryview: ...

    def take(self, spans: Sequence[SlotSpan]) -> None:
        """Copy from the pools. When it returns the bytes are here. Raises OSError."""

    def give(self, spans: Sequence[SlotSpan]) -> None:
        """Copy into the pools. When it returns, or raises OSError, nothing is written there any more."""

    def close(self) -> None:
        """Let the pools go."""


class HostStaging:
    def __init__(self, slot_bytes: int, unit_bytes: Sequence[int], pools: Sequence[PoolMemory]) -> None:
        """`pools` are a rank's, in the order of `KvLayout.unit_bytes`, and all in the host's memory."""
        self._pools = [(pool.base_address, size) for pool, size in zip(pools, unit_bytes, strict=True)]
        buffer = (ctypes.c_char * slot_bytes)()
        self._address = ctypes.addressof(buffer)
        self.bytes = memoryview(buffer).cast("B")

    def take(self, spans: Sequence[SlotSpan]) -> None:
        for span in spans:
            ctypes.memmove(self._address + span.at, self._of(span), span.num_bytes)

    def give(self, spans: Sequence[SlotSpan]) -> None:
        for span in spans:
            ctypes.memmove(self._of(span), self._address + span.at, span.num_bytes)

    def close(self) -> None:
        self._pools = []

    def _of(self, span: SlotSpan) -> int:
        base, unit_bytes = self._pools[span.pool]
        return base + span.unit * unit_bytes + span.start


class Copy:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self.error: OSError | None = None
        self.at_tier: int | None = None  # It reads or writes that tier's slab now, or did so last.

    def stop(self) -> None:
        """Stop the copy; it touches no page of the pool after this returns."""
        self._stopped = True  # It is said before the lock is waited for: the copy goes no further.
        with self._lock:
            pass

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def _with_pool(self, copy: Callable[[], None]) -> bool:
        with self._lock:
            if not self._stopped:
                copy()
            return not self._stopped

    def run(self, slabs: Sequence[TierSlots], staging: Staging) -> None:
        """Do the job. A failure is noted in `error` and never raised."""
        raise NotImplementedError


class Store(Copy):
    """It copies a block from its pages into its slot, or all parts of a checkpoint into theirs, in order.

    `digests` has those of the slots that are written.
    """

    def discard(self) -> None:
        """Have it write no further slot, without waiting: its pages may get other content from now on."""
        self._stopped = True

    def __init__(self, *parts: tuple[Block, Sequence[SlotSpan]]) -> None:
        super().__init__()
        self.blocks = tuple(block for block, _ in parts)
        self.digests: list[int] = []
        self._parts = [(block.place, record_of(block), spans) for block, spans in parts]

    def run(self, slabs: Sequence[TierSlots], staging: Staging) -> None:
        try:
            for place, record, spans in self._parts:
                if not self._with_pool(partial(staging.take, spans)):
                    return
                self.at_tier = place.tier
                self.digests.append(slabs[place.tier].write(place.slot, staging.bytes, record))
        except OSError as error:
            self.error = error


class Move(Copy):
    def __init__(self, block: Block) -> None:
        super().__init__()
        assert block.moves_to is not None
        self.block = block
        self.is_done = False
        self._source, self._target, self._record = block.place, block.moves_to, record_of(block)
        self.source_tier, self.target_tier = self._source.tier, self._target.tier

    @property
    def has_failed_to_read(self) -> bool:
        return not self.is_done and self.at_tier == self.source_tier

    def run(self, slabs: Sequence[TierSlots], staging: Staging) -> None:
        try:
            self.at_tier = self.source_tier
            slabs[self.at_tier].read(self._source.slot, staging.bytes)
            if is_whole(staging.bytes, self._record.digest):
                self.at_tier = self.target_tier
                slabs[self.at_tier].write(self._target.slot, staging.bytes, self._record)
                self.is_done = True
        except OSError as error:
            self.error = error


class ReadAhead(Copy):
    """It has blocks read from files into the kernel's page cache, while a request waits for its turn."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self.places = tuple(places)

    def run(self, slabs: Sequence[TierSlots], staging: Staging) -> None:
        try:
            for place in self.places:
                if self._stopped:
                    return
                self.at_tier = place.tier
                slabs[place.tier].read_ahead(place.slot)
        except SlotGone:
            return  # The read will notice it, too.
        except OSError as error:
            self.error = error


class Look(Copy):
    """It looks what other ranks keep in their files. Sequences wait a moment for it."""

    def __init__(self, shared: SharedFiles, tier: int) -> None:
        super().__init__()
        self.is_over = False
        self.took_s = 0.0
        self.at_tier = tier
        self._shared = shared

    def run(self, slabs: Sequence[TierSlots], staging: Staging) -> None:
        began_s = time.monotonic()
        try:
            self._shared.look()
        except OSError as error:
            self.error = error
        self.took_s = time.monotonic() - began_s


class LoadEnd(Enum):
    WHOLE = "whole"
    STOPPED = "stopped"
    SLOW = "slow"  # To compute the rest takes less time.
    CORRUPT = "corrupt"
    FAILED = "failed"
    GONE = "gone"  # Its owner, another rank, has overwritten it.


@dataclass(frozen=True, slots=True)
class CopyPiece:
    block: Block
    place: Place
    digest: int
    spans: tuple[SlotSpan, ...]


@dataclass(frozen=True, slots=True)
class CopyPace:
    """Reading goes on only while it is faster than computing; each piece saves the computing of `tokens`.

    With `is_whole` the copy saves so many tokens, but only once all of it is there.
    """

    tokens: int
    computed_tokens_per_s: float
    clock: Clock = field(default=time.monotonic)
    is_whole: bool = False


class LoadCopy(Copy):
    """It copies blocks into pages, in order. The first `num_done` of them are complete at any time."""

    def __init__(self, pieces: Sequence[CopyPiece], pace: CopyPace) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        self.num_done = 0
        # The seconds and the bytes are counted by tier.
        self.read_s: dict[int, float] = defaultdict(float)
        self.read_bytes: dict[int, int] = defaultdict(int)
        self.end = LoadEnd.STOPPED
        self._pace = pace

    def run(self, slabs: Sequence[TierSlots], staging: Staging) -> None:
        try:
            self.end = self._run(slabs, staging)
        except SlotGone:
            self.end = LoadEnd.GONE
        except OSError as error:
            self.error, self.end = error, LoadEnd.FAILED

    def _run(self, slabs: Sequence[TierSlots], staging: Staging) -> LoadEnd:
        for piece in self.pieces:
            began_s = self._pace.clock()
            if self._stopped:
                return LoadEnd.STOPPED
            if not self._is_worth_reading():
                return LoadEnd.SLOW
            self.at_tier = piece.place.tier
            slabs[self.at_tier].read(piece.place.slot, staging.bytes)
            if not is_whole(staging.bytes, piece.digest):
                is_gone = slabs[self.at_tier].has_changed(piece.place.slot, piece.digest)
                return LoadEnd.GONE if is_gone else LoadEnd.CORRUPT
            if not self._give(staging, piece.spans):
                return LoadEnd.STOPPED
            self.read_bytes[piece.place.tier] += len(staging.bytes)
            self.read_s[piece.place.tier] += self._pace.clock() - began_s
        return LoadEnd.WHOLE

    def _give(self, staging: Staging, spans: Sequence[SlotSpan]) -> bool:
        *first, last = _batches(spans)
        for batch in first:
            if not self._with_pool(partial(staging.give, batch)):
                return False
        return self._with_pool(partial(self._give_last, staging, last))

    def _give_last(self, staging: Staging, spans: Sequence[SlotSpan]) -> None:
        staging.give(spans)
        self.num_done += 1

    def _is_worth_reading(self) -> bool:
        if self.num_done == 0:
            return True
        pace, left = self._pace, len(self.pieces) - self.num_done
        seconds, tokens = left * sum(self.read_s.values()) / self.num_done, pace.tokens
        tokens *= 1 if pace.is_whole else left
        return Left(seconds, tokens, pace.computed_tokens_per_s).is_worth_reading


def _batches(spans: Sequence[SlotSpan]) -> list[list[SlotSpan]]:
    """Return the spans in order, cut so that a batch has at most _MOST_LOCKED bytes; at least one batch."""
    batches, left = [list[SlotSpan]()], _MOST_LOCKED
    for at, pool, unit, start, num_bytes in spans:
        done = 0
        while done < num_bytes:
            if left == 0:
                batches.append([])
                left = _MOST_LOCKED
            size = min(left, num_bytes - done)
            batches[-1].append(SlotSpan(at + done, pool, unit, start + done, size))
            done, left = done + size, left - size
    return batches


def record_of(block: Block) -> Stored:
    return Stored(
        *(block.place.slot, block.key, block.parent_key, block.block_hash, block.digest, block.sequence),
        *(block.kind, block.with_draft),
    )


def is_whole(content: memoryview, digest: int) -> bool:
    return digest_of(content) == digest
