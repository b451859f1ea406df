"""The order in which blocks of a tier leave it, against a sorted list."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kv.tiers.use_order import _MOST_PUT_BACK, MOST_LOOKED_AT, UseOrder


@dataclass(eq=False)
class Member:
    used: int
    depth: int = 1


class UseOrderMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.order, self.members = UseOrder(), []

    @rule(used=st.integers(0, 9), depth=st.integers(1, 3))
    def add(self, used, depth):
        self.members.append(Member(used, depth))
        self.order.add(self.members[-1])

    @rule(data=st.data())
    def use(self, data):
        if self.members:
            data.draw(st.sampled_from(self.members)).used += data.draw(st.integers(1, 5))

    @rule(data=st.data())
    def remove(self, data):
        if self.members:
            member = data.draw(st.sampled_from(self.members))
            self.members.remove(member)
            assert member in self.order
            self.order.remove(member)
            assert member not in self.order

    @rule()
    def rebuild(self):
        self.order.rebuild()

    @rule(most_used=st.integers(0, 12), depths=st.sets(st.integers(1, 3)))
    def first(self, most_used, depths):
        found = self.order.first(lambda each: each.depth in depths, most_used)
        due = [each for each in self.members if each.used <= most_used and each.depth in depths]
        if found is None:
            assert not due
        else:
            least = min(due, key=lambda each: (each.used, -each.depth))
            assert found in due and (found.used, found.depth) == (least.used, least.depth)

    @invariant()
    def has_not_many_that_have_left(self):
        assert len(self.order._heap) <= 2 * len(self.members) + MOST_LOOKED_AT


TestUseOrder = UseOrderMachine.TestCase
TestUseOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_has_left_is_forgotten_though_nobody_looks():
    order = UseOrder()
    for used in range(5 * MOST_LOOKED_AT):
        member = Member(used)
        order.add(member)
        order.remove(member)
        assert len(order._heap) <= MOST_LOOKED_AT + 1
    assert order.first(lambda each: True) is None


def test_a_look_after_many_uses_is_short():
    order, members = UseOrder(), [Member(0) for _ in range(3 * _MOST_PUT_BACK)]
    for member in members:
        order.add(member)
    for number, member in enumerate(reversed(members), start=1):
        member.used = number
    looks = 0
    while (found := order.first(lambda each: True)) is None:
        assert order.is_behind
        looks += 1
    assert (found, looks, order.is_behind) == (members[-1], 3, False)
    looked_at = []
    assert order.first(looked_at.append) is None and len(looked_at) == MOST_LOOKED_AT
    assert order.first(lambda each: True, most_used=0) is None
