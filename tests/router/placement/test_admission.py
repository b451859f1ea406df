"""Who is let in, by what he would wait, against a look at each of them."""

from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.admission import allowed_wait_s, bound_s, refusal, waits_of
from services.values.rank import Plan

LOCAL, REMOTE = frozenset({Plan.LOCAL}), frozenset({Plan.REMOTE})
BOTH = LOCAL | REMOTE


class Queues:
    """A role's: of each rank whether it receives, the seconds until room, and until it computes."""

    def __init__(self, ranks):
        self.ranks = ranks
        columns = list(zip(*ranks, strict=True)) or ([], [], [])
        self.receives = np.array(columns[0], np.bool_)
        self.queue_wait_s, self.compute_wait_s = (np.array(column, np.float64) for column in columns[1:])


def ways(decodes, prefills, plans):
    """How long one waits at every rank and pair."""
    for receives, room_s, compute_s in decodes:
        if Plan.LOCAL in plans:
            yield max(room_s, compute_s)
        for _, _, sender_s in prefills:
            if Plan.REMOTE in plans and receives:
                yield room_s + sender_s


wait_s = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 9.0])
ranks = st.lists(st.tuples(st.booleans(), wait_s, wait_s), max_size=90)


@given(ranks, st.sampled_from([LOCAL, REMOTE, BOTH, frozenset()]), wait_s)
def test_each_rank_makes_one_wait_for_what_the_plan_needs(decodes, plans, compute_s):
    waits, queues = waits_of(plans), Queues(decodes)
    local_s, remote_s = waits.local_s(queues).tolist(), waits.remote_s(queues, compute_s).tolist()
    assert local_s == [min(ways([each], [], plans - REMOTE), default=inf) for each in decodes]
    sender = [(True, 0.0, compute_s)]
    assert remote_s == [min(ways([each], sender, plans - LOCAL), default=inf) for each in decodes]


def test_how_long_one_may_wait_and_when_to_come_again(subtests):
    with subtests.test("half of the time may be waited and never longer than the setting"):
        for remaining_s, allowed_s in [(inf, 30.0), (100.0, 30.0), (60.0, 30.0), (10.0, 5.0), (0.0, 0.0)]:
            with subtests.test(remaining_s=remaining_s, allowed_s=allowed_s):
                assert allowed_wait_s(30.0, remaining_s) == allowed_s
    with subtests.test("a refusal says when to come again"):
        error = refusal(12.25, 5.0)
        assert error.retry_after_s == 7.25
        assert "would wait 12.2 s for its turn, 5.0 s at most are allowed; try again in 7 s" in str(error)
        assert refusal(5.1, 5.0).retry_after_s == 1.0  # not at once, with everybody else


@given(ranks, ranks, wait_s)
def test_the_bound_is_let_go_only_where_nobody_could_wait_longer(decodes, prefills, max_wait_s):
    bound = bound_s(max_wait_s, Queues(decodes), Queues(prefills).compute_wait_s)
    assert bound in (max_wait_s, inf)
    if bound == inf:
        assert all(both_s <= max_wait_s for both_s in ways(decodes, prefills, BOTH))
