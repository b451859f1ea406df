import asyncio
import os
import signal

from services.process.signals import stop_on_signals


async def test_a_signal_stops():
    stopping = stop_on_signals()
    assert not stopping.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stopping.wait(), 10)
