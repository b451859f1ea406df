"""From what a router knows to a decision, and back."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.index.read.prefix_index import PrefixIndex
from services.router.placement.candidates import Asked
from services.router.placement.decision import Nowhere
from services.router.placement.exclusion import TOO_SMALL
from services.router.placement.layouts import common_layout
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.router.ranks.shares import Share
from services.values.errors import NoCapacity, Unavailable
from services.values.kv import BlockHash, KvLayout, PageBooks
from services.values.load import RankLoad
from services.values.rank import Generation, Plan, RankAddress, RankId, RankKey, Role
from services.values.registration import NO_CACHE, Registration
from services.values.request import Admitted

BLOCK = 64
HASHES = [BlockHash(number) for number in range(1, 41)]
LAYOUT = KvLayout(page_size=BLOCK, page_bytes=1 << 20, model_fingerprint=1)
ROOMY = PageBooks(total=10_000, free=5_000, cached=5_000, locked=0, private=0, quarantined=0)
BOTH = frozenset(Plan)
NO_SLACK = PriceWeights(slack_ratio=0.0, slack_s=0.0)


def registration(role: Role, index: int) -> Registration:
    rank = RankId(role.value, index, Generation(1))
    address = RankAddress(rank, "host:1")
    return Registration(role, address, LAYOUT, "m", 100_000, 10_000, "fake")


class Router:
    """A placer and what it stands on. `held` and `waiting` are of each rank: blocks of HASHES, tokens."""

    def __init__(self, decodes: int, prefills: int, weights: PriceWeights = NO_SLACK) -> None:
        self.now = 100.0
        self.index = PrefixIndex()
        self.balance = Balance(lambda: self.now)
        self.records: Counter[RankKey] = Counter()
        self.placer = Placer(
            PlacerSettings(BLOCK, 512, weights),
            self.index,
            self.balance,
            self.records.__getitem__,
            lambda rank: True,
        )
        self.decodes, self.prefills = (
            [registration(role, i) for i in range(number)]
            for role, number in ((Role.DECODE, decodes), (Role.PREFILL, prefills))
        )
        self.placer.set_ranks(self.decodes, self.prefills)
        for rank in (*self.decodes, *self.prefills):
            self.holds(rank, 0)
            self.waits(rank, 0)
        self.now += 1

    def holds(self, rank: Registration, num_blocks: int) -> None:
        self.index.apply_snapshot(rank.id, HASHES[:num_blocks])

    def waits(self, rank: Registration, tokens: int, **load: object) -> None:
        load = {"books": ROOMY, "step_s": 0.01, "prefill_tokens_per_s": 10_000.0, **load}
        self.balance.report(rank.id.key, RankLoad(pending_tokens=tokens, **load))

    def all_but(self, *ranks: Registration) -> frozenset[RankId]:
        return frozenset(rank.id for rank in (*self.decodes, *self.prefills) if rank not in ranks)

    def place(self, num_blocks: int = 40, **changes):
        return self.placer.place(self.asked(num_blocks, **changes), 0.5)

    def asked(self, num_blocks: int = 40, **changes) -> Asked:
        asked = Asked(HASHES[:num_blocks], num_blocks * BLOCK + 7, BOTH)
        return replace(asked, **changes)


REMOTE = frozenset({Plan.REMOTE})


def admitted(decode_prefix_len: int, prefill_prefix_len: int = 0, plan: Plan = Plan.LOCAL) -> Admitted:
    return Admitted(2_567, decode_prefix_len, prefill_prefix_len, 100, 0, 0, 0.0, 0.0, 0.01, 0.0, plan)


held = st.sampled_from([0, 0, 0, 1, 1, 2, 20, 40])
waiting = st.sampled_from([0, 0, 500]) | st.integers(0, 20_000)
ranks = st.lists(st.tuples(held, waiting), min_size=17, max_size=60)


@settings(max_examples=60)
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


@pytest.mark.parametrize("blocks", [[3], [0, 3], [1, 3, 5]])
def test_a_rank_whose_records_are_half_applied_keeps_nobody_waiting(blocks):
    """It holds what comes after the other's, and a match of it is shorter."""
    router = Router(20, 0)
    router.holds(router.decodes[0], 3)
    router.index.apply_snapshot(router.decodes[1].id, [HASHES[block] for block in blocks])
    assert router.place(8).chosen.decode.id.rank == 0


