"""A rank brings up what its tiers hold below its pool, and that has a price."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.known_cluster import BLOCK, HYBRID, LAYOUT, Router, admitted
from services.kv.tails import carried_bytes
from services.router.placement.rank_snapshot import Hits, RankSnapshot
from services.values.kv import PageBooks
from services.values.rank import Plan
from services.values.rank_reports import LENDS, PULLS

BYTES_PER_TOKEN = LAYOUT.page_bytes / LAYOUT.page_size
WHOLE = 40 * BLOCK
# Memory is read faster than the ranks compute (10,000 tokens/s), files less so.
READ = {"memory_tier_bytes_per_s": 4e9, "file_tier_bytes_per_s": 1e9}
SHARED_READ = READ | {"shared_tier_bytes_per_s": 8e8}
LOOK_S = 0.01


def bring_s(num_tokens: int, bytes_per_s: float) -> float:
    return num_tokens * BYTES_PER_TOKEN / bytes_per_s


def test_a_rank_is_chosen_for_what_its_tier_holds(subtests):
    with subtests.test("it alone holds the prompt, below its pool"):
        router = Router(4, 0)
        kept = router.decodes[2]
        router.keeps(kept, 40)
        router.waits(kept, 100, **READ)
        decision = router.place()
        chosen = decision.chosen
        assert (chosen.decode.id, decision.reason) == (kept.id, "longest_prefix")
        terms = dict(chosen.terms)
        assert terms["bring"] == pytest.approx(bring_s(WHOLE, 4e9) - 100 / 10_000)
        assert terms["compute"] == pytest.approx(7 / 10_000)
        assert chosen.total_s == pytest.approx(min(way.total_s for way in decision.ranked))
        assert (chosen.reused_tokens, chosen.decode.hit_tokens) == (WHOLE, 0)
    with subtests.test("while a long queue passes, bringing up takes no time more"):
        router.waits(kept, 5_000, **READ)
        priced = next(way for way in router.place().ranked if way.decode.id == kept.id)
        assert dict(priced.terms)["bring"] == 0.0
    with subtests.test("who holds as much in its pool is the home"):
        router.waits(kept, 0, **READ)
        router.holds(router.decodes[1], 40)
        assert router.place().chosen.decode.id == router.decodes[1].id
    with subtests.test("a prefill rank brings up, and a decode rank does not what it receives"):
        router = Router(2, 2)
        router.keeps(router.prefills[1], 40)
        router.keeps(router.decodes[1], 40)
        chosen = router.place(plans=frozenset({Plan.REMOTE})).chosen
        assert chosen.prefill.id == router.prefills[1].id
        assert chosen.brought.tokens == chosen.reused_tokens == WHOLE
        assert chosen.decode.hit_tokens == 0
    with subtests.test("of many ranks, that one is among those that are priced"):
        router = Router(60, 0)
        router.keeps(router.decodes[37], 40)
        for number, rank in enumerate(router.decodes):
            router.waits(rank, 10 * number)
        assert router.place().chosen.decode.id == router.decodes[37].id


def look_at_one(why):
    layout, points = (HYBRID, (40,)) if why == "no checkpoint" else (LAYOUT, ())
    router = Router(60, 0, layout=layout)
    least_loaded, kept = router.decodes[0], router.decodes[37]
    router.holds(least_loaded, 40)
    router.keeps(kept, 40, resumable=points)
    for number, rank in enumerate(router.decodes):
        router.waits(rank, 10 * number, **READ)
    if why == "no trust":
        for _ in range(50):
            router.balance.trust.observe(least_loaded.id.key, WHOLE, 0, router.now)
    assert router.place().chosen.decode.id == kept.id
    every = router.placer.explain(router.asked(), 0.5)
    assert router.place().chosen.total_s == pytest.approx(every.chosen.total_s)


def test_of_many_ranks_one_is_looked_at_though_the_least_loaded_seems_to_hold_as_much(subtests):
    for why in ("no checkpoint", "no trust"):
        with subtests.test(why):
            look_at_one(why)


def test_nothing_is_promised_that_a_rank_would_compute(subtests):
    def chosen_of(router):
        return next(way for way in router.place().ranked if way.decode.id == router.decodes[0].id)

    def kept_by_one(files=(), **load):
        router = Router(2, 0)
        router.keeps(router.decodes[0], 40, files)
        router.waits(router.decodes[0], 0, **load)
        return router

    with subtests.test("what lies in files takes longer"):
        router = kept_by_one(range(30, 40), **READ)
        expected = bring_s(30 * BLOCK, 4e9) + bring_s(10 * BLOCK, 1e9)
        assert dict(chosen_of(router).terms)["bring"] == pytest.approx(expected)
    with subtests.test("a tier that was never read is assumed to pay"):
        assert chosen_of(kept_by_one()).brought.tokens == WHOLE
    with subtests.test("a tier that is slower than computing is left alone"):
        router = kept_by_one(range(40), file_tier_bytes_per_s=BYTES_PER_TOKEN * 9_000)
        assert chosen_of(router).brought is None
    with subtests.test("a rank that leaves its tiers alone says so"):
        assert chosen_of(kept_by_one(tiers_off=True)).brought is None
    with subtests.test("what may not be reused is not brought"):
        router = kept_by_one()
        assert router.place(reusable_tokens=1_000).chosen.reused_tokens == 1_000
    with subtests.test("a model with states goes on only from a checkpoint"):
        router = Router(2, 0, layout=HYBRID)
        router.keeps(router.decodes[0], 40)
        assert router.place().chosen.brought is None
        router.keeps(router.decodes[0], 40, resumable=(10, 30))
        router.waits(router.decodes[0], 0, **READ)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.brought.tokens) == (router.decodes[0].id, 30 * BLOCK)
        state_s = carried_bytes(HYBRID, 30 * BLOCK) / 4e9
        pages_s = 30 * HYBRID.page_bytes / 4e9
        assert chosen.brought.bring_s == pytest.approx(pages_s + state_s)
    with subtests.test("of a prefix in the pool the state alone is brought"):
        router.holds(router.decodes[0], 40, 10)
        chosen = router.place().chosen
        assert (chosen.reused_tokens, chosen.brought.tokens) == (30 * BLOCK, 30 * BLOCK)
        assert chosen.brought.bring_s == pytest.approx(state_s)
    with subtests.test("a checkpoint of the pool that lies as deep needs none of it"):
        router.holds(router.decodes[0], 40, 30)
        assert router.place().chosen.brought is None


def test_what_a_tier_keeps_is_not_lost_when_it_is_evicted(subtests):
    full = PageBooks(total=100, free=0, cached=100, locked=0, private=0, quarantined=0)
    evicted_s = 0.5 * (WHOLE + 7) / 10_000

    def evict_s(router, **load):
        for rank in router.decodes:
            router.waits(rank, 0, books=full, **load)
        # A rank without a tier has the same price as ever.
        ways = {way.decode.id.rank: dict(way.terms)["evict_decode"] for way in router.place().ranked}
        assert ways[1] == pytest.approx(evicted_s)
        return ways[0]

    router = Router(2, 0)
    assert evict_s(router, **READ) == pytest.approx(evicted_s)
    router.below.take_snapshot(router.decodes[0].id, [1_000_000])  # another prompt's
    with subtests.test("it is brought up again"):
        assert evict_s(router, **READ) == pytest.approx(0.5 * bring_s(WHOLE + 7, 4e9))
    with subtests.test("out of a file"):
        assert evict_s(router, file_tier_bytes_per_s=1e9) == pytest.approx(0.5 * bring_s(WHOLE + 7, 1e9))
    with subtests.test("or computed again, where that is faster or the tiers are left alone"):
        slow = {"memory_tier_bytes_per_s": BYTES_PER_TOKEN * 9_000}
        assert evict_s(router, **slow) == evict_s(router, **READ, tiers_off=True) == pytest.approx(evicted_s)
    with subtests.test("at a prefill rank, too"):
        router = Router(1, 1)
        router.below.take_snapshot(router.prefills[0].id, [1_000_000])
        router.waits(router.prefills[0], 0, books=full, **READ)
        terms = dict(router.place(plans=frozenset({Plan.REMOTE})).chosen.terms)
        assert terms["evict_prefill"] == pytest.approx(0.5 * bring_s(WHOLE + 7, 4e9))


def test_of_many_ranks_those_whose_tiers_keep_what_they_evict_come_first():
    router = Router(60, 0)
    full = PageBooks(total=100, free=0, cached=100, locked=0, private=0, quarantined=0)
    for rank in router.decodes:
        router.keeps(rank, 1 if rank.id.rank == 50 else 0)
        router.waits(rank, 0, books=full, **READ)
    asked = replace(router.asked(), hashes=())
    assert router.placer.place(asked, 0.5).chosen.decode.id.rank == 50


def test_a_source_is_its_pool_alone_and_may_be_faster_than_a_file(subtests):
    router = Router(2, 0, capabilities=(LENDS, PULLS))
    own, other = router.decodes
    router.waits(other, 300_000, **READ)
    router.keeps(other, 40)
    with subtests.test("what lies below a pool is not lent"):
        assert router.place().chosen.source is None
    router.holds(other, 40)
    with subtests.test("a source is asked in the place of a slower file"):
        router.keeps(own, 40, range(40))
        router.waits(own, 0, file_tier_bytes_per_s=3e8)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.source.id, chosen.brought) == (own.id, other.id, None)
        assert "bring" not in dict(chosen.terms)
    with subtests.test("and not of memory that is as near"):
        router.keeps(own, 40)
        router.waits(own, 0, **READ)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.source, chosen.brought.tokens) == (own.id, None, WHOLE)


def test_trust_in_tiers_and_in_the_pool_are_two(subtests):
    router = Router(1, 0)
    rank = router.decodes[0]
    router.holds(rank, 10)
    router.keeps(rank, 40)

    def request(name, delivered, brought):
        decision = router.place()
        hashes = router.asked().hashes
        router.placer.sent(name, hashes, WHOLE + 7, decision)
        got = replace(admitted(delivered), brought_tokens=brought)
        router.placer.outcomes.admitted(name, hashes, decision.chosen, got)
        router.placer.outcomes.ended(name)
        router.balance.predictions.forget(rank.id.key)
        return decision.chosen.brought.tokens

    with subtests.test("what came as promised changes nothing"):
        assert request("a", WHOLE, 30 * BLOCK) == WHOLE
        assert request("b", WHOLE, 30 * BLOCK) == WHOLE
    with subtests.test("what was not brought up counts against the tiers"):
        for number in range(6):
            request(str(number), 10 * BLOCK, 0)
        assert 10 * BLOCK < request("c", 10 * BLOCK, 0) < 30 * BLOCK
        assert router.balance.trust.of(rank.id.key, router.now) == 1.0
        assert router.index.num_blocks(rank.id.key) == 10
        assert router.below.num_blocks(rank.id.key) == 40
    with subtests.test("a pool that has less than the index says counts against the pool"):
        router.balance.tier_trust.forget(rank.id.key)
        router.records[rank.id.key] += 1  # so that the index is not corrected
        request("d", WHOLE, WHOLE)
        assert router.balance.trust.of(rank.id.key, router.now) < 1.0
        assert router.balance.tier_trust.of(rank.id.key, router.now) == 1.0


blocks = st.integers(0, 40)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)
)
def test_what_is_found_is_what_pools_and_tiers_hold_as_plain_sets(held):
    router = Router(len(held), 0)
    expected = []
    for rank, (pool, below, in_memory) in zip(router.decodes, held, strict=True):
        router.holds(rank, pool)
        router.keeps(rank, below, range(min(in_memory, below), below))
        places = {at: "pool" for at in range(pool)}
        for at in range(below):
            places.setdefault(at, "memory" if at < in_memory else "file")
        end = next(at for at in range(41) if at not in places)
        took_s = sum(bring_s(BLOCK, 4e9) for at in range(end) if places[at] == "memory")
        took_s += sum(bring_s(BLOCK, 1e9) for at in range(end) if places[at] == "file")
        router.waits(rank, 0, **READ)
        expected.append((end * BLOCK, pytest.approx(took_s)))
    snapshot = RankSnapshot(router.asked(), router.balance, router.index, lambda rank: True, {}, router.below)
    found = [(rank.id.key, rank, snapshot.held().depth(rank.id.key)) for rank in router.decodes]
    hits = Hits(router.index, router.balance, BLOCK).of(found, snapshot)
    got = [
        (hit.worth, 0.0) if hit.brought is None else (hit.brought.tokens, hit.brought.bring_s) for hit in hits
    ]
    assert got == expected


def test_a_rank_is_chosen_for_what_others_files_hold(subtests):
    router = Router(4, 0)
    router.share(["a", "a", "b", ""])
    owner, reader, *_ = router.decodes
    for rank in router.decodes:
        router.waits(rank, 0, **SHARED_READ)
    router.keeps(owner, 40, range(40))
    with subtests.test("its owner is the home, as if nobody shared"):
        assert router.place().chosen.decode.id == owner.id
        assert router.place().reason == "longest_prefix"
    with subtests.test("whoever shares the directory comes next, at the price of reading there"):
        router.waits(owner, 20_000, **SHARED_READ)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.reused_tokens) == (reader.id, WHOLE)
        assert chosen.brought.shared_tokens == WHOLE and chosen.decode.held_tokens == 0
        assert dict(chosen.terms)["bring"] == pytest.approx(LOOK_S + bring_s(WHOLE, 8e8))
    with subtests.test("also of ranks that leave"):
        router.decodes[0] = replace(owner, draining=True)
        router.placer.set_ranks(router.decodes, ())
        assert router.place().chosen.decode.id == reader.id
    with subtests.test("a rank that reads more slowly than it computes computes"):
        router.waits(reader, 0, shared_tier_bytes_per_s=BYTES_PER_TOKEN * 9_000)
        assert all(way.brought is None for way in router.place().ranked if way.decode.id != owner.id)
    with subtests.test("what is in its owner's memory is nobody else's"):
        router.waits(reader, 0, **SHARED_READ)
        router.keeps(owner, 40, range(10, 40))
        assert all(way.brought is None for way in router.place().ranked if way.decode.id != owner.id)
    with subtests.test("but for who holds that itself"):
        router.keeps(reader, 10)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.brought.shared_tokens) == (reader.id, 30 * BLOCK)
        assert chosen.decode.held_tokens == 10 * BLOCK
        expected = LOOK_S + bring_s(10 * BLOCK, 4e9) + bring_s(30 * BLOCK, 8e8)
        assert dict(chosen.terms)["bring"] == pytest.approx(expected)
    with subtests.test("a model with states needs a checkpoint there, too"):
        router = Router(2, 0, layout=HYBRID)
        router.share(["a", "a"])
        owner, reader = router.decodes
        router.waits(owner, 60_000, **SHARED_READ)
        router.waits(reader, 0, **SHARED_READ)
        router.keeps(owner, 40, range(40))
        assert router.place().chosen.brought is None
        router.keeps(owner, 40, range(40), resumable=(10, 30))
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.brought.tokens) == (reader.id, 30 * BLOCK)
    with subtests.test("of many ranks, one of those that share is among those that are priced"):
        router = Router(60, 0)
        router.share(["a" if number in (7, 37, 41) else "" for number in range(60)])
        for number, rank in enumerate(router.decodes):
            router.waits(rank, 100_000 if number == 7 else 10 * (60 - number))
        router.keeps(router.decodes[7], 40, range(40))
        assert router.place().chosen.decode.id == router.decodes[41].id


def test_trust_in_others_files_is_apart():
    router = Router(2, 0)
    router.share(["a", "a"])
    owner, reader = router.decodes
    router.keeps(owner, 40, range(40))
    router.waits(owner, 100_000)
    router.waits(reader, 0, **SHARED_READ)
    for number in range(6):  # Their owner overwrites them before they are read.
        decision, hashes = router.place(), router.asked().hashes
        assert decision.chosen.decode.id == reader.id
        router.placer.sent(str(number), hashes, WHOLE + 7, decision)
        router.placer.outcomes.admitted(str(number), hashes, decision.chosen, admitted(0))
        router.placer.outcomes.ended(str(number))
        router.balance.predictions.forget(reader.id.key)
    trusts = router.balance.tier_trust, router.balance.shared_trust
    assert [trust.of(reader.id.key, router.now) < 1.0 for trust in trusts] == [False, True]
    brought = router.place().chosen.brought
    assert brought is None or brought.tokens < WHOLE


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 40)] * 3, st.sampled_from(["", "a", "b"])), min_size=1, max_size=6)
)
def test_what_others_files_hold_is_found_as_in_plain_sets(held):
    router = Router(len(held), 0)
    router.share([group for *_, group in held])
    files = {}
    for rank, (pool, below, in_memory, group) in zip(router.decodes, held, strict=True):
        router.holds(rank, pool)
        router.keeps(rank, below, range(min(in_memory, below), below))
        router.waits(rank, 0, **SHARED_READ)
        files.setdefault(group, set()).update(range(min(in_memory, below), below))
    expected = []
    for pool, below, in_memory, group in held:
        end = below
        while group and end in files[group]:
            end += 1
        shared = max(0, end - max(pool, below))
        shared_s = LOOK_S + bring_s(shared * BLOCK, 8e8)
        if not shared or shared_s * 10_000 >= shared * BLOCK:
            shared, shared_s = 0, 0.0
        own = range(pool, max(pool, below))
        took_s = shared_s + sum(bring_s(BLOCK, 4e9 if at < in_memory else 1e9) for at in own)
        expected.append(((max(pool, below) + shared) * BLOCK, shared * BLOCK, pytest.approx(took_s)))
    snapshot = RankSnapshot(router.asked(), router.balance, router.index, lambda rank: True, {}, router.below)
    found = [(rank.id.key, rank, snapshot.held().depth(rank.id.key)) for rank in router.decodes]
    got = [
        (hit.worth, 0, 0.0)
        if (brought := hit.brought) is None
        else (brought.tokens, brought.shared_tokens, brought.bring_s)
        for hit in router.placer._hits.of(found, snapshot)
    ]
    assert got == expected
