"""A ledger knows what a rank holds, where it can go on computing, and what of both etcd has yet to hear.

store x, evict x, both unreported     nothing to report
evict x, store x, x was reported      reported again: a mirror that was corrected meanwhile gets it back
cleared, or too much to report        only a whole snapshot will do

Both kinds of block go by these rules. Resumable blocks are few, and all of them are held; a rank that can go
on wherever it holds has none. A pace says when the rank may write, as the cluster's budget, shared by all
ranks, lets it. All is pure.
"""

import math
from collections.abc import Iterable, Set
from itertools import chain, filterfalse, islice

from services.values.kv import BlockHash, CacheEvents

_MAX_UNTOLD = 1 << 17


class RankLedger:
    """It takes events at any rate; its size is bounded by what the pool can hold.

    Etcd never hears that a block is resumable before it hears that it is held, and a block that is held no
    more is not resumable.
    """

    def __init__(self, max_untold: int = _MAX_UNTOLD) -> None:
        self.needs_snapshot = True
        self._held, self._resumable = _Blocks(), _Blocks()
        self._max_untold = max_untold
        self._oldest_s: float | None = None  # It is the oldest unreported event's time.
        self._taken_s: float | None = None  # It is that of those that are on their way.

    def __repr__(self) -> str:
        kinds = f"held={self._held}, resumable={self._resumable}"
        return f"RankLedger({kinds}, needs_snapshot={self.needs_snapshot})"

    @property
    def held(self) -> Set[BlockHash]:
        return self._held.now

    @property
    def resumable(self) -> Set[BlockHash]:
        """Return the held blocks that were reported as resumable."""
        return self._resumable.now

    @property
    def has_news(self) -> bool:
        return bool(self.needs_snapshot or self._held.num_untold or self._resumable.num_untold)

    def age_s(self, now: float) -> float:
        """Return how long the oldest unreported event has waited, in seconds."""
        return 0.0 if self._oldest_s is None else max(0.0, now - self._oldest_s)

    def taken_age_s(self, now: float) -> float:
        """Return how long the oldest event of what was taken last, and is on its way, has waited."""
        return 0.0 if self._taken_s is None else max(0.0, now - self._taken_s)

    def record(self, events: CacheEvents, now: float) -> None:
        if self._oldest_s is None:
            self._oldest_s = now
        held, resumable = self._held, self._resumable
        if events.cleared:
            held.now.clear()
            resumable.now.clear()
            self.forget_told()
        notes = not self.needs_snapshot
        held.store(events.stored, notes)
        held.remove(events.removed, notes)
        if resumable.now or events.resumable_stored:
            resumable.store(filter(held.now.__contains__, events.resumable_stored), notes)
            resumable.remove(chain(events.resumable_removed, events.removed), notes)
        num_untold = held.num_untold + resumable.num_untold
        if num_untold > self._max_untold:
            self.forget_told()
        if not (num_untold or self.needs_snapshot):
            self._oldest_s = None

    def take_delta(self, max_hashes: int) -> CacheEvents:
        """Return the next changes, oldest first, at most `max_hashes` together; the rest stays.

        Call `told` when they have reached etcd, `forget_told` if they may not have.
        """
        self._taken_s = self._oldest_s
        added, removed = self._held.take(max_hashes)
        left = max_hashes - len(added) - len(removed)
        changes = CacheEvents(added, removed, False, *self._resumable.take(left))
        if not self.has_news:
            self._oldest_s = None
        return changes

    def take_snapshot(self) -> CacheEvents:
        """Return all that there is, of both kinds. Then call `told` or `forget_told`, as after a delta."""
        self.forget_told()
        self._taken_s, self._oldest_s = self._oldest_s, None
        self.needs_snapshot = False
        return CacheEvents(tuple(self.held), (), True, tuple(self.resumable))

    def told(self) -> None:
        """Note that what was taken last has reached etcd."""
        self._taken_s = None

    def forget_told(self) -> None:
        """Report all again: nothing that etcd heard counts any more."""
        if self._taken_s is not None:
            self._oldest_s, self._taken_s = self._taken_s, None
        self._held.forget_untold()
        self._resumable.forget_untold()
        self.needs_snapshot = True


