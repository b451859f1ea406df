"""The table's columns, against what is known of each rank by itself."""

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.known_cluster import BLOCK, HASHES, HYBRID, LAYOUT, Router, of_other_layout
from services.router.placement.exclusion import Standing, of_rank
from services.values.kv import PageBooks
from services.values.load import RankLoad
from services.values.rank import Generation, Plan, RankId
from services.values.registration import NO_RESUME_POINTS
from services.values.request import Admitted

loads = st.builds(
    RankLoad,
    running=st.integers(0, 9),
    waiting=st.sampled_from([0, 0, 3]),
    pending_tokens=st.sampled_from([0, 0, 500, 20_000]),
    waiting_tokens=st.sampled_from([0, 700]),
    books=st.builds(
        lambda free, cached: PageBooks(99, free, cached, 0, 0, 0), st.integers(0, 9), st.integers(0, 9)
    ),
    step_s=st.sampled_from([0.0, 0.02]),
    prefill_tokens_per_s=st.sampled_from([0.0, 5_000.0, 8_000.0]),
    admitted_per_s=st.sampled_from([0.0, 2.0]),
    stalled=st.sampled_from([False] * 5 + [True]),
    draining=st.sampled_from([False] * 5 + [True]),
    tokens_per_step=st.sampled_from([0.0, 1.5]),
)
rows = st.integers(0, 4)
events = st.one_of(
    st.tuples(st.just("report"), rows, loads),
    st.tuples(st.just("send"), rows, st.integers(0, 9_000)),
    st.tuples(st.just("admit"), rows, st.integers(20, 9_000)),
    st.tuples(
        st.sampled_from(["fail", "silence", "unreport", "forget", "end", "connect", "lose"]), rows, st.none()
    ),
    st.tuples(st.just("wait"), rows, st.sampled_from([0.01, 0.3, 2.0])),
)
questions = st.fixed_dictionaries(
    {
        "prompt_tokens": st.sampled_from([1, 40 * BLOCK, 40 * BLOCK + 7, 9_999, 10_001]),
        "plans": st.sampled_from([frozenset(Plan), frozenset({Plan.REMOTE})]),
        "answers": st.sampled_from([1, 3]),
        "reusable_tokens": st.sampled_from([inf, inf, 100]),
        "tried": st.sampled_from([frozenset(), frozenset({RankId("decode", 1, Generation(1))})]),
    }
)


class Known:
    """Three decode ranks and two prefill ranks, of which things become known."""

    def __init__(self, hybrid):
        self.router = Router(3, 2, layout=HYBRID if hybrid else LAYOUT)
        decodes = of_other_layout(self.router.decodes, 1) if not hybrid else self.router.decodes
        if hybrid:
            decodes = [replace(decodes[0], capabilities=(NO_RESUME_POINTS,)), *decodes[1:]]
        decodes[2] = replace(decodes[2], max_context_tokens=10_000)
        self.ranks = (*decodes, *self.router.prefills)
        self.lost, self.sent = set(), Counter()
        self.router.placer._is_connected = lambda key: key not in self.lost
        self.router.placer.set_ranks(decodes, self.router.prefills)

    def happens(self, event, row, what):
        router, key = self.router, self.ranks[row].id.key
        balance, decode = router.balance, self.ranks[row % 3].id.key
        match event:
            case "report":
                balance.report(key, what)
            case "send":
                balance.sent(f"{row}-{self.sent[row]}", decode, key if row > 2 else None, what)
                self.sent[row] += 1
            case "end":
                balance.ended(f"{row}-0")
            case "admit":
                plan = Plan.REMOTE if row > 2 else Plan.LOCAL
                admitted = Admitted(9_999, 0, 0, what, 0, 0, 0.0, 0.0, what / 3_000, 0.0, plan)
                balance.admitted(f"{row}-0")
                balance.observe_admitted(decode, key if row > 2 else None, admitted)
            case "fail":
                balance.failed(key)
            case "silence":
                balance.fell_silent(key)
            case "unreport":
                balance.unreported(key)
            case "forget":
                balance.forget(key)
            case "connect" | "lose":
                (self.lost.add if event == "lose" else self.lost.discard)(key)
                router.placer.changed(key)
            case "wait":
                router.now += what

    def exclusion(self, rank, asked):
        table, key = self.router.placer._table, rank.id.key
        standing = Standing(
            self.router.balance.liveness(key), key not in self.lost, table._apart.get(key, "")
        )
        return of_rank(rank, standing, asked)


