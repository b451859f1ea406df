"""These tests show how SGLang's start ends where it does; in its place is a process that does what a test
wants."""

import asyncio
import sys

import pytest

from engine.sglang.settings import sglang_settings
from services.values.errors import ConfigError, Unavailable
from services.values.rank import Generation, RankId


@pytest.fixture
def start(checkpoint, monkeypatch):
    """Starts a worker whose SGLang is `python *command`."""
    from services.engine.sglang.service import worker

    async def run(*command):
        class Program(worker.SglangProcess):
            def __init__(self, arguments, environment):
                super().__init__(arguments, environment)
                self._command = [sys.executable, *command]

        monkeypatch.setattr(worker, "SglangProcess", Program)
        await worker.SglangWorker(sglang_settings(checkpoint), {0: RankId("w", 0, Generation(1))}).start()

    return run


async def test_a_flag_that_sglang_refuses_is_a_setting_that_cannot_work(start):
    with pytest.raises(ConfigError, match="error: unrecognized arguments: --no-such-flag"):
        await start("-m", "sglang.launch_server", "--model-path=m", "--no-such-flag")


@pytest.mark.parametrize(
    "code", ["raise MemoryError('CUDA out of memory')", "import os; print('MemoryError'); os.abort()"]
)
async def test_an_sglang_that_ends_may_start_another_time(start, code):
    """Its memory or its GPU may be taken: exit code 78 would say that only a person can help."""
    with pytest.raises(Unavailable, match=r"SGLang ended while starting: .*MemoryError"):
        await start("-c", code)


async def test_a_start_that_is_given_up_waits_for_nobody_who_heeds_no_sigterm(start, caplog, capfd):
    """SGLang's processes heed it once they serve: before, all that would be waited for is the limit."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('waits'); time.sleep(600)"
    )
    starting, said = asyncio.create_task(start("-u", "-c", code)), ""
    async with asyncio.timeout(60):
        while "waits" not in said:
            await asyncio.sleep(0.05)
            said += capfd.readouterr().err
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled() and "sglang_killed" not in caplog.text
