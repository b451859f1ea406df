"""PrefixCache against a dumb oracle: a dict of whole prefixes, searched by brute force."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.prefix_cache import PrefixCache
from services.values.errors import ProtocolError
from services.values.kv import PageBooks

IDS = st.lists(st.integers(0, 1), max_size=10)
SALTS = st.sampled_from(["", "tenant"])


class Prefix:
    """One page in the oracle's cache, under the key (salt, every token up to the page's end)."""

    def __init__(self, page):
        self.page = page
        self.last_use = 0
        self.protected = False


class Held:
    """One sequence: the real one and what the oracle thinks of it."""

    def __init__(self, real, salt, ids, prefix_pages):
        self.real, self.salt, self.ids = real, salt, list(ids)
        self.table = list(prefix_pages)
        self.published = len(prefix_pages)
        self.private = set()


class CacheMachine(RuleBasedStateMachine):
    open_sequences = Bundle("open_sequences")
    in_quarantine = Bundle("in_quarantine")

    @initialize(
        num_pages=st.integers(1, 9),
        page_size=st.integers(1, 4),
        pages_per_block=st.integers(1, 3),
        share=st.sampled_from([0.0, 0.3, 0.6]),
    )
    def start(self, num_pages, page_size, pages_per_block, share):
        self.page_size, self.index_block = page_size, page_size * pages_per_block
        self.cache = PrefixCache(num_pages, page_size, self.index_block, "m", protected_share=share)
        self.share = int(share * num_pages)
        self.free = set(range(num_pages))
        self.total = num_pages
        self.prefixes = {}
        self.held, self.quarantined = [], []
        self.clock = 0
        self.replayed = set()

    # -- the oracle -------------------------------------------------------------------------------

    def path(self, salt, ids, num_pages):
        return [(salt, tuple(ids[: end * self.page_size])) for end in range(1, num_pages + 1)]

    def cached_path(self, salt, ids):
        path = self.path(salt, ids, len(ids) // self.page_size)
        missing = [index for index, key in enumerate(path) if key not in self.prefixes]
        return path[: missing[0]] if missing else path

    def use(self, path):
        self.clock += 1
        for key in path:
            self.prefixes[key].last_use = self.clock

    def held_path(self, held):
        return self.path(held.salt, held.ids, held.published)

    def locked(self):
        return {key for held in self.held for key in self.held_path(held)}

    def evict_one(self):
        locked = self.locked()
        parents = {(salt, ids[: -self.page_size]) for salt, ids in self.prefixes}
        leaves = [key for key in self.prefixes if key not in parents and key not in locked]
        protected = {key for key, prefix in self.prefixes.items() if prefix.protected}
        if len(protected - locked) <= self.share:
            leaves = [key for key in leaves if key not in protected] or leaves
        oldest = min(leaves, key=lambda key: self.prefixes[key].last_use)
        self.free.add(self.prefixes.pop(oldest).page)

    def complete_blocks(self):
        return {
            sequence_hashes(ids, self.index_block, scope_seed("m", salt))[-1]
            for salt, ids in self.prefixes
            if len(ids) % self.index_block == 0
        }

    # -- what may happen --------------------------------------------------------------------------

    @rule(
        target=open_sequences,
        ids=IDS,
        salt=SALTS,
        limit=st.none() | st.integers(0, 10),
        protect=st.booleans(),
    )
    def open(self, ids, salt, limit, protect):
        path = self.cached_path(salt, ids)
        assert self.cache.match_len(ids, salt) == len(path) * self.page_size
        if limit is not None:
            path = path[: limit // self.page_size]
        real = self.cache.open(ids, salt, limit, protect=protect)
        held = Held(real, salt, ids, [self.prefixes[key].page for key in path])
        assert real.prefix_len == len(path) * self.page_size
        self.use(path)
        for key in path:
            self.prefixes[key].protected |= protect
        self.held.append(held)
        return held

    @rule(held=open_sequences)
    def protect(self, held):
        self.cache.protect(held.real)
        for key in self.held_path(held):
            self.prefixes[key].protected = True

    @rule(held=open_sequences, num_pages=st.integers(0, 5))
    def extend(self, held, num_pages):
        evictable = len(self.prefixes) - len(self.locked())
        fits = num_pages <= len(self.free) + evictable
        assert self.cache.available_pages == len(self.free) + evictable
        assert self.cache.extend(held.real, num_pages) == fits
        if not fits:
            return
        while len(self.free) < num_pages:
            self.evict_one()
        added = held.real.pages[len(held.table) :]
        assert len(added) == num_pages and self.free.issuperset(added)
        self.free.difference_update(added)
        held.private.update(added)
        held.table += added

    @rule(held=open_sequences, new_ids=IDS, leave_out=st.integers(0, 6), keep=st.booleans())
    def publish(self, held, new_ids, leave_out, keep):
        capacity = len(held.table) * self.page_size
        held.ids += new_ids[: max(0, capacity - len(held.ids))]
        num_tokens = max(0, min(len(held.ids), capacity) - leave_out)
        self.cache.publish(held.real, held.ids[:num_tokens], keep_duplicates=keep)
        num_pages = num_tokens // self.page_size
        if num_pages <= held.published:
            return
        path = self.path(held.salt, held.ids, num_pages)
        for index in range(held.published, num_pages):
            key, page = path[index], held.table[index]
            if key not in self.prefixes:
                self.prefixes[key] = Prefix(page)
                held.private.remove(page)
            elif not keep:
                held.private.remove(page)
                self.free.add(page)
                held.table[index] = self.prefixes[key].page
        held.published = num_pages
        self.use(path)

    @rule(held=open_sequences, limit=st.none() | st.integers(0, 10))
    def adopt(self, held, limit):
        ids = held.ids[: len(held.table) * self.page_size]
        path = self.cached_path(held.salt, ids)
        if limit is not None:
            path = path[: max(held.published, limit // self.page_size)]
        self.cache.adopt(held.real, ids, limit)
        for index in range(held.published, len(path)):
            held.private.remove(held.table[index])
            self.free.add(held.table[index])
            held.table[index] = self.prefixes[path[index]].page
        held.published = max(held.published, len(path))
        self.use(path)

    @rule(num_pages=st.integers(0, 9))
    def make_room(self, num_pages):
        available = self.cache.available_pages
        assert self.cache.make_room(num_pages) == (num_pages <= available)
        while len(self.free) < min(num_pages, available):
            self.evict_one()

    @rule(held=open_sequences)
    def publish_more_than_there_are_pages_for(self, held):
        with pytest.raises(ProtocolError):
            self.cache.publish(held.real, [0] * (len(held.table) * self.page_size + 1))

    @rule(held=consumes(open_sequences))
    def close(self, held):
        self.cache.close(held.real)
        self.use(self.held_path(held))
        self.held.remove(held)
        self.free |= held.private
        with pytest.raises(ProtocolError):
            self.cache.close(held.real)

    @rule(target=in_quarantine, held=consumes(open_sequences))
    def quarantine(self, held):
        self.cache.quarantine(held.real)
        self.use(self.held_path(held))
        self.held.remove(held)
        self.quarantined.append(held)
        for step in (self.cache.close, self.cache.quarantine):
            with pytest.raises(ProtocolError):
                step(held.real)
        return held

    @rule(target=in_quarantine, held=open_sequences, kept=st.integers(0, 9))
    def set_aside(self, held, kept):
        kept = min(kept, len(held.table))
        if kept < held.published:
            with pytest.raises(ProtocolError):
                self.cache.set_aside(held.real, kept)
            return multiple()
        aside = Held(self.cache.set_aside(held.real, kept), held.salt, (), ())
        aside.private = set(held.table[kept:])
        held.private -= aside.private
        del held.table[kept:]
        self.quarantined.append(aside)
        return aside

    @rule(target=in_quarantine, held=consumes(in_quarantine), really=st.booleans())
    def end_quarantine(self, held, really):
        if not really:
            return held
        self.cache.end_quarantine(held.real)
        self.quarantined.remove(held)
        self.free |= held.private
        with pytest.raises(ProtocolError):
            self.cache.end_quarantine(held.real)
        return multiple()

    @rule()
    def clear(self):
        self.cache.clear()
        for key in self.prefixes.keys() - self.locked():
            self.free.add(self.prefixes.pop(key).page)

    @rule()
    def take_events(self):
        events = self.cache.take_events()
        stored, removed = set(events.stored), set(events.removed)
        assert len(stored) == len(events.stored) and stored.isdisjoint(self.replayed)
        assert len(removed) == len(events.removed) and removed <= self.replayed
        self.replayed = self.replayed - removed | stored
        assert self.replayed == self.complete_blocks()

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def the_books_are_the_oracles(self):
        locked = len(self.locked())
        books = self.cache.check()
        assert books == PageBooks(
            total=self.total,
            free=len(self.free),
            cached=len(self.prefixes) - locked,
            locked=locked,
            private=sum(len(held.private) for held in self.held),
            quarantined=sum(len(held.private) for held in self.quarantined),
        )
        assert books.balanced and books == self.cache.books()
        assert self.cache.num_open == len(self.held)

    @invariant()
    def tables_never_change_but_at_their_end(self):
        for held in self.held:
            assert held.real.pages == held.table
            assert held.real.num_private == len(held.private)
            assert set(held.real.private_pages) == held.private
        assert all(held.real.pages == [] for held in self.quarantined)

    @invariant()
    def what_nobody_else_holds_is_a_sequences_own(self):
        holders = Counter(key for held in self.held for key in self.held_path(held))
        for held in self.held:
            alone = sum(holders[key] == 1 for key in self.held_path(held))
            assert self.cache.own_pages(held.real) == len(held.private) + alone

    @invariant()
    def every_cached_prefix_matches(self):
        for salt, ids in self.prefixes:
            assert self.cache.match_len(ids, salt) == len(ids)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for held in list(self.held):
            self.close(held)
        for held in list(self.quarantined):
            self.end_quarantine(held, really=True)
        assert self.cache.check().locked == 0
        self.clear()
        assert self.cache.check() == PageBooks(self.total, self.total, 0, 0, 0, 0)
        self.take_events()
        assert self.replayed == set()


CacheMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=40)
TestAgainstOracle = CacheMachine.TestCase


def filled(cache, ids, salt=""):
    """A sequence whose `ids` are all computed and published."""
    sequence = cache.open(ids, salt)
    missing = -(-len(ids) // cache.page_size) - len(sequence.pages)
    assert cache.extend(sequence, missing)
    cache.publish(sequence, ids)
    return sequence


def test_the_second_turn_finds_the_first():
    cache = PrefixCache(8, page_size=2, index_block=2, model="m")
    first = filled(cache, [1, 2, 3, 4, 5])
    table = list(first.pages)
    cache.close(first)
    second = cache.open([1, 2, 3, 4, 5, 6], "")
    assert (second.prefix_len, second.pages) == (4, table[:2])


def test_duplicates_stay_in_the_table_and_are_freed_at_the_end():
    cache = PrefixCache(8, page_size=1, index_block=1, model="m")
    one, other = cache.open([1, 2], ""), cache.open([1, 2], "")
    assert cache.extend(one, 2) and cache.extend(other, 2)
    table = list(other.pages)
    cache.publish(one, [1, 2])
    cache.publish(other, [1, 2])
    assert other.pages == table and other.num_private == 2
    cache.close(other)
    assert cache.check() == PageBooks(8, free=6, cached=0, locked=2, private=0, quarantined=0)


def test_who_keeps_no_duplicates_goes_on_with_the_trees_pages():
    cache = PrefixCache(8, page_size=1, index_block=1, model="m")
    one, other = cache.open([1, 2], ""), cache.open([1, 2], "")
    assert cache.extend(one, 2) and cache.extend(other, 3)
    cache.publish(one, [1, 2])
    cache.publish(other, [1, 2, 3], keep_duplicates=False)
    assert other.pages[:2] == one.pages
    assert cache.check() == PageBooks(8, free=5, cached=0, locked=3, private=0, quarantined=0)


def test_quarantined_pages_are_not_lent_again_until_the_writer_has_stopped():
    cache = PrefixCache(3, page_size=1, index_block=1, model="m")
    given_up = cache.open([1, 2], "")
    assert cache.extend(given_up, 2)
    cache.quarantine(given_up)
    waiting = cache.open([3, 4], "")
    assert not cache.extend(waiting, 2)
    cache.end_quarantine(given_up)
    assert cache.extend(waiting, 2)


def test_what_is_evicted_ahead_lets_the_next_ones_lie_together():
    cache = PrefixCache(6, page_size=1, index_block=1, model="m", evict_ahead_pages=2)
    for number in range(6):
        cache.close(filled(cache, [number]))
    one, other = cache.open([], ""), cache.open([], "")
    assert cache.extend(one, 2)
    assert cache.check() == PageBooks(6, free=2, cached=2, locked=0, private=2, quarantined=0)
    assert cache.extend(other, 2)
    assert (cache.check().free, cache.check().cached) == (0, 2)
    assert not cache.extend(one, 3)


def test_it_knows_in_how_many_pieces_it_lends():
    cache = PrefixCache(8, page_size=1, index_block=1, model="m", enabled=False)
    held = [cache.open([], "") for _ in range(8)]
    for sequence in held:
        assert cache.extend(sequence, 1)
    for sequence in held[:6]:
        if sequence.pages[0] not in (2, 5):
            cache.close(sequence)
    assert cache.free_runs == 2
    assert cache.extend(held[7], 4)
    assert (cache.lent_pages, cache.lent_runs) == (4, 2)


def test_a_table_is_shortened_by_pages_of_ones_own():
    cache = PrefixCache(8, page_size=1, index_block=1, model="m")
    sequence = cache.open([], "")
    assert cache.extend(sequence, 3)
    cache.publish(sequence, [1])
    first = sequence.pages[0]
    cache.shorten(sequence, 1)
    assert sequence.pages == [first]
    assert cache.check() == PageBooks(8, free=7, cached=0, locked=1, private=0, quarantined=0)
    with pytest.raises(ProtocolError, match="is published"):
        cache.shorten(sequence, 0)


def test_a_refused_extension_evicts_nothing():
    cache = PrefixCache(3, page_size=1, index_block=1, model="m")
    cache.close(filled(cache, [1, 2]))
    assert not cache.extend(cache.open([9], ""), 4)
    assert cache.match_len([1, 2], "") == 2


def test_who_goes_on_with_anothers_pages_gives_its_own_back():
    cache = PrefixCache(8, page_size=1, index_block=1, model="m")
    one, other = cache.open([1, 2, 3], ""), cache.open([1, 2, 3], "")
    assert cache.extend(one, 3) and cache.extend(other, 3)
    last = other.pages[2]
    cache.publish(one, [1, 2])
    cache.adopt(other, [1, 2, 3], 2)
    assert other.pages == [*one.pages[:2], last]
    assert cache.check() == PageBooks(8, free=4, cached=0, locked=2, private=2, quarantined=0)


def test_pages_that_others_came_to_share_are_nobodys_own():
    """Neither adopting a prefix nor publishing it again is a match."""
    cache = PrefixCache(16, page_size=1, index_block=1, model="m")
    one, adopts, publishes = (cache.open([1, 2, 3], "") for _ in range(3))
    for sequence in (one, adopts, publishes):
        assert cache.extend(sequence, 3)
    cache.publish(one, [1, 2])
    assert cache.own_pages(one) == 3
    cache.adopt(adopts, [1, 2, 3], 2)
    cache.publish(publishes, [1, 2, 3], keep_duplicates=False)
    assert [cache.own_pages(sequence) for sequence in (one, adopts, publishes)] == [1, 1, 1]


def test_what_a_sequence_matched_and_holds_alone_is_its_own():
    """The second turn of a conversation, or who comes in again after a retraction."""
    cache = PrefixCache(8, page_size=1, index_block=1, model="m")
    cache.close(filled(cache, [1, 2, 3]))
    turn = filled(cache, [1, 2, 3, 4])
    assert cache.own_pages(turn) == 4
    available = cache.available_pages
    cache.close(turn)
    assert cache.available_pages == available + 4


def test_disabled_it_lends_pages_and_remembers_nothing():
    cache = PrefixCache(4, page_size=1, index_block=1, model="m", enabled=False)
    cache.close(filled(cache, [1, 2]))
    sequence = filled(cache, [1, 2])
    assert (sequence.prefix_len, sequence.num_private, cache.match_len([1, 2], "")) == (0, 2, 0)
    cache.quarantine(sequence)
    assert cache.check().quarantined == 2
    cache.end_quarantine(sequence)
    assert cache.check().free == 4
    assert cache.take_events().stored == ()


def test_a_sequence_of_another_cache_is_refused():
    one, other = (PrefixCache(2, page_size=1, index_block=1, model="m") for _ in range(2))
    with pytest.raises(ProtocolError):
        other.extend(one.open([1], ""), 1)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda sequence: sequence.pages.pop(), "lost"),
        (lambda sequence: sequence.pages.append(sequence.pages[-1]), "in two places"),
        (lambda sequence: sequence.pages.append(99), "foreign"),
        (lambda sequence: sequence.pages.__setitem__(0, 7), "page 7 is not held"),
        (lambda sequence: setattr(sequence.node, "holders", 2), "should have 1 holders"),
    ],
)
def test_check_finds_what_is_wrong(damage, complaint):
    cache = PrefixCache(8, page_size=1, index_block=1, model="m")
    sequence = filled(cache, [1, 2])
    assert cache.extend(sequence, 1)
    damage(sequence)
    with pytest.raises(AssertionError, match=complaint):
        cache.check()