@given(st.booleans(), st.lists(events, max_size=30), questions)
def test_the_columns_say_what_is_known_of_each_rank(hybrid, happened, question):
    known = Known(hybrid)
    for event in happened:
        known.happens(*event)
    asked, balance = known.router.asked(**question), known.router.balance
    sides = known.router.placer._table.sides(asked)
    assert [len(side) for side in sides] == [3, 2]
    for rank, candidate in zip(known.ranks, (*sides[0].all(), *sides[1].all()), strict=True):
        key, now, page = rank.id.key, balance.now(rank.id.key), rank.layout.page_size
        assert candidate.id == rank.id
        assert (candidate.pending_tokens, candidate.queued) == (now.pending_tokens, now.queued)
        assert candidate.prefill_tokens_per_s == pytest.approx(now.tokens_per_s)
        assert candidate.compute_wait_s == pytest.approx(now.compute_wait_s)
        books = now.load.books
        assert (candidate.free_tokens, candidate.evictable_tokens) == (books.free * page, books.cached * page)
        assert candidate.holds_tokens == rank.max_context_tokens
        assert candidate.excluded == known.exclusion(rank, asked)
        if rank in known.ranks[:3]:
            assert (candidate.running, candidate.token_s) == (now.running, now.load.token_s)
            assert candidate.waiting_tokens == now.load.waiting_tokens
            assert candidate.tokens_per_step == now.load.tokens_per_step
            assert candidate.queue_wait_s == pytest.approx(balance.queue_wait_s(key, asked.answers - 1))
    for side in sides:
        assert [not candidate.excluded for candidate in side.all()] == side.is_open.tolist()
        assert side.are_open is all(side.is_open.tolist())


held = st.sampled_from([0, 0, 1, 20, 40])


@given(
    st.booleans(),
    st.lists(st.tuples(held, st.sets(st.integers(1, 40)), held, held, st.booleans()), min_size=5, max_size=5),
    questions,
)
def test_a_hit_is_what_the_index_says_as_far_as_it_is_trusted_or_what_was_sent(hybrid, states, question):
    known = Known(hybrid)
    router, balance = known.router, known.router.balance
    for rank, (depth, points, guess, resume_guess, lied) in zip(known.ranks, states, strict=True):
        router.holds(rank, depth, *(point for point in points if point <= depth))
        balance.predict(rank.id.key, HASHES[:guess])
        if resume_guess:
            balance.resume_guesses.add(rank.id.key, HASHES[resume_guess - 1], router.now, 5.0)
        if lied:
            balance.trust.observe(rank.id.key, 9_000, 0, router.now)
            balance.resume_trust.observe(rank.id.key, 9_000, 0, router.now)
    asked = router.asked(**question)
    candidates = [each for side in router.placer._table.sides(asked) for each in side.all()]
    for rank, state, candidate in zip(known.ranks, states, candidates, strict=True):
        key, (depth, points, guess, resume_guess, _) = rank.id.key, state
        worth = max(balance.trust.worth(key, depth * BLOCK, router.now), guess * BLOCK)
        assert (candidate.matched_tokens, candidate.hit_tokens) == (depth * BLOCK, worth)
        most = asked.most_reused
        if rank.tells_resume_points:
            furthest = most // BLOCK
            point = max((p for p in points if p <= min(depth, furthest)), default=0) * BLOCK
            soon = resume_guess * BLOCK if resume_guess <= furthest else 0
            assert candidate.matched_resume_tokens == point
            trusted = balance.resume_trust.worth(key, point, router.now)
            assert candidate.resume_tokens == min(worth, max(trusted, soon))
        else:
            assert candidate.matched_resume_tokens is None
            assert candidate.resume_tokens == (None if asked.reusable_tokens == inf else min(worth, most))
        side = router.placer._table.sides(asked)[0 if rank in known.ranks[:3] else 1]
        assert side.reused[side.rows[key]] == candidate.reused_tokens


def test_a_column_of_the_index_that_another_rank_takes_is_looked_up_again():
    router = Router(2, 0)
    router.holds(router.decodes[0], 40)
    assert router.place(tried=router.all_but(router.decodes[0])).chosen.decode.hit_tokens == 40 * BLOCK
    router.index.remove_rank(router.decodes[0].id.key)
    for _ in range(70):
        router.holds(router.decodes[1], 20)
    for rank, hit_tokens in zip(router.decodes, (0, 20 * BLOCK), strict=True):
        chosen = router.place(tried=router.all_but(rank)).chosen
        assert chosen.decode.hit_tokens == hit_tokens