def test_a_few_of_a_thousand_ranks_are_priced():
    router = Router(800, 200)
    for rank in router.decodes:
        router.holds(rank, 1)
    router.holds(router.decodes[700], 30)
    router.waits(router.decodes[700], 100)
    decision = router.place()
    assert decision.chosen.decode.id.rank == 700
    assert len(decision._compared) < 100
    assert len(router.placer.explain(router.asked(), 0.5)._compared) >= 800


def test_requests_that_come_at_once_spread_over_many_idle_ranks():
    router = Router(40, 20)
    for number in range(40):
        asked = router.asked(1, hashes=(), plans=frozenset({Plan.REMOTE}))
        decision = router.placer.place(asked, number / 40)
        router.placer.sent(str(number), (), asked.prompt_tokens, decision)
    assert {router.balance.now(rank.id.key).running for rank in router.decodes} == {1}
    assert {router.balance.now(rank.id.key).running for rank in router.prefills} == {2}
    for number in range(40):
        router.placer.outcomes.ended(str(number))
    assert {router.balance.now(rank.id.key).running for rank in router.decodes} == {0}


@pytest.mark.parametrize(("decodes", "prefills"), [(8, 4), (60, 40)])
def test_two_routers_that_know_nothing_of_each_other_choose_different_ranks(decodes, prefills):
    for plan, side in ((Plan.LOCAL, "decode"), (Plan.REMOTE, "prefill")):
        chosen: list[RankKey] = []
        for index in range(2):
            router = Router(decodes, prefills, PriceWeights())
            router.placer.set_share(Share(index, 2))
            for number in range(2):
                asked = router.asked(1, hashes=(), plans=frozenset({plan}))
                decision = router.placer.place(asked, 0.5)
                router.placer.sent(str(number), (), asked.prompt_tokens, decision)
                chosen.append(getattr(decision.chosen, side).id.key)
        assert len(set(chosen)) == 4, plan


def test_excluded_ranks_among_many_are_passed_over():
    router = Router(40, 40)
    for rank in router.decodes:
        router.holds(rank, 40)
    only = router.decodes[33].id
    others = router.all_but(router.decodes[33], *router.prefills)
    assert router.place(tried=others).chosen.decode.id == only
    with pytest.raises(Unavailable, match="40 it failed this request"):
        router.place(tried=others | {only})


def test_the_pinned_rank_is_looked_at_however_busy():
    router = Router(40, 1, PriceWeights())
    pinned = router.decodes[20]
    router.waits(pinned, 100)
    assert router.place(pinned=pinned.id.key).reason == "pinned"


def test_a_promise_that_was_not_kept_lowers_what_the_next_one_is_worth():
    router = Router(2, 0)
    liar = router.decodes[0]
    for number in range(30):
        router.holds(liar, 40)
        decision = router.placer.place(router.asked(tried=router.all_but(liar)), 0.5)
        router.placer.sent(str(number), HASHES, 2_567, decision)
        router.placer.outcomes.admitted(str(number), HASHES, decision.chosen, admitted(0))
        router.placer.outcomes.ended(str(number))
        router.now += 7  # what was predicted has ended
    router.holds(liar, 40)
    asked = router.asked(tried=router.all_but(liar))
    chosen = router.placer.place(asked, 0.5).chosen.decode
    assert chosen.matched_tokens == 40 * BLOCK
    assert chosen.hit_tokens < 0.4 * chosen.matched_tokens
    router.now += 600
    assert router.place().chosen.decode.hit_tokens == 40 * BLOCK  # given another chance


def run_one(router: Router, decode_prefix_len: int):
    decision = router.place(num_blocks=20)
    router.placer.sent("a", HASHES[:20], 20 * BLOCK + 7, decision)
    yield
    router.placer.outcomes.admitted("a", HASHES[:20], decision.chosen, admitted(decode_prefix_len))
    yield


