"""These tests show what tenants have had, against sums made anew."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.engine.paged.fair_share import (
    CREDIT_TOKENS,
    GRAIN_TOKENS,
    LAG_TOKENS,
    MOST_SESSION_TOKENS,
    SLACK_TOKENS,
    FairShare,
    token_cost,
)
from services.values.request import TenantShare

WEIGHTS = {"a": 4.0, "b": 1.0, "c": 0.5}
COSTS = st.lists(st.integers(1, 5000), min_size=40, max_size=120)


def share(tenant, session_tokens=0):
    return TenantShare(tenant, WEIGHTS[tenant], session_tokens)


@settings(max_examples=40, deadline=None)
@given(COSTS)
def test_who_always_wants_more_lags_by_no_more_than_a_request(costs):
    shares, had = FairShare(), dict.fromkeys(WEIGHTS, Fraction())
    for tenant in WEIGHTS:
        shares.came(share(tenant))
    most = GRAIN_TOKENS + max(costs) / min(WEIGHTS.values())
    for cost in costs:
        served = min(WEIGHTS, key=shares.rank)
        shares.charge(share(served), cost)
        had[served] += Fraction(cost) / Fraction(WEIGHTS[served])
        assert max(had.values()) - min(had.values()) <= most
        for tenant, tokens in had.items():
            assert shares.had(tenant) == pytest.approx(float(tokens) - CREDIT_TOKENS)


EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["came", "left", "charge"]), st.integers(1, 9000)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
@example([("b", "came", 1), ("b", "charge", 1), ("b", "left", 1), ("b", "came", 1)])
def test_a_pause_saves_up_no_more_than_a_bound_and_hides_nothing(events):
    shares, present, charged = FairShare(), dict.fromkeys("abc", 0), dict.fromkeys("abc", -math.inf)
    for tenant, what, tokens in events:
        if what == "came":
            others = [shares.had(each) for each in present if present[each] and each != tenant]
            before = shares.had(tenant)
            shares.came(share(tenant))
            if not present[tenant]:
                assert shares.had(tenant) >= min(others, default=before) - CREDIT_TOKENS
                assert shares.had(tenant) >= charged[tenant] - 1e-6  # Nothing that it has had is forgotten.
            present[tenant] += 1
            charged[tenant] = shares.had(tenant)
        elif present[tenant] and what == "left":
            shares.left(share(tenant))
            present[tenant] -= 1
            if not present[tenant] and shares.had(tenant) < charged[tenant]:
                charged[tenant] = shares.had(tenant)  # The others have had as much: it need not be kept.
        elif present[tenant]:
            shares.charge(share(tenant), tokens)
            charged[tenant] += tokens / WEIGHTS[tenant]
            assert shares.had(tenant) == pytest.approx(charged[tenant])
        assert shares.is_on == any(present.values())


def test_where_a_tenant_begins_and_what_it_may(subtests):
    with subtests.test("behind the prompt that is computed, and not behind those that were let in"):
        shares = FairShare()
        shares.came(share("b"))
        shares.charge(share("b"), 50_000)
        shares.serves(20_000.0)
        shares.came(share("c"))
        assert shares.had("c") == 20_000 - CREDIT_TOKENS
        assert shares.lags("c", "b") and not shares.lags("b", "c")
        assert not shares.may_pass("b", "c") and shares.may_pass("c", "b")
        shares.charge(share("c"), (30_000 - LAG_TOKENS) * WEIGHTS["c"])
        assert shares.lags("c", "b") and shares.may_pass("b", "c") == (LAG_TOKENS <= SLACK_TOKENS)
        shares.charge(share("c"), 1)
        assert not shares.lags("c", "b")
    with subtests.test("the session that has had least goes first, and nobody starves"):
        shares = FairShare()
        old, new = shares.came(share("a", 8000)), shares.came(share("a", 0))
        assert (old, new) == (2000 - CREDIT_TOKENS, -CREDIT_TOKENS)
        longest = shares.came(share("a", 10**9))
        shares.charge(share("a"), MOST_SESSION_TOKENS)
        assert shares.came(share("a", 0)) == longest
    with subtests.test("what a sequence holds costs, too"):
        assert token_cost(8192) - token_cost(4096) == 1
    with subtests.test("without a word of whose they are nothing is counted"):
        shares = FairShare()
        assert shares.came(None) == 0
        shares.charge(None, 5)
        shares.left(None)
        assert not shares.is_on and (shares.had("a"), shares.weight("a"), shares.rank("a")) == (0, 1, 0)
