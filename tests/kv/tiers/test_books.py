"""The books of what lies below a pool, against a plain oracle."""

import time
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.kv.tiers.block import Place, SlotState
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import LateTier, SlotKind, Stored
from services.kv.tiers.tier_keys import ROOT
from services.values.errors import ProtocolError

PATHS = [(a,) * depth + (b,) for a in range(2) for depth in range(4) for b in range(3)]
# Some have a checkpoint of two parts.
PATHS += [(a,) * depth + (9,) * parts for a in range(2) for depth in (1, 2) for parts in (1, 2)]


def kind_of(path):
    return SlotKind.END if path[-2:] == (9, 9) else SlotKind(path[-1] == 9)


def key_of(path):
    return bytes(path).ljust(15, b"\xff") + bytes([len(path)]) if path else ROOT


class BooksMachine(RuleBasedStateMachine):
    """`contents` is the oracle: what the bytes of each slot are, as whoever writes them leaves them."""

    writes = Bundle("writes")
    reads = Bundle("reads")
    moves = Bundle("moves")

    def __init__(self):
        super().__init__()
        self.books = TierBooks([4, 3, 0], [False, True, True])
        self.told = set(), set()  # as who follows the events knows it: all, and what is in files
        self.told_of_points = set()
        self.contents = {}  # by place
        self.in_use = []  # places that somebody reads or writes

    @rule(target=writes, path=st.sampled_from(PATHS))
    def claim(self, path):
        before = set(self.books._blocks)
        block = self.books.claim(key_of(path), key_of(path[:-1]), hash(path), kind_of(path))
        if block is None:
            assert set(self.books._blocks) == before
            return multiple()
        assert key_of(path[:-1]) in {*before, ROOT}, "it was taken without its parent"
        self._write(block.place)
        return path, block

    @rule(write=consumes(writes), good=st.booleans())
    def end_write(self, write, good):
        path, block = write
        self.in_use.remove(block.place)
        if good:
            self.contents[block.place] = key_of(path)
            self.books.written(block, digest=len(path))
        else:
            self.contents[block.place] = None
            self.books.write_failed(block)

    @rule(target=reads, path=st.sampled_from(PATHS), data=st.data())
    def begin_read(self, path, data):
        keys = [key_of(path[: end + 1]) for end in range(len(path))]
        found = self.books.find(keys)
        for block, key in zip(found, keys, strict=False):
            assert self.contents[block.place] == key, "another block lies in its slot"
        if not found:
            return multiple()
        block = found[-1]
        self.books.use(block)
        self.books.begin_read(block)
        self.in_use.append(block.place)
        return block, block.place

    @rule(read=consumes(reads), good=st.booleans())
    def end_read(self, read, good):
        block, place = read
        assert self.contents[place] == block.key, "it was overwritten while it was read"
        self.in_use.remove(place)
        self.books.end_read(block, good=good)

    @rule(target=moves, tier=st.integers(0, 1), newest=st.booleans())
    def begin_move(self, tier, newest):
        before = set(self.books._blocks.values())
        block = self.books.begin_move_of_newest() if newest else self.books.begin_move(tier)
        gone = before - set(self.books._blocks.values())
        if block is None:
            assert not gone
            return multiple()
        parent, children = block.parent, block.children
        if newest:
            assert parent is None or parent.place.tier or parent.moves_to, "parents go first"
        else:
            assert all(child.place.tier != tier for child in children), "leaves go first"
        assert all(each.used <= block.used for each in gone), "what was used later gave way"
        self._write(block.moves_to)
        self.in_use.append(block.place)
        return block, block.place, block.moves_to

    @rule(move=consumes(moves), good=st.booleans())
    def end_move(self, move, good):
        block, source, target = move
        assert self.contents[source] == block.key
        self.in_use.remove(source)
        self.in_use.remove(target)
        self.contents[target] = block.key if good else None
        self.books.moved(block, good=good)

    @rule(paths=st.lists(st.sampled_from(PATHS), max_size=3), first=st.integers(0, 2))
    def a_tier_is_opened_late(self, paths, first):
        """It has what an earlier life left, some of which may be here by now, or lack its parent."""
        if self.books.num_slots[2]:
            return
        stored = []
        for nth, path in enumerate(paths):
            slot, keys = (first + nth) % 3, (key_of(path), key_of(path[:-1]))
            self.contents[Place(2, slot)] = keys[0]
            stored.append(Stored(slot, *keys, hash(path), len(path), 1_000 + nth, kind_of(path)))
        self.books.open_tier(LateTier.of(2, 3, stored))
        assert self.books.has_late == bool(stored)

    @rule(most=st.integers(1, 2))
    def take_in(self, most):
        self.books.take_in(most)

    @rule()
    def restart(self):
        """Whoever reads the table now has all that is held, and nothing else."""
        stored = [
            [
                Stored(b.place.slot, b.key, b.parent_key, b.block_hash, b.digest, b.sequence, b.kind)
                for b in self.books._blocks.values()
                if b.place.tier == tier and b.state is SlotState.HELD
            ]
            for tier in range(3)
        ]
        again = TierBooks([4, 3, self.books.num_slots[2]])
        again.load(stored)
        again.check()
        events = again.take_events()
        assert set(events.stored) == {b.block_hash for b in again._blocks.values() if b.kind == 0}
        assert set(events.resumable_stored) == {b.block_hash for b in again._blocks.values() if b.kind == 2}
        held = {s.key for tier in stored for s in tier}
        parents = {s.key: s.parent_key for tier in stored for s in tier}

        def is_closed(key):
            return key == ROOT or (key in held and is_closed(parents[key]))

        assert set(again._blocks) == {key for key in held if is_closed(key)}

    @invariant()
    def holds(self):
        self.books.check()
        for block in self.books._blocks.values():
            if block.state is SlotState.HELD:
                assert self.contents[block.place] == block.key

    @rule()
    def take_events(self):
        events = self.books.take_events()
        held, in_files = self.told
        assert not held & set(events.stored) and set(events.removed) <= held, "it was told already"
        held |= set(events.stored)
        held -= set(events.removed)
        in_files |= set(events.files_stored)
        in_files -= set(events.files_removed)
        all_held = [b for b in self.books._blocks.values() if b.state is SlotState.HELD]
        self.told_of_points |= set(events.resumable_stored)
        self.told_of_points -= set(events.resumable_removed)
        assert self.told_of_points == {b.block_hash for b in all_held if b.kind is SlotKind.END}
        blocks = [b for b in all_held if b.kind is SlotKind.BLOCK]
        assert held == {b.block_hash for b in blocks}
        assert in_files == {b.block_hash for b in blocks if b.place.tier > 0}

    def _write(self, place):
        assert place not in self.in_use, "a slot in use is written"
        self.in_use.append(place)
        self.contents[place] = "being written"


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def held(books, path):
    block = books.claim(key_of(path), key_of(path[:-1]), 0)
    books.written(block, 0)
    return block