def test_an_index_that_has_heard_nothing_since_is_corrected_at_once():
    router = Router(1, 0)
    rank = router.decodes[0]
    router.holds(rank, 40)
    request = run_one(router, 5 * BLOCK)
    next(request)
    next(request)
    assert router.index.match(rank.id.key, HASHES[:20]) == 5
    assert not router.index.holds(rank.id.key, HASHES[19])
    assert router.balance.predicted_match(rank.id.key, HASHES) == 20  # for it was computed since


def test_an_index_that_was_told_meanwhile_is_left_alone():
    router = Router(1, 0)
    rank = router.decodes[0]
    router.holds(rank, 40)
    request = run_one(router, 5 * BLOCK)
    next(request)
    router.holds(rank, 20)  # evicted, and computed again for this request
    router.records[rank.id.key] += 1
    next(request)
    assert router.index.match(rank.id.key, HASHES) == 20


def test_what_was_sent_counts_where_it_will_be_computed_before_the_index_knows():
    router = Router(1, 2)
    remote = frozenset({Plan.REMOTE})
    first = router.place(plans=remote)
    router.placer.sent("a", HASHES, 2_567, first)
    prefill = first.chosen.prefill
    assert router.balance.predicted_match(prefill.id.key, HASHES) == 40
    assert router.index.match(prefill.id.key, HASHES) == 0  # never mixed
    assert router.balance.predicted_match(first.chosen.decode.id.key, HASHES) == 0  # nothing has landed
    router.placer.outcomes.admitted("a", HASHES, first.chosen, admitted(0, 0, Plan.REMOTE))
    assert router.balance.predicted_match(first.chosen.decode.id.key, HASHES) == 40
    router.now += 60
    assert router.balance.predicted_match(prefill.id.key, HASHES) == 0


@pytest.mark.parametrize("plans", [REMOTE, frozenset({Plan.LOCAL})])
def test_nothing_is_predicted_of_a_rank_without_a_cache(plans):
    """Its siblings keep one, as in the middle of a roll-out."""
    router, (plan,) = Router(2, 2), plans
    cacheless = [replace(side[0], capabilities=(NO_CACHE,)) for side in (router.decodes, router.prefills)]
    router.placer.set_ranks([cacheless[0], router.decodes[1]], [cacheless[1], router.prefills[1]])
    for index in range(2):
        others = router.all_but(router.decodes[index], router.prefills[index])
        decision = router.place(plans=plans, tried=others)
        router.placer.sent("a", HASHES, 2_567, decision)
        router.placer.outcomes.admitted("a", HASHES, decision.chosen, admitted(0, 0, plan))
        router.placer.outcomes.finished(HASHES, decision.chosen, range(42 * BLOCK), 0)
        router.placer.outcomes.ended("a")
        used = [rank for rank in (decision.chosen.decode, decision.chosen.prefill) if rank is not None]
        predicted = {router.balance.predicted_match(rank.id.key, HASHES) for rank in used}
        assert predicted == {40 if index else 0}
    assert router.place(plans=plans).chosen.decode.hit_tokens == 40 * BLOCK


def test_a_hot_prefix_spreads_when_its_rank_is_busy():
    router = Router(4, 0, PriceWeights())
    router.holds(router.decodes[0], 40)
    chosen = []
    for number in range(80):  # at once, each with 40 blocks in common and 200 tokens of its own
        asked = router.asked(prompt_tokens=40 * BLOCK + 200)
        decision = router.placer.place(asked, number / 80)
        router.placer.sent(str(number), HASHES, asked.prompt_tokens, decision)
        chosen.append(decision.chosen.decode.id.rank)
    assert chosen[0] == 0
    assert set(chosen) == {0, 1, 2, 3}


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


def of_other_layout(ranks: list[Registration], num: int) -> list[Registration]:
    """The first ones with pages of another size."""
    layout = replace(LAYOUT, page_bytes=1 << 19)
    return [replace(rank, layout=layout) for rank in ranks[:num]] + ranks[num:]


