"""Of many ranks few are priced: the best are among them."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.known_cluster import BOTH, HASHES, HYBRID, REMOTE, Router, of_other_layout
from services.router.placement.decision import Nowhere
from services.router.placement.exclusion import TOO_SMALL
from services.router.placement.placer import Placer
from services.router.placement.price import PriceWeights
from services.router.ranks.rank_order import LoadOrder
from services.values.errors import NoCapacity, Unavailable
from services.values.rank import Plan

held = st.sampled_from([0, 0, 0, 1, 1, 2, 20, 40])


waiting = st.sampled_from([0, 0, 500]) | st.integers(0, 20_000)


ranks = st.lists(st.tuples(held, waiting), min_size=17, max_size=60)


@settings(max_examples=25)
@given(
    ranks,
    ranks,
    st.sampled_from([BOTH, frozenset({Plan.REMOTE}), frozenset({Plan.LOCAL})]),
    st.sampled_from([math.inf, math.inf, 0.2, 1.0]),
    st.data(),
)
def test_of_many_ranks_the_few_that_are_looked_at_have_the_best_among_them(
    decodes, prefills, plans, max_wait_s, data
):
    router = Router(len(decodes), len(prefills))
    num_other = data.draw(st.sampled_from([0, 0, 5]))
    router.placer.set_ranks(of_other_layout(router.decodes, num_other), router.prefills)
    states = zip((*router.decodes, *router.prefills), (*decodes, *prefills), strict=True)
    for rank, (num_held, tokens) in states:
        router.holds(rank, num_held)
        router.waits(rank, tokens)
    guess = data.draw(st.none() | st.tuples(st.sampled_from(router.decodes + router.prefills), held))
    if guess is not None:
        router.balance.predict(guess[0].id.key, HASHES[: guess[1]])
    asked = router.asked(plans=plans, max_wait_s=max_wait_s)
    every = router.placer.explain(asked, 0.5)
    if isinstance(every, Nowhere):
        assert "the cluster is full" in every.reason
        with pytest.raises(NoCapacity):
            router.placer.place(asked, 0.5)
        return
    few = router.placer.place(asked, 0.5)
    assert few.chosen.total_s == pytest.approx(every.chosen.total_s)


@settings(max_examples=25)
@given(ranks, ranks, st.sampled_from([BOTH, frozenset({Plan.REMOTE}), frozenset({Plan.LOCAL})]), st.data())
def test_of_many_that_go_on_where_they_kept_a_state_the_best_are_looked_at(decodes, prefills, plans, data):
    router = Router(len(decodes), len(prefills), layout=HYBRID)
    for rank, (num_held, tokens) in zip(
        (*router.decodes, *router.prefills), (*decodes, *prefills), strict=True
    ):
        router.holds(rank, num_held, *data.draw(st.sets(st.integers(1, num_held))) if num_held else ())
        router.waits(rank, tokens)
    guess = data.draw(st.none() | st.tuples(st.sampled_from(router.decodes + router.prefills), held))
    if guess is not None and guess[1]:
        router.balance.predict(guess[0].id.key, HASHES[: guess[1]], resumable=guess[1])
    asked = router.asked(plans=plans)
    every, few = router.placer.explain(asked, 0.5), router.placer.place(asked, 0.5)
    assert few.chosen.total_s == pytest.approx(every.chosen.total_s)


def test_each_rank_is_looked_for_once_however_many_points_it_has(subtests, monkeypatch):
    ascending, looked_at = LoadOrder.ascending, []

    def counting(order, ranks, before=None):
        looked_at.append(len(ranks))
        return ascending(order, ranks, before)

    monkeypatch.setattr(LoadOrder, "ascending", counting)
    monkeypatch.setattr(Placer, "_holding", lambda *_: iter(()))
    for least_has_points in [True, False]:
        with subtests.test(least_has_points=least_has_points):
            router = Router(40, 0, layout=HYBRID)
            for number, rank in enumerate(router.decodes):
                router.holds(rank, 40, *range(1, 41) if number or least_has_points else ())
                router.waits(rank, 100 * number)
            looked_at.clear()
            assert router.place().chosen.decode.id.rank == (0 if least_has_points else 1)
            assert looked_at == ([40] if least_has_points else [39] + 39 * [0])


def test_a_rank_whose_records_are_half_applied_keeps_nobody_waiting(subtests):
    """It holds what comes after the other's, and a match of it is shorter."""
    for blocks in [[3], [0, 3], [1, 3, 5]]:
        with subtests.test(blocks=blocks):
            router = Router(20, 0)
            router.holds(router.decodes[0], 3)
            router.index.apply_snapshot(router.decodes[1].id, [HASHES[block] for block in blocks])
            assert router.place(8).chosen.decode.id.rank == 0


def test_of_many_a_few_are_priced_and_those_that_must_be(subtests):
    with subtests.test("a few of a thousand ranks are priced"):
        router = Router(800, 200)
        for rank in router.decodes:
            router.holds(rank, 1)
        router.holds(router.decodes[700], 30)
        router.waits(router.decodes[700], 100)
        decision = router.place()
        assert decision.chosen.decode.id.rank == 700
        assert len(decision._compared) < 100
        assert len(router.placer.explain(router.asked(), 0.5)._compared) >= 800
    with subtests.test("excluded ranks among many are passed over"):
        router = Router(40, 40)
        for rank in router.decodes:
            router.holds(rank, 40)
        only = router.decodes[33].id
        others = router.all_but(router.decodes[33], *router.prefills)
        assert router.place(tried=others).chosen.decode.id == only
        with pytest.raises(Unavailable, match="40 it failed this request"):
            router.place(tried=others | {only})
    with subtests.test("the pinned rank is looked at however busy"):
        router = Router(40, 1, PriceWeights())
        pinned = router.decodes[20]
        router.waits(pinned, 100)
        assert router.place(pinned=pinned.id.key).reason == "pinned"
    with subtests.test("of many ranks the roomiest are looked at where nobody says how long it becomes"):
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


def test_of_many_ranks_those_that_hold_all_of_it_are_looked_at(subtests):
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
