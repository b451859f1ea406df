"""SGLang's events, whose hashes are names to us, become the index's hashes."""

import hashlib
import random

from services.engine.sglang.service.scheduler_reports import TreeEventRebuilder
from services.kv.block_hash import scope_seed, sequence_hashes
from services.values.kv import CacheEvents

PAGE, BLOCK = 4, 8


def name(tokens):
    """Any function of the whole prefix would do."""
    return int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:8], "big", signed=True)


def stored(tokens, start=0, salt=None):
    ends = range(start + PAGE, len(tokens) + 1, PAGE)
    return {
        "type": "BlockStored",
        "block_hashes": [name(tokens[:end]) for end in ends],
        "parent_block_hash": name(tokens[:start]) if start else None,
        "token_ids": list(tokens[start:]),
        "block_size": PAGE,
        **({"cache_salt": salt} if salt else {}),
    }


def removed(tokens, start):
    ends = range(start + PAGE, len(tokens) + 1, PAGE)
    return {"type": "BlockRemoved", "block_hashes": [name(tokens[:end]) for end in ends]}


def rebuilder():
    return TreeEventRebuilder("m", PAGE, BLOCK)


def test_pages_become_index_blocks_of_their_scope(subtests):
    with subtests.test("pages become index blocks"):
        tokens = list(range(100, 120))
        events = rebuilder().rebuild([stored(tokens)])
        assert list(events.stored) == sequence_hashes(tokens, BLOCK, scope_seed("m"))
        assert not events.removed and not events.cleared
    with subtests.test("a block may come in two batches"):
        tokens, tree = list(range(16)), rebuilder()
        first = tree.rebuild([stored(tokens[:12])])
        second = tree.rebuild([stored(tokens, start=12)])
        assert [*first.stored, *second.stored] == sequence_hashes(tokens, BLOCK, scope_seed("m"))
        assert len(second.stored) == 1
    with subtests.test("salt and model are in the hash"):
        tokens = list(range(8))
        assert list(rebuilder().rebuild([stored(tokens, salt="t1")]).stored) == sequence_hashes(
            tokens, BLOCK, scope_seed("m", "t1")
        )


def test_what_goes_and_comes(subtests):
    with subtests.test("a name that comes to stand for another block gives the old one back"):
        tokens, tree = list(range(8)), rebuilder()
        plain = sequence_hashes(tokens, BLOCK, scope_seed("m"))
        salted = sequence_hashes(tokens, BLOCK, scope_seed("m", "t1"))
        for _ in range(2):
            tree.rebuild([stored(tokens)])
            events = tree.rebuild([stored(tokens, salt="t1")])
            assert (list(events.stored), list(events.removed)) == (salted, plain)
            assert list(tree.rebuild([removed(tokens, 0)]).removed) == salted
            assert tree.num_pages == 0
    with subtests.test("what is stored and removed in one batch is not told"):
        tokens = list(range(8))
        assert rebuilder().rebuild([stored(tokens), removed(tokens, 0)]) == CacheEvents()
    with subtests.test("what is removed and stored again in one batch is not told"):
        tokens, tree = list(range(8)), rebuilder()
        tree.rebuild([stored(tokens)])
        assert tree.rebuild([removed(tokens, 0), stored(tokens)]) == CacheEvents()
    with subtests.test("clearing forgets everything"):
        tokens, tree = list(range(8)), rebuilder()
        tree.rebuild([stored(tokens)])
        events = tree.rebuild([{"type": "AllBlocksCleared"}])
        assert events.cleared and tree.num_pages == 0
        assert tree.rebuild([stored(list(range(12)), start=8)]) == CacheEvents()  # its parent is unknown


NEW = list(range(200, 200 + BLOCK))


def pairs(tokens):
    """As SGLang tells of a tree whose keys are bigrams: a token with the next one."""
    return {**stored(tokens), "token_ids": [[token, token + 1] for token in tokens]}


UNREADABLE = [
    {**pairs(NEW), "token_ids": [[token, token] for token in NEW]},
    {"type": "BlockMoved"},
    {"type": "BlockStored"},
    {"type": "BlockRemoved", "block_hashes": 7},
    {"block_hashes": []},
    ["BlockStored"],
    None,
    {**stored(NEW), "block_size": 8},
    {**stored(NEW), "token_ids": NEW[:-1]},
    {**stored(NEW), "token_ids": [-1] * BLOCK},
    {**stored(NEW), "token_ids": [2**32] * BLOCK},
    {**stored(NEW), "block_hashes": [[1], [2]]},
]


