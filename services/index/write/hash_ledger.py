"""A ledger knows what a rank's radix tree holds, and what of that etcd has yet to hear. All is pure.

store x, evict x, both unreported     nothing to report evict x, store x, x was reported      reported again:
a mirror that was corrected meanwhile gets it back cleared, or too much to report        only a whole snapshot
will do
"""

from itertools import filterfalse, islice

from services.values.kv import CacheEvents

_MAX_UNTOLD = 1 << 17


class HashLedger:
    """It takes events at any rate; its size is bounded by what the pool can hold."""

    def __init__(self, max_untold: int = _MAX_UNTOLD) -> None:
        self.held: set[int] = set()
        self.needs_snapshot = True
        self._max_untold = max_untold
        # These are dicts, for they keep the order: parents are stored first and evicted last.
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._again: set[int] = set()  # etcd believes these of the added to be there.
        self._oldest_s: float | None = None  # It is the oldest unreported event's time.
        self._taken_s: float | None = None  # It is that of those that are on their way.

    def __repr__(self) -> str:
        untold = f"added={len(self._added)}, removed={len(self._removed)}"
        return f"HashLedger(held={len(self.held)}, {untold}, needs_snapshot={self.needs_snapshot})"

    @property
    def has_news(self) -> bool:
        return bool(self.needs_snapshot or self._added or self._removed)

    def age_s(self, now: float) -> float:
        """Return how long the oldest unreported event has waited, in seconds."""
        return 0.0 if self._oldest_s is None else max(0.0, now - self._oldest_s)

    def taken_age_s(self, now: float) -> float:
        """Return how long the oldest event of what was taken last, and is on its way, has waited."""
        return 0.0 if self._taken_s is None else max(0.0, now - self._taken_s)

    def record(self, events: CacheEvents, now: float) -> None:
        if self._oldest_s is None:
            self._oldest_s = now
        if events.cleared:
            self.held.clear()
            self.forget_told()
        self._store(dict.fromkeys(filterfalse(self.held.__contains__, events.stored)))
        self._remove(dict.fromkeys(filter(self.held.__contains__, events.removed)))
        if len(self._added) + len(self._removed) > self._max_untold:
            self.forget_told()
        if not self.has_news:
            self._oldest_s = None

    # Both take whole batches: an engine may store hundreds of thousands of blocks a second.

    def _store(self, blocks: dict[int, None]) -> None:
        self.held.update(blocks)
        if self.needs_snapshot:
            return
        back = blocks.keys() & self._removed.keys()
        self._again |= back
        for block in back:
            del self._removed[block]
        self._added.update(blocks)

    def _remove(self, blocks: dict[int, None]) -> None:
        self.held.difference_update(blocks)
        if self.needs_snapshot:
            return
        untold = blocks.keys() & self._added.keys()
        for block in untold:
            del self._added[block]
            if block not in self._again:
                del blocks[block]
        self._again -= untold
        self._removed.update(blocks)

    def take_delta(self, max_hashes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the next (added, removed), oldest first, at most `max_hashes` together; the rest stays.

        Call `told` when it has reached etcd, `forget_told` if it may not have.
        """
        self._taken_s = self._oldest_s
        removed = _take(self._removed, max_hashes)
        added = _take(self._added, max_hashes - len(removed))
        if self._again:
            self._again.difference_update(added)
        if not self.has_news:
            self._oldest_s = None
        return added, removed

    def take_snapshot(self) -> tuple[int, ...]:
        """Return all that is held. Then call `told` or `forget_told`, as after a delta."""
        self.forget_told()
        self._taken_s, self._oldest_s = self._oldest_s, None
        self.needs_snapshot = False
        return tuple(self.held)

    def told(self) -> None:
        """Note that what was taken last has reached etcd."""
        self._taken_s = None

    def forget_told(self) -> None:
        """Report all again: nothing that etcd heard counts any more."""
        if self._taken_s is not None:
            self._oldest_s, self._taken_s = self._taken_s, None
        self._added.clear()
        self._removed.clear()
        self._again.clear()
        self.needs_snapshot = True


def _take(untold: dict[int, None], count: int) -> tuple[int, ...]:
    if count >= len(untold):
        taken = tuple(untold)
        untold.clear()
        return taken
    taken = tuple(islice(untold, count))
    for block in taken:
        del untold[block]
    return taken
