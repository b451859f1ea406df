"""These tests show whom a rank that computes may pull from: against the plainest way to say it, and what it
changes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement.known_cluster import (
    BLOCK,
    HASHES,
    HYBRID,
    LAYOUT,
    REMOTE,
    Router,
    admitted,
    registration,
)
from router.placement.placement_ranks import decode
from services.router.placement.rank_snapshot import RankSnapshot
from services.router.placement.sources import PullSources
from services.values.kv import PageBooks
from services.values.rank import Plan, Role
from services.values.rank_reports import LENDS, PULLS
from services.values.request import Pulled

BOTH_WAYS = (LENDS, PULLS)
BYTES_PER_TOKEN = LAYOUT.page_bytes / BLOCK
OTHER = replace(LAYOUT, page_bytes=1 << 19)


@st.composite
def holders(draw) -> list:
    """At most three that lend, so that all are looked at: (layout, blocks, trusted, well, running)."""
    state = st.tuples(
        st.sampled_from([LAYOUT, LAYOUT, LAYOUT, OTHER]),
        st.sampled_from([0, 1, 10, 30, 39, 40]),
        st.booleans(),
        st.sampled_from([True, True, True, False]),
        st.integers(0, 3),
    )
    return draw(st.lists(state, max_size=3))


def in_words(router: Router, ranks, candidate, most_tokens: int) -> list:
    """Every one looked at by itself: what the candidate would pull from it, and for how long."""
    ways = []
    lending = [rank for rank in ranks if router.balance.may_lend(rank.id.key)]
    most = max((router.index.match(rank.id.key, HASHES) for rank in lending), default=0)
    for rank in lending:
        key = rank.id.key
        if 2 * router.index.match(key, HASHES) < most:  # of no interest beside the one that holds the most
            continue
        indexed = min(router.index.match(key, HASHES) * BLOCK, most_tokens)
        tokens = router.balance.trust.worth(key, indexed, router.now)
        num_bytes = max(0, tokens - candidate.hit_tokens) * BYTES_PER_TOKEN
        pull_s = 0.005 + num_bytes / 1e9
        saved_s = (tokens - candidate.reused_tokens) / candidate.prefill_tokens_per_s
        if rank.layout == LAYOUT and tokens > candidate.reused_tokens and 2 * pull_s <= saved_s:
            ways.append((-tokens, router.balance.now(key).running, pull_s, key))
    return sorted(ways)


@settings(max_examples=60, deadline=None)
@given(
    holders(),
    st.integers(0, 40),
    st.sampled_from([0, 5, 40]),
    st.sampled_from([200.0, 8_000.0, 40_000.0, 1e6]),
    st.sampled_from([2_567, 2_560, 1_000]),
)
def test_the_sources_of_a_rank_are_the_two_that_hold_the_most(
    held, own_blocks, resume_blocks, tokens_per_s, prompt_tokens
):
    router = Router(6, 0)
    ranks = [
        replace(rank, layout=layout, capabilities=BOTH_WAYS)
        for rank, (layout, *_) in zip(router.decodes, held, strict=False)
    ]
    idle = replace(router.decodes[3], capabilities=(PULLS,))  # it holds all, and lends nothing
    router.holds(idle, 40)
    for rank, (_, blocks, is_trusted, is_well, running) in zip(ranks, held, strict=True):
        router.holds(rank, blocks)
        router.waits(rank, 0, running=running)
        if not is_trusted:
            router.balance.trust.observe(rank.id.key, 20_000, 0, router.now)
        if not is_well:
            router.balance.failed(rank.id.key)
    sources = PullSources(router.index, router.balance, BLOCK, lambda rank: True)
    sources.set_ranks([*ranks, idle])
    asked = replace(router.asked(), prompt_tokens=prompt_tokens)
    snapshot = RankSnapshot(asked, router.balance, router.index, lambda rank: True, {})
    candidate = decode(
        3,
        hit_tokens=own_blocks * BLOCK,
        resume_tokens=min(own_blocks, resume_blocks) * BLOCK,
        prefill_tokens_per_s=tokens_per_s,
    )
    found = sources.holders(snapshot)
    got = sources.of([candidate], found)[0] if found else ()
    expected = in_words(router, ranks, candidate, prompt_tokens - 1)[:2]
    assert [(-source.tokens, source.running, source.pull_s) for source in got] == [
        way[:3] for way in expected
    ]


def full(router: Router, rank) -> None:
    """So much waits there that nobody computes there."""
    router.waits(rank, 300_000)


def test_a_source_changes_who_computes(subtests):
    with subtests.test("plan local: an idle rank takes over what a busy one holds"):
        router = Router(2, 0, capabilities=BOTH_WAYS)
        home, idle = router.decodes
        router.holds(home, 40)
        full(router, home)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.source.id) == (idle.id, home.id)
        assert chosen.source.tokens == chosen.reused_tokens == 40 * BLOCK
        assert dict(chosen.terms)["pull"] == pytest.approx(0.005 + 40 * BLOCK * BYTES_PER_TOKEN / 1e9)
    with subtests.test("plan remote: prefill gets what decode generated"):
        router = Router(1, 2, capabilities=BOTH_WAYS)
        router.holds(router.decodes[0], 40)
        router.holds(router.prefills[1], 10)
        chosen = router.place(plans=REMOTE).chosen
        assert (chosen.prefill.id, chosen.source.id) == (router.prefills[1].id, router.decodes[0].id)
        assert dict(chosen.terms)["compute"] == pytest.approx(7 / 10_000)
    with subtests.test("a rank that drains is still a source"):
        router = Router(2, 0, capabilities=BOTH_WAYS)
        router.holds(router.decodes[0], 40)
        router.waits(router.decodes[0], 0, draining=True)
        chosen = router.place().chosen
        assert (chosen.decode.id, chosen.source.id) == (router.decodes[1].id, router.decodes[0].id)
    with subtests.test("of many ranks, too"):
        router = Router(40, 40, capabilities=BOTH_WAYS)
        router.holds(router.decodes[33], 40)
        full(router, router.decodes[33])
        assert router.place().chosen.source.id == router.decodes[33].id


def test_who_is_no_source(subtests):
    def of(router: Router, **asked):
        return router.place(**asked).chosen.source

    def busy_holder(**settings) -> Router:
        router = Router(2, 0, **settings)
        router.holds(router.decodes[0], 40)
        full(router, router.decodes[0])
        return router

    for capabilities in ((), (LENDS,), (PULLS,)):
        with subtests.test("ranks that do not both lend and pull", capabilities=capabilities):
            assert of(busy_holder(capabilities=capabilities)) is None
    with subtests.test("anybody, where the router is told so"):
        assert of(busy_holder(capabilities=BOTH_WAYS, pulls=False)) is None
    with subtests.test("a rank that failed this request"):
        router = busy_holder(capabilities=BOTH_WAYS)
        assert of(router, tried=frozenset({router.decodes[0].id})) is None
    with subtests.test("a rank that is only to hold it soon"):
        router = busy_holder(capabilities=BOTH_WAYS)
        router.holds(router.decodes[0], 0)
        router.balance.predict(router.decodes[0].id.key, HASHES)
        assert of(router) is None
    with subtests.test("a rank that lends as much as it may"):
        router = busy_holder(capabilities=BOTH_WAYS)
        books = PageBooks(total=800, free=0, cached=700, locked=0, private=100, quarantined=0)
        router.waits(router.decodes[0], 300_000, books=books, granted_pages=100)
        assert of(router) is None
    with subtests.test("a rank that refused a moment ago"):
        router = busy_holder(capabilities=BOTH_WAYS)
        first, second = (rank.id.key for rank in router.decodes)
        router.balance.observe_pulled(first, second, Pulled(refused="busy"))
        assert of(router) is None


def test_a_request_that_reads_its_prompt_pulls_what_it_may_reuse():
    router = Router(2, 0, capabilities=BOTH_WAYS)
    router.holds(router.decodes[0], 40)
    full(router, router.decodes[0])
    assert router.place(reusable_tokens=2_000.0).chosen.source.tokens == 2_000


def test_with_states_a_source_is_worth_its_deepest_checkpoint(subtests):
    with subtests.test("what it holds beyond that is computed"):
        router = Router(2, 0, layout=HYBRID, capabilities=BOTH_WAYS)
        router.holds(router.decodes[0], 40, 10, 30)
        full(router, router.decodes[0])
        router.waits(router.decodes[1], 0, prefill_tokens_per_s=2_000.0)
        source = router.place().chosen.source
        assert source.tokens == 30 * BLOCK
        state_s = 62 * 2**20 / 1e9
        assert source.pull_s == pytest.approx(0.005 + 30 * BLOCK * (20 << 10) / 1e9 + state_s)
    with subtests.test("a rank without any is none"):
        router.holds(router.decodes[0], 40)
        assert router.place().chosen.source is None
    with subtests.test("who holds the pages and lacks the state pulls the state alone"):
        router.holds(router.decodes[0], 40, 40)
        router.holds(router.decodes[1], 40)
        assert router.place().chosen.source.pull_s == pytest.approx(0.005 + state_s)


def test_of_equal_sources_the_least_busy_come_first():
    router = Router(0, 0)
    ranks = [registration(Role.DECODE, index, capabilities=BOTH_WAYS) for index in range(5)]
    for rank, running in zip(ranks, (3, 2, 0, 1, 9), strict=True):
        router.holds(rank, 20)
        router.waits(rank, 0, running=running)
    sources = PullSources(router.index, router.balance, BLOCK, lambda rank: rank.rank != 2)
    sources.set_ranks(ranks)
    snapshot = RankSnapshot(router.asked(), router.balance, router.index, lambda rank: True, {})
    found = sources.holders(snapshot)
    assert [holder.id.rank for holder in found] == [3, 1, 0]  # the third is not connected
    own = decode(3, prefill_tokens_per_s=1_000.0)
    assert [source.id.rank for source in sources.of([own], found)[0]] == [1, 0]  # not from itself


def test_what_was_computed_counts_before_it_is_told(subtests):
    with subtests.test("the prompt of an admitted request, and its answer when that has ended"):
        router = Router(1, 2, capabilities=BOTH_WAYS)
        first = router.place(20, plans=REMOTE)
        router.waits(next(rank for rank in router.prefills if rank.id == first.chosen.prefill.id), 300_000)
        router.placer.sent("a", HASHES[:20], 20 * BLOCK + 7, first)
        assert not router.balance.there.of(HASHES, router.now).deepest()
        told = admitted(0, 0, Plan.REMOTE)
        router.placer.outcomes.admitted("a", HASHES[:20], first.chosen, told)
        router.now += 4
        assert router.place(plans=REMOTE).chosen.source.tokens == 20 * BLOCK
        router.balance.there.add(router.decodes[0].id.key, HASHES, router.now, 5.0)
        assert router.place(plans=REMOTE).chosen.source.tokens == 40 * BLOCK
        router.now += 6
        assert router.place(plans=REMOTE).chosen.source is None  # By then its events would have come.
    with subtests.test("a rank that lends nothing is not noted"):
        router = Router(1, 1, capabilities=(PULLS,))
        first = router.place(20, plans=REMOTE)
        router.placer.outcomes.admitted("a", HASHES[:20], first.chosen, told)
        assert not router.balance.there.of(HASHES, router.now).deepest()
    with subtests.test("with states up to the checkpoint of what was computed"):
        router = Router(2, 0, layout=HYBRID, capabilities=BOTH_WAYS)
        router.balance.there.add(router.decodes[0].id.key, HASHES, router.now, 5.0, resumable=30)
        full(router, router.decodes[0])
        router.waits(router.decodes[1], 0, prefill_tokens_per_s=2_000.0)
        assert router.place().chosen.source.tokens == 30 * BLOCK


def test_a_source_is_named_in_case_a_prediction_is_wrong(subtests):
    router = Router(1, 1, capabilities=BOTH_WAYS)
    holder, prefill = router.decodes[0], router.prefills[0].id.key
    router.holds(holder, 40)
    router.balance.predict(prefill, HASHES)
    with subtests.test("the price is that of what is predicted"):
        chosen = router.place(plans=REMOTE).chosen
        assert (chosen.source.id, chosen.source.tokens) == (holder.id, 40 * BLOCK)
        assert chosen.reused_tokens == 40 * BLOCK and "pull" not in dict(chosen.terms)
        explained = router.placer.explain(router.asked(plans=REMOTE), 0.5)
        assert explained.chosen.source == chosen.source and explained.chosen in explained.ranked
    with subtests.test("where the index says so too, none is named"):
        router.holds(router.prefills[0], 40)
        assert router.place(plans=REMOTE).chosen.source is None
    with subtests.test("nor where nobody holds it"):
        router.holds(router.prefills[0], 0)
        router.holds(holder, 0)
        assert router.place(plans=REMOTE).chosen.source is None
