"""A ledger knows what a rank holds, and which of this etcd has not received.

store x, evict x, both unreported     nothing to report
evict x, store x, x was reported      reported again: a mirror that was corrected in between gets it back
cleared, or too much to report        only a whole snapshot will do

Some of the blocks that it holds are marked: it can continue computing there, or they lie in files. Marks
follow these rules, too. Resumable blocks are few; a rank that can continue anywhere has none, and a rank's
pool has none in files. The module is pure.
"""

from collections.abc import Iterable, Set
from itertools import chain, filterfalse, islice

from services.values.kv import BlockHash, CacheEvents

_MAX_UNREPORTED = 1 << 17


class RankLedger:
    """It accepts events at any rate; its size is limited by what the pool can hold.

    etcd never receives that a block is marked before it receives that it is held, and a block that is no
    longer held has no mark.
    """

    def __init__(self, max_unreported: int = _MAX_UNREPORTED) -> None:
        self.needs_snapshot = True
        self._held, self._resumable, self._files = self._kinds = _Blocks(), _Blocks(), _Blocks()
        self._max_unreported = max_unreported
        self._oldest_s: float | None = None  # This is the time of the oldest unreported event.
        self._taken_s: float | None = None  # This is the time of the oldest event that is being written.

    def __repr__(self) -> str:
        kinds = f"held={self._held}, resumable={self._resumable}, files={self._files}"
        return f"RankLedger({kinds}, needs_snapshot={self.needs_snapshot})"

    @property
    def held(self) -> Set[BlockHash]:
        return self._held.now

    @property
    def resumable(self) -> Set[BlockHash]:
        return self._resumable.now

    @property
    def has_news(self) -> bool:
        return bool(self.needs_snapshot or self._num_unreported)

    @property
    def _num_unreported(self) -> int:
        held, resumable, files = self._kinds
        return held.num_unreported + resumable.num_unreported + files.num_unreported

    def age_s(self, now: float) -> float:
        return 0.0 if self._oldest_s is None else max(0.0, now - self._oldest_s)

    def taken_age_s(self, now: float) -> float:
        """Return how long the oldest event has waited that was taken last, and is being written."""
        return 0.0 if self._taken_s is None else max(0.0, now - self._taken_s)

    def record(self, events: CacheEvents, now: float) -> None:
        if self._oldest_s is None:
            self._oldest_s = now
        if events.cleared:
            for kind in self._kinds:
                kind.now.clear()
            self.forget_reported()
        held, notes = self._held, not self.needs_snapshot
        held.store(events.stored, notes)
        held.remove(events.removed, notes)
        self._mark(self._resumable, events.resumable_stored, events.resumable_removed, events.removed)
        self._mark(self._files, events.files_stored, events.files_removed, events.removed)
        num_unreported = self._num_unreported
        if num_unreported > self._max_unreported:
            self.forget_reported()
        if not (num_unreported or self.needs_snapshot):
            self._oldest_s = None

    def _mark(
        self,
        marked: "_Blocks",
        stored: Iterable[BlockHash],
        removed: Iterable[BlockHash],
        gone: Iterable[BlockHash],
    ) -> None:
        if marked.now or stored:
            notes = not self.needs_snapshot
            marked.store(filter(self._held.now.__contains__, stored), notes)
            marked.remove(chain(removed, gone), notes)

    def take_delta(self, max_hashes: int) -> CacheEvents:
        """Return the next changes, oldest first, at most `max_hashes` together; the rest stays.

        Call `reported` when they have reached etcd, `forget_reported` if they may not have.
        """
        self._taken_s = self._oldest_s
        added, removed = self._held.take(max_hashes)
        left = max_hashes - len(added) - len(removed)
        resumable = self._resumable.take(left)
        left -= sum(map(len, resumable))
        changes = CacheEvents(added, removed, False, *resumable, *self._files.take(left))
        if not self.has_news:
            self._oldest_s = None
        return changes

    def take_snapshot(self) -> CacheEvents:
        """Return all blocks and their marks. Then call `reported` or `forget_reported`, as after a delta."""
        self.forget_reported()
        self._taken_s, self._oldest_s = self._oldest_s, None
        self.needs_snapshot = False
        return CacheEvents(tuple(self.held), (), True, tuple(self.resumable), (), tuple(self._files.now))

    def reported(self) -> None:
        """Note that what was taken last has reached etcd."""
        self._taken_s = None

    def forget_reported(self) -> None:
        """Report everything again, because what etcd received does not count any more."""
        if self._taken_s is not None:
            self._oldest_s, self._taken_s = self._taken_s, None
        for kind in self._kinds:
            kind.forget_unreported()
        self.needs_snapshot = True


class _Blocks:
    """These are a rank's blocks of one kind, and their changes since the last report to etcd.

    Whole batches are applied at once: an engine may store hundreds of thousands of blocks a second.
    """

    def __init__(self) -> None:
        self.now: set[BlockHash] = set()
        # These are dicts, because they keep the order: parents are stored first and evicted last.
        self._added: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._again: set[BlockHash] = set()  # etcd has these of the added blocks already.

    def __repr__(self) -> str:
        return f"{len(self.now)} (+{len(self._added)} -{len(self._removed)})"

    @property
    def num_unreported(self) -> int:
        return len(self._added) + len(self._removed)

    def store(self, those: Iterable[BlockHash], notes: bool) -> None:
        blocks = dict.fromkeys(filterfalse(self.now.__contains__, those))
        self.now.update(blocks)
        if not (notes and blocks):
            return
        back = blocks.keys() & self._removed.keys()
        self._again |= back
        for block in back:
            del self._removed[block]
        self._added.update(blocks)

    def remove(self, those: Iterable[BlockHash], notes: bool) -> None:
        blocks = dict.fromkeys(filter(self.now.__contains__, those))
        self.now.difference_update(blocks)
        if not (notes and blocks):
            return
        unreported = blocks.keys() & self._added.keys()
        for block in unreported:
            del self._added[block]
            if block not in self._again:
                del blocks[block]
        self._again -= unreported
        self._removed.update(blocks)

    def take(self, most: int) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return the next (added, removed), oldest first, at most `most` together, and removed ones first."""
        removed = _take(self._removed, most)
        added = _take(self._added, most - len(removed))
        if self._again:
            self._again.difference_update(added)
        return added, removed

    def forget_unreported(self) -> None:
        self._added.clear()
        self._removed.clear()
        self._again.clear()


def _take(unreported: dict[BlockHash, None], count: int) -> tuple[BlockHash, ...]:
    if count >= len(unreported):
        everything = tuple(unreported)
        unreported.clear()
        return everything
    first = tuple(islice(unreported, count))
    for block in first:
        del unreported[block]
    return first
