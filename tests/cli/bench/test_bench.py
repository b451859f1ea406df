"""These tests show what a whole run tells its shell."""

import asyncio
import os
import signal

import pytest

from cli.bench.test_load import ScriptedSide
from services.cli.bench import bench
from services.cli.bench.bench import BenchConfig

pytestmark = pytest.mark.long


class ClosedSide(ScriptedSide):
    async def close(self):
        pass


async def test_a_run_that_is_stopped_between_two_requests_has_not_ended_well(monkeypatch, capsys):
    side = ClosedSide()
    monkeypatch.setattr(bench, "open_side", lambda config: side)
    config = BenchConfig(rate=1e-6, num_prompts=2, input_len=3, output_len=2, vocab_size=9, warm_up=0)

    async def press():
        while not side.asked or side.running:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    async with asyncio.timeout(10):
        _, code = await asyncio.gather(press(), bench._bench(config))
    assert code == 130
    assert "stopped, with 0 still running" in capsys.readouterr().out
