"""A loop of the Handshake that stands still in a process of SGLang's ends that SGLang."""

import asyncio
import threading

from services.engine.sglang.inside.reporter import LoopThread
from services.engine.sglang.service import process_connections as beats_module
from services.engine.sglang.service.process_connections import Beats


def test_who_was_heard_of_is_silent_after_so_many_looks():
    beats = Beats()
    assert [beats.look() for _ in range(200)] == [[]] * 200  # nobody has spoken yet
    beats.received(7)
    assert [beats.look() for _ in range(59)] == [[]] * 59
    beats.received(7)
    beats.received(8)
    assert [beats.look() for _ in range(59)] == [[]] * 59
    beats.received(8)
    assert beats.look() == [7]


def test_a_loop_beats_until_it_stands_still():
    beaten, stands_still, ends = threading.Semaphore(0), threading.Event(), threading.Event()
    thread = LoopThread("a-test")
    thread.every(0.001, beaten.release)
    for _ in range(3):
        assert beaten.acquire(timeout=60)
    thread.soon(lambda: (stands_still.set(), ends.wait()))
    assert stands_still.wait(60)
    while beaten.acquire(blocking=False):
        pass
    assert not beaten.acquire(timeout=0.05)
    ends.set()
    assert beaten.acquire(timeout=60)


def test_what_fails_is_called_again_and_tells_so_once_until_it_goes_well(caplog):
    calls, called_again = [], threading.Event()
    fails = [True, True, False, True, True]

    def sometimes():
        calls.append(1)
        if len(calls) > len(fails):
            called_again.set()
        elif fails[len(calls) - 1]:
            raise OSError(f"call {len(calls)}")

    LoopThread("a-test").every(0.001, sometimes)
    assert called_again.wait(60)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["call 1", "call 4"]


async def test_it_looks_until_somebody_is_silent(monkeypatch):
    monkeypatch.setattr(beats_module, "_LOOK_S", 0.0)
    beats = Beats()
    watching = asyncio.create_task(beats.until_silent())
    for _ in range(200):
        await asyncio.sleep(0)
    assert not watching.done()
    beats.received(4321)
    async with asyncio.timeout(60):
        assert await watching == [4321]
