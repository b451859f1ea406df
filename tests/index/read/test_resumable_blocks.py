import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.index.read import prefix_index
from services.index.read.prefix_index import PrefixIndex, ResumableBlocks
from services.values.rank import Generation, RankId, RankKey

SEQUENCES = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 14, 15, 16], [21, 22])
EVERY_BLOCK = sorted({block for sequence in SEQUENCES for block in sequence})


def life(rank: int) -> RankId:
    return RankId("w", rank, Generation(1))


def key(rank: int) -> RankKey:
    return RankKey("w", rank)


def by_walking_back(points: set[int], hashes: list[int], most: int) -> int:
    return next((depth for depth in range(most, 0, -1) if hashes[depth - 1] in points), 0)


ranks = st.integers(0, 1)
sets = st.sets(st.sampled_from(EVERY_BLOCK))


class Resuming(RuleBasedStateMachine):
    """An index beside two plain sets a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[int, set[int]] = {}
        self.resumable: dict[int, set[int]] = {}

    @rule(rank=ranks, held=sets, some=sets)
    def snapshot(self, rank: int, held: set[int], some: set[int]) -> None:
        self.index.apply_snapshot(life(rank), held, held & some)
        self.held[rank], self.resumable[rank] = set(held), held & some

    @rule(rank=ranks, added=sets, removed=sets, resumable=sets, no_more=sets)
    def delta(
        self, rank: int, added: set[int], removed: set[int], resumable: set[int], no_more: set[int]
    ) -> None:
        """As a ledger tells it: resumable are only held blocks; evicted ones are told in one kind only."""
        known = rank in self.held
        held = (self.held.get(rank, set()) - removed) | added
        resumable, no_more = (resumable & held) - no_more, no_more - removed
        assert self.index.apply_delta(life(rank), added, removed - added, resumable, no_more) is known
        if known:
            self.held[rank] = held
            gone = (removed - added) | no_more
            self.resumable[rank] = (self.resumable[rank] - gone) | resumable

    @rule(rank=ranks, sequence=st.sampled_from(SEQUENCES), depth=st.integers(0, 6))
    def correct(self, rank: int, sequence: list[int], depth: int) -> None:
        self.index.correct(key(rank), sequence, depth)
        for blocks in (self.held.get(rank, set()), self.resumable.get(rank, set())):
            blocks -= set(sequence[depth:])

    @rule(rank=ranks, sequence=st.sampled_from(SEQUENCES), depth=st.integers(0, 6))
    def forget_points(self, rank: int, sequence: list[int], depth: int) -> None:
        known = self.resumable.get(rank, set())
        gone = known & set(sequence[depth:])
        assert self.index.checkpoints.remove(key(rank), sequence[depth:]) == len(gone)
        known -= gone

    @rule(rank=ranks)
    def remove_rank(self, rank: int) -> None:
        self.index.remove_rank(key(rank))
        self.held.pop(rank, None)
        self.resumable.pop(rank, None)

    @invariant()
    def every_rank_is_matched_as_by_walking_back(self) -> None:
        points = self.index.checkpoints
        assert len(points) == sum(map(len, self.resumable.values()))
        for rank in range(2):
            assert points.num_blocks(key(rank)) == len(self.resumable.get(rank, ()))
        for sequence in SEQUENCES:
            most = self.index.match_all(sequence)
            expected = {
                key(rank): by_walking_back(resumable, sequence, most.get(key(rank), 0))
                for rank, resumable in self.resumable.items()
            }
            found = points.deepest(sequence, most)
            assert found == {rank: depth for rank, depth in expected.items() if depth}

    def teardown(self) -> None:
        for rank in range(2):
            self.index.remove_rank(key(rank))
        points = self.index.checkpoints
        assert points._ranks == points._blocks == {}


TestResuming = Resuming.TestCase
TestResuming.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_what_is_evicted_or_corrected_is_gone_on_from_no_more_though_told_as_held_alone() -> None:
    index, sequence = PrefixIndex(), SEQUENCES[0]
    index.apply_snapshot(life(0), sequence, [2, 4, 6])
    index.apply_delta(life(0), [], [6])
    index.apply_delta(life(0), [6], [])
    assert index.checkpoints.deepest(sequence, {key(0): 6}) == {key(0): 4}
    index.correct(key(0), sequence, 3)
    index.apply_delta(life(0), [4, 5], [])
    assert index.checkpoints.deepest(sequence, {key(0): 6}) == {key(0): 2}


@given(st.lists(sets, max_size=4))
def test_along_a_sequence_they_come_deepest_first(blocks: list[set[int]]) -> None:
    points = ResumableBlocks()
    for rank, those in enumerate(blocks):
        points.add(key(rank), those)
    for sequence in SEQUENCES:
        expected = [
            (depth, {key(rank) for rank, those in enumerate(blocks) if sequence[depth - 1] in those})
            for depth in range(len(sequence), 0, -1)
        ]
        assert list(points.along(sequence)) == [(depth, ranks) for depth, ranks in expected if ranks]


def test_blocks_of_the_same_ranks_share_their_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of its own would take 216 bytes."""
    points = ResumableBlocks()
    points.add(key(0), [1, 2, 3])
    points.add(key(1), [3, 1])
    points.remove(key(0), [3])
    points.add(key(1), [4])
    found = dict(points.along([1, 2, 3, 4]))
    assert found == {1: {key(0), key(1)}, 2: {key(0)}, 3: {key(1)}, 4: {key(1)}}
    assert found[3] is found[4]
    monkeypatch.setattr(prefix_index, "_MAX_SHARED", 2)
    points.add(key(2), range(5, 9))
    assert all(len({id(ranks) for _, ranks in points.along(those)}) == 1 for those in ([5, 6], [7, 8]))
    assert len(points._shared) <= 2
