"""SGLang as a child process; here a Python that prints."""

import asyncio
import os
import sys

import pytest

from services.engine.sglang import process as process_module
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


_WITH_A_CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}])
"""
_WITH_A_SEGMENT = """
import os, time
open(f"{folder}/sgl_shm_mq_{{os.getpid()}}_0badcafe", "w").close()
time.sleep(600)
"""


async def test_what_was_killed_leaves_no_shared_memory(start, monkeypatch, tmp_path):
    """Of SGLang's processes that do not heed SIGTERM; other workers' segments stay."""
    monkeypatch.setattr(process_module, "_SHARED_MEMORY", tmp_path)
    others = tmp_path / f"sgl_shm_mq_{os.getpid()}_0badcafe"
    others.touch()
    process = await start(_WITH_A_CHILD.format(child=_WITH_A_SEGMENT.format(folder=tmp_path)))
    async with asyncio.timeout(WITHIN_S):
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.01)
    await process.stop(in_order=False)
    assert list(tmp_path.iterdir()) == [others]
