"""What came in time is found before what is late fails, also after a stop of the process or of its loop."""

import asyncio
import time

import pytest

from services.transfer import waits as hearing_module
from services.transfer.waits import Hearing, within


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


def test_what_a_look_has_heard(subtests):
    with subtests.test("who looks again and again has heard everything"):
        clock = Clock()
        assert looks(Hearing(clock), clock, 0.125, 0.25, 0.875) == [100.125, 100.375, 101.25]

    with subtests.test("after a stall all is heard once it has looked for a while"):
        clock = Clock()
        hearing = Hearing(clock)
        assert looks(hearing, clock, 60.0, *[0.125] * 9) == [100.0] * 10
        assert looks(hearing, clock, 0.125, 0.125) == [161.25, 161.375]

    with subtests.test("who always stalls hears some time"):
        clock = Clock()
        heard_s = looks(Hearing(clock), clock, *[2.0] * 22)
        assert heard_s == [100.0] * 10 + [122.0] * 11 + [144.0]


async def test_limits_while_the_loop_runs_and_after_it_stood_still(subtests):
    with subtests.test("within a limit the result comes and past it none"):
        assert await within(60.0, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(TimeoutError):
            await within(0.01, asyncio.sleep(1000))

    with subtests.test("what came while the loop stood still is found"):
        # A message that takes a few turns of the loop, as through gRPC's sockets.
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
