"""These tests show which checkpoints are kept, found and evicted."""

from itertools import count

import pytest

from services.kv.checkpoints import Checkpoints, SavedPoint, _KeptPoint
from services.kv.radix_tree import Node, RadixTree

BLOCK = 2


class Store:
    def __init__(self):
        self.dropped = []
        self.points = Checkpoints(lambda point: self.dropped.append(point.position))
        self.tree = RadixTree(1, BLOCK, "m", forget=self.points.forget)
        self._pages = count()

    def path(self, ids):
        pages = [next(self._pages) for _ in ids]
        self.tree.insert(self.tree.root(""), ids, pages)
        return self.tree.match(ids, "").node

    def keep(self, ids, size_bytes=1, resumed=0):
        node = self.path(ids)
        self.points.keep(node, SavedPoint(len(ids), None, ()), size_bytes, resumed)
        self.points.check()
        return node

    def all_evicted(self):
        """Their positions, in order."""
        before = len(self.dropped)
        while self.points.evict():
            self.points.check()
        return self.dropped[before:]

    def positions(self):
        return sorted(point.position for point in self.points)


@pytest.fixture
def store():
    return Store()


def test_the_deepest_point_above_is_found(store):
    node = store.path(range(10))
    store.keep(range(4))
    store.keep(range(8))
    assert store.points.deepest(node).position == 8
    assert store.points.deepest(store.path(range(6))).position == 4
    assert store.points.deepest(store.path([9, 9])) is None


def test_of_two_at_one_node_the_first_stays(store):
    store.keep(range(4))
    store.keep(range(4))
    assert (store.positions(), store.dropped) == ([4], [4])


def test_what_saves_least_for_its_bytes_goes_first(store):
    store.keep([1] * 4)
    store.keep([2] * 8)
    store.keep([3] * 12, size_bytes=10)
    assert store.all_evicted() == [12, 4, 8]


def test_what_a_conversation_has_passed_goes_before_where_it_is(store):
    """However much it saved."""
    store.keep([2] * 4)
    passed = store.keep([1] * 100)
    store.points.use(passed)
    store.keep([1] * 102, resumed=100)
    assert store.all_evicted() == [100, 4, 102]


def test_a_point_that_others_go_on_from_stays_though_it_was_passed(store):
    store.keep([2] * 4)
    passed = store.keep([1] * 8)
    for answer in (3, 4, 5):
        store.points.use(passed)
        store.keep([1] * 8 + [answer] * 2, resumed=8)
    assert store.all_evicted()[-1] == 8


def test_who_made_a_point_does_not_take_the_use_of_another(store):
    """It was kept for a second prompt that begins so, which comes to it before the first one ends."""
    store.keep([2] * 6)
    store.points.use(store.keep([1] * 8))
    store.keep([1] * 8 + [3] * 2)
    assert store.all_evicted() == [10, 6, 8]


def test_where_two_have_parted_a_third_is_expected(store):
    """The point between comes last, and was not passed by those that are below."""
    store.keep([1] * 8 + [3] * 2)
    store.keep([1] * 8)
    store.keep([1] * 8 + [4] * 2)
    assert store.all_evicted() == [10, 10, 8]


def test_a_point_saves_more_once_the_one_above_is_gone(store):
    store.keep(range(100, 104))
    upper, _ = store.keep(range(8)), store.keep(range(10))
    store.points.forget(upper)
    store.points.check()
    store.points.evict()
    assert store.dropped == [8, 4]  # not the one at 10, which saves all ten now


def test_what_was_of_use_stays_longer_and_not_for_ever(store):
    node = store.keep([1] * 4)
    store.keep([2] * 6)
    store.points.use(node)
    store.points.evict()
    assert store.positions() == [4]
    for salt in range(10, 20):  # each goes for the next one, and what is not used any more goes some time
        store.keep([salt] * 6)
        store.points.evict()
    assert 4 not in store.positions()


def test_one_that_is_spared_is_worth_what_it_was(store):
    least = store.keep(range(2))
    for ids in ([8] * 4, [9] * 4):
        store.keep(ids)
    spared = store.points.deepest(least)
    while store.points.evict(spared):
        store.points.check()
    assert (store.dropped, store.positions()) == ([4, 4], [2])
    assert store.points.evict() and not store.points.evict()


def test_a_point_dies_with_its_node(store):
    store.keep(range(4))
    store.tree.evict(1)
    assert (store.positions(), store.dropped) == ([], [4])


def test_the_index_is_told_of_points_on_borders_of_blocks(store):
    node = store.keep(range(4))
    assert store.points.events.take() == ((node.block_hash,), ())
    store.points.forget(node)
    assert store.points.events.take() == ((), (node.block_hash,))
    store.points.forget(store.keep(range(4)))
    assert store.points.events.take() == ((), ())


def reads_of(monkeypatch, cls, name):
    """Counts how often the attribute is read from now on."""
    attribute, counted = getattr(cls, name), [0]

    def read(self):
        counted[0] += 1
        return attribute.__get__(self)

    monkeypatch.setattr(cls, name, property(read, getattr(attribute, "__set__", None)))
    return counted


def test_a_point_costs_the_same_however_many_there_are(store, monkeypatch):
    worths = reads_of(monkeypatch, _KeptPoint, "worth")
    parents = reads_of(monkeypatch, Node, "parent")
    costs = []
    for salt in range(300):
        ids = [salt] + [7] * 7
        upper, lower = store.path(ids[:4]), store.path(ids)
        worths[0] = parents[0] = 0
        for node, position in ((lower, 8), (upper, 4)):
            store.points.keep(node, SavedPoint(position, None, ()), 1)
        store.points.forget(upper)
        costs.append((worths[0], parents[0]))
    assert costs[299] == costs[0]


def test_evicting_looks_at_few_points_each_time(store, monkeypatch):
    for salt in range(300):
        store.keep([salt] * (4 + salt % 7))
    worths = reads_of(monkeypatch, _KeptPoint, "worth")
    while store.points.evict():
        pass
    assert worths[0] < 10 * 300
