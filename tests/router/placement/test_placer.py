"""These tests show where requests go that come at once, by one router or by two."""

from collections import Counter
from dataclasses import replace

import pytest

from router.placement.known_cluster import BLOCK, Router, chains
from services.router.placement.price import PriceWeights
from services.router.ranks.rank_order import Share
from services.values.errors import NoCapacity
from services.values.rank import Plan, RankKey
from services.values.rank_reports import Overtaken


def test_requests_that_come_at_once_spread_over_many_idle_ranks():
    router = Router(40, 20)
    for number in range(40):
        asked = router.asked(1, hashes=chains(0), plans=frozenset({Plan.REMOTE}))
        decision = router.placer.place(asked, number / 40)
        router.placer.sent(str(number), chains(0), asked.prompt_tokens, decision)
    assert {router.balance.now(rank.id.key).running for rank in router.decodes} == {1}
    assert {router.balance.now(rank.id.key).running for rank in router.prefills} == {2}
    for number in range(40):
        router.placer.outcomes.ended(str(number))
    assert {router.balance.now(rank.id.key).running for rank in router.decodes} == {0}


def test_two_routers_that_know_nothing_of_each_other_choose_different_ranks(subtests):
    for decodes, prefills in [(8, 4), (60, 40)]:
        with subtests.test(decodes=decodes, prefills=prefills):
            for plan, side in ((Plan.LOCAL, "decode"), (Plan.REMOTE, "prefill")):
                chosen: list[RankKey] = []
                for index in range(2):
                    router = Router(decodes, prefills, PriceWeights())
                    router.placer.set_share(Share(index, 2))
                    for number in range(2):
                        asked = router.asked(1, hashes=chains(0), plans=frozenset({plan}))
                        decision = router.placer.place(asked, 0.5)
                        router.placer.sent(str(number), chains(0), asked.prompt_tokens, decision)
                        chosen.append(getattr(decision.chosen, side).id.key)
                assert len(set(chosen)) == 4, plan


def test_a_short_prompt_goes_where_it_overtakes_what_waits(subtests):
    router = Router(2, 1, PriceWeights())
    long = (Overtaken(30_000, 40_000, 1),)
    router.waits(router.decodes[0], 40_000, overtaken=long)
    router.waits(router.decodes[1], 4_000)
    router.waits(router.prefills[0], 60_000, overtaken=long)
    for plan, num_blocks, chosen, wait_tokens in [
        (Plan.LOCAL, 1, 0, 0),
        (Plan.LOCAL, 600, 1, 4_000),
        (Plan.REMOTE, 1, 1, 20_000),
    ]:
        with subtests.test(plan=plan, num_blocks=num_blocks):
            about = dict(hashes=chains(0), prompt_tokens=num_blocks * BLOCK, plans=frozenset({plan}))
            decision = router.placer.place(router.asked(**about), 0.5)
            priced = decision.chosen
            terms = dict(priced.terms)
            wait_s = terms["wait_prefill" if priced.prefill else "wait_decode"]
            assert priced.decode.id.rank == chosen
            assert wait_s == pytest.approx(wait_tokens / 10_000)
    with subtests.test("a limit of the wait is for what it waits for itself"):
        router.waits(router.decodes[1], 40_000)
        short = router.asked(hashes=chains(0), prompt_tokens=BLOCK, plans=frozenset({Plan.LOCAL}))
        assert router.placer.place(replace(short, max_wait_s=1.0), 0.5).chosen.decode.id.rank == 0
        with pytest.raises(NoCapacity):
            router.placer.place(replace(short, prompt_tokens=31_000, max_wait_s=1.0), 0.5)


