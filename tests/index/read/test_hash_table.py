import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.index.read.hash_table import HashTable, PackedHashes

# Of few buckets, of the first ones, and any.
blocks = st.one_of(
    st.integers(0, 40),
    st.integers(0, 2**64 - 1),
    *(st.integers(0, 300).map(each.__mul__) for each in (64, 4096)),
)
steps = st.lists(
    st.tuples(
        st.dictionaries(blocks, st.integers(0, 5), max_size=200),
        st.none() | st.tuples(*[st.integers(0, 5)] * 5),
    ),
    max_size=12,
)


def packed(hashes: object) -> PackedHashes:
    return np.array(list(hashes), np.uint64)  # type: ignore[call-overload]


def put(table: HashTable, numbers: dict[int, int]) -> list[int]:
    """What they were before."""
    hashes = packed(numbers)
    table.make_room(len(hashes))
    rows, before = table.locate(hashes)
    table.put(hashes, rows, np.array(list(numbers.values()), np.uint32))
    return before.tolist()


@settings(max_examples=60, deadline=None)
@given(steps)
def test_a_table_agrees_with_a_dict(steps: list[tuple[dict[int, int], tuple[int, ...] | None]]) -> None:
    table, known = HashTable(), dict[int, int]()
    for numbers, renumbered in steps:
        assert put(table, numbers) == [known.get(block, 0) for block in numbers]
        known |= numbers
        if renumbered is not None:
            new_of = np.array([0, *renumbered], np.uint32)
            for start in range(0, table.num_buckets, 7):
                table.renumber(start, min(start + 7, table.num_buckets), new_of)
            known = {block: int(new_of[number]) for block, number in known.items()}
        known = {block: number for block, number in known.items() if number}
        asked = [*known, *range(50)]
        expected = [known.get(block, 0) for block in asked]
        assert table.find(packed(asked)).tolist() == expected == [table.number(block) for block in asked]
        assert len(table) == len(known)
        in_use = np.zeros(6, np.bool_)
        for start in range(0, table.num_buckets, 7):
            table.mark_numbers(start, min(start + 7, table.num_buckets), in_use)
        assert {*np.flatnonzero(in_use).tolist()} | {0} == {0, *known.values()}


def test_many_hashes_take_little_more_than_their_rows_and_are_found_while_buckets_are_split() -> None:
    rng, table, known = np.random.default_rng(0), HashTable(), dict[int, int]()
    sizes = []
    for number in range(1, 80):
        hashes = rng.integers(0, 2**64, 1000, dtype=np.uint64).tolist()
        assert put(table, dict.fromkeys(hashes, number)) == [0] * 1000
        known |= dict.fromkeys(hashes, number)
        sizes.append(table.size_bytes / len(table))
    assert table.find(packed(known)).tolist() == list(known.values())
    assert max(sizes[20:]) < 40 and len(table) == 79_000
    assert put(table, dict.fromkeys(known, 0)) == list(known.values())
    assert len(table) == 0 and not table.find(packed(known)).any()
