"""A quota against one that counts second by second."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.quotas import (
    CONCURRENT,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    RATES,
    REQUESTS,
    Quota,
    TenantLimits,
)


@dataclass
class Slow:
    """All rates are multiples of 60 a minute and all times whole seconds, so levels are integers."""

    limits: TenantLimits
    levels: dict[str, float] = field(default_factory=dict)
    now_s: int = 0
    running: int = 0

    def __post_init__(self):
        self.levels = {name: self.full(name) for name in RATES}

    def full(self, name):
        return max(1.0, getattr(self.limits, name))

    def until(self, now_s):
        while self.now_s < now_s:
            self.now_s += 1
            for name in RATES:
                level = self.levels[name] + getattr(self.limits, name) / 60
                self.levels[name] = min(self.full(name), level)

    def wait_s(self, name):
        each_s = getattr(self.limits, name) / 60
        level, waited_s = self.levels[name], 0.0
        if level < 1:
            waited_s = (1 - level) / each_s
        return waited_s


RATE = st.one_of(st.just(math.inf), st.integers(1, 4).map(lambda each_s: 60.0 * each_s))
LIMITS = st.builds(TenantLimits, RATE, RATE, RATE, st.sampled_from([math.inf, 1, 3]))
ASKED = st.tuples(
    st.integers(0, 90), st.sampled_from(["enter", "prompt", "output", "leave"]), st.integers(1, 500)
)


@settings(max_examples=60, deadline=None)
@given(LIMITS, st.lists(ASKED, max_size=60))
def test_who_is_refused_by_which_limit_and_for_how_long(limits, asked):
    quota, slow, now_s = Quota(limits), Slow(limits), 0
    for after_s, what, tokens in asked:
        now_s += after_s
        slow.until(now_s)
        if what == "output":
            quota.take_output(tokens, now_s)
            slow.levels[OUTPUT_TOKENS] -= tokens
        elif what == "prompt":
            refused = quota.take_prompt(tokens, now_s)
            assert (refused.retry_after_s if refused else 0.0) == slow.wait_s(PROMPT_TOKENS)
            if refused is None:
                slow.levels[PROMPT_TOKENS] -= tokens
        elif what == "leave" and slow.running:
            quota.leave()
            slow.running -= 1
        elif what == "enter":
            waits = {name: slow.wait_s(name) for name in RATES}
            waits[CONCURRENT] = 1.0 if slow.running >= limits.concurrent_requests else 0.0
            refused = quota.enter(now_s)
            assert (refused.retry_after_s if refused else 0.0) == max(waits.values())
            if refused is None:
                slow.levels[REQUESTS] -= 1
                slow.running += 1
            else:
                assert waits[refused.limit] == refused.retry_after_s
                assert refused.allowed == getattr(limits, refused.limit)
        assert quota.running == slow.running


def test_a_router_enforces_its_share_and_lets_at_least_one_in(subtests):
    with subtests.test("concurrent requests"):
        quota = Quota(TenantLimits(concurrent_requests=5))
        assert [quota.enter(0.0, share=0.5) for _ in range(2)] == [None, None]
        refused = quota.enter(0.0, share=0.5)
        assert (refused.limit, refused.allowed) == (CONCURRENT, 2)
        alone = Quota(TenantLimits(concurrent_requests=1))
        assert alone.enter(0.0, share=0.1) is None and alone.enter(0.0, share=0.1) is not None
    with subtests.test("rates"):
        quota = Quota(TenantLimits(requests_per_minute=1))
        assert quota.enter(0.0, share=0.25) is None
        assert quota.enter(0.0, share=0.25).retry_after_s == 240
        assert quota.enter(239.0, share=0.25).retry_after_s == pytest.approx(1)
        assert quota.enter(240.0, share=0.25) is None
