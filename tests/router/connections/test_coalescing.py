"""These tests show when tokens wait for others of their request, and that none is lost or late by it."""

import asyncio
from unittest.mock import MagicMock

from hypothesis import given
from hypothesis import strategies as st

from services.router.connections.output_stream import Coalescing, OutputStream, Window, busy_s
from services.values.errors import PeerFailed
from services.values.rank import Plan
from services.values.request import Admitted, FinishReason, Output

FIRST = Output((1,), admitted=Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL))
MOST_S = 0.02


class Times:
    """A clock, and a thread that is so busy."""

    def __init__(self):
        self.now = self.ran = 0.0

    def spend(self, seconds, share):
        self.now += seconds
        self.ran += share * seconds

    def coalescing(self):
        return Coalescing(MOST_S, lambda: self.now, lambda: self.ran)

    def is_held(self, coalescing, since_s=0.0):
        return coalescing.hold(MagicMock(), self.now, self.now - since_s)


def busy_coalescing(samples=20):
    """Its window is open as far as it goes, if it was busy for long enough."""
    times = Times()
    coalescing = times.coalescing()
    for _ in range(samples):
        times.spend(0.3, 1.0)
        times.is_held(coalescing)
    assert (coalescing.window_s == MOST_S) == (samples == 20) and coalescing.window_s
    coalescing._release()
    return times, coalescing


@given(st.lists(st.floats(0, 2)), st.floats(0.001, 1))
def test_a_window_is_between_nothing_and_the_most(shares, most_s):
    window = Window(most_s)
    for busy in shares:
        before = window.now_s
        window.heed(busy)
        assert 0 <= window.now_s <= most_s
        assert window.now_s >= before if busy > 0.8 else window.now_s <= before


def test_it_opens_while_the_thread_is_short_of_time_and_closes_after():
    window = Window(MOST_S)
    for _ in range(20):
        window.heed(0.79)
    assert window.now_s == 0
    for _ in range(10):
        window.heed(0.95)
    assert window.now_s == MOST_S
    window.heed(0.7)
    assert window.now_s == MOST_S
    for _ in range(15):
        window.heed(0.3)
    assert window.now_s == 0


async def test_an_idle_router_and_tokens_far_apart(subtests):
    with subtests.test("an idle router holds nothing"):
        times = Times()
        coalescing = times.coalescing()
        for _ in range(20):
            times.spend(0.3, 0.5)
            assert not times.is_held(coalescing)
    with subtests.test("tokens further apart than they would wait do not"):
        times, coalescing = busy_coalescing(3)
        window_s = coalescing.window_s
        assert times.is_held(coalescing, 0.9 * window_s) and not times.is_held(coalescing, 1.1 * window_s)
        stream = OutputStream(MagicMock(), "r", None, coalescing)
        for token in (1, 2, 3):
            times.spend(1.1 * window_s, 1.0)
            stream.put(Output((token,)))
            assert stream._came.is_set()
            await stream.next(all_at_once=True)


async def test_of_a_router_that_is_late_all_wait():
    """Its streams hear less often than a window is long: with a message for each token that stays so."""
    times, coalescing = busy_coalescing()
    stream = OutputStream(MagicMock(), "r", None, coalescing)
    for token in (1, 2, 3):
        times.spend(2 * MOST_S, 1.0)
        stream.put(Output((token,)))
        assert not stream._came.is_set()
    coalescing._release()
    assert (await asyncio.wait_for(stream.next(all_at_once=True), 1)).token_ids == (1, 2, 3)


async def test_what_does_not_wait(subtests):
    with subtests.test("tokens of a moment come in one and the first and the last at once"):
        _, coalescing = busy_coalescing()
        stream = OutputStream(MagicMock(), "r", None, coalescing)
        stream.put(FIRST)
        assert await asyncio.wait_for(stream.next(all_at_once=True), 1) is FIRST
        for token in (2, 3, 4):
            stream.put(Output((token,)))
        assert not stream._came.is_set()
        assert (await asyncio.wait_for(stream.next(all_at_once=True), 1)).token_ids == (2, 3, 4)
        stream.put(Output((5,)))
        stream.put(Output((6,), finished=FinishReason.STOP))
        assert stream._came.is_set()
        last = await stream.next(all_at_once=True)
        assert (last.token_ids, last.finished) == ((5, 6), FinishReason.STOP)
        await asyncio.sleep(2 * MOST_S)  # it is released, and has nothing
        assert not stream._came.is_set()
    with subtests.test("a failure does not wait"):
        _, coalescing = busy_coalescing()
        stream = OutputStream(MagicMock(), "r", None, coalescing)
        stream.put(FIRST)
        await stream.next()
        stream.put(Output((2,)))
        assert not stream._came.is_set()
        stream.put(PeerFailed("lost"))
        assert stream._came.is_set()
        assert (await stream.next(all_at_once=True)).token_ids == (2,)


async def test_streams_are_released_together_and_each_once():
    _, coalescing = busy_coalescing()
    streams = [OutputStream(MagicMock(), str(number), None, coalescing) for number in range(3)]
    for stream in streams:
        stream.put(FIRST)
        await stream.next()
    for stream in (*streams, *streams):
        stream.put(Output((1,)))
    assert len(coalescing._held) == 3
    for stream in streams:
        assert (await asyncio.wait_for(stream.next(all_at_once=True), 1)).token_ids == (1, 1)
    assert not coalescing._held


def test_the_kernel_tells_how_long_this_thread_ran():
    before = busy_s()
    while busy_s() - before < 0.01:
        pass
    assert busy_s() > before
