"""Whether anybody is in time, against a look at all of them."""

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.queues import Queues
from services.values.kv import KvLayout
from services.values.rank import Generation, Plan, RankAddress, RankId, Role
from services.values.registration import Registration

LAYOUT = KvLayout(page_size=16, page_bytes=1024, model_fingerprint=1)
LOCAL, REMOTE = frozenset({Plan.LOCAL}), frozenset({Plan.REMOTE})
BOTH = LOCAL | REMOTE


class Ranks:
    """Each role's with (whether it receives, seconds until room, until it computes)."""

    def __init__(self, decodes, prefills, plans):
        self.waits = {}
        self.plans, self.looked_at = plans, Counter()
        self.decodes, self.prefills = (
            self._ordered(Role.DECODE, decodes),
            self._ordered(Role.PREFILL, prefills),
        )

    def _ordered(self, role, waits):
        ranks = []
        for index, its in enumerate(sorted(waits, key=lambda each: each[2])):
            address = RankAddress(RankId(role.value, index, Generation(1)), "host:1")
            ranks.append(Registration(role, address, LAYOUT, "m", 1, 1, "fake"))
            self.waits[ranks[-1].id.key] = its
        return ranks

    def shortest_s(self, enough_s):
        queues = Queues(
            self.plans, lambda key: self.waits[key][0], lambda key: self.waits[key][1], self._compute
        )
        return queues.shortest_s(self.decodes, self.prefills, enough_s)

    def _compute(self, key):
        self.looked_at[key] += 1
        return self.waits[key][2]

    def ways(self):
        """Of every rank and pair: until it has room, until the prompt is computed, and until both."""
        for receives, room_s, own_s in self._of(Role.DECODE):
            if Plan.LOCAL in self.plans:
                yield room_s, own_s, max(room_s, own_s)
            for _, _, sender_s in self._of(Role.PREFILL):
                if Plan.REMOTE in self.plans and receives:
                    yield room_s, sender_s, room_s + sender_s

    def _of(self, role):
        return [its for key, its in self.waits.items() if key.worker == role.value]


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


@pytest.mark.parametrize("plans", [LOCAL, REMOTE, BOTH])
@pytest.mark.parametrize("room_s", [0.0, 9.0])
def test_of_a_thousand_that_are_full_few_are_looked_at(plans, room_s):
    full = Ranks([(True, room_s, 9.0)] * 800, [(True, 0.0, 8.0)] * 200, plans)
    assert full.shortest_s(5.0) == {LOCAL: 9.0, REMOTE: 8.0 + room_s, BOTH: 8.0 if not room_s else 9.0}[plans]
    assert len(full.looked_at) <= 128


@pytest.mark.parametrize("plans", [LOCAL, REMOTE, BOTH])
def test_room_is_found_wherever_it_is(plans):
    decodes = [(True, 9.0, 0.0)] * 700 + [(True, 1.0, 0.5)]
    assert Ranks(decodes, [(True, 0.0, 0.5)], plans).shortest_s(5.0) == 0.0


def test_who_is_in_time_ends_the_search():
    idle = Ranks([(True, 0.0, 0.0)] * 800, [(True, 0.0, 0.0)] * 200, BOTH)
    assert idle.shortest_s(5.0) == 0.0
    assert len(idle.looked_at) <= 2
