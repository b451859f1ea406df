import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.contents import contents_of
from services.index.read.prefix_index import PrefixIndex
from services.values.rank import Generation, RankId, RankKey


def life(rank: int, generation: int = 1) -> RankId:
    return RankId("w", rank, Generation(generation))


def linear_scan(held: set[int], hashes: list[int]) -> int:
    depth = 0
    while depth < len(hashes) and hashes[depth] in held:
        depth += 1
    return depth


sequences = st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=0, max_size=70)


@given(sequences, st.lists(st.integers(0, 70), max_size=5), st.sets(st.integers(0, 2**64 - 1)))
def test_match_agrees_with_a_linear_scan(hashes: list[int], depths: list[int], others: set[int]) -> None:
    index = PrefixIndex()
    held = {rank: set(hashes[:depth]) | (others - set(hashes)) for rank, depth in enumerate(depths)}
    for rank, blocks in held.items():
        index.apply_snapshot(life(rank), blocks)
    expected = {RankKey("w", rank): linear_scan(blocks, hashes) for rank, blocks in held.items()}
    assert {key: index.match(key, hashes) for key in expected} == expected
    assert index.match_all(hashes) == {key: depth for key, depth in expected.items() if depth}
    deepest = list(index.held(hashes).deepest())
    assert dict(deepest) == index.match_all(hashes) and len(dict(deepest)) == len(deepest)
    assert [depth for _, depth in deepest] == sorted((depth for _, depth in deepest), reverse=True)


@given(st.data())
def test_many_ranks_that_hold_and_evict_are_matched_as_by_a_linear_scan(data: st.DataObject) -> None:
    """Long prompts, and hashes of few buckets."""
    length = data.draw(st.integers(1, 600))
    lowest_bits = data.draw(st.sampled_from([2**64, 3, 50]))
    hashes = [((i * 0x9E3779B97F4A7C15) % 2**48 << 16) + i % lowest_bits % 2**16 for i in range(length)]
    index, held = PrefixIndex(), {}
    depths = data.draw(st.lists(st.integers(0, length) | st.just(length), max_size=90))
    for rank, depth in enumerate(depths):
        others = {hash_ ^ 1 << 63 for hash_ in hashes[: data.draw(st.integers(0, 20))]}
        index.apply_snapshot(life(rank), {*hashes[:depth], *others})
        kept = data.draw(st.integers(0, depth) | st.just(depth))
        assert index.apply_delta(life(rank), [], hashes[kept:depth])
        grown = data.draw(st.integers(kept, length) | st.just(kept))
        assert index.apply_delta(life(rank), hashes[kept:grown], [])
        held[RankKey("w", rank)] = grown
    for rank in data.draw(st.sets(st.sampled_from(range(len(depths))))) if depths else ():
        index.remove_rank(RankKey("w", rank))
        del held[RankKey("w", rank)]
    assert index.match_all(hashes) == {key: depth for key, depth in held.items() if depth}
    assert {key: index.match(key, hashes) for key in held} == held
    depth, all_held = data.draw(st.integers(0, length)), index.held(hashes)
    deeper = sorted(key for key, held_depth in held.items() if held_depth > depth)
    assert (all_held.num_beyond(depth), sorted(all_held.beyond(depth))) == (len(deeper), deeper)
    assert {key: all_held.depth(key) for key in (*held, RankKey("unknown", 0))} == held | {
        RankKey("unknown", 0): 0
    }


@given(st.data())
def test_what_lies_below_is_found_as_by_a_linear_scan(data: st.DataObject) -> None:
    """A rank's tiers hold a prefix whatever is in which, and each of their blocks is in memory or in a file.

    Where that changes once along the prefix, each block counts as what it is.
    """
    length = data.draw(st.integers(1, 300))
    hashes = [i * 0x9E3779B97F4A7C15 % 2**64 for i in range(length)]
    index, held, files = PrefixIndex(), dict[RankKey, int](), dict[RankKey, set[int]]()
    changes_once = data.draw(st.booleans())
    for rank, depth in enumerate(data.draw(st.lists(st.integers(0, length), max_size=8))):
        if changes_once:
            at = data.draw(st.integers(0, depth))
            of_files = set(data.draw(st.sampled_from([hashes[:at], hashes[at:depth]])))
        else:
            of_files = {block for block in hashes[:depth] if block >> 40 & 1}
        early = data.draw(st.integers(0, depth))
        index.apply_snapshot(life(rank), hashes[:early], (), set(hashes[:early]) & of_files)
        added = hashes[early:depth]
        moved_back = hashes[: data.draw(st.integers(0, early))] if not changes_once else []
        of_files -= set(moved_back)
        assert index.apply_delta(life(rank), added, [], (), (), set(added) & of_files, set(moved_back))
        held[RankKey("w", rank)], files[RankKey("w", rank)] = depth, of_files
    found = index.held_below(hashes)
    assert found.depths() == {key: depth for key, depth in held.items() if depth}
    for key, depth in held.items():
        assert index.num_blocks(key) == depth
        first = data.draw(st.integers(0, depth))
        in_files = found.in_files(key, first, depth)
        if changes_once:
            assert in_files == len(files[key] & set(hashes[first:depth]))
        else:
            assert 0 <= in_files <= depth - first
        for number in range(depth):
            one = index.held_below(hashes[number : number + 1])
            assert one.in_files(key, 0, 1) == (hashes[number] in files[key])
    for key in held:
        index.remove_rank(key)
    assert index.is_empty and index.total_blocks == 0
    assert not any(index.held_below(hashes).in_files(key, 0, length) for key in held)