@pytest.mark.parametrize("decodes", [3, 60])
def test_a_decode_rank_of_another_layout_computes_alone(decodes):
    """A roll-out has reached the first ones; they are empty, and no prefill rank can write to them."""
    router, new = Router(decodes, 4), decodes // 3
    router.placer.set_ranks(of_other_layout(router.decodes, new), router.prefills)
    for rank in router.decodes[new:]:
        router.waits(rank, 1_000)
    assert router.place(plans=REMOTE).chosen.decode.id.rank >= new
    remote = router.placer.explain(router.asked(plans=REMOTE), 0.5)
    assert {rank.id.rank for rank in remote.excluded} == set(range(new))
    either = router.place()
    assert (either.chosen.plan, either.excluded) == (Plan.LOCAL, ())
    assert either.chosen.decode.id.rank < new
    with_others = [way.decode.id.rank for way in either.ranked if way.plan is Plan.REMOTE]
    assert with_others and min(with_others) >= new


@pytest.mark.parametrize(
    ("new_decodes", "new_prefills", "apart"),
    [
        (1, 0, {"decode/0"}),
        (2, 0, {"decode/0", "decode/1"}),
        (2, 1, {"decode/2", "prefill/1", "prefill/2"}),  # as many pairs of each, and more decode ranks
        (3, 1, {"prefill/1", "prefill/2"}),
    ],
)
def test_the_layout_that_counts_is_that_of_the_most_pairs(new_decodes, new_prefills, apart):
    router = Router(3, 3)
    router.placer.set_ranks(
        of_other_layout(router.decodes, new_decodes), of_other_layout(router.prefills, new_prefills)
    )
    excluded = router.placer.explain(router.asked(plans=REMOTE), 0.5).excluded
    assert {str(rank.id.key) for rank in excluded} == apart
    reasons = {rank.excluded for rank in excluded}
    assert reasons == {"its KV layout differs from that of most ranks in page_bytes"}


def test_layouts_that_differ_in_their_tp_degrees_count_as_one():
    router = Router(5, 2)
    old = [replace(rank, layout=replace(LAYOUT, tp_size=2**n)) for n, rank in enumerate(router.decodes[2:])]
    router.placer.set_ranks(of_other_layout(router.decodes, 2)[:2] + old, of_other_layout(router.prefills, 1))
    excluded = router.placer.explain(router.asked(plans=REMOTE), 0.5).excluded
    assert {str(rank.id.key) for rank in excluded} == {"decode/0", "decode/1", "prefill/0"}


A, B = LAYOUT, replace(LAYOUT, page_bytes=1 << 19)


def blue_and_green(router: Router, new: str, drained: str) -> tuple[list[Registration], list[Registration]]:
    """Both roles' ranks, those with layout B and those that drain by the first letter and number."""
    return tuple(
        [
            replace(rank, layout=B if name in new else A, draining=name in drained)
            for rank in side
            if (name := f"{rank.role.value[0]}{rank.id.rank}")
        ]
        for side in (router.decodes, router.prefills)
    )


