"""The publisher's real writes, with faults and zombies, replayed to a reader from any point."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etcd.fake_etcd import FakeEtcd
from services.etcd.etcd_errors import LeaseNotFound
from services.etcd.watch import KeyChange
from services.index.codec import decode_record
from services.index.keys import ClusterKeys
from services.index.read.prefix_index import PrefixIndex
from services.index.read.rank_history import RankHistory, Verdict
from services.index.records import PrefixDelta, PrefixHead, PrefixSnapshot, hashes_of
from services.index.write.prefix_writer import LogLimits, RecordsMoved
from services.index.write.publisher import Publisher, PublisherSettings
from services.values.errors import ProtocolError, StaleGeneration, Unavailable
from services.values.kv import BlockHash, CacheEvents
from services.values.rank import Generation, RankId, RankKey

KEYS = ClusterKeys("c")
RANK = RankKey("w", 0)
SMALL = PublisherSettings(
    flush_s=0.0, writes_per_s=1e6, max_delta_hashes=2, log=LogLimits(max_deltas=3, max_chunk_hashes=3)
)


class Life:
    """One life of the rank: a publisher with its lease."""

    def __init__(self, etcd: FakeEtcd, generation: int) -> None:
        self.etcd = etcd
        self.generation = generation
        self.publisher = Publisher(etcd, KEYS, RankId("w", 0, Generation(generation)), SMALL)  # type: ignore[arg-type]
        self.held: set[int] = set()
        self.resumable: set[int] = set()
        self.files: set[int] = set()
        self.lease_id = 0
        self.new_lease()

    def new_lease(self) -> None:
        self.lease_id = max(self.etcd.leases, default=self.lease_id) + 1 + 100 * self.generation
        self.etcd.leases.add(self.lease_id)
        self.publisher.attach(self.lease_id)

    def change(self, stored: set[int], removed: set[int], number: int) -> None:
        """With 0 all of before is gone. Of other numbers the multiples are where it can go on, and the next
        ones are in files."""
        cleared = number == 0
        self.held = ((set() if cleared else self.held) | stored) - removed
        before = set() if cleared else self.resumable
        self.resumable = {block for block in self.held if number and block % number == 0}
        in_files = set() if cleared else self.files
        self.files = {block for block in self.held if number and block % number == 1}
        told = (stored, removed, self.resumable - before, before - self.resumable)
        told += (self.files - in_files, in_files - self.files)
        added, gone, *marks = (tuple(map(BlockHash, blocks)) for blocks in told)
        self.publisher.record(CacheEvents(added, gone, cleared, *marks))

    async def flush(self) -> None:
        with contextlib.suppress(Unavailable, LeaseNotFound, StaleGeneration, RecordsMoved):
            await self.publisher.flush()

    async def flush_all(self) -> None:
        self.etcd.fault = None
        for _ in range(100):
            if self.publisher.idle:
                return
            await self.publisher.flush()
        raise AssertionError(f"never idle: {self.publisher}")


class Reader:
    """What a mirror does with one rank's records."""

    def __init__(self) -> None:
        self.history = RankHistory()
        self.index = PrefixIndex()
        self.delivered: dict[bytes, int] = {}

    @property
    def blocks(self) -> set[int]:
        return {block for block in range(40) if self.index.match(RANK, [block])}

    @property
    def resumable(self) -> set[int]:
        points = self.index.checkpoints
        return {block for block in range(40) if points.deepest([block], {RANK: 1})}

    @property
    def files(self) -> set[int]:
        return {block for block in range(40) if self.index.held_below([block]).in_files(RANK, 0, 1)}

    def agrees_with(self, life: Life) -> bool:
        known = (self.blocks, self.resumable, self.files)
        return self.history.current and known == (life.held, life.resumable, life.files)

    def take(self, change: KeyChange) -> Verdict | None:
        if change.value is None:
            self.delivered.pop(change.key, None)
            return None
        self.delivered[change.key] = change.mod_revision
        key = KEYS.parse(change.key)
        step = self.history.offer(decode_record(key, change.value), change.mod_revision)  # type: ignore[arg-type]
        if step.verdict is Verdict.APPLY:
            life = RankId("w", 0, step.generation or Generation(0))
            if step.snapshot is not None:
                held, resumable, files = [], [], []
                for chunk in step.snapshot:
                    held += chunk.hashes
                    resumable += chunk.resumable
                    files += chunk.files
                self.index.apply_snapshot(life, held, resumable, files)
            for delta in step.deltas:
                marks = delta.resumable_added, delta.resumable_removed, delta.files_added, delta.files_removed
                assert self.index.apply_delta(life, delta.added, delta.removed, *marks)
            assert self.resumable <= self.blocks
        return step.verdict

    def list_at(self, etcd: FakeEtcd, revision: int) -> None:
        """A listing's difference to what was delivered, as PrefixWatch gives it."""
        for change in etcd.state_at(revision).values():
            if self.delivered.get(change.key) != change.mod_revision:
                self.take(change)

    def watch(self, etcd: FakeEtcd, after: int, until: int) -> None:
        for changes in etcd.history[after + 1 : until + 1]:
            for change in changes:
                self.take(change)
            assert not self.history.gap()


