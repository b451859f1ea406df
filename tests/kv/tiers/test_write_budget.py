"""These tests show what a rank writes to files in any time, whatever is asked when."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.kv.tiers.write_budget import WriteBudget

WRITES = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400)), max_size=40)  # waited before it, bytes


@given(WRITES, st.floats(10, 200))
def test_in_no_time_is_more_written_than_that_time_and_a_second_allow(writes, rate):
    budget, now_s, written = WriteBudget(rate, 5.0), 5.0, []
    for waited_s, num_bytes in writes:
        now_s += waited_s
        if (wait_s := budget.wait_s(now_s)) == 0:
            budget.spend(num_bytes)
            written.append((now_s, num_bytes))
            continue
        assert budget.wait_s(now_s + 0.99 * wait_s) > 0 == budget.wait_s(now_s + 1.01 * wait_s + 1e-9)
        now_s += 1.01 * wait_s + 1e-9
    for index, (from_s, _) in enumerate(written):
        for until in range(index, len(written)):
            to_s, _ = written[until]
            before_the_last = sum(size for _, size in written[index:until])
            assert before_the_last <= rate * (to_s - from_s + 1) + 1e-6, "and of the last one its first byte"


def test_without_a_limit_nothing_waits():
    budget = WriteBudget(math.inf)
    budget.spend(1 << 60)
    assert budget.wait_s(0.0) == 0.0
