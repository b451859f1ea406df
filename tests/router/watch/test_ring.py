from hypothesis import given
from hypothesis import strategies as st

from services.router.watch_cluster import Ring


@given(st.integers(1, 4), st.lists(st.sampled_from(["put", "put", "put", "take"])))
def test_the_oldest_give_way_and_are_counted(capacity, steps):
    ring, waiting, dropped, number = Ring(capacity), [], 0, 0
    for step in steps:
        if step == "put":
            number += 1
            assert ring.put(number) is (len(waiting) < capacity)
            waiting.append(number)
            dropped += len(waiting) > capacity
            waiting = waiting[-capacity:]
        else:
            assert ring.take() == waiting
            waiting = []
        assert (len(ring), ring.dropped) == (len(waiting), dropped)
