"""A step that never ends ends the rank: what runs there fails, so that it goes on elsewhere."""

import asyncio
import threading
from dataclasses import replace

import pytest

from pair import FAKE, Pair
from services.engine.fake import FakeRunner, continuation
from services.engine.paged.turn_watch import TurnWatch
from services.errors import PeerFailed, Unavailable
from services.kv.types import Plan

PROMPT = range(100, 130)
WITHIN_S = 60.0  # a deadline for conditions, never waited out


def test_a_turn_is_counted_for_as_long_as_it_is_the_same():
    watch, counted = TurnWatch(), []
    for happens in ("rests", "", "begins", "", "", "begins", "", "rests", "", "begins", "", ""):
        if happens:
            getattr(watch, happens)()
        watch.look()
        counted.append(watch.looks)
    assert counted == [0, 0, 0, 1, 2, 0, 1, 0, 0, 0, 1, 2]


class HangingRunner(FakeRunner):
    """As a kernel that does not end, until the test is over."""

    def run(self, chunks):
        self.ends.wait()
        return super().run(chunks)


@pytest.fixture
def hang():
    ends = threading.Event()

    def hang(engine):
        engine._core.runner.ends = ends
        engine._core.runner.__class__ = HangingRunner

    yield hang
    ends.set()


def limited(step_limit_s, **changes):
    return replace(FAKE, limits=replace(FAKE.limits, step_limit_s=step_limit_s), **changes)


async def test_a_decode_rank_that_hangs_fails_what_runs_and_ends(hang, caplog):
    async with asyncio.timeout(WITHIN_S), Pair(limited(1.0)) as pair:
        hang(pair.decode)
        failed = await asyncio.gather(
            *(pair.generate(range(i, 30 + i), 9, Plan.LOCAL) for i in range(3)), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["the engine crashed: EngineHangs"] * 3
        assert {type(error) for error in failed} == {Unavailable}
        await pair.decode.crashed()
        with pytest.raises(Unavailable):
            await pair.generate(PROMPT, 5, Plan.LOCAL)
        assert not pair.prefill._crashed.is_set()  # it rests
    # Nobody has waited for the thread, which hangs still; the log says where.
    assert "engine_hangs limit_s=1" in caplog.text and "in run" in caplog.text


async def test_a_prefill_rank_that_hangs_costs_its_peer_one_leg(hang):
    async with asyncio.timeout(WITHIN_S), Pair(limited(0.0), limited(1.0)) as pair:
        hang(pair.prefill)
        with pytest.raises(PeerFailed):
            await pair.generate(PROMPT, 5)
        await pair.prefill.crashed()
        answer = await pair.generate(PROMPT, 5, Plan.LOCAL)
        assert answer.tokens == continuation(PROMPT, 5)
        assert not pair.decode._crashed.is_set()


async def test_who_computes_slowly_does_not_hang():
    """A step takes twice its limit here, as the warm-up has shown."""
    async with Pair(limited(0.1, fake_step_s=0.2)) as pair:
        assert (await pair.generate(PROMPT, 5, Plan.LOCAL)).tokens == continuation(PROMPT, 5)


async def test_without_a_limit_nobody_looks():
    async with Pair(limited(0.0)) as pair:
        assert pair.decode._watching is None
