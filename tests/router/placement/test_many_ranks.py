"""Of many ranks every one is priced: who is the best is found wherever it stands."""

from dataclasses import replace
from itertools import product

import pytest

from router.placement.known_cluster import BLOCK, BOTH, HASHES, REMOTE, Router
from services.router.placement.exclusion import TOO_SMALL
from services.router.placement.price import PriceWeights
from services.values.errors import Unavailable


def test_a_rank_whose_records_are_half_applied_keeps_nobody_waiting(subtests):
    """It holds what comes after the other's, and a match of it is shorter."""
    for blocks in [[3], [0, 3], [1, 3, 5]]:
        with subtests.test(blocks=blocks):
            router = Router(20, 0)
            router.holds(router.decodes[0], 3)
            router.index.apply_snapshot(router.decodes[1].id, [HASHES[block] for block in blocks])
            assert router.place(8).chosen.decode.id.rank == 0


def test_the_one_that_is_wanted_is_found_among_many(subtests):
    with subtests.test("it holds the most, though it is the busiest"):
        router = Router(800, 200)
        for rank in router.decodes:
            router.holds(rank, 1)
        router.holds(router.decodes[700], 30)
        router.waits(router.decodes[700], 100)
        decision = router.place()
        assert decision.chosen.decode.id.rank == 700
        assert (decision.longest_decode_hit, decision.longest_prefill_reuse) == (30 * BLOCK, 0)
    with subtests.test("excluded ranks among many are passed over"):
        router = Router(40, 40)
        for rank in router.decodes:
            router.holds(rank, 40)
        only = router.decodes[33].id
        others = router.all_but(router.decodes[33], *router.prefills)
        assert router.place(tried=others).chosen.decode.id == only
        with pytest.raises(Unavailable, match="40 it failed this request"):
            router.place(tried=others | {only})
    with subtests.test("the pinned rank however busy"):
        router = Router(40, 1, PriceWeights())
        pinned = router.decodes[20]
        router.waits(pinned, 100)
        assert router.place(pinned=pinned.id.key).reason == "pinned"
    with subtests.test("the roomiest where nobody says how long it becomes"):
        router = Router(40, 0)
        with_pools(router, range(1, 40))
        router.waits(router.decodes[0], 100)
        assert router.place(prompt_tokens=4_999).chosen.decode.id.rank == 0
        assert router.place(prompt_tokens=2_600).chosen.decode.id.rank != 0


def with_pools(router: Router, small: range, large_tokens: int = 100_000) -> None:
    """Those decode ranks hold 5,000 tokens."""
    router.decodes = [
        replace(rank, max_context_tokens=5_000 if rank.id.rank in small else large_tokens)
        for rank in router.decodes
    ]
    router.placer.set_ranks(router.decodes, router.prefills)


def test_those_that_hold_all_of_it_go_first(subtests):
    """Though it is the busiest of all, and alone."""
    for decodes, plans in product([2, 40], [BOTH, REMOTE]):
        with subtests.test(decodes=decodes, plans=plans):
            router = Router(decodes, 2)
            with_pools(router, range(decodes - 1))
            router.waits(router.decodes[-1], 50_000)
            fits, outgrows, fits_nowhere = 5_000, 5_001, 100_001
            assert router.place(plans=plans, most_tokens=fits).chosen.decode.id.rank < decodes - 1
            decision = router.place(plans=plans, most_tokens=outgrows)
            assert decision.chosen.decode.id.rank == decodes - 1
            assert router.place(plans=plans, most_tokens=fits_nowhere).chosen.decode.id.rank < decodes - 1
            excluded = {
                c.excluded for c in router.placer.explain(router.asked(most_tokens=outgrows), 0.5).excluded
            }
            assert excluded == {TOO_SMALL}
            large = frozenset({router.decodes[-1].id})
            chosen = router.place(plans=plans, most_tokens=outgrows, tried=large).chosen
            assert dict(chosen.terms)["outgrow"] > 0