def test_the_least_recently_used_leaf_goes_and_never_a_parent_before_it():
    books = TierBooks([3])
    first, second = held(books, (1,)), held(books, (1, 1))
    other = held(books, (2,))
    books.use(second)
    assert held(books, (3,)).place == other.place  # it was the oldest that leads to nothing
    assert held(books, (4,)).place == second.place
    assert [b.key for b in books.find([key_of((1,))])] == [first.key]


def test_a_bad_block_takes_its_descendants_along_once_nobody_reads_them():
    books = TierBooks([3])
    first, second = held(books, (1,)), held(books, (1, 1))
    books.begin_read(first)
    books.begin_read(second)
    books.end_read(first, good=False)
    assert (len(books), books.free_slots(0)) == (0, 2)
    with pytest.raises(ProtocolError):
        books.begin_read(second)
    books.end_read(second)
    assert books.free_slots(0) == 3
    books.check()


def test_a_tier_moves_what_it_cannot_keep_down_to_the_next_one():
    books = TierBooks([2, 2])
    first, second = held(books, (1,)), held(books, (1, 1))
    assert books.begin_move(0) is second  # the leaf first
    books.moved(second)
    assert (second.place.tier, books.free_slots(0)) == (1, 1)
    assert books.begin_move(0) is first  # its child lies below already
    books.begin_read(first)
    books.moved(first)
    assert first.place.tier == 0, "it was read meanwhile"
    books.end_read(first)
    assert books.begin_move(1) is None
    books.check()