@pytest.mark.parametrize("of_the_load", [False, True])
@pytest.mark.parametrize(
    ("new", "drained", "layout"),
    [
        ("d2 p2", "", A),  # four pairs against one
        ("d2 p2", "d0 d1 p0 p1", B),  # the old ones drain: the new one takes over
        ("d2 p2", "d0 p0", A),  # a pair of each, and the first rank's counts
        ("d0 p0", "d1 p1", B),
        ("d2 p2", "p0 p1", B),  # nobody sends to the old ones any more
        ("d2 p2", "d0 d1", B),
        ("d2 p2", "d2 p2", A),
        ("d1 d2", "p0 p1 p2", B),  # no pairs: most decode ranks
        ("d1 d2", "d2 p0 p1 p2", A),
        ("d1 d2", "d0 d1 d2 p0", A),  # none is left: then all count, as if none drained
        ("d1 d2 p1 p2", "d0 d1 d2", B),
    ],
)
def test_the_layout_that_counts_is_that_of_the_ranks_that_stay(new, drained, layout, of_the_load):
    router = Router(3, 3)
    decodes, prefills = blue_and_green(router, new, drained)
    if of_the_load:  # they could not reach etcd, and only their loads tell it
        told = [replace(rank, draining=False) for rank in (*decodes, *prefills)]
        router.placer.set_ranks(told[:3], told[3:])
        for rank in (*decodes, *prefills):
            router.waits(rank, 0, draining=rank.draining)
    else:
        router.placer.set_ranks(decodes, prefills)
    excluded = router.placer.explain(router.asked(plans=REMOTE), 0.5)
    candidates = excluded.candidates if isinstance(excluded, Nowhere) else excluded.excluded
    apart = {rank.id for rank in candidates if "layout differs" in rank.excluded}
    staying = [rank for rank in (*decodes, *prefills) if not rank.draining]
    assert apart == {rank.id for rank in staying if rank.layout != layout}
    drained_keys = {rank.id.key for rank in (*decodes, *prefills) if rank.draining}
    assert common_layout(decodes, prefills, drained_keys) == layout


@pytest.mark.parametrize("half", [2, 30])
def test_prefill_computes_for_the_new_ranks_once_the_old_ones_drain(half):
    """Blue and green: as many of each, and whoever drains is still registered for as long as it runs."""
    router = Router(2 * half, 2 * half)
    decodes, prefills = of_other_layout(router.decodes, half), of_other_layout(router.prefills, half)
    router.placer.set_ranks([*decodes[half:], *decodes[:half]], [*prefills[half:], *prefills[:half]])

    def place() -> set[int]:
        chosen = router.place(plans=REMOTE).chosen
        return {chosen.decode.id.rank // half, chosen.prefill.id.rank // half}

    assert place() == {1}
    for rank in (*router.decodes[half:], *router.prefills[half:]):
        router.waits(rank, 0, draining=True)
    assert place() == {0}
    for rank in (*router.decodes[half:], *router.prefills[half:]):
        router.waits(rank, 0)  # put back
    assert place() == {1}


def with_pools(router: Router, small: range, large_tokens: int = 100_000) -> None:
    """Those decode ranks hold 5,000 tokens."""
    router.decodes = [
        replace(rank, max_context_tokens=5_000 if rank.id.rank in small else large_tokens)
        for rank in router.decodes
    ]
    router.placer.set_ranks(router.decodes, router.prefills)


@pytest.mark.parametrize("decodes", [2, 40])
@pytest.mark.parametrize("plans", [BOTH, REMOTE])
def test_of_many_ranks_those_that_hold_all_of_it_are_looked_at(decodes, plans):
    """Though it is the busiest of all, and alone."""
    router = Router(decodes, 2)
    with_pools(router, range(decodes - 1))
    router.waits(router.decodes[-1], 50_000)
    fits, outgrows, fits_nowhere = 5_000, 5_001, 100_001
    assert router.place(plans=plans, most_tokens=fits).chosen.decode.id.rank < decodes - 1
    decision = router.place(plans=plans, most_tokens=outgrows)
    assert decision.chosen.decode.id.rank == decodes - 1
    assert router.place(plans=plans, most_tokens=fits_nowhere).chosen.decode.id.rank < decodes - 1
    excluded = {c.excluded for c in router.placer.explain(router.asked(most_tokens=outgrows), 0.5).excluded}
    assert excluded == {TOO_SMALL}
    large = frozenset({router.decodes[-1].id})
    chosen = router.place(plans=plans, most_tokens=outgrows, tried=large).chosen
    assert dict(chosen.terms)["outgrow"] > 0


def test_of_many_ranks_the_roomiest_are_looked_at_where_nobody_says_how_long_it_becomes():
    router = Router(40, 0)
    with_pools(router, range(1, 40))
    router.waits(router.decodes[0], 100)
    assert router.place(prompt_tokens=4_999).chosen.decode.id.rank == 0
    assert router.place(prompt_tokens=2_600).chosen.decode.id.rank != 0
