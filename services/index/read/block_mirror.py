"""A mirror learns what the ranks hold from their records, as the watch delivers them.

    record --RankHistory--> apply, wait or ignore --apply--> index, in slices that requests come between
               |--a record is missing--> a gap: the rank's records are read again, beside the watch

The blocks of a rank's snapshot take effect all at once, when it is complete. Its resumable blocks are changed
in slices, removals before that and additions after it, so that no resumable block is seen without its block.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from services.etcd.etcd_client import Etcd
from services.etcd.etcd_errors import Backoff
from services.etcd.watch import KeyChange
from services.index.codec import decode_record
from services.index.keys import ClusterKeys, HeadKey, LogKey, SnapshotKey
from services.index.read.prefix_index import PrefixIndex
from services.index.read.rank_history import RankHistory, Step, Verdict
from services.index.records import Hashes, PrefixDelta, PrefixHead, PrefixSnapshot
from services.values.errors import IsthmusError, ProtocolError
from services.values.rank import Generation, RankId, RankKey

logger = logging.getLogger(__name__)

RecordKey = HeadKey | SnapshotKey | LogKey
_SLICE_HASHES = 8192  # This many hashes are applied in about a millisecond.
_RESUMABLE_COST = 8  # A resumable block costs as much as this many hashes.
_TAKE_IN_S = 0.05
_SLICE_RESUMABLE = _SLICE_HASHES // _RESUMABLE_COST


@dataclass(frozen=True, slots=True)
class RankProgress:
    """This is how far one rank's records have been read. `age_s` is the age of its last delta or snapshot
    when it was written.
    """

    epoch: int
    next_seq: int
    age_s: float
    current: bool  # A snapshot has been read, and no delta is missing.


class _Reading:
    __slots__ = ("age_s", "history")

    def __init__(self) -> None:
        self.history = RankHistory()
        self.age_s = 0.0


class BlockMirror:
    """One event loop owns it. Hold `lock` while applying, since a rank's records may be read again at the
    same time.

    `report` is called for each applied delta and snapshot, with the rank and the age at which it was written.
    """

    def __init__(self, etcd: Etcd, keys: ClusterKeys, report: Callable[[RankKey, float], None]) -> None:
        self.index = PrefixIndex()
        self.lock = asyncio.Lock()
        self.gaps = 0  # This counts missing records.
        self.resyncs = 0  # This counts how often a rank's records were read again.
        self.added_blocks = 0
        self.removed_blocks = 0
        self._etcd = etcd
        self._keys = keys
        self._report = report
        self._readings: dict[RankKey, _Reading] = {}
        self._touched: set[RankKey] = set()  # These had records since the last complete revision.
        self._rereads: set[asyncio.Task[None]] = set()
        self._taking_in: asyncio.TimerHandle | None = None
        self._cost = 0  # This is the cost since the loop last ran other tasks.

    def progress(self, rank: RankKey) -> RankProgress:
        reading = self._readings.get(rank) or _Reading()
        epoch, next_seq = reading.history.position
        return RankProgress(epoch, next_seq, reading.age_s, reading.history.current)

    def expect(self, rank: RankKey, generation: Generation) -> None:
        self._reading(rank).history.expect(generation)
        if self.index.generation(rank) != generation:
            self.index.remove_rank(rank)

    def restart(self) -> None:
        """Forget revisions, which a restored etcd counts anew, but keep the blocks of the ranks."""
        for reading in self._readings.values():
            reading.history.restart()

    def forget(self, rank: RankKey) -> None:
        self.index.remove_rank(rank)
        self._readings.pop(rank, None)
        self._touched.discard(rank)

    def close(self) -> None:
        for task in self._rereads:
            task.cancel()
        if self._taking_in is not None:
            self._taking_in.cancel()

    async def give_way(self, cost: int) -> None:
        """Let requests run once the costs, counted in hashes, add up to a slice."""
        self._cost += cost
        if self._cost >= _SLICE_HASHES:
            self._cost = 0
            await asyncio.sleep(0)

    async def apply(self, key: RecordKey, change: KeyChange) -> None:
        """Apply a record. If the value is torn, it raises ProtocolError and changes nothing."""
        if change.value is not None:
            await self._offer(key.rank, decode_record(key, change.value), change.mod_revision)

    def look_for_gaps(self) -> None:
        """Read missing records again, once everything up to some revision has been applied."""
        touched, self._touched = self._touched, set()
        for rank in touched:
            reading = self._reading(rank)
            if reading.history.gap():
                self.gaps += 1
                logger.warning("index_gap rank=%s", rank)
                task = asyncio.create_task(self._read_again(rank, reading))
                self._rereads.add(task)
                task.add_done_callback(self._rereads.discard)

    async def _offer(
        self, rank: RankKey, record: PrefixHead | PrefixSnapshot | PrefixDelta, revision: int
    ) -> None:
        reading = self._reading(rank)
        self._touched.add(rank)
        step = reading.history.offer(record, revision)
        if step.verdict is Verdict.APPLY and step.generation is not None:
            await self._take(RankId(rank.worker, rank.rank, step.generation), reading, step)

    async def _take(self, life: RankId, reading: _Reading, step: Step) -> None:
        if step.snapshot is not None:
            await self._take_snapshot(life, reading, step.snapshot)
            if self._readings.get(life.key) is not reading:
                return  # The rank was forgotten meanwhile.
            self._note_age(life.key, reading, step.snapshot_age_s)
        for delta in step.deltas:
            self.index.apply_delta(
                *(life, delta.added, delta.removed, delta.resumable_added, delta.resumable_removed),
                *(delta.files_added, delta.files_removed),
            )
            self.added_blocks += len(delta.added)
            self.removed_blocks += len(delta.removed)
            self._take_in_soon()
            self._note_age(life.key, reading, delta.age_s)
            resumable = len(delta.resumable_added) + len(delta.resumable_removed)
            others = (delta.added, delta.removed, delta.files_added, delta.files_removed)
            await self.give_way(sum(map(len, others)) + resumable * _RESUMABLE_COST)

    def _take_in_soon(self) -> None:
        """Apply waiting changes soon even without a request, so that the numbers of blocks are right."""
        if self._taking_in is None:
            self._taking_in = asyncio.get_running_loop().call_later(_TAKE_IN_S, self._take_in)

    def _take_in(self) -> None:
        self._taking_in = None
        self.index.take_in()

    async def _take_snapshot(self, life: RankId, reading: _Reading, chunks: Sequence[PrefixSnapshot]) -> None:
        draft, is_shown = self.index.draft(), False
        try:
            for part in _parts(chunk.hashes for chunk in chunks):
                self.index.add_to_draft(draft, part)
                await self.give_way(len(part))
            for part in _parts(chunk.files for chunk in chunks):
                self.index.mark_in_files(draft, part)
                await self.give_way(len(part))
            resumable = await self._gather([chunk.resumable for chunk in chunks])
            points = self.index.checkpoints
            gone, new = points.changes(life.key, resumable)
            await self._in_slices(life.key, reading, points.remove, gone)
            if self._readings.get(life.key) is reading:
                self.index.show_draft(draft, life)
                is_shown = True
                self.added_blocks += self.index.num_blocks(life.key)
        finally:
            if not is_shown:
                self.index.drop_draft(draft)
        await self._in_slices(life.key, reading, points.add, new)

    async def _in_slices(
        self,
        rank: RankKey,
        reading: _Reading,
        change: Callable[[RankKey, Sequence[int]], object],
        resumable: Iterable[int],
    ) -> None:
        rest = iter(resumable)
        while (part := tuple(islice(rest, _SLICE_RESUMABLE))) and self._readings.get(rank) is reading:
            change(rank, part)
            await self.give_way(len(part) * _RESUMABLE_COST)

    async def _gather(self, chunks: Sequence[Hashes]) -> set[int]:
        blocks: set[int] = set()
        for chunk in chunks:
            for start in range(0, len(chunk), _SLICE_HASHES):
                part = chunk[start : start + _SLICE_HASHES]
                blocks.update(part)
                await self.give_way(len(part))
        return blocks

    def _note_age(self, rank: RankKey, reading: _Reading, age_s: float) -> None:
        reading.age_s = age_s
        self._report(rank, age_s)

    async def _read_again(self, rank: RankKey, reading: _Reading) -> None:
        """Read the rank's records beside the watch, which goes on.

        If a record is lost for good, the next snapshot makes up for it.
        """
        backoff = Backoff(self._etcd.rng)
        while True:
            try:
                _, kvs = await self._etcd.snapshot(self._keys.rank_prefix(rank))
                break
            except IsthmusError as error:
                logger.warning("index_resync_failed rank=%s error=%s", rank, error)
                await backoff.sleep()
        async with self.lock:
            for kv in kvs:
                if self._readings.get(rank) is not reading:
                    return  # The rank was forgotten meanwhile.
                key = self._keys.parse(kv.key)
                if isinstance(key, HeadKey | SnapshotKey | LogKey):
                    try:
                        await self._offer(rank, decode_record(key, kv.value), kv.mod_revision)
                    except ProtocolError:
                        continue  # The torn value was counted when the watch delivered it.
        self.resyncs += 1

    def _reading(self, rank: RankKey) -> _Reading:
        reading = self._readings.get(rank)
        if reading is None:
            reading = self._readings[rank] = _Reading()
        return reading


def _parts(chunks: Iterable[Hashes]) -> Iterator[Hashes]:
    for hashes in chunks:
        for start in range(0, len(hashes), _SLICE_HASHES):
            yield hashes[start : start + _SLICE_HASHES]
