from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.top.cluster_news import D0, D1, P0, finished
from services.cli.look.cluster_picture import RecentRequests, Totals, name_of, percentile
from services.wire.isthmus.v1 import common_pb2

pytestmark = pytest.mark.long


def test_totals_and_hits(subtests):
    with subtests.test("a window without requests has nothing to tell"):
        assert RecentRequests(60.0, 0.0).totals(5.0) == Totals(0.0, 0, None, None, None)
    with subtests.test("totals are of the requests within"):
        window = RecentRequests(10.0, began_s=0.0)
        window.add(1.0, finished(found=0, ttft_s=9.0))
        for number in range(4):
            window.add(5.0 + number, finished(prompt=100, found=20 * number, ttft_s=0.01 * (number + 1)))
        window.add(9.0, finished(outcome="RESOURCE_EXHAUSTED"))
        window.add(9.0, finished(outcome="aborted"))
        totals = window.totals(11.5)  # the first is forgotten
        assert totals == Totals(0.6, 1, pytest.approx(0.3), 0.02, 0.04)
    with subtests.test("a window that has just been opened is not as long yet"):
        window = RecentRequests(60.0, began_s=100.0)
        window.add(104.0, finished())
        assert window.totals(104.0).requests_per_s == 0.25
    with subtests.test("each rank has its own hits"):
        window = RecentRequests(60.0, 0.0)
        window.add(0.0, finished(prompt=100, found=80, decode=D0))
        window.add(0.0, finished(prompt=300, found=0, decode=D0))
        window.add(0.0, finished(prompt=10, found=5, decode=D1, plan=common_pb2.PLAN_LOCAL))
        assert window.hit_rates(1.0) == {name_of(D0): 0.2, name_of(D1): 0.5, name_of(P0): 0.1}
        assert window.hit_rates(60.0) == {}
    with subtests.test("what a rank pulled is no hit of its own"):
        window = RecentRequests(60.0, 0.0)
        window.add(0.0, finished(prompt=100, found=80, pulled=30))
        assert window.hit_rates(1.0) == {name_of(D0): 0.8, name_of(P0): 0.1}
        window.add(0.0, finished(prompt=100, found=80, pulled=60, decode=D1, plan=common_pb2.PLAN_LOCAL))
        assert window.hit_rates(1.0)[name_of(D1)] == 0.2
        assert window.totals(1.0).hit_rate == 0.5


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=1), st.fractions(Fraction(1, 100), 1))
def test_a_percentile_is_the_least_that_so_many_are_not_above(values, share):
    found = percentile(sorted(values), share)
    fitting = [each for each in values if sum(v <= each for v in values) >= share * len(values)]
    assert found == min(fitting)
    assert percentile([], 0.5) is None
