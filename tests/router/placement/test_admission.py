"""These tests show who is let in, by what he would wait; whether anybody is in time, against a look at all of
them."""

from collections import Counter
from itertools import product
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.candidates import allowed_wait_s, bound_s, refusal, waits_of
from services.values.rank import Plan

LOCAL, REMOTE = frozenset({Plan.LOCAL}), frozenset({Plan.REMOTE})
BOTH = LOCAL | REMOTE


class Queue:
    """A rank's; it counts who looks until when it computes."""

    def __init__(self, looked_at, receives, queue_wait_s, compute_wait_s):
        self.looked_at, self.receives = looked_at, receives
        self.queue_wait_s, self.known_s = queue_wait_s, compute_wait_s

    @property
    def compute_wait_s(self):
        self.looked_at[self] += 1
        return self.known_s


class Ranks:
    """Each role's with (whether it receives, seconds until room, until it computes)."""

    def __init__(self, decodes, prefills, plans):
        self.plans, self.looked_at = plans, Counter()
        self.decodes, self.prefills = (
            [Queue(self.looked_at, *its) for its in sorted(waits, key=lambda each: each[2])]
            for waits in (decodes, prefills)
        )

    def shortest_s(self, enough_s):
        return waits_of(self.plans).about_s(self.decodes, self.prefills, enough_s)

    def ways(self):
        """Of every rank and pair: until it has room, until the prompt is computed, and until both."""
        for decode in self.decodes:
            room_s = decode.queue_wait_s
            if Plan.LOCAL in self.plans:
                yield room_s, decode.known_s, max(room_s, decode.known_s)
            for prefill in self.prefills:
                if Plan.REMOTE in self.plans and decode.receives:
                    yield room_s, prefill.known_s, room_s + prefill.known_s


wait_s = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 9.0])
ranks = st.lists(st.tuples(st.booleans(), wait_s, wait_s), max_size=90)


@given(ranks, ranks, st.sampled_from([LOCAL, REMOTE, BOTH, frozenset()]), wait_s)
def test_somebody_in_time_is_found_and_else_how_long_it_takes(decodes, prefills, plans, enough_s):
    asked = Ranks(decodes, prefills, plans)
    ways, shortest_s = list(asked.ways()), asked.shortest_s(enough_s)
    in_time = [way for way in ways if max(way[:2]) <= enough_s]
    assert (shortest_s == 0.0) == bool(in_time)
    if not in_time:
        exact_s = min((both for _, _, both in ways), default=inf)
        assert shortest_s >= exact_s and (shortest_s == inf) == (exact_s == inf)
        if not any(sender_s <= enough_s for _, sender_s, _ in ways):
            assert shortest_s == exact_s  # else the first sender in time is reckoned with


def test_few_are_looked_at_where_all_are_full(subtests):
    with subtests.test("of a thousand that are full few are looked at"):
        for plans, room_s in product([LOCAL, REMOTE, BOTH], [0.0, 9.0]):
            with subtests.test(plans=plans, room_s=room_s):
                full = Ranks([(True, room_s, 9.0)] * 800, [(True, 0.0, 8.0)] * 200, plans)
                assert (
                    full.shortest_s(5.0)
                    == {LOCAL: 9.0, REMOTE: 8.0 + room_s, BOTH: 8.0 if not room_s else 9.0}[plans]
                )
                assert len(full.looked_at) <= 128
    with subtests.test("room is found wherever it is"):
        for plans in [LOCAL, REMOTE, BOTH]:
            with subtests.test(plans=plans):
                decodes = [(True, 9.0, 0.0)] * 700 + [(True, 1.0, 0.5)]
                assert Ranks(decodes, [(True, 0.0, 0.5)], plans).shortest_s(5.0) == 0.0
    with subtests.test("who is in time ends the search"):
        idle = Ranks([(True, 0.0, 0.0)] * 800, [(True, 0.0, 0.0)] * 200, BOTH)
        assert idle.shortest_s(5.0) == 0.0
        assert len(idle.looked_at) <= 2


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
    asked = Ranks(decodes, prefills, BOTH)
    bound = bound_s(max_wait_s, asked.decodes, asked.prefills)
    assert bound in (max_wait_s, inf)
    if bound == inf:
        assert all(both_s <= max_wait_s for *_, both_s in asked.ways())
