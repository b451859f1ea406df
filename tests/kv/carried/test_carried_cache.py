"""Tails, states and their books, by hand; under a core: tests/engine/paged/test_core_stateful.py."""

import pytest

from services.kv.carried.carried_cache import CarriedCache
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
        self.cache.extend(seq, end)
        self.cache.trim(seq, end)

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


def test_a_resume_point_shares_pages_and_has_a_copy_of_the_state():
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


def test_a_sequence_gets_what_only_resume_points_hold():
    books = Books(STATE, units=(4,))
    seq = books.cache.resume(None, 0)
    for end in (2, 4, 6):
        books.compute(seq, end)
        books.cache.note_border(seq)
        books.cache.keep_border(seq, books.node(list(range(end))))
    assert (books.free(), len(books.cache.points)) == ((0,), 3)
    assert books.cache.may_open()
    other = books.cache.receive(7)
    assert (len(books.cache.points), books.free()) == (2, (0,))
    assert not books.cache.may_open()
    books.cache.close(other)
    assert books.cache.may_open()


def test_what_a_writer_may_write_is_not_lent_before_he_has_stopped():
    books = Books(WINDOW, STATE, units=(8, 2))
    seq = books.cache.receive(7)
    assert [len(units) for units in books.cache.units_of(seq)] == [2, 1]
    books.cache.quarantine(seq)
    assert [of_pool.quarantined for of_pool in books.cache.check()] == [2, 1]
    assert not books.cache.may_open()
    with pytest.raises(ProtocolError, match="not open"):
        books.cache.close(seq)
    books.cache.end_quarantine(seq)
    assert books.free() == (8, 2)


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
    books.cache.clear()
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
    with pytest.raises(ConfigError, match=r"a pool of 1 units for recurrent layers .* needs up to 2"):
        Books(STATE, units=(1,))
    with pytest.raises(ConfigError, match="sliding_window"):
        Books(WINDOW, units=(3,))


def test_without_carried_groups_every_match_is_a_resume_point():
    books = Books()
    node = books.node([1, 2, 3, 4])
    assert books.cache.resumable(node, 4) == 4 == books.cache.resume(node, 4).position
    assert books.cache.is_empty and books.cache.may_open()


def test_without_a_point_it_is_computed_from_the_start():
    books = Books(STATE, units=(4,))
    node = books.node([1, 2, 3, 4])
    assert books.cache.resumable(node, 4) == 0 == books.cache.resume(node, 4).position