def test_of_many_ranks_a_long_prompt_finds_one_where_it_waits_for_little():
    """The ranks where a usual prompt would overtake what waits are the least loaded ones for that alone."""
    router = Router(40, 0)
    for number, rank in enumerate(router.decodes):
        if number < 10:
            router.waits(rank, 100_000, overtaken=(Overtaken(20_000, 100_000, 1),))
        else:
            router.waits(rank, 20_000 + number)
    for index, of in [(0, 1), (3, 7)]:
        router.placer.set_share(Share(index, of))
        for tokens, chosen in [(4_000, range(10)), (60_000, range(10, 40))]:
            about = dict(hashes=chains(0), prompt_tokens=tokens, plans=frozenset({Plan.LOCAL}))
            assert router.placer.place(router.asked(**about), 0.5).chosen.decode.id.rank in chosen


def test_a_hot_prefix_spreads_when_its_rank_is_busy():
    router = Router(4, 0, PriceWeights())
    router.holds(router.decodes[0], 40)
    chosen = []
    for number in range(80):  # at once, each with 40 blocks in common and 200 tokens of its own
        asked = router.asked(prompt_tokens=40 * BLOCK + 200)
        decision = router.placer.place(asked, number / 80)
        router.placer.sent(str(number), chains(), asked.prompt_tokens, decision)
        chosen.append(decision.chosen.decode.id.rank)
    assert chosen[0] == 0
    assert set(chosen) == {0, 1, 2, 3}


def test_prompts_that_come_to_a_role_are_counted_for_each_rank_and_router(subtests):
    for routers in (1, 2):
        with subtests.test(routers=routers):
            router = Router(4, 0, PriceWeights())
            router.placer.set_share(Share(0, routers))
            for number in range(8):
                decision = router.place()
                router.placer.sent(str(number), chains(0), 1, decision)
            asked = router.place()._pricing.request
            assert asked.decode_requests_per_s == pytest.approx(routers * 8 / 4 / 10, rel=0.1)
            assert asked.prefill_requests_per_s == 0.0


def test_a_prefix_is_copied_once_requests_have_waited_for_it_as_long_as_that_takes():
    """Each waits for 1,000 tokens longer than elsewhere, and a copy has 40 blocks of 64 tokens."""
    router = Router(2, 0)
    holder, other = router.decodes
    router.holds(holder, 40)
    router.waits(holder, 1_000)
    chosen = []
    for number in range(6):
        decision = router.place()
        router.placer.sent(str(number), router.asked().hashes, router.asked().prompt_tokens, decision)
        router.placer.outcomes.ended(str(number))
        router.waits(holder, 1_000)
        chosen.append(decision.chosen.decode.id)
    assert chosen[:2] == [holder.id, holder.id]
    assert other.id in chosen[2:4]


def test_while_everybody_waits_hits_count_for_more():
    """At capacity work saved shortens all queues: then a longer wait for a hit is worth it."""
    router = Router(2, 0)
    holder, other = router.decodes
    router.holds(holder, 20)
    router.waits(holder, 30_000, waiting=0)
    router.waits(other, 10_000, waiting=0)
    assert router.place().chosen.decode.id == other.id
    router.waits(holder, 30_000, waiting=20)
    router.waits(other, 10_000, waiting=20)
    assert router.place().chosen.decode.id == holder.id


def test_idle_ranks_that_measured_about_the_same_get_about_as_many_requests():
    """The fastest by a little would get all of them, and the pools of the others were of no use."""
    router = Router(4, 0)
    for rank, rate in zip(router.decodes, (1_918.0, 1_960.0, 1_967.0, 1_925.0), strict=True):
        router.waits(rank, 0, prefill_tokens_per_s=rate)
    asked = router.asked(hashes=())
    chosen = Counter(router.placer.place(asked, tie / 100).chosen.decode.id.rank for tie in range(100))
    assert len(chosen) == 4 and min(chosen.values()) >= 20
    router.waits(router.decodes[3], 0, prefill_tokens_per_s=2_500.0)
    assert {router.placer.place(asked, tie / 10).chosen.decode.id.rank for tie in range(10)} == {3}