blocks = st.sets(st.integers(0, 30), max_size=5)
operations = st.one_of(
    st.tuples(st.just("change"), st.integers(0, 2), blocks, blocks, st.integers(0, 9)),
    st.tuples(
        st.just("flush"),
        st.integers(0, 2),
        st.sampled_from([None, None, "before", "after"]),
        st.integers(0, 3),
    ),
    st.tuples(st.just("lapse"), st.integers(0, 2)),
    st.tuples(st.just("reborn"), st.just(0)),
)


async def play(story: list[tuple]) -> tuple[FakeEtcd, Life]:
    """Returns etcd with its history, and the last life, all of whose blocks have been told."""
    etcd = FakeEtcd()
    lives = [Life(etcd, 1)]
    await lives[0].flush_all()
    for operation in story:
        life = lives[operation[1] % len(lives)]
        match operation:
            case ("change", _, stored, removed, number):
                life.change(stored, removed, number)
            case ("flush", _, fault, writes):
                etcd.fault, etcd.writes_until_fault = fault, writes
                await life.flush()
            case ("lapse", _):
                etcd.lapse(life.lease_id)
                life.new_lease()
            case ("reborn", _):
                lives.append(Life(etcd, len(lives) + 1))
                await lives[-1].flush_all()
    await lives[-1].flush_all()
    return etcd, lives[-1]


def zombie_free(story: list[tuple]) -> list[tuple]:
    """Without the one thing that no fence can stop: an old life that writes when no head is there."""
    return [operation for operation in story if operation[0] != "lapse"]


@settings(max_examples=80, deadline=None)
@given(st.lists(operations, max_size=40), st.data())
def test_a_reader_that_comes_at_any_time_ends_with_the_blocks_of_the_last_life(
    story: list[tuple], data: st.DataObject
) -> None:
    etcd, life = asyncio.run(play(zombie_free(story)))
    reader, end = Reader(), etcd.revision
    here = data.draw(st.integers(1, end), label="first listing")
    reader.list_at(etcd, here)
    while here < end:
        there = data.draw(st.integers(here + 1, end), label="watched or listed up to")
        if data.draw(st.booleans(), label="compacted meanwhile"):
            reader.list_at(etcd, there)
        else:
            reader.watch(etcd, here, there)
        here = there
    assert reader.agrees_with(life)
    assert reader.index.generation(RANK) == life.generation


@settings(max_examples=30, deadline=None)
@given(st.lists(operations, max_size=30), st.data())
def test_leases_that_lapse_and_records_that_come_again(story: list[tuple], data: st.DataObject) -> None:
    etcd, life = asyncio.run(play([operation for operation in story if operation[0] != "reborn"]))
    reader = Reader()
    everything = [change for changes in etcd.history for change in changes]
    for number, change in enumerate(everything):
        reader.take(change)
        for earlier in data.draw(st.lists(st.integers(0, number), max_size=2), label="again"):
            reader.take(everything[earlier])
    assert reader.agrees_with(life)


@settings(max_examples=30, deadline=None)
@given(st.lists(operations, max_size=30), st.lists(operations, max_size=5), st.data())
def test_what_an_etcd_restored_under_a_living_lease_has_lost_is_told_again(
    before: list[tuple], after: list[tuple], data: st.DataObject
) -> None:
    def of_one_life(story: list[tuple]) -> list[tuple]:
        return [operation for operation in story if operation[0] in ("change", "flush")]

    etcd, life = asyncio.run(play(of_one_life(before)))
    etcd.restore(data.draw(st.integers(1, etcd.revision), label="backup"))

    async def go_on() -> None:
        life.publisher.doubt()
        for operation in of_one_life(after):
            if operation[0] == "change":
                life.change(operation[2], operation[3], operation[4])
            else:
                etcd.fault, etcd.writes_until_fault = operation[2], operation[3]
                await life.flush()
        etcd.fault = None
        await life.flush()  # whatever it finds, it has news after that or etcd has everything
        await life.flush_all()

    asyncio.run(go_on())
    reader = Reader()
    reader.list_at(etcd, etcd.revision)
    assert reader.agrees_with(life)


