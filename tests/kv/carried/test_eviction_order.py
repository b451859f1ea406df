"""These tests show who is evicted next, against a look at all of them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.kv.checkpoints import EvictionOrder


@dataclass(eq=False)
class Item:
    worth: float


CHANGES = st.lists(st.tuples(st.sampled_from(["add", "change", "remove", "least"]), st.integers(0, 9)))


@given(CHANGES)
def test_the_least_is_who_a_look_at_all_would_find(changes):
    order, items = EvictionOrder(), []
    for what, number in changes:
        if what == "add":
            items.append(Item(number))
            order.add(items[-1])
        elif items and what == "change":
            item = items[number % len(items)]
            fallen, item.worth = number < item.worth, number
            if fallen:
                order.sink(item)
        elif items and what == "remove":
            order.remove(items.pop(number % len(items)))
        else:
            assert order.least() is min(items, key=lambda item: item.worth, default=None)
        order.check()


def test_those_that_are_gone_are_not_kept():
    order = EvictionOrder()
    for number in range(1000):
        order.add(item := Item(number))
        order.remove(item)
    assert len(order._heap) < 100