def test_a_tier_that_ends_moves_whole_prefixes_the_last_used_first():
    books = TierBooks([4, 3])
    held(books, (1,))
    first, second, third = held(books, (2,)), held(books, (2, 1)), held(books, (2, 1, 1))
    books.use(third)
    moving = [books.begin_move_of_newest() for _ in range(3)]
    assert moving == [first, second, third] and books.begin_move_of_newest() is None
    for block in moving:
        books.moved(block)
    assert [block.place.tier for block in moving] == [1, 1, 1] and books.free_slots(0) == 3
    books.check()


def test_a_tier_that_ends_pushes_out_what_was_used_before_and_nothing_else():
    books = TierBooks([4, 2])
    gone, left, older, newer = (held(books, (token,)) for token in range(4))
    books.moved(books.begin_move(0))
    assert gone.place.tier == 1
    for block in (newer, older):
        assert books.begin_move_of_newest() is block
        books.moved(block)
    assert gone.state is SlotState.BAD
    assert books.begin_move_of_newest() is None and books.begin_move(0) is None
    books.use(left)
    assert books.begin_move_of_newest() is left
    books.check()


@given(
    num_slots=st.tuples(st.integers(2, 8), st.integers(1, 8)),
    lives=st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=4,
    ),
    demotes=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_tier_that_ends_leaves_what_was_used_last_below_though_it_has_begun_before(
    num_slots, lives, demotes
):
    """A rank serves some prompts, begins to leave, serves again, and leaves in the end."""
    books = TierBooks(num_slots, (False, True))
    for prompts, num_moves in lives:
        for prompt in prompts:
            serve(books, tuple(prompt), demotes)
        for _ in range(num_moves):
            move_newest(books)
    by_use = sorted(books._blocks.values(), key=lambda block: (-block.used, block.depth))
    due = {block.key for block in by_use[: num_slots[1]]}
    while move_newest(books):
        books.check()
    assert {block.key for block in books._blocks.values() if block.place.tier == 1} == due


def serve(books, prompt, demotes):
    path = [prompt[: end + 1] for end in range(len(prompt))]
    for each in path:
        if demotes and not books.free_slots(0) and (block := books.begin_move(0)) is not None:
            books.moved(block)
        if (block := books.claim(key_of(each), key_of(each[:-1]), 0)) is not None:
            books.written(block, 0)
    if found := books.find(map(key_of, path)):
        books.use(found[-1])


def move_newest(books):
    if (block := books.begin_move_of_newest()) is not None:
        books.moved(block)
    return block is not None


def test_a_tier_full_of_parents_of_another_tiers_blocks_is_not_looked_through():
    books = TierBooks([5000, 5000])
    records = [
        Stored(n, n.to_bytes(16), (n - 1).to_bytes(16) if n > 1 else ROOT, 0, 0, n) for n in range(1, 5000)
    ]
    books.load([records[:-1], records[-1:]])
    looked_at = []
    books._may_move = lambda block: looked_at.append(block)
    assert books.begin_move(0) is None and 0 < len(looked_at) < 500


def test_a_tier_that_is_opened_late_has_what_its_records_tell(subtests):
    books = TierBooks([2, 0])
    first, writing = held(books, (1,)), books.claim(key_of((2,)), ROOT, 0)
    paths = [(1, 1), (1, 1, 1), (2, 2), (3, 3)]
    records = [Stored(n, key_of(p), key_of(p[:-1]), n, 0, 9 + n) for n, p in enumerate(paths)]
    books.open_tier(LateTier.of(1, 5, records))
    with subtests.test("a few at a time, nothing of which is lent meanwhile"):
        assert books.free_slots(1) == 1 and books.find([first.key, key_of((1, 1))]) == [first]
        books.take_in(3)
        books.check()
        assert [block.place for block in books.find(map(key_of, [(1,), (1, 1), (1, 1, 1)]))][1:] == [
            (1, 0),
            (1, 1),
        ]
    with subtests.test("what is behind a block that is written comes with it"):
        books.take_in(3)
        assert not books.has_late and len(books) == 4
        books.written(writing, 0)
        assert books.find(map(key_of, [(2,), (2, 2)]))[1].place == (1, 2)
    with subtests.test("what has no beginning here may give way"):
        assert books.free_slots(1) == 2
        books.check()
    with subtests.test("whoever opens it has sorted its records already"):
        many = [Stored(n, n.to_bytes(16), ROOT, n, 0, -n % 20_000) for n in range(20_000)]
        began_s = time.thread_time()
        late = LateTier.of(0, 30_000, many)
        sorted_s = time.thread_time()
        TierBooks([0]).open_tier(late)
        assert time.thread_time() - sorted_s < (sorted_s - began_s) / 4


