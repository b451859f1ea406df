import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.radix_tree import Lookup, RadixTree
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import CacheEvents


def tree_of(*prefixes, page_size=1, index_block=2):
    """Page 10 * n + i holds page i of prefix n, unless an earlier prefix has it."""
    tree = RadixTree(page_size, index_block, "m")
    for number, ids in enumerate(prefixes):
        pages = [10 * number + index for index in range(len(ids) // page_size)]
        tree.insert(tree.root(""), ids, pages)
    return tree


def hashes(ids, salt="", index_block=2):
    return sequence_hashes(ids, index_block, scope_seed("m", salt))


BITS = st.lists(st.integers(0, 1), max_size=6)
OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), BITS),
    st.tuples(st.just("lock"), BITS),
    st.tuples(st.just("unlock"), st.none()),
    st.tuples(st.just("evict"), st.integers(1, 4)),
)


@given(st.integers(1, 2), st.lists(OPERATIONS, max_size=25), st.none() | st.integers(0, 4))
def test_looking_on_finds_what_looking_anew_does(page_size, operations, limit):
    """Every prompt of six bits asks after every operation."""
    tree, locked, page = RadixTree(page_size, 2, "m"), [], 0
    prompts = [[int(bit) for bit in f"{number:06b}"] for number in range(64)]
    answers = [None] * len(prompts)
    for name, value in operations:
        if name == "insert":
            whole = value[: len(value) // page_size * page_size]
            tree.insert(tree.root(""), whole, range(page, page + len(whole) // page_size))
            page += len(whole)
        elif name == "lock":
            locked.append(tree.match(value, "").node)
            tree.lock(locked[-1])
        elif name == "evict":
            tree.evict(value)
        elif locked:
            tree.unlock(locked.pop(0))
        anew = [tree.look_up(ids, "", limit) for ids in prompts]
        answers = [tree.look_up(ids, "", limit, old) for ids, old in zip(prompts, answers, strict=True)]
        assert answers == anew


def test_insert_says_what_it_took_and_what_it_had():
    tree = tree_of([1, 2, 3, 4], page_size=2)
    inserted = tree.insert(tree.root(""), [1, 2, 5, 6, 7, 8], [20, 21, 22])
    assert (inserted.taken, inserted.duplicates) == ([21, 22], [20])
    assert tree.match([1, 2, 5, 6, 7, 9], "").pages == [0, 21]
    assert tree.cached_pages == 4


def test_insert_goes_on_under_a_node():
    tree = tree_of([1, 2])
    tree.insert(tree.match([1, 2], "").node, [3], [7])
    assert tree.match([1, 2, 3, 4], "").pages == [0, 1, 7]


def test_insert_refuses_tokens_that_do_not_fill_the_pages():
    tree = tree_of(page_size=2)
    with pytest.raises(ProtocolError, match="3 tokens do not fill 1 pages"):
        tree.insert(tree.root(""), [1, 2, 3], [0])
    assert tree.cached_pages == 0


def test_matches_whole_pages_at_most_so_many_and_in_the_same_salt():
    tree = tree_of([1, 2, 3, 4], page_size=2)
    assert tree.match([1, 2, 3], "").pages == [0]
    assert tree.match([1, 2, 3, 4], "", max_pages=1).pages == [0]
    assert tree.match([1, 2, 3, 4], "other").pages == []
    assert tree.look_up([1, 2, 3, 4, 5], "") == Lookup(cached_pages=2, locked_pages=0)
    assert tree.look_up([1, 2], "other") == Lookup(0, 0)


def test_evicts_least_recently_used_leaf_first_and_upward():
    tree = tree_of([1, 2, 3], [4, 5], [6])
    tree.match([1, 2], "")  # 3's page stays older than that
    assert tree.evict(1) == [2]
    assert tree.evict(3) == [11, 10, 20]
    assert tree.evict(9) == [1, 0]
    tree.check({})


def test_a_parent_is_as_recent_as_the_last_use_below_it():
    tree = tree_of([1, 2], [4, 5])
    assert tree.evict(1) == [1]
    tree.match([4, 5], "")
    tree.insert(tree.match([1], "").node, [3], [30])
    assert tree.evict(4) == [11, 10, 30, 0]


PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
STEPS = st.tuples(st.sampled_from(["insert", "insert", "match", "lock", "unlock", "evict"]), PREFIXES)


class EagerTree:
    """The same order of eviction, kept the slow way: a use stamps every page of the path."""

    def __init__(self, share):
        self.last_use, self.locks, self.clock, self.protected, self.share = {}, [], 0, set(), share

    def path(self, ids):
        return [ids[:end] for end in range(1, len(ids) + 1) if ids[:end] in self.last_use]

    def use(self, path):
        self.clock += 1
        self.last_use.update(dict.fromkeys(path, self.clock))

    def match(self, ids):
        path = self.path(ids)
        self.use(path)
        self.protected.update(path)

    def next_to_go(self):
        locked = {ids[:end] for ids in self.locks for end in range(1, len(ids) + 1)}
        parents = {ids[:-1] for ids in self.last_use}
        leaves = self.last_use.keys() - locked - parents
        if len(self.protected - locked) <= self.share:
            leaves = leaves - self.protected or leaves
        return min(leaves, key=self.last_use.__getitem__, default=None)

    def remove(self, ids):
        self.last_use.pop(ids, None)
        self.protected.discard(ids)


@settings(max_examples=80)
@given(st.lists(STEPS, min_size=25, max_size=40), st.integers(0, 4))
def test_order_of_eviction_against_stamping_every_page(steps, share):
    tree, eager, locked, pages = RadixTree(1, 1, "m", share), EagerTree(share), [], {}
    for number, (step, ids) in enumerate(steps):
        match step:
            case "insert":
                new = [100 * number + index for index in range(len(ids))]
                taken = tree.insert(tree.root(""), ids, new).taken
                pages.update({page: ids[: page % 100 + 1] for page in taken})
                eager.use([ids[:end] for end in range(1, len(ids) + 1)])
            case "match":
                tree.match(ids, "")
                eager.match(ids)
            case "lock":
                match = tree.match(ids, "")
                tree.lock(match.node)
                locked.append(match.node)
                eager.match(ids)
                eager.locks.append(ids[: len(match.pages)])
            case "unlock" if locked:
                tree.unlock(locked.pop())
                eager.use(eager.path(eager.locks.pop()))
            case "evict":
                leaf = eager.next_to_go()
                assert [pages[page] for page in tree.evict(1)] == ([] if leaf is None else [leaf])
                eager.remove(leaf)
        assert tree.cached_pages + tree.locked_pages == len(eager.last_use)


def test_a_scan_does_not_wash_out_what_was_asked_for_twice():
    tree = RadixTree(1, 1, "m", protected_share_pages=2)
    tree.insert(tree.root(""), [1, 2], [0, 1])
    tree.match([1, 2], "")
    for number in range(3, 9):
        tree.insert(tree.root(""), [number], [number])
    assert tree.evict(6) == [3, 4, 5, 6, 7, 8]
    assert tree.evict(2) == [1, 0]


def test_above_its_share_a_protected_page_is_as_old_as_it_is():
    tree = RadixTree(1, 1, "m", protected_share_pages=1)
    for number in (1, 2, 3):
        tree.insert(tree.root(""), [number], [number])
    tree.match([1], "")
    tree.match([2], "")
    assert tree.evict(3) == [3, 1, 2]
    for number in (1, 2):
        tree.insert(tree.root(""), [number], [number])
        tree.match([number], "")
    tree.insert(tree.root(""), [4], [4])
    assert tree.evict(3) == [1, 4, 2]
    tree.check({})


def test_looking_up_is_not_a_use():
    tree = tree_of([1], [2])
    tree.look_up([1], "")
    assert tree.evict(1) == [0]


def test_never_evicts_a_locked_path():
    tree = tree_of([1, 2, 3], [1, 2, 4])
    node = tree.match([1, 2], "").node
    tree.lock(node)
    tree.lock(node)
    assert (tree.cached_pages, tree.locked_pages) == (2, 2)
    assert sorted(tree.evict(9)) == [2, 12]
    tree.unlock(node)
    assert tree.evict(9) == []
    tree.unlock(node)
    assert tree.evict(9) == [1, 0]


def test_a_lock_cannot_be_undone_twice_not_even_above_a_locked_child():
    tree = tree_of([1, 2])
    parent, child = tree.match([1], "").node, tree.match([1, 2], "").node
    tree.lock(child)
    with pytest.raises(ProtocolError, match="more often than locked"):
        tree.unlock(parent)
    tree.unlock(child)
    with pytest.raises(ProtocolError, match="more often than locked"):
        tree.unlock(child)
    tree.check({})


def test_an_index_block_is_stored_with_its_last_page_and_removed_with_it():
    ids = [1, 2, 3, 4, 5]
    tree = tree_of(ids, index_block=2)
    assert tree.take_events() == CacheEvents(stored=tuple(hashes(ids)))
    assert tree.take_events() == CacheEvents()
    tree.evict(2)
    assert tree.take_events() == CacheEvents(removed=(hashes(ids)[1],))
    tree.insert(tree.match([1, 2, 3], "").node, [4], [7])
    assert tree.take_events() == CacheEvents(stored=(hashes(ids)[1],))


def test_events_hash_whole_pages_of_several_tokens():
    ids = list(range(16))
    tree = tree_of(ids, page_size=2, index_block=4)
    assert tree.take_events().stored == tuple(hashes(ids, index_block=4))


def test_salts_have_their_own_hashes():
    tree = tree_of()
    tree.insert(tree.root("tenant"), [1, 2], [0, 1])
    assert tree.take_events().stored == tuple(hashes([1, 2], "tenant")) != tuple(hashes([1, 2]))


def test_store_then_evict_cancels_out_and_the_other_way_round():
    tree = tree_of([1, 2])
    tree.evict(2)
    assert tree.take_events() == CacheEvents()
    tree.insert(tree.root(""), [1, 2], [0, 1])
    tree.take_events()
    tree.evict(1)
    tree.insert(tree.root(""), [1, 2], [5, 6])
    assert tree.take_events() == CacheEvents()


def test_an_idle_root_is_forgotten_and_a_held_one_is_not():
    tree = tree_of([1])
    tree.evict(1)
    held = tree.root("held")
    tree.lock(held)
    assert "salts=1" in repr(tree)
    assert tree.root("held") is held
    tree.unlock(held)
    assert "salts=0" in repr(tree)


@pytest.mark.parametrize("page_size, index_block", [(4, 6), (0, 4), (4, 0)])
def test_an_index_block_is_whole_pages(page_size, index_block):
    with pytest.raises(ConfigError):
        RadixTree(page_size, index_block, "m")
