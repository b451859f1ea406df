"""Tails and states from pools to pools, with the delta: real gRPC, real threads, real bytes."""

import asyncio

import numpy as np
import pytest

from services.kv.page_digest import differing_pages, digest_of
from services.kv.tails import units_at
from services.kv.transfer_plan import moved_bytes
from services.values.errors import PeerFailed
from services.values.kv import PageId
from services.values.rank import TransferId
from transfer.receiving.link_pair import HYBRID, NUM_PAGES, PAGE, Pair

BOTH = pytest.mark.parametrize("pair", ["local", pytest.param("nixl", marks=pytest.mark.nixl)], indirect=True)


@pytest.fixture
async def pair(request, make_pool):
    pair = Pair(make_pool, HYBRID, getattr(request, "param", "local"))
    yield pair
    await pair.close()


def copied(pair, prefill, sources, targets):
    """What a dumb copy of each group's units gives."""
    expected = [pool.snapshot() for pool in pair.pools]
    for pool, source, from_units, to_units in zip(expected, prefill.pools, sources, targets, strict=True):
        for from_unit, to_unit in zip(from_units, to_units, strict=True):
            pool[to_unit] = source.pages[from_unit]
    return expected


def same(pair, expected):
    return all((pool.pages == pages).all() for pool, pages in zip(pair.pools, expected, strict=True))


@BOTH
async def test_all_of_it_lands_and_nothing_else_changes(subtests, pair, prefill, link):
    for prompt_len, prefix_len, sources, targets in [
        (10, 0, ([5, 6, 30], [3, 4], [7]), ([9, 3, 4], [20, 8], [31])),
        (10, 8, ([30], [3, 4], [7]), ([11], [5, 6], [30])),
        (8, 8, ([], [3, 4], [7]), ([], [0, 1], [0])),  # a full hit
    ]:
        with subtests.test(prompt_len=prompt_len, prefix_len=prefix_len):
            expected = copied(pair, prefill, sources, targets)
            assert not same(pair, expected)
            before, moved = [0] * (prefix_len // PAGE), prefill.sender.bytes_moved_total

            watch = pair.send_ticket(link, targets[0], prompt_len, prefix_len, carried=targets[1:])
            ended = await prefill.request(watch.transfer_id, prompt_len, [*before, *sources[0]], sources[1:])

            landed, due = await watch.outcome(), moved_bytes(prefix_len, prompt_len, HYBRID)
            assert landed.group_bytes == due == ended.group_bytes
            assert landed.bytes_moved == prefill.sender.bytes_moved_total - moved
            assert same(pair, expected)


async def test_digests_tell_a_unit_of_any_group_that_came_changed(pair, prefill, link):
    units = ([9, 3], [20, 8], [31])
    watch = pair.send_ticket(link, units[0], prefix_len=4, carried=units[1:], want_digests=True)
    prefill.request(watch.transfer_id, 10, (5, 6, 30), ([3, 4], [7]))
    digests = (await watch.outcome()).page_digests

    def read_pages(pages, group):
        return (memoryview(pair.pools[group].pages[page]) for page in pages)

    landed = [digest_of(content) for group, pages in enumerate(units) for content in read_pages(pages, group)]
    assert list(digests) == landed
    assert differing_pages(digests, units, read_pages) == ()
    for group, page in ((1, 8), (2, 31), (0, 3)):
        pair.pools[group].pages[page, 17] ^= 4
        assert differing_pages(digests, units, read_pages) == ((group, page),)
        pair.pools[group].pages[page, 17] ^= 4


async def test_what_does_not_fit_is_refused(subtests, pair, prefill, link, make_pool):
    with subtests.test("a ticket without its targets is refused"):
        watch = pair.send_ticket(link, (1, 2, 3))
        with pytest.raises(PeerFailed, match=r"refused: the ticket has targets of the groups \[\]"):
            await watch.outcome()

    with subtests.test("ranks whose groups differ do not pair"):
        other = Pair(make_pool)
        with pytest.raises(PeerFailed, match="differ"):
            await other.links.link(await prefill.listen())
        await other.close()

    with subtests.test("a rank of too few pools does not pair"):
        own = pair.make_links(pools=pair.pools[:2])
        with pytest.raises(PeerFailed, match="carried_memory has 1 pools, its layout 2"):
            await own.link(await prefill.listen())
        await own.close()


@BOTH
async def test_random_transfers_equal_a_dumb_copy(pair, prefill, link):
    """Many transfers at once, the tickets before and after what is computed."""
    rng = np.random.default_rng(3)
    free = [list(map(int, rng.permutation(NUM_PAGES))) for _ in pair.pools]
    expected, watches = [pool.snapshot() for pool in pair.pools], []
    for transfer_id in range(100, 108):
        num_pages = int(rng.integers(1, 4))
        prompt_len = num_pages * PAGE - int(rng.integers(0, PAGE))
        held = int(rng.integers(0, prompt_len // PAGE + 1))
        counts = [num_pages, *(units_at(group, prompt_len, PAGE) for group in HYBRID.carried)]
        sources = [[PageId(int(unit)) for unit in rng.permutation(NUM_PAGES)[:count]] for count in counts]
        targets = [[free[i].pop() for _ in range(n)] for i, n in enumerate([num_pages - held, *counts[1:]])]
        for pool, source, from_units, to_units in zip(
            expected, prefill.pools, [sources[0][held:], *sources[1:]], targets, strict=True
        ):
            for from_unit, to_unit in zip(from_units, to_units, strict=True):
                pool[to_unit] = source.pages[from_unit]
        late = bool(rng.integers(0, 2))
        if not late:
            prefill.request(TransferId(transfer_id), prompt_len, sources[0], sources[1:])
        where = {"transfer_id": TransferId(transfer_id), "carried": targets[1:]}
        watches.append(pair.send_ticket(link, targets[0], prompt_len, held * PAGE, **where))
        if late:
            prefill.request(TransferId(transfer_id), prompt_len, sources[0], sources[1:])
    await asyncio.gather(*(watch.outcome() for watch in watches))
    assert same(pair, expected)
