"""Trees whose keys are pairs of neighbours, as SGLang's with EAGLE: their first tokens name the blocks."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sglang.key_tree import KeyTree, name
from services.engine.sglang.service.scheduler_reports import TreeEventRebuilder
from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import scope_seed, sequence_hashes
from services.values.kv import CacheEvents
from services.values.rank import Generation, RankId

PAGE, BLOCK = 2, 4
RANK = RankId("d", 0, Generation(1))
SEED = scope_seed("m")


def joined(events):
    """As SGLang may put neighbours into one event."""
    parts = ("block_hashes", "token_ids")
    return {**events[0], **{key: [part for event in events for part in event[key]] for key in parts}}


IDS = st.lists(st.integers(0, 1), max_size=14)
STEPS = st.lists(st.one_of(IDS, st.integers(0, 9)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([PAGE, BLOCK]), st.booleans(), st.integers(0, 99))
def test_the_index_promises_a_page_more_than_a_tree_of_pairs_finds_at_most(steps, block, joins, seed):
    tree, events, index = KeyTree(PAGE), TreeEventRebuilder("m", PAGE, block), PrefixIndex()
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
            promised = index.match(RANK.key, sequence_hashes(prompt, block, SEED)) * block
            found = tree.matched(prompt)
            assert promised == held_by_first_tokens(tree, prompt) // block * block
            assert found // block * block <= promised <= found + PAGE
    assert not events.unreadable


def held_by_first_tokens(tree, prompt):
    """Return how many tokens of the prompt are the first ones of a page's pairs and of all before it."""
    firsts = [[first for first, _ in page] for page in tree.pages]
    return max((len(ids) for ids in firsts if ids == prompt[: len(ids)]), default=0)


def test_two_pages_of_the_same_first_tokens_are_one_block_until_both_are_gone():
    tree, events = KeyTree(PAGE), TreeEventRebuilder("m", PAGE, PAGE)
    first, second = [7, 8, 9], [7, 8, 5]
    blocks = tuple(sequence_hashes([7, 8], PAGE, SEED))
    assert events.rebuild([*tree.insert(first), *tree.insert(second)]).stored == blocks
    for ids, removed in ((first, ()), (first, ()), (second, blocks)):
        gone = {"type": "BlockRemoved", "block_hashes": [name(tuple(pairwise(ids)))]}
        assert events.rebuild([gone]).removed == removed
    assert events.rebuild([*tree.evict(0), tree.stored(tuple(pairwise(second)))]).stored == blocks
    assert events.rebuild([{"type": "AllBlocksCleared"}]).cleared
    assert events.rebuild([tree.stored(tuple(pairwise(first)))]).stored == blocks


def test_salts_share_no_block():
    tree = KeyTree(PAGE)
    told = [{**event, "cache_salt": "t"} for event in tree.insert([1, 2, 3])]
    stored = TreeEventRebuilder("m", PAGE, PAGE).rebuild(told).stored
    assert stored == tuple(sequence_hashes([1, 2], PAGE, scope_seed("m", "t")))


def test_keys_that_are_no_pairs_of_neighbours_are_counted(subtests):
    for keys in (
        [[1, 2], 3],
        [3, [1, 2]],
        [[1, 2], [3, 4]],
        [[1, 2, 3], [2, 3, 4]],
        [[1], [2]],
        [[1, 2], []],
    ):
        with subtests.test(keys=keys):
            event = {**KeyTree(PAGE).stored(((1, 2), (2, 3))), "token_ids": keys}
            tree = TreeEventRebuilder("m", PAGE, PAGE)
            assert tree.rebuild([event]) == CacheEvents()
            assert tree.unreadable.total() == 1
