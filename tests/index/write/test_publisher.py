import pytest

from etcd.fake_etcd import FakeEtcd
from services.etcd.etcd_errors import LeaseNotFound
from services.index.codec import decode_record
from services.index.keys import ClusterKeys, HeadKey, LogKey, ParsedKey, SnapshotKey
from services.index.records import PrefixDelta, PrefixHead, PrefixSnapshot, hashes_of, pack_hashes
from services.index.write.prefix_writer import LogLimits, RecordsMoved
from services.index.write.publisher import Publisher, PublisherSettings
from services.values.errors import StaleGeneration, Unavailable
from services.values.kv import BlockHash, CacheEvents
from services.values.rank import Generation, RankId, RankKey
from services.wire.isthmus.v1 import index_pb2

KEYS = ClusterKeys("c")
RANK = RankKey("w", 0)
SMALL = PublisherSettings(log=LogLimits(max_deltas=3, max_chunk_hashes=4))
LEASE = 9


def publisher(etcd: FakeEtcd, generation: int = 1, keys: ClusterKeys = KEYS) -> Publisher:
    made = Publisher(etcd, keys, RankId("w", 0, Generation(generation)), SMALL)  # type: ignore[arg-type]
    etcd.leases.add(LEASE)
    made.attach(LEASE)
    return made


def store(target: Publisher, *blocks: int) -> None:
    target.record(CacheEvents(stored=tuple(map(BlockHash, blocks))))


def parsed(etcd: FakeEtcd) -> list[ParsedKey | None]:
    return [KEYS.parse(key) for key in sorted(etcd.kvs)]


def head(etcd: FakeEtcd) -> PrefixHead:
    record = decode_record(HeadKey(RANK), etcd.kvs[KEYS.head(RANK)].value)
    assert isinstance(record, PrefixHead)
    return record


def chunk_of(etcd: FakeEtcd, epoch: int, number: int, keys: ClusterKeys = KEYS) -> PrefixSnapshot:
    key = SnapshotKey(RANK, epoch, number)
    record = decode_record(key, etcd.kvs[keys.snapshot(RANK, epoch, number)].value)
    assert isinstance(record, PrefixSnapshot)
    return record


