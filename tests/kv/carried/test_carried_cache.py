"""Tails, states and their books, by hand; under a core: tests/engine/paged/core/test_core_stateful.py."""

import pytest

from services.kv.carried_cache import CarriedCache
from services.kv.radix_tree import RadixTree
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout

FULL = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32")
WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (1,), 1, 8, "float32", window=4, unit_bytes=100)
STATE = KvGroup(GroupKind.RECURRENT, (2,), 0, 0, "float32", unit_bytes=1000)


class Books:
    def __init__(self, *carried, units=(), page_size=2, chunk_size=4):
        layout = KvLayout(page_size, 64, 1, groups=(FULL, *carried))
        self.copies = []
        self.cache = CarriedCache(
            layout,
            units,
            index_block=page_size,
            chunk_size=chunk_size,
            copy_slot=lambda source, target: self.copies.append((source, target)),
        )
        self.tree = RadixTree(page_size, page_size, "m", forget=self.cache.points.forget)
        self._pages = iter(range(1000))

    def node(self, ids):
        pages = [next(self._pages) for _ in range(len(ids) // self.tree.page_size)]
        return self.tree.insert(self.tree.root(""), ids, pages).node

    def compute(self, seq, end):
        assert self.cache.extend(seq, end) == end
        self.cache.trim(seq, end)

    def keep(self, ids):
        """A checkpoint at the end of what one has computed who is gone."""
        seq = self.cache.resume(None, 0)
        self.compute(seq, len(ids))
        self.cache.note_border(seq)
        node = self.node(ids)
        self.cache.keep_border(seq, node)
        self.cache.close(seq)
        return node

    def free(self):
        return tuple(books.free for books in self.cache.check())


def test_a_tail_follows_its_sequence():
    books = Books(WINDOW, units=(8,))
    seq = books.cache.resume(None, 0)
    books.cache.extend(seq, 4)
    assert books.free() == (6,)
    books.cache.trim(seq, 4)  # the next token sees 1, 2, 3: both pages
    assert (seq.tails[0].first_page, books.free()) == (0, (6,))
    books.compute(seq, 6)
    assert (seq.tails[0].first_page, books.free()) == (1, (6,))
    assert books.cache.units_of(seq) == (tuple(seq.tails[0].pages),)
    books.cache.close(seq)
    assert books.free() == (8,)


def test_a_checkpoint_shares_pages_and_has_a_copy_of_the_state():
    books = Books(WINDOW, STATE, units=(8, 4))
    seq = books.cache.resume(None, 0)
    books.compute(seq, 4)
    books.cache.note_border(seq)
    node = books.node([1, 2, 3, 4])
    books.cache.keep_border(seq, node)
    assert (books.free(), len(books.copies)) == ((6, 2), 1)
    again = books.cache.resume(node, 4)
    assert (again.position, again.tails[0].pages, books.free()) == (4, seq.tails[0].pages, (6, 1))
    assert books.copies[1] == (books.copies[0][1], again.slot)
    assert again.slot not in (seq.slot, books.copies[0][1])


def test_a_sequence_gets_what_only_checkpoints_hold():
    books = Books(STATE, units=(4,))
    seq = books.cache.resume(None, 0)
    for end in (2, 4, 6):
        books.compute(seq, end)
        books.cache.note_border(seq)
        books.cache.keep_border(seq, books.node(list(range(end))))
    assert (books.free(), len(books.cache.points)) == ((0,), 3)
    books.cache.receive(7)
    assert (len(books.cache.points), books.free()) == (2, (0,))


def test_one_who_computes_counts_as_two_beside_others():
    """Else a pool full of those that compute would keep no checkpoint."""
    books = Books(STATE, units=(4,))
    for _ in range(2):
        assert books.cache.may_open(computes=True)
        seq = books.cache.resume(None, 0)
    assert not books.cache.may_open(computes=False)
    books.cache.close(seq)
    for _ in range(2):
        assert books.cache.may_open(computes=False)
        books.cache.receive(7)
    assert not books.cache.may_open(computes=False)


def test_alone_one_may_compute_whom_the_pool_has_no_checkpoint_for():
    books = Books(STATE, units=(1,))
    assert books.cache.may_open(computes=True)
    seq = books.cache.resume(None, 0)
    books.compute(seq, 2)
    books.cache.note_border(seq)
    assert seq.saved is None and not books.cache.may_open(computes=False)


def test_those_that_receive_take_no_pages_for_chunks():
    books = Books(WINDOW, units=(20,), chunk_size=20)
    open_ = 0
    while books.cache.may_open(computes=False):
        books.cache.receive(7)
        open_ += 1
    assert open_ == (20 - 10) // 3  # a chunk of 20 takes 10 pages more than a token, which takes 3


def test_what_others_have_saved_goes_when_checkpoints_have_and_the_one_that_saves_least_first():
    books = Books(STATE, units=(6,))
    long, short = books.cache.receive(8), books.cache.receive(4)
    for seq in (long, short):
        books.cache.note_border(seq)
    books.keep([1, 2])
    books.cache.receive(7)
    assert (len(books.cache.points), books.free()) == (1, (0,))
    books.cache.receive(7)
    assert (len(books.cache.points), short.saved is None) == (0, False)
    newest = books.cache.receive(7)
    assert (long.saved is None, short.saved is None, books.free()) == (False, True, (0,))
    books.cache.keep_border(short, books.node([1, 2, 3, 4]))
    assert len(books.cache.points) == 0
    books.cache.close(newest)
    books.cache.note_border(short)
    assert short.saved is not None


def test_nothing_is_saved_where_sequences_hold_all_states():
    books = Books(STATE, units=(3,))
    seqs = [books.cache.receive(4) for _ in range(3)]
    books.cache.note_border(seqs[0])
    assert seqs[0].saved is None and books.copies == []
    books.cache.check()


def test_a_point_is_evicted_for_what_is_saved_and_what_others_have_saved_is_not():
    books = Books(STATE, units=(3,))
    first = books.cache.receive(4)
    books.keep([1, 2])
    books.keep([3, 4])
    books.cache.note_border(first)
    assert (len(books.cache.points), first.saved is None) == (1, False)
    second = books.cache.receive(4)
    books.cache.note_border(second)
    assert (first.saved is None, second.saved is None) == (False, True)


def test_pages_of_a_window_that_only_what_was_saved_holds_are_given_up():
    books = Books(WINDOW, units=(7,), chunk_size=4)
    seqs = [books.cache.receive(4), books.cache.receive(4)]
    for seq in seqs:
        books.cache.note_border(seq)
        books.compute(seq, 5)
        books.compute(seq, 8)  # two pages of its own, and two that only what was saved holds
    assert [seq.saved is None for seq in seqs] == [True, False]
    for seq in seqs:
        assert books.cache.extend(seq, 9) == 9
    assert [seq.saved for seq in seqs] == [None, None]
    assert books.cache.pools()[0].free == 1


def test_a_chunk_ends_where_those_of_others_have_taken_the_pages():
    books = Books(WINDOW, units=(3 + 3 + 4,), chunk_size=8)
    first, second = books.cache.receive(5), books.cache.receive(5)
    assert books.cache.extend(first, 13) == 13  # 2 to 13: 6 pages
    assert books.cache.extend(second, 13) == 10  # 4 are left, 2 to 10
    books.cache.trim(first, 13)
    books.cache.trim(second, 10)
    assert books.cache.extend(second, 18) == 18


def test_pages_behind_where_it_is_are_let_go_of():
    """A rejected draft lies there: a checkpoint would share them, and the next token be written there."""
    books = Books(WINDOW, units=(8,))
    seq = books.cache.receive(4)
    assert books.cache.extend(seq, 9) == 9
    books.cache.trim(seq, 6)
    assert (seq.tails[0].first_page, len(seq.tails[0].pages), books.free()) == (1, 2, (6,))
    books.cache.note_border(seq)
    assert seq.saved.tails == (tuple(seq.tails[0].pages),)


def test_one_who_goes_on_from_a_point_does_not_evict_that():
    books = Books(STATE, units=(3,))
    node = books.keep([1, 2])
    books.keep([3, 4])
    books.cache.receive(7)
    assert books.free() == (0,)
    assert books.cache.resume(node, 2).position == 2


def test_what_another_has_saved_goes_before_the_point_that_one_goes_on_from():
    books = Books(STATE, units=(3,))
    node = books.keep([1, 2])
    other = books.cache.receive(4)
    books.cache.note_border(other)
    assert (other.saved is None, books.free()) == (False, (0,))
    assert books.cache.resume(node, 2).position == 2
    assert (other.saved, len(books.cache.points)) == (None, 1)


def test_where_no_other_slot_is_left_one_goes_on_in_the_points_own():
    books = Books(WINDOW, STATE, units=(8, 2))
    node = books.keep([1, 2])
    point = books.cache.points.deepest(node)
    books.cache.rest(books.cache.receive(4))
    books.copies.clear()
    seq = books.cache.resume(node, 2)
    assert (seq.position, seq.slot, books.copies) == (2, point.slot, [])
    assert (len(books.cache.points), books.free()) == (0, (5, 0))
    books.cache.close(seq)
    assert books.free() == (6, 1)


def test_one_that_rests_has_what_it_holds_and_no_more():
    """Of a window three pages are set aside for each that goes on, twice for one that computes."""
    books = Books(WINDOW, units=(2 + 1 + 7,))
    for _ in range(2):
        seq = books.cache.resume(None, 0)
        assert not books.cache.may_open(computes=True)
        books.compute(seq, 4)
        books.cache.note_border(seq)
        books.cache.rest(seq)
        assert seq.saved is None
    assert books.cache.may_open(computes=True)
    computing = books.cache.resume(None, 0)
    assert not books.cache.may_open(computes=False)
    assert books.cache.extend(computing, 20) == 12  # the others hold two pages each
    books.cache.trim(computing, 12)
    books.cache.check()


def test_what_a_writer_may_write_is_not_lent_before_he_has_stopped():
    books = Books(WINDOW, STATE, units=(8, 1))
    seq = books.cache.receive(7)
    assert [len(units) for units in books.cache.units_of(seq)] == [2, 1]
    books.cache.quarantine(seq)
    assert [of_pool.quarantined for of_pool in books.cache.check()] == [2, 1]
    assert not books.cache.may_open(computes=False)
    with pytest.raises(ProtocolError, match="not open"):
        books.cache.close(seq)
    books.cache.end_quarantine(seq)
    assert books.free() == (8, 1)


def test_a_sequence_jumps_to_what_others_have_kept_meanwhile():
    books = Books(WINDOW, STATE, units=(16, 8))
    ahead, behind = books.cache.resume(None, 0), books.cache.resume(None, 0)
    books.compute(ahead, 6)
    books.cache.note_border(ahead)
    node = books.node(list(range(6)))
    books.cache.keep_border(ahead, node)
    books.compute(behind, 2)
    assert books.cache.advance(behind, node)
    assert (behind.position, behind.tails[0].pages) == (6, ahead.tails[0].pages)
    assert not books.cache.advance(behind, node)
    books.cache.close(ahead)
    books.cache.close(behind)
    assert books.cache.points.evict() and not books.cache.points.evict()
    assert books.free() == (16, 8)


def test_a_copy_that_fails_leaks_nothing():
    books = Books(WINDOW, STATE, units=(8, 4))
    seq = books.cache.resume(None, 0)
    books.compute(seq, 4)
    books.cache.note_border(seq)
    node = books.node([1, 2, 3, 4])
    books.cache.keep_border(seq, node)
    before, num_open = books.free(), books.cache.num_open
    books.copies = None  # nothing can be added to that
    with pytest.raises(AttributeError):
        books.cache.resume(node, 4)
    with pytest.raises(AttributeError):
        books.cache.note_border(seq)
    assert (books.free(), books.cache.num_open) == (before, num_open)


def test_a_pool_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ConfigError, match=r"a pool of 3 units for sliding_window .* needs up to 4"):
        Books(WINDOW, units=(3,))


def test_without_carried_groups_every_match_is_a_checkpoint():
    books = Books()
    node = books.node([1, 2, 3, 4])
    assert books.cache.resumable(node, 4) == 4 == books.cache.resume(node, 4).position
    assert books.cache.is_empty and books.cache.may_open(computes=True)


def test_without_a_point_it_is_computed_from_the_start():
    books = Books(STATE, units=(4,))
    node = books.node([1, 2, 3, 4])
    assert books.cache.resumable(node, 4) == 0 == books.cache.resume(node, 4).position


def test_what_is_granted_stays_though_its_point_goes():
    books = Books(WINDOW, STATE, units=(16, 8))
    node = books.keep([1, 2, 3, 4])
    point = books.cache.points.deepest(node)
    granted = books.cache.grant(node, 4)
    assert (granted.position, books.cache.units_of(granted)) == (4, (point.tails[0], (point.slot,)))
    assert books.free() == (14, 7)
    assert books.cache.points.evict()
    assert books.free() == (14, 7)
    books.cache.close(granted)
    assert books.free() == (16, 8)
    assert books.cache.grant(node, 4) is None


def test_a_grant_takes_nothing_that_a_sequence_may_need():
    """One that computes counts as two here, too."""
    for units, is_granted in ((3, True), (2, False)):
        books = Books(STATE, units=(units,))
        node = books.keep([1, 2])
        seq = books.cache.resume(None, 0)
        granted = books.cache.grant(node, 2)
        assert (granted is not None) is is_granted
        assert not books.cache.may_open(computes=False)
        books.compute(seq, 2)
        books.cache.note_border(seq)
        books.cache.check()


def test_one_who_goes_on_from_a_granted_point_has_a_slot_of_its_own():
    """Another rank reads the slot of that checkpoint, so nobody may write it."""
    books = Books(STATE, units=(3,))
    node = books.keep([1, 2])
    granted = books.cache.grant(node, 2)
    seq = books.cache.resume(node, 2)
    assert seq.position == 2 and seq.slot != granted.slot
    assert books.copies[-1] == (granted.slot, seq.slot)
