"""What came in time is found before what is late fails, also after a stop of the process or of its loop."""

import asyncio
import time

import pytest

from services.transfer import hearing as hearing_module
from services.transfer.hearing import Hearing, within


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def looks(hearing, clock, *pauses_s):
    """What was heard up to, at each look."""
    heard_s = []
    for pause_s in pauses_s:
        clock.now_s += pause_s
        hearing.look()
        heard_s.append(hearing.heard_s)
    return heard_s


def test_who_looks_again_and_again_has_heard_everything():
    clock = Clock()
    assert looks(Hearing(clock), clock, 0.125, 0.25, 0.875) == [100.125, 100.375, 101.25]


def test_after_a_stall_all_is_heard_once_it_has_looked_for_a_while():
    clock = Clock()
    hearing = Hearing(clock)
    assert looks(hearing, clock, 60.0, *[0.125] * 9) == [100.0] * 10
    assert looks(hearing, clock, 0.125, 0.125) == [161.25, 161.375]


def test_who_always_stalls_hears_some_time():
    clock = Clock()
    heard_s = looks(Hearing(clock), clock, *[2.0] * 22)
    assert heard_s == [100.0] * 10 + [122.0] * 11 + [144.0]


async def test_within_a_limit_the_result_comes_and_past_it_none():
    assert await within(60.0, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(TimeoutError):
        await within(0.01, asyncio.sleep(1000))


async def test_what_came_while_the_loop_stood_still_is_found():
    """A message that takes a few turns of the loop, as through gRPC's sockets."""

    async def read():
        await asyncio.sleep(0)
        time.sleep(0.02)  # the loop stands still for longer than the limit
        for _ in range(3):
            await asyncio.sleep(0)
        return "hello"

    assert await within(0.01, read()) == "hello"


async def test_it_looks_until_it_is_cancelled(monkeypatch):
    monkeypatch.setattr(hearing_module, "_LOOK_S", 0.001)
    hearing = Hearing()
    before_s = hearing.heard_s
    listening = asyncio.create_task(hearing.listen())
    async with asyncio.timeout(30):
        while hearing.heard_s == before_s:
            await asyncio.sleep(0.001)
    listening.cancel()
