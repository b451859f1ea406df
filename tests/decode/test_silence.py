"""These tests show when somebody who waits is told that nothing comes."""

import asyncio

import pytest

from services.decode.decode_service import Silence

LIMIT_S = 0.5


@pytest.fixture
async def silence(monkeypatch):
    """One on a clock of its own: `at(seconds)` is when the loop's timers are due."""
    loop, now, timers, rung = asyncio.get_running_loop(), [0.0], [], []

    class Loop:
        def time(self):
            return now[0]

        def call_later(self, delay, callback):
            assert delay > 0
            timers.append((now[0] + delay, callback))
            return loop.call_later(60, lambda: None)

    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    made = Silence(LIMIT_S, lambda: rung.append(now[0]))

    def at(seconds):
        while timers and timers[0][0] <= seconds:
            now[0], callback = timers.pop(0)
            callback()
        now[0] = seconds

    made.at, made.rung = at, rung
    yield made
    made.close()


async def test_it_rings_when_the_wait_has_been_long_and_again(silence):
    silence.at(0.3)
    silence.begins()
    silence.at(0.79)
    assert silence.rung == []
    silence.at(1.9)
    assert silence.rung == pytest.approx([0.8, 1.3, 1.8])


async def test_each_wait_is_one_of_its_own(silence):
    for tenth in range(1, 30):
        silence.begins()
        silence.at(tenth / 10)
        silence.ends()
    silence.begins()
    silence.at(3.5)
    assert silence.rung == pytest.approx([3.4])


async def test_while_nobody_waits_nobody_is_told(silence):
    silence.at(5.0)
    assert silence.rung == []
