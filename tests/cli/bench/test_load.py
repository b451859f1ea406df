"""These tests show who is sent when, and what becomes of it."""

import asyncio

import pytest

from router.scripted_router import Pauses
from services.cli.bench.meter import Meter
from services.cli.bench.sides import Arrival, Counts, LoadRequest, vocab_size_of
from services.cli.bench.workload import LoadSession, LoadTurn, closed_loop, open_loop
from services.values.errors import NoCapacity, PeerFailed

pytestmark = pytest.mark.long


class ScriptedSide:
    """Answers each request with ids of its own, `turns` of the event loop later."""

    name = "scripted"

    def __init__(self, turns=3, failing=(), tells_ids=True):
        self.asked, self.running, self.most = [], 0, 0
        self._turns, self._failing, self._tells_ids = turns, failing, tells_ids

    async def ask(self, asked):
        self.asked.append(LoadRequest(list(asked.token_ids), asked.max_tokens, asked.conversation))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            if len(self.asked) in self._failing:
                raise NoCapacity("full")
            ids = [900 + len(self.asked)] * asked.max_tokens
            yield Arrival(len(ids), ids if self._tells_ids else ())
            yield Arrival(counts=Counts(len(asked.token_ids), len(ids)))
        finally:
            self.running -= 1


def sessions(count, *turns, at_s=lambda number: None):
    for number in range(count):
        yield LoadSession(f"{number}", [LoadTurn([number, turn], 2) for turn in turns or (0,)], at_s(number))


async def test_loops(subtests):
    with subtests.test("an open loop sends at its times"):
        time = Pauses()
        side, meter = ScriptedSide(), Meter(time.clock)
        sent_s = []

        async def sleep(seconds):
            time.sleep(seconds)
            sent_s.append(time.now - 100.0)
            await asyncio.sleep(0)

        await open_loop(side, sessions(4, at_s=lambda number: 0.5 * number), None, meter, time.clock, sleep)
        assert sent_s == [0.0, 0.5, 1.0, 1.5] and meter.completed == 4
    with subtests.test("one that is late does not wait again"):
        time = Pauses()
        side, meter = ScriptedSide(turns=20), Meter(time.clock)

        async def sleep(seconds):
            time.sleep(seconds)
            time.now += 3.0  # the loop was busy
            await asyncio.sleep(0)

        await open_loop(side, sessions(3, at_s=lambda number: 1.0 * number), 2, meter, time.clock, sleep)
        assert time.slept == [0.0, 0.0, 0.0] and side.most == 2
    with subtests.test("a closed loop keeps so many busy"):
        side, meter = ScriptedSide(), Meter(Pauses().clock)
        await closed_loop(side, sessions(10), 3, meter)
        assert meter.completed == 10 and side.most == meter.most_running == 3 and meter.running == 0
        assert sorted(asked.token_ids[0] for asked in side.asked) == list(range(10))
    with subtests.test("a conversation goes on with what was answered"):
        side, meter = ScriptedSide(), Meter(Pauses().clock)
        await closed_loop(side, sessions(1, 7, 8), 1, meter)
        first, second = side.asked
        assert (first.token_ids, second.token_ids) == ([0, 7], [0, 7, 901, 901, 0, 8])
        assert first.conversation == second.conversation == "0"
        assert meter.counts.prompt_tokens == 8
        side = ScriptedSide()
        await closed_loop(side, sessions(1), 1, meter)
        assert side.asked[0].conversation == ""
    with subtests.test("a turn that fails ends its conversation alone"):
        side, meter = ScriptedSide(failing=(1,)), Meter(Pauses().clock)
        await closed_loop(side, sessions(2, 0, 1), 1, meter)
        assert meter.errors == {"NoCapacity": 1} and meter.first_errors == {"NoCapacity": "full"}
        assert meter.completed == 2 and len(side.asked) == 3
    with subtests.test("a conversation wants the answers ids"):
        side, meter = ScriptedSide(tells_ids=False), Meter(Pauses().clock)
        await closed_loop(side, sessions(1), 1, meter)
        assert meter.completed == 1
        with pytest.raises(ExceptionGroup) as raised:
            await closed_loop(side, sessions(1, 0, 1), 1, meter)
        assert raised.group_contains(PeerFailed, match="token ids")
    with subtests.test("a run that is stopped tells what was cut"):
        side, meter = ScriptedSide(turns=10**6), Meter(Pauses().clock)
        running = asyncio.create_task(closed_loop(side, sessions(9), 2, meter))
        while side.running < 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert meter.cut_off == 2 and meter.running == side.running == 0 and not meter.errors


async def test_a_vocabulary_is_found_by_asking(subtests):
    for size in [1, 2, 3, 259, 512, 151_936]:
        with subtests.test(size=size):

            class Side(ScriptedSide):
                calls = 0

                async def is_token(self, token_id, size=size):
                    self.calls += 1
                    return token_id < size

            side = Side()
            assert await vocab_size_of(side) == size and side.calls <= 40
