"""A ledger knows what a rank holds, where it can go on computing, and what of both etcd has yet to hear.

Resumable blocks are few, and all of them are held: their ledger is one more of the same kind, read with the
other. It stays empty for a rank that can go on wherever it holds. All is pure.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from services.index.write.hash_ledger import HashLedger
from services.values.kv import CacheEvents


@dataclass(frozen=True, slots=True)
class Contents:
    """This is all that there is, as sequence hashes."""

    held: Sequence[int]
    resumable: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class UntoldChanges:
    """These go into a delta, oldest first."""

    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    resumable_added: Sequence[int] = ()
    resumable_removed: Sequence[int] = ()


class RankLedger:
    """This is a HashLedger of both kinds. Etcd never hears that a block is resumable before it hears that it
    is held, and a block that is held no more is not resumable."""

    def __init__(self, held: HashLedger | None = None) -> None:
        self._held = held or HashLedger()
        self._resumable = HashLedger()

    def __repr__(self) -> str:
        return f"RankLedger(held={self._held!r}, resumable={self._resumable!r})"

    @property
    def held(self) -> Set[int]:
        return self._held.held

    @property
    def resumable(self) -> Set[int]:
        """Return the held blocks that were reported as resumable."""
        return self._resumable.held

    @property
    def needs_snapshot(self) -> bool:
        return self._held.needs_snapshot or self._resumable.needs_snapshot

    @property
    def has_news(self) -> bool:
        return self._held.has_news or self._resumable.has_news

    def age_s(self, now: float) -> float:
        return max(self._held.age_s(now), self._resumable.age_s(now))

    def taken_age_s(self, now: float) -> float:
        return max(self._held.taken_age_s(now), self._resumable.taken_age_s(now))

    def record(self, events: CacheEvents, now: float) -> None:
        self._held.record(events, now)
        if self.resumable or events.resumable_stored:
            stored = tuple(filter(self.held.__contains__, events.resumable_stored))
            removed = (*events.resumable_removed, *events.removed)
            self._resumable.record(CacheEvents(stored, removed, events.cleared), now)

    def take_delta(self, max_hashes: int) -> UntoldChanges:
        added, removed = self._held.take_delta(max_hashes)
        room = max_hashes - len(added) - len(removed)
        return UntoldChanges(added, removed, *self._resumable.take_delta(room))

    def take_snapshot(self) -> Contents:
        return Contents(self._held.take_snapshot(), self._resumable.take_snapshot())

    def told(self) -> None:
        self._held.told()
        self._resumable.told()

    def forget_told(self) -> None:
        self._held.forget_told()
        self._resumable.forget_told()