def test_what_is_claimed_in_reverse_is_newer_than_what_a_late_tier_has():
    books = TierBooks([9, 0])
    before = held(books, (1,)).sequence
    books.number_down(True)
    first = held(books, (2,)).sequence
    books.open_tier(LateTier.of(1, 2, [Stored(0, key_of((9,)), ROOT, 1, 0, 1 << 40)]))
    down = [held(books, (token,)).sequence for token in (3, 4)]
    books.number_down(False)
    after = held(books, (5,)).sequence
    assert before < first < 1 << 40 < down[1] < down[0] < after


def test_what_is_being_written_is_not_held_yet():
    books = TierBooks([3])
    first = held(books, (1,))
    second, third = (books.claim(key_of(path), key_of(path[:-1]), 0) for path in ((1, 1), (1, 2)))
    assert (books.num_held, len(books)) == (1, 3)
    books.written(second, 0)
    assert books.num_held == 2
    books.drop(first)
    books.written(third, 0)
    assert (books.num_held, books.free_slots(0)) == (0, 3)
    books.check()


def test_a_table_that_leads_in_a_circle_is_of_no_use():
    books = TierBooks([2])
    books.load([[Stored(0, b"a" * 16, b"b" * 16, 0, 0, 1), Stored(1, b"b" * 16, b"a" * 16, 0, 0, 2)]])
    assert (len(books), books.free_slots(0)) == (0, 2)


def test_a_long_prefix_costs_no_more_for_each_block_than_a_short_one():
    length = 100
    moves = []

    class Counting(OrderedDict):
        def move_to_end(self, block, last=True):
            moves.append(block)
            super().move_to_end(block, last)

    def counted():
        books = TierBooks([2 * length])
        books._nearest = Counting()
        return books

    keys = [bytes([number + 1]) * 16 for number in range(length)]
    records = [
        Stored(number, key, keys[number - 1] if number else ROOT, 0, 0, number)
        for number, key in enumerate(keys)
    ]
    for number in range(length):  # It branches off everywhere.
        records.append(Stored(length + number, bytes([number + 101]) * 16, keys[number], 0, 0, 999 - number))
    books = counted()
    for each in records:
        books.written(books.claim(each.key, each.parent_key, 0), 0)
    assert not moves
    again = counted()
    again.load([records])
    assert len(moves) == len(records)
    for key in [record.key for record in sorted(records, key=lambda record: record.sequence)]:
        books.use(books._blocks[key])
    order = [[block.key for block in each._nearest] for each in (books, again)]
    assert order[0] == order[1], "the next life lets others go first"


def test_what_has_lost_its_parent_waits_for_it_and_is_the_first_to_go():
    head, long, other = (1,), (1, 1), (1, 2)
    below = [(1, 1, 1), (1, 1, 2), other]

    def lost(tier):
        books = TierBooks([3, 4])
        paths = [long, *below] if tier else [long, other]
        records = [Stored(n, key_of(path), key_of(path[:-1]), 7, n, n) for n, path in enumerate(paths)]
        books.load([records, []] if not tier else [[], records])
        books.check()
        assert len(books) == 0
        return books

    def depth(books, path):
        return len(books.find([key_of(path[: end + 1]) for end in range(len(path))]))

    books = lost(1)  # the head was in memory
    held(books, head)
    books.check()
    assert [depth(books, path) for path in below] == [3, 3, 2] and len(books) == 5
    assert books.claim(key_of((2,)), ROOT, 0).sequence > 3
    books = lost(0)
    assert books.free_slots(0) == 3
    for number in (2, 3, 4):
        held(books, (number,))
        books.check()
    assert len(books) == 3, "one was let go that somebody can reach"
    books = lost(0)
    parent = books.claim(key_of(head), ROOT, 0)
    child = books.claim(key_of(other), key_of(head), 0)  # in place of the oldest
    books.written(parent, 0)
    books.check()
    books.written(child, 0)
    books.check()
    assert depth(books, other) == 2