@settings(max_examples=30, deadline=None)
@given(st.lists(operations, max_size=30))
def test_once_registered_a_life_is_the_only_one_that_counts(story: list[tuple]) -> None:
    etcd, life = asyncio.run(play(zombie_free(story)))
    reader = Reader()
    reader.history.expect(Generation(life.generation))
    for changes in etcd.history:
        for change in changes:
            reader.take(change)
            assert reader.index.generation(RANK) in (None, life.generation)
    assert reader.agrees_with(life)


GENERATION = Generation(7)
HEAD = PrefixHead(GENERATION, epoch=1, base_seq=0, snapshot_chunks=0)


def delta(seq: int, epoch: int = 1, generation: int = 7) -> PrefixDelta:
    return PrefixDelta(Generation(generation), epoch, seq, added=hashes_of([seq]))


def test_a_missing_delta(subtests: pytest.Subtests) -> None:
    with subtests.test("a missing delta asks once to read again and nothing after it is applied"):
        history = RankHistory()
        assert history.offer(HEAD, 5).verdict is Verdict.APPLY
        assert history.offer(delta(1), 6).verdict is Verdict.WAIT
        assert not history.current
        assert [history.gap(), history.gap()] == [True, False]
        assert history.offer(delta(2), 7).verdict is Verdict.WAIT
        found = history.offer(delta(0), 5)
        assert [step.seq for step in found.deltas] == [0, 1, 2]
        assert history.current
    with subtests.test("a missing delta is made up for by the next snapshot"):
        history = RankHistory()
        history.offer(HEAD, 5)
        history.offer(delta(1), 6)
        history.offer(PrefixSnapshot(GENERATION, 2, 0, hashes_of([1, 2])), 7)
        step = history.offer(PrefixHead(GENERATION, epoch=2, base_seq=2, snapshot_chunks=1), 8)
        assert ([chunk.hashes for chunk in step.snapshot or ()], history.current) == (
            [hashes_of([1, 2])],
            True,
        )
    with subtests.test("who missed no delta waits for the next snapshot all the same"):
        history = RankHistory()
        history.offer(HEAD, 5)
        history.offer(delta(0), 6)
        listed = [
            history.offer(PrefixHead(GENERATION, epoch=2, base_seq=1, snapshot_chunks=2), 9),
            history.offer(delta(1, epoch=2), 10),
            history.offer(PrefixSnapshot(GENERATION, 2, 0, hashes_of([5])), 7),
        ]
        assert [step.verdict for step in listed] == [Verdict.WAIT] * 3
        step = history.offer(PrefixSnapshot(GENERATION, 2, 1, hashes_of([6])), 8)
        assert [chunk.hashes for chunk in step.snapshot or ()] == [hashes_of([5]), hashes_of([6])]
        assert (step.deltas, history.current) == ((delta(1, epoch=2),), True)


def test_what_counts_of_the_past(subtests: pytest.Subtests) -> None:
    for record in [
        delta(0, epoch=0),
        delta(0, epoch=2),
        delta(0, generation=6),
        PrefixHead(GENERATION, 9, 9, 0),
    ]:
        with subtests.test(record=record):
            history = RankHistory()
            history.offer(HEAD, 5)
            assert history.offer(record, 5).verdict is Verdict.IGNORE
            assert history.offer(delta(0), 6).verdict is Verdict.APPLY
    with subtests.test("after a restart lower revisions count"):
        history = RankHistory()
        history.offer(HEAD, 500)
        history.restart()
        assert not history.current
        assert history.offer(HEAD, 5).snapshot == ()
    with subtests.test("chunks of failed attempts do not pile up"):
        history = RankHistory()
        history.offer(HEAD, 5)
        for epoch in range(2, 100):
            history.offer(PrefixSnapshot(GENERATION, epoch, 0, hashes_of([epoch])), epoch)
        assert len(history._chunks) <= 3
        newest = PrefixSnapshot(GENERATION, 99, 0, hashes_of([99]))
        assert history.offer(PrefixHead(GENERATION, 99, 1, 1), 100).snapshot == (newest,)


def test_torn_values_are_named(subtests: pytest.Subtests) -> None:
    for value in [b"\xff", b"\x22\x03abc"]:
        with subtests.test(value=value):
            with pytest.raises(ProtocolError):
                decode_record(KEYS.parse(KEYS.log(RANK, 0)), value)  # type: ignore[arg-type]
            with pytest.raises(ProtocolError):
                decode_record(KEYS.parse(KEYS.snapshot(RANK, 0, 0)), value)  # type: ignore[arg-type]