def test_after_an_event_that_cannot_be_read_nothing_earlier_counts_as_held(subtests):
    for event in UNREADABLE:
        with subtests.test(event=event):
            first, later, tree = list(range(8)), list(range(50, 58)), rebuilder()
            tree.rebuild([stored(first)])
            events = tree.rebuild([stored(NEW), event, stored(later)])
            assert events == CacheEvents(
                tuple(sequence_hashes(later, BLOCK, scope_seed("m"))), (), cleared=True
            )
            assert tree.unreadable.total() == 1
            # What SGLang still holds below it: where it begins is not known any more.
            assert tree.rebuild([stored(list(range(16)), start=8), removed(first, 0)]) == CacheEvents()
            assert tree.rebuild([removed(later, 0)]).removed == tuple(
                sequence_hashes(later, BLOCK, scope_seed("m"))
            )


def test_what_cannot_be_read(subtests):
    with subtests.test("what was removed before an event that cannot be read is told"):
        tokens, tree = list(range(8)), rebuilder()
        tree.rebuild([stored(tokens)])
        events = tree.rebuild([removed(tokens, 0), {"type": "BlockMoved"}])
        assert events == CacheEvents(removed=tuple(sequence_hashes(tokens, BLOCK, scope_seed("m"))))
    with subtests.test("a batch that cannot be read at all is like an event"):
        tokens, tree = list(range(8)), rebuilder()
        tree.rebuild([stored(tokens)])
        assert tree.forget("half of it") == CacheEvents(cleared=True)
        assert tree.forget("half of it") == CacheEvents()
        assert tree.unreadable == {"half of it": 2}
    with subtests.test("half a block is forgotten like a whole one"):
        tokens, tree = list(range(8)), rebuilder()
        tree.rebuild([stored(tokens[:4])])
        assert tree.forget("half of it") == CacheEvents() and tree.num_pages == 0
        assert tree.rebuild([stored(tokens, start=4)]) == CacheEvents()
    with subtests.test("kinds of unreadable events do not grow without end"):
        tree = rebuilder()
        tree.rebuild({"type": f"Block{number}"} for number in range(1000))
        assert tree.unreadable.total() == 1000 and len(tree.unreadable) < 30


def test_what_happens_on_another_tier_is_not_of_our_pages():
    tokens, tree = list(range(8)), rebuilder()
    assert tree.rebuild([{**stored(tokens), "medium": "CPU_PINNED"}]) == CacheEvents()
    on_device = tree.rebuild([{**stored(tokens), "medium": "GPU"}])
    assert on_device.stored == tuple(sequence_hashes(tokens, BLOCK, scope_seed("m")))
    assert tree.rebuild([{**removed(tokens, 0), "medium": "CPU_PINNED"}]) == CacheEvents()
    assert tree.rebuild([{**removed(tokens, 0), "medium": "GPU"}]).removed == on_device.stored
    assert not tree.unreadable


def test_random_growth_and_eviction_against_a_plain_set():
    """What a mirror of our events holds is at all times what the tree's pages imply."""
    rng, tree, pages, mirror = random.Random(3), rebuilder(), {}, set()
    for _ in range(400):
        if pages and rng.random() < 0.4:
            parents = {tuple(tokens[:-PAGE]) for tokens in pages.values()}
            leaf = rng.choice([tokens for tokens in pages.values() if tuple(tokens) not in parents])
            batch = [removed(leaf, len(leaf) - PAGE)]
            del pages[name(leaf)]
        else:
            base = list(rng.choice(list(pages.values()))) if pages and rng.random() < 0.8 else []
            tokens = base + [rng.randrange(3) for _ in range(PAGE * rng.randint(1, 3))]
            batch = [stored(tokens, start=len(base))]
            for end in range(len(base) + PAGE, len(tokens) + 1, PAGE):
                pages[name(tokens[:end])] = tokens[:end]
        events = tree.rebuild(batch)
        assert not mirror & set(events.stored) and mirror >= set(events.removed)
        mirror = (mirror | set(events.stored)) - set(events.removed)
        full = [tokens for tokens in pages.values() if len(tokens) % BLOCK == 0]
        assert mirror == {sequence_hashes(tokens, BLOCK, scope_seed("m"))[-1] for tokens in full}
        assert tree.num_pages == len(pages)
