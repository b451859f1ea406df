"""Trees whose keys are pairs of neighbours, as SGLang's with EAGLE: the index says exactly what they find."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sglang.key_tree import KeyTree, name
from services.engine.sglang.service.tree_events import TreeEventRebuilder
from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import pair_hashes, scope_seed
from services.values.kv import CacheEvents
from services.values.rank import Generation, RankId

PAGE, BLOCK = 2, 4
RANK = RankId("d", 0, Generation(1))
SEED = scope_seed("m")


def rebuilder(block=BLOCK):
    tree = TreeEventRebuilder("m", PAGE, block)
    tree.paired = True
    return tree


def joined(events):
    """As SGLang may put neighbours into one event."""
    parts = ("block_hashes", "token_ids")
    return {**events[0], **{key: [part for event in events for part in event[key]] for key in parts}}


IDS = st.lists(st.integers(0, 1), max_size=14)
STEPS = st.lists(st.one_of(IDS, st.integers(0, 9)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([PAGE, BLOCK]), st.booleans(), st.integers(0, 99))
def test_the_index_promises_what_a_tree_of_pairs_finds_and_no_block_more(steps, block, joins, seed):
    tree, events, index = KeyTree(PAGE), rebuilder(block), PrefixIndex()
    index.apply_snapshot(RANK, ())
    rng = random.Random(seed)
    for step in steps:
        told = tree.evict(step) if isinstance(step, int) else tree.insert(step)
        if joins and told and told[0]["type"] == "BlockStored":
            told = [joined(told)]
        if rng.random() < 0.2 and tree.pages:  # a page whose KV came back is told of again
            told.append(tree.stored(rng.choice(sorted(tree.pages))))
        news = events.rebuild(told)
        assert not news.cleared
        index.apply_delta(RANK, news.stored, news.removed)
        for _ in range(8):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(16))]
            promised = index.match(RANK.key, pair_hashes(prompt, block, SEED)) * block
            assert promised == tree.matched(prompt) // block * block
    assert not events.unreadable


def test_two_pages_of_the_same_first_tokens_are_two_blocks():
    """Single tokens would name both alike: to remove one would take the other's name away."""
    tree, events = KeyTree(PAGE), rebuilder(PAGE)
    first, second = [7, 8, 9], [7, 8, 5]
    stored = events.rebuild([*tree.insert(first), *tree.insert(second)]).stored
    assert stored == (*pair_hashes(first, PAGE, SEED), *pair_hashes(second, PAGE, SEED))
    gone = {"type": "BlockRemoved", "block_hashes": [name(tuple(pairwise(first)))]}
    assert events.rebuild([gone]).removed == tuple(pair_hashes(first, PAGE, SEED))


def test_a_prompts_last_page_is_no_hit_without_the_token_behind_it():
    tree, events = KeyTree(PAGE), rebuilder(PAGE)
    held = set(events.rebuild(tree.insert([1, 2, 3, 4, 5])).stored)
    found = [held.intersection(pair_hashes(ids, PAGE, SEED)) for ids in ([1, 2, 3, 4], [1, 2, 3, 4, 5])]
    assert list(map(len, found)) == [1, 2]


def test_salts_share_no_block():
    tree = KeyTree(PAGE)
    told = [{**event, "cache_salt": "t"} for event in tree.insert([1, 2, 3])]
    assert rebuilder(PAGE).rebuild(told).stored == tuple(pair_hashes([1, 2, 3], PAGE, scope_seed("m", "t")))


@pytest.mark.parametrize(
    "keys",
    [[1, 2], [[1, 2], 3], [3, [1, 2]], [[1, 2], [3, 4]], [[1, 2, 3], [2, 3, 4]], [[1], [2]], [[1, 2], []]],
)
def test_keys_that_are_no_pairs_of_neighbours_are_counted(keys):
    event = {**KeyTree(PAGE).stored(((1, 2), (2, 3))), "token_ids": keys}
    tree = rebuilder(PAGE)
    assert tree.rebuild([event]) == CacheEvents()
    assert tree.unreadable.total() == 1
