"""SGLang as a child process; here a Python that prints."""

import asyncio
import os
import sys

import pytest

from services.engine.sglang.process import SglangProcess

WITHIN_S = 60.0


@pytest.fixture
def start(monkeypatch):
    async def start(script):
        process = SglangProcess((), os.environ)
        monkeypatch.setattr(process, "_command", [sys.executable, "-c", script])
        await process.start()
        return process

    return start


async def test_an_endless_line_does_not_keep_its_end_from_being_seen(start, capfd):
    process = await start("print('x' * 2300000, flush=True)\nfor _ in range(1000): print('y' * 200)")
    async with asyncio.timeout(WITHIN_S):
        await process.ended.wait()
    await process.stop()
    assert capfd.readouterr().err.count("y" * 200) == 1000


async def test_its_end_is_seen_though_its_output_goes_nowhere(start, monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self): ...

    process = await start("print('a last word')")
    monkeypatch.setattr(sys, "stderr", Closed())
    async with asyncio.timeout(WITHIN_S):
        await process.ended.wait()
    monkeypatch.undo()
    await process.stop()
