from hypothesis import given
from hypothesis import strategies as st

from services.index.read.holder_filter import HolderFilter

# Few of them differ in their lowest bits, so that blocks share slots.
blocks = st.integers(0, 40).map(lambda number: (number % 7) + (number << 40) + (number % 2 << 63))
columns = st.integers(0, 130)
calls = st.lists(st.tuples(st.sampled_from(["fill", "add", "give"]), columns, st.sets(blocks)), max_size=30)


@given(calls, st.lists(blocks, min_size=1, max_size=255))
def test_no_block_that_a_rank_holds_is_missed(
    calls: list[tuple[str, int, set[int]]], asked: list[int]
) -> None:
    ranks, held = HolderFilter(), {}
    taken = [ranks.take_column() for _ in range(131)]
    assert len(set(taken)) == 131
    for what, number, some in calls:
        column = taken[number]
        if what == "add":
            ranks.add(column, some)
            held.setdefault(column, set()).update(some)
        elif what == "fill":
            ranks.fill(column, some, 1 << 20)
            held[column] = set(some)
        else:
            ranks.give_column(column)
            held.pop(column, None)
            taken[number] = ranks.take_column()
    depths = ranks.depths(asked)
    for column, some in held.items():
        assert depths[column] >= next((i for i, b in enumerate(asked) if b not in some), len(asked))
        assert all(column in (ranks.holders(block, 192) or []) for block in some)


def test_what_is_alone_in_its_slot_is_told_exactly() -> None:
    ranks = HolderFilter()
    taken = [ranks.take_column() for _ in range(70)]
    for depth, column in enumerate(taken):
        ranks.fill(column, set(range(depth)), 1 << 20)
    depths = ranks.depths(range(100))
    assert [depths[column] for column in taken] == list(range(70))
    assert HolderFilter().depths([1]) == []
    assert set(ranks.depths(range(70, 90))) == {0}
    assert ranks.holders(66, 3) == [taken[67], taken[68], taken[69]]
    assert ranks.holders(66, 2) is None


def test_a_column_that_is_given_back_is_empty() -> None:
    ranks = HolderFilter()
    first = ranks.take_column()
    ranks.fill(first, {1, 2}, 2)
    ranks.give_column(first)
    assert ranks.holders(1, 64) == []
    assert {ranks.take_column() for _ in range(64)} >= {first}
    assert ranks.num_columns == 64


def test_it_grows_with_the_ranks_and_never_beyond_its_share() -> None:
    ranks = HolderFilter()
    one, other = ranks.take_column(), ranks.take_column()
    ranks.fill(one, {1, 1 + 2**30}, 2)
    size = ranks.size_bytes
    ranks.fill(other, set(range(100_000)), 100_000)
    assert ranks.size_bytes == size  # two ranks are few to share 64 columns
    ranks.fill(other, set(range(100_000)), 1_000_000)
    assert size < ranks.size_bytes <= 4 * 1_000_000
    assert one in (ranks.holders(1, 64) or []) and one in (ranks.holders(1 + 2**30, 64) or [])
