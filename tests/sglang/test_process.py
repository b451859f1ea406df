"""SGLang as a child process; here a Python that prints."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from services.engine.sglang.service import leftovers
from services.engine.sglang.service import sglang_process as process_module
from services.engine.sglang.service.sglang_process import SglangProcess

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


async def test_it_is_read_on_though_its_output_goes_nowhere(start, monkeypatch):
    """It would stand still at its next line, and so would its end."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self): ...

    process = await start("for _ in range(1000): print('x' * 2000)\nprint('a last word')")
    monkeypatch.setattr(sys, "stderr", Closed())
    async with asyncio.timeout(WITHIN_S):
        await process.ended.wait()
    monkeypatch.undo()
    await process.stop()
    assert process._lines[-1] == "a last word"


_LEAVES_ONE_BEHIND = """
import signal, subprocess, time
def leave(*_):
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
signal.signal(signal.SIGTERM, leave)
print("waits", flush=True)
time.sleep(600)
"""


async def test_a_stop_waits_for_nobody_who_holds_its_output(start, monkeypatch):
    """A child that it makes while it ends is in no list of ours."""
    monkeypatch.setattr(process_module, "_TERM_TIMEOUT_S", 1.0)
    process = await start(_LEAVES_ONE_BEHIND)
    async with asyncio.timeout(WITHIN_S):
        while "waits" not in process._lines:
            await asyncio.sleep(0.01)
        await process.stop()
    assert process.exit_code == -signal.SIGKILL
    os.kill(int(process._lines[-1]), signal.SIGKILL)


_WITH_A_CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}])
"""
_WITH_A_SEGMENT = """
import os, time
open(f"{folder}/sgl_shm_mq_{{os.getpid()}}_0badcafe", "w").close()
time.sleep(600)
"""


@pytest.fixture
def shm(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(leftovers, "_FOLDER", Path(folder))
        yield Path(folder)


@pytest.fixture
async def with_a_segment(start, shm):
    """A process whose child has made one."""
    process = await start(_WITH_A_CHILD.format(child=_WITH_A_SEGMENT.format(folder=shm)))
    async with asyncio.timeout(WITHIN_S):
        while not list(shm.iterdir()):
            await asyncio.sleep(0.01)
    return process


async def test_what_was_killed_leaves_no_shared_memory(with_a_segment, shm):
    """Of SGLang's processes that do not heed SIGTERM; other workers' segments stay."""
    others = shm / f"sgl_shm_mq_{os.getpid()}_0badcafe"
    others.touch()
    await with_a_segment.stop(in_order=False)
    assert list(shm.iterdir()) == [others]


async def test_what_ended_by_itself_leaves_no_shared_memory_and_no_process(with_a_segment, shm):
    with_a_segment.note_tree()
    os.kill(with_a_segment._process.pid, signal.SIGKILL)
    async with asyncio.timeout(WITHIN_S):
        while with_a_segment.exit_code is None:
            await asyncio.sleep(0.01)
    (segment,) = shm.iterdir()
    child = psutil.Process(int(segment.name.split("_")[-2]))
    assert process_module._alive(child)  # and found by nobody who looks for children
    await with_a_segment.stop(in_order=False)
    assert not process_module._alive(child)
    assert not list(shm.iterdir())


_WAITS = """
import signal, time
signal.signal(signal.SIGTERM, signal.{how})
print("waits", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["SIG_IGN", "SIG_DFL"])
async def test_what_had_to_be_killed_is_named(start, monkeypatch, caplog, how):
    """And so each stop of which memory was given back by nobody."""
    heeds = how == "SIG_DFL"
    process = await start(_WAITS.format(how=how))
    async with asyncio.timeout(WITHIN_S):
        while "waits" not in process._lines:
            await asyncio.sleep(0.01)
    if not heeds:
        monkeypatch.setattr(process_module, "_TERM_TIMEOUT_S", 0.2)
    await process.stop()
    assert process.exit_code == -(signal.SIGTERM if heeds else signal.SIGKILL)
    assert (f"sglang_killed pids=[{process._process.pid}]" in caplog.text) is not heeds