async def test_snapshots_leave_nothing_old(subtests: pytest.Subtests) -> None:
    with subtests.test("a long log gives way to a snapshot and nothing old is left"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        for block in range(5):
            store(writer, block)
            await writer.flush()
        assert parsed(etcd) == [
            HeadKey(RANK),
            SnapshotKey(RANK, 2, 0),
            SnapshotKey(RANK, 2, 1),
        ]
        assert head(etcd) == PrefixHead(Generation(1), epoch=2, base_seq=3, snapshot_chunks=2)
        store(writer, 5)
        await writer.flush()
        assert LogKey(RANK, 3) in parsed(etcd)
        assert {kv.lease_id for kv in etcd.kvs.values()} == {LEASE}
        assert (writer.snapshots_written, writer.deltas_written) == (2, 4)
    with subtests.test("an aborted snapshot leaves no chunks once the next one is written"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        store(writer, *range(10))
        etcd.fault, etcd.writes_until_fault = "before", 2
        with pytest.raises(Unavailable):
            await writer.flush()
        assert parsed(etcd) == [SnapshotKey(RANK, 1, 0), SnapshotKey(RANK, 1, 1)]
        etcd.fault = None
        await writer.flush()
        assert parsed(etcd) == [HeadKey(RANK), *(SnapshotKey(RANK, 2, chunk) for chunk in range(3))]


async def test_records_of_one_kind_and_of_both(subtests: pytest.Subtests) -> None:
    with subtests.test("chunks hold both kinds and no more hashes than one may"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        held, resumable = tuple(map(BlockHash, range(6))), tuple(map(BlockHash, (1, 3, 5)))
        writer.record(CacheEvents(stored=held, resumable_stored=resumable))
        await writer.flush()
        chunks = [chunk_of(etcd, epoch=1, number=number) for number in range(head(etcd).snapshot_chunks)]
        assert [len(chunk.hashes) + len(chunk.resumable) for chunk in chunks] == [4, 4, 1]
        assert {block for chunk in chunks for block in chunk.hashes} == set(held)
        assert {block for chunk in chunks for block in chunk.resumable} == set(resumable)
        assert (writer.num_blocks, writer.num_resumable) == (6, 3)
        writer.record(CacheEvents(resumable_removed=resumable[:1]))
        await writer.flush()
        told = decode_record(LogKey(RANK, 0), etcd.kvs[KEYS.log(RANK, 0)].value)
        assert told == PrefixDelta(Generation(1), 1, 0, resumable_removed=hashes_of(resumable[:1]))
    with subtests.test("what lies below has keys of its own, and says what of it is in files"):
        etcd = FakeEtcd()
        above, below = publisher(etcd), publisher(etcd, keys=KEYS.below)
        store(above, 1, 2)
        below.record(CacheEvents(stored=held, files_stored=held[:2]))
        for writer in (above, below):
            await writer.flush()
        chunks = [chunk_of(etcd, 1, number, KEYS.below) for number in range(2)]
        assert [(len(chunk.hashes), len(chunk.files)) for chunk in chunks] == [(4, 0), (2, 2)]
        below.record(CacheEvents(files_stored=held[2:3], files_removed=held[:1]))
        await below.flush()
        told = decode_record(LogKey(RANK, 0, below=True), etcd.kvs[KEYS.below.log(RANK, 0)].value)
        moved = {"files_added": hashes_of(held[2:3]), "files_removed": hashes_of(held[:1])}
        assert told == PrefixDelta(Generation(1), 1, 0, **moved)
        assert (above.num_blocks, below.num_blocks) == (2, 6)
        assert KEYS.log(RANK, 0) not in etcd.kvs
    with subtests.test("who goes on wherever it holds writes no byte more"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        store(writer, 1, 2)
        await writer.flush()
        store(writer, 3)
        await writer.flush()
        of_one_kind = {
            KEYS.snapshot(RANK, 1, 0): index_pb2.PrefixSnapshot(
                generation=1, epoch=1, hashes=pack_hashes(hashes_of((1, 2)))
            ),
            KEYS.log(RANK, 0): index_pb2.PrefixDelta(
                generation=1, epoch=1, added=pack_hashes(hashes_of((3,)))
            ),
        }
        for key, message in of_one_kind.items():
            assert etcd.kvs[key].value == message.SerializeToString()


async def test_a_later_life_uses_later_epochs_and_clears_up_after_the_earlier_one() -> None:
    etcd = FakeEtcd()
    old = publisher(etcd, generation=1)
    for block in range(6):
        store(old, block)
        await old.flush()
    assert head(etcd).epoch == 2 and LogKey(RANK, 3) in parsed(etcd)
    new = publisher(etcd, generation=2)
    store(new, 1)
    await new.flush()
    assert head(etcd) == PrefixHead(Generation(2), epoch=3, base_seq=0, snapshot_chunks=1)
    assert parsed(etcd) == [HeadKey(RANK), SnapshotKey(RANK, 3, 0)]
    store(old, 9)
    with pytest.raises(Exception, match="written by someone else"):
        await old.flush()
    with pytest.raises(StaleGeneration):
        await old.flush()
    assert parsed(etcd) == [HeadKey(RANK), SnapshotKey(RANK, 3, 0)]


async def test_what_etcd_has_lost_is_written_anew(subtests: pytest.Subtests) -> None:
    with subtests.test("a delta is not appended to a log that etcd has lost"):
        # The head is as it was; so is the lease.
        etcd = FakeEtcd()
        writer = publisher(etcd)
        await writer.flush()
        backup = etcd.revision
        store(writer, 1)
        await writer.flush()
        etcd.restore(backup)
        store(writer, 2)
        with pytest.raises(RecordsMoved):
            await writer.flush()
        assert parsed(etcd) == [HeadKey(RANK)]
        await writer.flush()
        assert parsed(etcd) == [HeadKey(RANK), SnapshotKey(RANK, 2, 0)] and writer.idle
    with subtests.test("a snapshot whose first chunk etcd has lost never takes effect"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        await writer.flush()
        store(writer, *range(10))
        backup = etcd.revision
        txn = etcd.txn

        async def restore_after_the_first_chunk(*arguments, **options):
            result = await txn(*arguments, **options)
            if result.revision == backup + 1:
                etcd.restore(backup)
            return result

        etcd.txn = restore_after_the_first_chunk  # type: ignore[method-assign]
        writer._writer.start_over()
        with pytest.raises(RecordsMoved):
            await writer.flush()
        assert head(etcd).snapshot_chunks == 0
        etcd.txn = txn  # type: ignore[method-assign]
        await writer.flush()
        assert head(etcd).snapshot_chunks == 3


async def test_how_long_the_oldest_event_waited_is_said(subtests: pytest.Subtests) -> None:
    with subtests.test("a delta says how long its oldest event waited"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        await writer.flush()
        store(writer, 1)
        etcd.now += 0.5
        store(writer, 2)
        etcd.now += 0.25
        assert writer.lag_s == 0.75
        await writer.flush()
        delta = decode_record(LogKey(RANK, 0), etcd.kvs[KEYS.log(RANK, 0)].value)
        assert isinstance(delta, PrefixDelta)
        assert (tuple(delta.added), delta.age_s, writer.lag_s, writer.idle) == ((1, 2), 0.75, 0.0, True)
    with subtests.test("a snapshot says how long its oldest event waited for the last chunk"):
        etcd = FakeEtcd()
        writer = publisher(etcd)
        store(writer, *range(10))
        etcd.now += 0.5
        txn = etcd.txn

        async def take_a_tenth(*arguments, **options):
            result = await txn(*arguments, **options)
            etcd.now += 0.1
            return result

        etcd.txn = take_a_tenth  # type: ignore[method-assign]
        await writer.flush()
        assert (head(etcd).snapshot_chunks, head(etcd).age_s) == (3, pytest.approx(0.7))


async def test_without_a_lease_it_only_collects() -> None:
    etcd = FakeEtcd()
    writer = publisher(etcd)
    etcd.lapse(LEASE)
    with pytest.raises(LeaseNotFound):
        store(writer, 1)
        await writer.flush()
    store(writer, 2)
    await writer.flush()
    assert etcd.kvs == {} and not writer.idle
    etcd.leases.add(LEASE + 1)
    writer.attach(LEASE + 1)
    await writer.flush()
    assert parsed(etcd) == [HeadKey(RANK), SnapshotKey(RANK, 1 + 1, 0)] and writer.idle