@given(st.lists(st.tuples(st.integers(1, 2), st.sets(st.integers(0, 2**64 - 1))), min_size=1))
def test_a_snapshot_replaces_all_that_was_held(snapshots: list[tuple[int, set[int]]]) -> None:
    index, other = PrefixIndex(), {1, 2, 3}
    index.apply_snapshot(life(7), other)
    for generation, hashes in snapshots:
        replace = index.take_snapshot if len(hashes) % 2 else index.apply_snapshot
        replace(life(0, generation), hashes)
        assert index.generation(RankKey("w", 0)) == generation
        assert index.num_blocks(RankKey("w", 0)) == len(hashes)
        for block in hashes | other:
            expected = {RankKey("w", 0): 1} if block in hashes else {}
            assert index.match_all([block]) == expected | ({RankKey("w", 7): 1} if block in other else {})
            assert index.match(RankKey("w", 0), [block]) == (block in hashes)


@given(st.lists(st.tuples(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))))
def test_deltas_agree_with_a_plain_set(deltas: list[tuple[set[int], set[int]]]) -> None:
    index, held = PrefixIndex(), {1, 2, 3}
    index.apply_snapshot(life(0), held)
    for added, removed in deltas:
        assert index.apply_delta(life(0), added - removed, removed - added)
        held = (held - (removed - added)) | (added - removed)
    assert {block for block in range(21) if index.match(life(0).key, [block])} == held
    assert index.num_blocks(life(0).key) == len(held)
    assert contents_of(index) == {block: {life(0).key} for block in held}


small_sets = st.sets(st.integers(0, 9))
verbs = st.sampled_from(["snapshot", "delta", "correct", "remove"])


@given(st.lists(st.tuples(verbs, st.integers(0, 2), st.integers(1, 2), small_sets, small_sets)))
def test_the_total_is_what_the_ranks_hold_together(
    steps: list[tuple[str, int, int, set[int], set[int]]],
) -> None:
    index = PrefixIndex()
    for verb, rank, generation, some, others in steps:
        match verb:
            case "snapshot":
                index.apply_snapshot(life(rank, generation), some)
            case "delta":
                index.apply_delta(life(rank, generation), some, others - some)
            case "correct":
                index.correct(life(rank).key, sorted(some), 2)
            case "remove":
                index.remove_rank(life(rank).key)
        assert index.total_blocks == sum(index.num_blocks(life(rank).key) for rank in range(3))


def test_lives_and_corrections(subtests: pytest.Subtests) -> None:
    with subtests.test("another life changes nothing but its snapshot replaces all"):
        index, key = PrefixIndex(), life(0).key
        assert not index.apply_delta(life(0), [1], [])
        index.apply_snapshot(life(0, generation=1), [1, 2])
        assert not index.apply_delta(life(0, generation=2), [3], [1])
        assert index.match(key, [1, 2, 3]) == 2
        index.apply_snapshot(life(0, generation=2), [1])
        assert (index.match(key, [1, 2]), index.generation(key)) == (1, 2)
        index.remove_rank(key)
        assert (index.match(key, [1]), index.generation(key), index.match_all([1])) == (0, None, {})
    with subtests.test("a correction leaves other ranks and other sequences alone"):
        index = PrefixIndex()
        index.apply_snapshot(life(0), [1, 2, 3, 10, 11])
        index.apply_snapshot(life(1), [1, 2, 3])
        assert index.correct(life(0).key, [1, 2, 3], 1) == 2
        assert index.match(life(0).key, [10, 11]) == 2
        assert index.match_all([1, 2, 3]) == {life(0).key: 1, life(1).key: 3}
        assert index.correct(life(5).key, [1], 0) == 0


@given(sequences, st.integers(0, 70), st.integers(0, 70))
def test_after_a_correction_no_more_is_matched_than_was_present(
    hashes: list[int], believed: int, present: int
) -> None:
    index, key = PrefixIndex(), life(0).key
    index.apply_snapshot(life(0), hashes[:believed])
    forgotten = index.correct(key, hashes[:believed], present)
    assert index.match(key, hashes) == min(believed, present, len(hashes))
    assert forgotten == max(0, min(believed, len(hashes)) - present)
