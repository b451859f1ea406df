"""One rank's records as a watch brings them, with no etcd behind."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etcd.fake_etcd import FakeEtcd
from etcd.real_etcd import until
from index.cluster import registration
from services.etcd.etcd_client import KeyValue
from services.etcd.watch import KeyChange, WatchBatch
from services.index.codec import encode_delta, encode_head, encode_snapshot
from services.index.joining import encode_registration
from services.index.keys import ClusterKeys, HeadKey, LogKey, SnapshotKey
from services.index.pins import Pin, encode_pin
from services.index.read.block_mirror import BlockMirror
from services.index.read.mirror import Mirror
from services.index.records import PrefixDelta, PrefixHead, PrefixSnapshot, hashes_of
from services.values.errors import ProtocolError, Unavailable
from services.values.rank import Generation, RankId, RankKey

KEYS = ClusterKeys("c")
RANK = RankKey("d0", 0)
LIFE = Generation(1)


def mirror_of_nothing() -> BlockMirror:
    return BlockMirror(FakeEtcd(), KEYS, lambda rank, age_s: None)  # type: ignore[arg-type]


def snapshot(chunk: int, *blocks: int) -> KeyChange:
    record = PrefixSnapshot(LIFE, 1, chunk, hashes_of(blocks))
    return KeyChange(KEYS.snapshot(RANK, 1, chunk), encode_snapshot(record), 1)


def head(num_chunks: int) -> KeyChange:
    return KeyChange(KEYS.head(RANK), encode_head(PrefixHead(LIFE, 1, 0, num_chunks)), 2)


def delta(seq: int, *added: int, age_s: float = 0.0) -> KeyChange:
    record = PrefixDelta(LIFE, 1, seq, hashes_of(added), age_s=age_s)
    return KeyChange(KEYS.log(RANK, seq), encode_delta(record), 3 + seq)


async def apply(mirror: BlockMirror, *changes: KeyChange) -> None:
    for change in changes:
        key = KEYS.parse(change.key)
        assert isinstance(key, HeadKey | SnapshotKey | LogKey)
        await mirror.apply(key, change)


async def test_what_is_large_lets_others_have_their_turn(subtests: pytest.Subtests) -> None:
    with subtests.test("a large snapshot lets others have their turn and takes effect at once"):
        mirror = mirror_of_nothing()
        await apply(mirror, snapshot(0, 7), head(1))
        seen: list[int] = []

        async def look() -> None:
            while True:
                seen.append(mirror.index.num_blocks(RANK))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        blocks = range(100_000)
        second = PrefixSnapshot(LIFE, 2, 0, hashes_of(blocks))
        await apply(
            mirror,
            KeyChange(KEYS.snapshot(RANK, 2, 0), encode_snapshot(second), 5),
            KeyChange(KEYS.head(RANK), encode_head(PrefixHead(LIFE, 2, 0, 1)), 6),
        )
        await asyncio.sleep(0)
        looking.cancel()
        assert len(seen) > 10 and set(seen) == {1, 100_000}
    with subtests.test("many resumable blocks of a delta let others have their turn"):
        mirror = mirror_of_nothing()
        await apply(mirror, *resumable_snapshot(1, range(0)))
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: turns.append(mirror.index.checkpoints.num_blocks(RANK)))
        record = PrefixDelta(LIFE, 1, 0, resumable_added=hashes_of(range(2_000)))
        await apply(mirror, KeyChange(KEYS.log(RANK, 0), encode_delta(record), 20))
        assert turns == [2_000]


def resumable_snapshot(epoch: int, resumable: range) -> tuple[KeyChange, KeyChange]:
    """Of the first 100,000 blocks."""
    record = PrefixSnapshot(LIFE, epoch, 0, hashes_of(range(100_000)), hashes_of(resumable))
    revision = 10 * epoch
    return (
        KeyChange(KEYS.snapshot(RANK, epoch, 0), encode_snapshot(record), revision),
        KeyChange(KEYS.head(RANK), encode_head(PrefixHead(LIFE, epoch, 0, 1)), revision + 1),
    )


async def test_resumable_blocks_let_others_have_their_turn_and_are_never_seen_without_their_block() -> None:
    mirror = mirror_of_nothing()
    points = mirror.index.checkpoints
    await apply(mirror, snapshot(0, 7), head(1))
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        while True:
            seen.append((mirror.index.num_blocks(RANK), points.num_blocks(RANK)))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await apply(mirror, *resumable_snapshot(2, range(40_000)))
    assert seen[-1][1] < points.num_blocks(RANK) == 40_000
    assert _largest_step(seen) <= 1024 and {held for held, resumable in seen if resumable} == {100_000}
    seen.clear()
    await apply(mirror, *resumable_snapshot(3, range(20_000, 60_000)))
    looking.cancel()
    assert _largest_step(seen) <= 1024 and 20_000 <= min(resumable for _, resumable in seen) < 21_024
    assert list(points.deepest([20_000], {RANK: 1})) == [RANK] and not points.deepest([19_999], {RANK: 1})


def _largest_step(seen: list[tuple[int, int]]) -> int:
    return max(abs(after - before) for (_, before), (_, after) in pairwise(seen))


async def test_what_is_told_twice_or_torn_or_never_comes(subtests: pytest.Subtests) -> None:
    with subtests.test("what nobody asks for is taken in and counted all the same"):
        # One block is told twice.
        mirror = mirror_of_nothing()
        await apply(mirror, snapshot(0, 1, 2), head(1), delta(0, 2, 3), delta(1, 3, 4))
        await until(lambda: mirror.index.num_blocks(RANK) == 4)
    with subtests.test("a chunk that never came is a gap"):
        mirror = mirror_of_nothing()
        await apply(mirror, snapshot(0, 1), head(2))
        assert mirror.gaps == 0
        mirror.look_for_gaps()
        mirror.look_for_gaps()
        assert mirror.gaps == 1 and not mirror.progress(RANK).current
        mirror.close()
        await apply(mirror, snapshot(1, 2), delta(0, 3, age_s=0.25))
        progress = mirror.progress(RANK)
        assert (progress.epoch, progress.next_seq, progress.age_s, progress.current) == (1, 1, 0.25, True)
        assert mirror.index.total_blocks == 3
    with subtests.test("a torn record changes nothing"):
        mirror = mirror_of_nothing()
        await apply(mirror, snapshot(0, 1), head(1))
        with pytest.raises(ProtocolError):
            await apply(mirror, KeyChange(KEYS.log(RANK, 0), b"\xff", 9))
        await apply(mirror, delta(0, 2))
        assert mirror.index.num_blocks(RANK) == 2


class FailingEtcd(FakeEtcd):
    """Refuses so many times to list what it has."""

    def __init__(self, failures: int, *changes: KeyChange) -> None:
        super().__init__()
        self.failures, self.changes = failures, changes

    async def snapshot(self, prefix: bytes) -> tuple[int, list[KeyValue]]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("etcd is away")
        assert all(change.key.startswith(prefix) and change.value is not None for change in self.changes)
        return 9, [KeyValue(c.key, c.value or b"", c.mod_revision, 0) for c in self.changes]


async def test_a_gap_is_read_again_until_etcd_answers() -> None:
    etcd = FailingEtcd(2, snapshot(0, 1), snapshot(1, 2), head(2), delta(0, 3))
    mirror = BlockMirror(etcd, KEYS, lambda rank, age_s: None)  # type: ignore[arg-type]
    await apply(mirror, snapshot(0, 1), head(2))
    mirror.look_for_gaps()
    await until(lambda: mirror.resyncs == 1)
    assert etcd.failures == 0 and mirror.gaps == 1
    assert mirror.progress(RANK).current and mirror.index.total_blocks == 3
    mirror.look_for_gaps()
    assert mirror.gaps == 1


async def test_what_is_forgotten_while_it_is_taken_in_stays_forgotten(subtests: pytest.Subtests) -> None:
    for turns in [1, 10, 20, 30]:
        with subtests.test(turns=turns):
            mirror = mirror_of_nothing()
            chunk, its_head = resumable_snapshot(1, range(20_000))
            await apply(mirror, chunk)
            taking = asyncio.create_task(apply(mirror, its_head))
            for _ in range(turns):
                await asyncio.sleep(0)
            assert not taking.done()
            mirror.forget(RANK)
            await taking
            assert mirror.index.num_blocks(RANK) == len(mirror.index.checkpoints) == 0


any_key = st.sampled_from(
    [
        KEYS.head(RANK),
        KEYS.log(RANK, 0),
        KEYS.snapshot(RANK, 1, 0),
        KEYS.registration(RANK),
        KEYS.pin("0" * 32),
        KEYS.probe("r0"),
        KEYS.schema,
        KEYS.prefix + b"prefix/d0/0/log/not-a-number",
        KEYS.prefix + b"\xff\xfe",
    ]
)
good_values = st.sampled_from(
    [
        head(1).value,
        snapshot(0, 1, 2).value,
        delta(0, 5).value,
        encode_registration(registration()),
        encode_pin(Pin(RankId("d0", 0, LIFE))),
    ]
)
cut_values = st.tuples(good_values, st.integers(0, 200)).map(lambda cut: cut[0][: cut[1]])


@given(st.lists(st.tuples(any_key, st.one_of(st.none(), st.binary(max_size=60), good_values, cut_values))))
def test_nothing_that_stands_in_etcd_ends_a_mirror(values: list[tuple[bytes, bytes | None]]) -> None:
    """Torn, cut, foreign, at another's key: counted or taken, and what comes after them is read."""

    async def play() -> None:
        mirror = Mirror(FakeEtcd(), KEYS, "r0")  # type: ignore[arg-type]
        changes = tuple(KeyChange(key, value, 10 + i) for i, (key, value) in enumerate(values))
        await mirror._apply(WatchBatch(9, changes))
        mirror.blocks.close()
        rank = RankKey("d1", 0)
        its = encode_registration(registration("d1"))
        record = PrefixSnapshot(LIFE, 1, 0, hashes_of([1, 2, 3]))
        good = (
            KeyChange(KEYS.registration(rank), its, 1000),
            KeyChange(KEYS.snapshot(rank, 1, 0), encode_snapshot(record), 1000),
            KeyChange(KEYS.head(rank), encode_head(PrefixHead(LIFE, 1, 0, 1)), 1000),
        )
        await mirror._apply(WatchBatch(1000, good))
        assert mirror.index.match_all([1, 2, 3])[rank] == 3 and rank in mirror.ranks

    asyncio.run(play())
