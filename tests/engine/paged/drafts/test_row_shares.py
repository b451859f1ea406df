"""Drafts by sequence are those with the most tokens for the step's seconds: against all there are."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.draft_chances import Candidate, StepCost, share_rounds, share_rows

SECONDS = st.floats(0.001, 1.0)
CANDIDATES = st.lists(st.builds(Candidate, st.integers(0, 3), st.floats(0.0, 1.0)), min_size=1, max_size=3)


def tokens(candidates, counts, batch):
    chances = zip(candidates, counts, strict=True)
    return batch + sum(c.chance**j for c, count in chances for j in range(1, count + 1))


def rate(candidates, counts, batch, cost, round_s=0.0):
    step_s = cost.plain_s + cost.draft_s * sum(counts) + round_s * max(counts)
    return tokens(candidates, counts, batch) / step_s


@given(
    candidates=CANDIDATES,
    others=st.integers(0, 3),
    plain_s=SECONDS,
    draft_s=SECONDS,
    round_s=st.floats(0.0, 1.0),
)
def test_no_rounds_of_guesses_give_more_tokens_a_second(candidates, others, plain_s, draft_s, round_s):
    batch, cost = len(candidates) + others, StepCost(plain_s, draft_s)
    counts = share_rounds(candidates, batch, 99, cost, round_s)
    all_counts = product(*(range(c.most + 1) for c in candidates))
    best = max(rate(candidates, each, batch, cost, round_s) for each in all_counts)
    assert rate(candidates, counts, batch, cost, round_s) == pytest.approx(best)


@given(candidates=CANDIDATES, others=st.integers(0, 3), plain_s=SECONDS, draft_s=SECONDS)
def test_none_give_more_tokens_a_second(candidates, others, plain_s, draft_s):
    batch, cost = len(candidates) + others, StepCost(plain_s, draft_s)
    counts = share_rows(candidates, batch, 99, cost)
    best = max(
        rate(candidates, each, batch, cost) for each in product(*(range(c.most + 1) for c in candidates))
    )
    assert rate(candidates, counts, batch, cost) == pytest.approx(best)


@given(
    candidates=CANDIDATES,
    max_drafts=st.integers(0, 4),
    plain_s=SECONDS,
    draft_s=st.floats(0.0, 0.3),
    limit_s=SECONDS,
    round_s=st.floats(0.0, 0.3),
)
def test_bounds_hold(candidates, max_drafts, plain_s, draft_s, limit_s, round_s):
    cost = StepCost(plain_s, draft_s, limit_s)
    counts = share_rounds(candidates, 3, max_drafts, cost, round_s)
    assert not any(counts) or plain_s + draft_s * sum(counts) + round_s * max(counts) <= limit_s
    counts = share_rows(candidates, 3, max_drafts, cost)
    assert sum(counts) <= max_drafts
    assert all(0 <= count <= c.most for count, c in zip(counts, candidates, strict=True))
    assert not any(counts) or plain_s + draft_s * sum(counts) <= limit_s


def test_the_most_tokens_a_second(subtests):
    with subtests.test("at one sequence all that are likely and none that never are"):
        cost = StepCost(plain_s=0.010, draft_s=0.0011)  # of a row at batch 1, on a CPU
        assert share_rows([Candidate(5, 0.95)], 1, 99, cost) == [5]
        assert share_rows([Candidate(5, 0.05)], 1, 99, cost) == [0]
        assert share_rows([Candidate(5, 0.4)], 1, 99, cost) == [2]

    with subtests.test("where rows cost what sequences do only what is nearly sure"):
        cost = StepCost(plain_s=0.024, draft_s=0.001)  # 16 sequences, of 1 ms each
        shares = share_rows([Candidate(5, 0.9), Candidate(5, 0.3)], 16, 99, cost)
        assert shares == [3, 0]

    with subtests.test("what is dear to guess is not"):
        cost = StepCost(plain_s=0.010, draft_s=0.001)
        assert share_rounds([Candidate(5, 0.8)], 1, 99, cost, round_s=0.009) == [0]
        assert share_rounds([Candidate(5, 0.8)], 1, 99, cost, round_s=0.001) == [4]

    with subtests.test("a round is not worth it for few"):
        cost, few = StepCost(plain_s=0.020, draft_s=0.0002), [Candidate(5, 0.0)] * 6
        assert share_rounds([Candidate(5, 0.9), *few, few[0]], 8, 99, cost, round_s=0.004) == [0] * 8
        assert share_rounds([Candidate(5, 0.9)] * 8, 8, 99, cost, round_s=0.004) == [5] * 8

    with subtests.test("nothing before a step was measured"):
        assert share_rows([Candidate(5, 0.9)], 1, 99, StepCost(0.0, 0.0)) == [0]