class _Blocks:
    """These are a rank's blocks of one kind, and which of them changed since etcd heard of them.

    Whole batches are taken in at once: an engine may store hundreds of thousands of blocks a second.
    """

    def __init__(self) -> None:
        self.now: set[BlockHash] = set()
        # These are dicts, for they keep the order: parents are stored first and evicted last.
        self._added: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._again: set[BlockHash] = set()  # Etcd believes these of the added to be there.

    def __repr__(self) -> str:
        return f"{len(self.now)} (+{len(self._added)} -{len(self._removed)})"

    @property
    def num_untold(self) -> int:
        return len(self._added) + len(self._removed)

    def store(self, those: Iterable[BlockHash], notes: bool) -> None:
        """Add blocks, and where `notes` keep which of them are new, to be told."""
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
        """Remove blocks, and where `notes` keep which of them etcd believes to be there, to be told."""
        blocks = dict.fromkeys(filter(self.now.__contains__, those))
        self.now.difference_update(blocks)
        if not (notes and blocks):
            return
        untold = blocks.keys() & self._added.keys()
        for block in untold:
            del self._added[block]
            if block not in self._again:
                del blocks[block]
        self._again -= untold
        self._removed.update(blocks)

    def take(self, most: int) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return the next (added, removed), oldest first, at most `most` together, removed ones first."""
        removed = _take(self._removed, most)
        added = _take(self._added, most - len(removed))
        if self._again:
            self._again.difference_update(added)
        return added, removed

    def forget_untold(self) -> None:
        self._added.clear()
        self._removed.clear()
        self._again.clear()


def _take(untold: dict[BlockHash, None], count: int) -> tuple[BlockHash, ...]:
    if count >= len(untold):
        taken = tuple(untold)
        untold.clear()
        return taken
    taken = tuple(islice(untold, count))
    for block in taken:
        del untold[block]
    return taken


_MAX_SLOW_S = 1.0


class FlushPace:
    """This adapts the interval between two writes, and nothing else. Times are seconds on one monotonic
    clock.

    It is never below `flush_s`; never below the rank's share of `writes_per_s`, which is what all ranks of
    the cluster may write together; and, where etcd is slow, at most half of the time is spent writing. A rank
    that has not written for so long waits only `flush_s`, for what else may happen.

    Every rank keeps the beat that chance gave it. Many who have news at one moment, or whom a slow moment of
    etcd held up, would otherwise write at one moment from then on, and so hold each other up again.
    """

    def __init__(self, flush_s: float, writes_per_s: float) -> None:
        assert flush_s >= 0 and writes_per_s > 0
        self.num_ranks = 1  # The cluster has so many.
        self._flush_s = flush_s
        self._writes_per_s = writes_per_s
        self._took_s = 0.0
        self._next_at = -math.inf

    def __repr__(self) -> str:
        return f"FlushPace(interval_s={self.interval_s:.3f}, num_ranks={self.num_ranks})"

    @property
    def interval_s(self) -> float:
        """Return the time from the beginning of one write to that of the next, where the last one is
        typical."""
        return max(self._beat_s, self._took_s + min(self._took_s, _MAX_SLOW_S))

    @property
    def _beat_s(self) -> float:
        return max(self._flush_s, self.num_ranks / self._writes_per_s)

    def wait_s(self, now: float, age_s: float) -> float:
        """Return the time until the next write, where the oldest unreported event happened `age_s` ago."""
        return max(0.0, self._next_at - now, self._flush_s - age_s)

    def scatter(self, now: float, chance: float) -> None:
        """Write next anywhere in the interval, by `chance` in [0, 1): all ranks may be about to."""
        self._next_at = max(self._next_at, now + chance * self._beat_s)

    def tries(self, now: float) -> None:
        """Note that a write begins; should it fail, it counts too."""
        if self._next_at == -math.inf:
            self._next_at = now
        # A beat that was missed, or nearly so, is left out.
        beats = 1 + math.floor(max(0.0, now - self._next_at) / self._beat_s + 0.5)
        self._next_at += beats * self._beat_s

    def wrote(self, now: float, took_s: float) -> None:
        """Note that a write took so long and has ended."""
        self._took_s = took_s
        self._next_at = max(self._next_at, now + min(took_s, _MAX_SLOW_S))
