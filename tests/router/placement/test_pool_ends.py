"""Pools of different sizes: where a request is placed, and what the end of a pool means to it."""

from dataclasses import replace
from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.placement_ranks import LOCAL, REMOTE, choose, decode, prefill, request
from services.router.placement.exclusion import TOO_SMALL, beside_others
from services.router.placement.outcomes import length_means
from services.values.errors import Unavailable
from services.values.rank import Plan
from services.values.request import FinishReason

SMALL, LARGE = decode(0, holds_tokens=5_000), decode(1, holds_tokens=20_000)


def test_who_cannot_hold_all_of_it_is_left_out(subtests):
    """However busy the other one is."""
    for plans in [REMOTE, LOCAL, REMOTE | LOCAL]:
        with subtests.test(plans=plans):
            busy = LARGE._replace(pending_tokens=50_000)
            asked = request(4_000, plans=plans, most_tokens=5_001, longest_tokens=20_000)
            decision = choose(asked, [SMALL, busy], [prefill(0)])
            assert decision.chosen.decode is busy
            assert [(rank.id, rank.excluded) for rank in decision.excluded] == [(SMALL.id, TOO_SMALL)]
            asked = replace(asked, most_tokens=5_000)
            assert choose(asked, [SMALL, busy], [prefill(0)]).chosen.decode is SMALL


def test_where_nobody_who_could_hold_it_can_be_chosen_the_others_serve(subtests):
    """It will go on elsewhere, and that has its price."""
    for state in [{"excluded": "draining"}, {"queue_wait_s": 9.0, "compute_wait_s": 9.0}]:
        with subtests.test(state=state):
            asked = request(4_000, plans=LOCAL, most_tokens=9_000, longest_tokens=20_000, max_wait_s=5.0)
            decision = choose(asked, [SMALL, LARGE._replace(**state)])
            assert decision.chosen.decode is SMALL
            assert dict(decision.chosen.terms)["outgrow"] == pytest.approx(exp(-1_000 / 512) * 5_000 / 5_000)


def test_the_price_of_outgrowing_a_rank(subtests):
    for prompt_tokens, most_tokens, longest_tokens, price in [
        (4_000, None, 20_000, exp(-1_000 / 512)),  # nobody says how long the answer may be
        (4_990, None, 20_000, exp(-10 / 512)),
        (10, None, 20_000, pytest.approx(0.0, abs=1e-4)),
        (4_000, None, 5_000, 0.0),  # nobody holds more
        (4_000, None, 0, 0.0),
        (4_000, 4_500, 20_000, 0.0),
    ]:
        with subtests.test(
            prompt_tokens=prompt_tokens, most_tokens=most_tokens, longest_tokens=longest_tokens, price=price
        ):
            asked = request(
                prompt_tokens, plans=LOCAL, most_tokens=most_tokens, longest_tokens=longest_tokens
            )
            assert dict(choose(asked, [SMALL]).chosen.terms)["outgrow"] == pytest.approx(price)


def test_pools_of_several_sizes(subtests):
    with subtests.test("a long prompt that may become any length goes to the larger pool"):
        asked = request(4_990, plans=LOCAL, longest_tokens=20_000)
        busy = LARGE._replace(pending_tokens=2_000)
        assert choose(asked, [SMALL, busy]).chosen.decode is busy
        assert choose(replace(asked, prompt_tokens=500), [SMALL, busy]).chosen.decode is SMALL
    with subtests.test("nothing is left out that already is"):
        gone = SMALL._replace(excluded="draining")
        assert beside_others(request(most_tokens=6_000), [gone, LARGE], []) == ([gone, LARGE], [])
        assert beside_others(request(), [SMALL, LARGE], []) == ([SMALL, LARGE], [])


def at_end(rank, num_tokens: int):
    """As the router excludes it."""
    return rank._replace(excluded="the prompt is longer than its context" * (num_tokens >= rank.holds_tokens))


def lived(pools: list[int], model_tokens: int, prompt_tokens: int, max_tokens: int | None):
    """How a request goes from rank to rank: what these held, its tokens in the end, and why it ended.
    Unavailable: no rank holds the prompt."""
    ranks = [decode(i, holds_tokens=min(pool, model_tokens)) for i, pool in enumerate(pools)]
    longest = max(rank.holds_tokens for rank in ranks)
    most = inf if max_tokens is None else min(model_tokens, prompt_tokens + max_tokens)
    num_tokens, held = prompt_tokens, []
    while True:
        asked = request(
            num_tokens,
            plans=frozenset({Plan.LOCAL}),
            most_tokens=most if most <= longest else None,
            longest_tokens=longest,
        )
        rank = choose(asked, [at_end(rank, num_tokens) for rank in ranks]).chosen.decode
        held.append(rank.holds_tokens)
        num_tokens = min(most, rank.holds_tokens)
        reason = length_means(
            num_tokens=num_tokens,
            output_tokens=num_tokens - prompt_tokens,
            max_tokens=max_tokens,
            model_tokens=model_tokens,
            longest_tokens=longest,
        )
        if reason is not None:
            return held, num_tokens, reason


sizes = st.integers(2, 400)


@given(st.lists(sizes, min_size=1, max_size=6), sizes, st.integers(1, 400), st.none() | sizes)
def test_a_request_gets_all_that_the_roomiest_rank_holds(pools, model_tokens, prompt_tokens, max_tokens):
    longest = min(max(pools), model_tokens)
    wanted = min(model_tokens, inf if max_tokens is None else prompt_tokens + max_tokens)
    if prompt_tokens >= longest:
        with pytest.raises(Unavailable):
            lived(pools, model_tokens, prompt_tokens, max_tokens)
        return
    held, num_tokens, reason = lived(pools, model_tokens, prompt_tokens, max_tokens)
    assert num_tokens == min(wanted, longest)
    assert (reason is FinishReason.LENGTH) == (num_tokens == wanted)
    assert (reason is FinishReason.CAPACITY) == (num_tokens < wanted)
    assert held == sorted(set(held))  # each time a larger one: nobody is met twice
    if max_tokens is not None and wanted <= longest:
        assert len(held) == 1  # it was placed where it fits
