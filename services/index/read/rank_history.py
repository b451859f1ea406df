"""This pure module decides what to do with each record of one rank, whatever their order, number and age.

    NOTHING --head--> WAITING for its chunks --all there--> FOLLOWING: deltas base_seq, base_seq + 1, ...
                         ^                                     |--head of a newer epoch or incarnation--+
                         +-------------------------------------|----------------------------------------+
                         |--a chunk never comes--+             |--delta out of order: it is kept
                         +--> a gap, reported once an epoch: read the rank's records again

Old records are excluded so: a head counts only if its etcd revision is above that of the last one that
counted; a chunk or delta only if its generation and epoch are the head's; a delta only in order. And once a
registration has named the generation, records of any other incarnation are ignored.
"""

from dataclasses import dataclass
from enum import Enum

from services.index.records import PrefixDelta, PrefixHead, PrefixSnapshot
from services.values.rank import Generation

_Life = tuple[Generation, int]  # It consists of a generation and an epoch.
_MAX_WAITING_DELTAS = 10_000
_MAX_WAITING_SNAPSHOTS = 3  # A failed attempt to write a snapshot leaves its chunks behind.


class Verdict(Enum):
    APPLY = "apply"
    WAIT = "wait"  # The record is kept until the records before it come.
    IGNORE = "ignore"  # The record is old, a duplicate, or of another incarnation.


@dataclass(frozen=True, slots=True)
class Step:
    """APPLY means that the snapshot, if there is one, replaces all blocks, and that the deltas are applied
    then.

    The snapshot has the chunks in which it was written.
    """

    verdict: Verdict
    generation: Generation | None = None
    snapshot: tuple[PrefixSnapshot, ...] | None = None
    snapshot_age_s: float = 0.0
    deltas: tuple[PrefixDelta, ...] = ()


_IGNORE = Step(Verdict.IGNORE)
_WAIT = Step(Verdict.WAIT)


class RankHistory:
    def __init__(self) -> None:
        self._expected: Generation | None = None
        self._head: PrefixHead | None = None
        self._head_revision = 0
        self._following = False  # The head's snapshot has been applied.
        self._next_seq = 0
        self._chunks: dict[_Life, dict[int, PrefixSnapshot]] = {}
        self._deltas: dict[int, PrefixDelta] = {}  # These deltas of the head's epoch wait for earlier ones.
        self._reported_gap: _Life | None = None

    def __repr__(self) -> str:
        return f"RankHistory(head={self._head}, following={self._following}, next_seq={self._next_seq})"

    @property
    def current(self) -> bool:
        return self._following and not self._deltas

    @property
    def position(self) -> tuple[int, int]:
        """Return the present epoch and the sequence number of the next delta; zeros before any."""
        return (self._head.epoch if self._head else 0, self._next_seq)

    def gap(self) -> bool:
        """Return whether a record is missing; call it when everything up to some revision has been offered.

        It reports this once an epoch: if reading again does not help, the rank's next snapshot will.
        """
        head = self._head
        if head is None or self.current or self._reported_gap == (head.generation, head.epoch):
            return False
        self._reported_gap = (head.generation, head.epoch)
        return True

    def expect(self, generation: Generation) -> None:
        self._expected = generation
        if self._head is not None and self._head.generation != generation:
            self._head, self._following = None, False
            self._deltas.clear()
        self._chunks = {life: chunks for life, chunks in self._chunks.items() if life[0] == generation}

    def restart(self) -> None:
        """Forget all records and revisions, which mean nothing after a restore of etcd."""
        self._head, self._head_revision, self._following = None, 0, False
        self._reported_gap = None
        self._chunks.clear()
        self._deltas.clear()

    def offer(self, record: PrefixHead | PrefixSnapshot | PrefixDelta, revision: int) -> Step:
        if self._expected is not None and record.generation != self._expected:
            return _IGNORE
        match record:
            case PrefixHead():
                return self._offer_head(record, revision)
            case PrefixSnapshot():
                return self._offer_snapshot(record)
            case PrefixDelta():
                return self._offer_delta(record)

    def _offer_head(self, head: PrefixHead, revision: int) -> Step:
        if revision <= self._head_revision:
            return _IGNORE
        self._head, self._head_revision, self._following = head, revision, False
        self._deltas.clear()
        # Even a reader that missed no delta needs the snapshot: nothing else reports a cleared tree, or
        # what a failed write should have reported.
        life = (head.generation, head.epoch)
        self._chunks = {life: self._chunks.get(life, {})}
        return self._advance()

    def _offer_snapshot(self, snapshot: PrefixSnapshot) -> Step:
        life = (snapshot.generation, snapshot.epoch)
        if self._following and self._head is not None and self._is_past(life, self._head):
            return _IGNORE
        if life not in self._chunks:
            self._make_room_for_chunks()
        self._chunks.setdefault(life, {})[snapshot.chunk] = snapshot
        return self._advance()

    def _make_room_for_chunks(self) -> None:
        head = (self._head.generation, self._head.epoch) if self._head else None
        others = [life for life in self._chunks if life != head]
        for life in others[: max(0, len(others) + 1 - _MAX_WAITING_SNAPSHOTS)]:
            del self._chunks[life]

    def _offer_delta(self, delta: PrefixDelta) -> Step:
        head = self._head
        if head is None or (delta.generation, delta.epoch) != (head.generation, head.epoch):
            return _IGNORE
        if self._following and delta.seq == self._next_seq and not self._deltas:
            self._next_seq += 1
            return Step(Verdict.APPLY, head.generation, deltas=(delta,))
        if delta.seq < (self._next_seq if self._following else head.base_seq):
            return _IGNORE
        if len(self._deltas) < _MAX_WAITING_DELTAS:
            self._deltas[delta.seq] = delta
        return self._advance()

    @staticmethod
    def _is_past(life: _Life, head: PrefixHead) -> bool:
        return life[0] == head.generation and life[1] <= head.epoch

    def _advance(self) -> Step:
        head = self._head
        if head is None:
            return _WAIT
        snapshot = None if self._following else self._whole_snapshot(head)
        if snapshot is not None:
            self._following, self._next_seq = True, head.base_seq
            self._chunks.pop((head.generation, head.epoch), None)
        if not self._following:
            return _WAIT
        deltas = self._take_next_deltas()
        if snapshot is None and not deltas:
            return _WAIT
        return Step(Verdict.APPLY, head.generation, snapshot, head.age_s, deltas)

    def _whole_snapshot(self, head: PrefixHead) -> tuple[PrefixSnapshot, ...] | None:
        chunks = self._chunks.get((head.generation, head.epoch), {})
        # A damaged head may name billions of chunks.
        if len(chunks) < head.snapshot_chunks or not all(
            map(chunks.__contains__, range(head.snapshot_chunks))
        ):
            return None
        return tuple(chunks[chunk] for chunk in range(head.snapshot_chunks))

    def _take_next_deltas(self) -> tuple[PrefixDelta, ...]:
        deltas = []
        while (delta := self._deltas.pop(self._next_seq, None)) is not None:
            deltas.append(delta)
            self._next_seq += 1
        return tuple(deltas)
