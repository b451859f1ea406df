from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.index.read import block_holders
from services.index.read.block_holders import BlockHolders, columns_of, packed

BLOCKS = [*range(12), *(64 * i for i in range(1, 30))]  # these all of one bucket
sets = st.lists(st.sampled_from(BLOCKS), max_size=8)
ranks = st.integers(0, 4)


@pytest.fixture(autouse=True)
def swept_a_little_with_each_change(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(block_holders, "_SWEPT_BUCKETS", 7)
    monkeypatch.setattr(block_holders, "_MOST_DEAD_COLUMNS", 1)
    monkeypatch.setattr(block_holders, "_SETS_AT_ONCE", 16)
    monkeypatch.setattr(block_holders, "_MIN_SETS", 3)
    yield


class Holding(RuleBasedStateMachine):
    """Beside a plain set a column; columns come and go, and are swept out of the table meanwhile."""

    @initialize()
    def begin(self) -> None:
        self.holders = BlockHolders()
        self.columns = [self.holders.take_column() for _ in range(5)]
        self.held: list[set[int]] = [set() for _ in range(5)]
        self.shown = [False] * 5

    @rule(changes=st.lists(st.tuples(ranks, st.sampled_from(BLOCKS), st.booleans()), max_size=20))
    def change(self, changes: list[tuple[int, int, bool]]) -> None:
        columns = np.array([self.columns[rank] for rank, _, _ in changes], np.int64)
        is_added = np.array([added for _, _, added in changes], np.bool_)
        self.holders.change(packed([block for _, block, _ in changes]), columns, is_added)
        for rank, block, added in changes:
            (self.held[rank].add if added else self.held[rank].discard)(block)

    @rule(rank=ranks)
    def show(self, rank: int) -> None:
        self.holders.show(self.columns[rank])
        self.shown[rank] = True

    @rule(rank=ranks)
    def replace(self, rank: int) -> None:
        self.holders.give_column(self.columns[rank])
        self.columns[rank] = self.holders.take_column()
        assert len({*self.columns}) == 5
        self.held[rank], self.shown[rank] = set(), False

    @invariant()
    def each_block_is_held_by_those(self) -> None:
        for block in BLOCKS:
            holding = {
                column
                for column, held, shown in zip(self.columns, self.held, self.shown, strict=True)
                if shown and block in held
            }
            runs = self.holders.runs([block])
            assert {column for _, mask in runs for column in columns_of(mask)} == holding
        assert [*map(self.holders.num_blocks, self.columns)] == [*map(len, self.held)]


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_columns_are_used_again(subtests: pytest.Subtests) -> None:
    with subtests.test("columns and sets that nobody needs are used again"):
        holders = BlockHolders()
        nothing = packed(()), np.zeros(0, np.int64), np.zeros(0, np.bool_)
        for number in range(600):
            column = holders.take_column()
            holders.change(packed([number, number + 1]), np.full(2, column), np.ones(2, np.bool_))
            if number >= 2:
                holders.give_column(column)
        for _ in range(100):
            holders.change(*nothing)
        assert holders._dead == 0 and len(holders._alone) == 64 and len(holders._sets.masks) < 150
        assert len(holders._table) == 3
    with subtests.test("columns that never held anything are used again"):
        # Ranks that start and fail, one after the other, while nobody holds or changes anything.
        holders = BlockHolders()
        for _ in range(1000):
            column = holders.take_column()
            holders.show(column)
            holders.give_column(column)
        assert len(holders._alone) == 64 and len(holders._sets.masks) < 150


def test_sets_that_nobody_needs_are_forgotten_while_a_column_is_dead() -> None:
    """One that holds too little to be swept out: a rank that left, or that wrote a snapshot anew."""
    holders = BlockHolders()
    columns = [holders.take_column() for _ in range(12)]
    one = np.ones(1, np.bool_)
    for block in range(100):
        holders.change(packed([block]), np.array([columns[0]]), one)
    holders.change(packed([100]), np.array([columns[1]]), one)
    holders.give_column(columns[1])
    for number in range(1, 1 << 10):  # one block, held by ever other ranks
        for bit in range(10):
            is_added = np.array([bool(number >> bit & 1)])
            holders.change(packed([0]), np.array([columns[2 + bit]]), is_added)
    assert holders._dead and len(holders._sets.masks) < 150


def test_sets_are_forgotten_as_fast_as_they_are_made(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subtests.test("sets are forgotten between sweeps that follow each other"):
        holders, rng, most = BlockHolders(), np.random.default_rng(0), 0
        columns = [holders.take_column() for _ in range(40)]
        for turn in range(600):
            holders.give_column(columns[turn % 40])
            columns[turn % 40] = holders.take_column()
            some = packed(rng.permutation(200)[:100].tolist())
            holders.change(some, np.full(100, columns[turn % 40]), np.ones(100, np.bool_))
            most = max(most, len(holders._sets.masks))
        assert most < 20_000
    with subtests.test("sets are forgotten as fast as they are made"):
        monkeypatch.setattr(block_holders, "_SWEPT_BUCKETS", 100)
        holders, rng, most = BlockHolders(), np.random.default_rng(0), 0
        columns = np.array([holders.take_column() for _ in range(40)])
        blocks = packed(range(1000))
        for _ in range(300):
            is_added = rng.integers(0, 2, 1000) > 0
            holders.change(blocks, columns[rng.integers(0, 40, 1000)], is_added)
            most = max(most, len(holders._sets.masks))
        assert most < 20_000


def test_no_change_tidies_up_more_than_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each change some: 200,000 sets at once would take 150 ms, in which no token is told."""
    touched, sets = [0], block_holders._Sets
    number, forget = sets.number, sets.forget

    def counted_number(self: block_holders._Sets, mask: int) -> int:
        touched[-1] += 1
        return number(self, mask)

    def counted_forget(self: block_holders._Sets, numbers: list[int]) -> None:
        touched[-1] += len(numbers)
        forget(self, numbers)

    holders = BlockHolders()
    columns = [holders.take_column() for _ in range(12)]
    for block in range(1, 400):
        some = [column for bit, column in enumerate(columns) if block >> bit & 1]
        for column in some:
            holders.change(packed([block]), np.array([column]), np.ones(1, np.bool_))
    for column in columns[:6]:
        holders.give_column(column)
    monkeypatch.setattr(sets, "number", counted_number)
    monkeypatch.setattr(sets, "forget", counted_forget)
    while (holders._dead or holders._sets.are_many) and len(touched) < 1000:
        touched.append(0)
        holders.change(packed(()), np.zeros(0, np.int64), np.zeros(0, np.bool_))
    assert not holders._dead and sum(touched) > 300 and max(touched) <= 16


def test_columns_of_a_mask() -> None:
    for mask in (0, 1, 1 << 900, 0b1011 << 61, (1 << 1000) - 1):
        assert columns_of(mask) == [bit for bit in range(1000) if mask >> bit & 1]
