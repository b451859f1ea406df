"""Children of a cluster on this machine; here a Python that prints."""

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from services.cli.local.local_cluster import Child, LocalCluster, Shape
from services.cli.local.up import UpConfig
from services.process.health import ProcessPhase
from services.values.errors import Unavailable

pytestmark = pytest.mark.long

WITHIN_S = 60.0


@pytest.fixture
def printing_module(tmp_path, monkeypatch):
    (tmp_path / "chatty.py").write_text(
        "print('x' * 140000, flush=True)\nfor _ in range(1000): print('y' * 200)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return "chatty"


async def test_a_child_that_prints_an_endless_line_goes_on(printing_module):
    shown = []
    cluster = LocalCluster(Shape(Path("."), Path(".")), lambda name, line: shown.append((name, line)))
    child = await cluster.start_child("router", printing_module, [])
    async with asyncio.timeout(WITHIN_S):
        assert await child.process.wait() == 0
        await child.log_task
    assert shown.count(("router", "y" * 200)) == 1000


def test_how_long_children_are_waited_for(subtests):
    # The last flag counts, and a supervisor needs 15 s on top.
    for flags, timeout_s in [
        ([], 50.0),
        (["--grace-s=5"], 25.0),
        (["--grace-s=5", "--port=1", "--grace-s=600"], 620.0),
        (["--grace-s=soon"], 50.0),
        (["--worker=d"], 60.0),
        (["--worker=d", "--grace-s=5", "--hand-over-s=90"], 115.0),
        (["--worker=d", "--hand-over-s=0"], 50.0),
    ]:
        with subtests.test("nobody is killed before its grace is over", flags=flags, timeout_s=timeout_s):
            assert Child("decode", ["python", *flags], None, None, None).stop_timeout_s == timeout_s
    with subtests.test("up waits for a model for as long as it loads"):
        assert UpConfig(model=Path("m")).shape().ready_timeout_s is None


@pytest.fixture
def ending_module(tmp_path, monkeypatch):
    (tmp_path / "ending.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return "ending"


async def test_without_a_limit_a_child_that_ends_is_noticed(ending_module):
    shape = Shape(Path("."), Path("."), ready_timeout_s=None)
    cluster = LocalCluster(shape, lambda name, line: None, router_ports=(1,))
    await cluster.start_child("router", ending_module, [])
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(Unavailable, match="router ended with exit code 3"):  # another start may do
            await cluster._until_ready()


@pytest.fixture
def dying_module(tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text(
        "import os, sys, time\n"
        "print(*sys.argv[1:], os.getpid(), flush=True)\n"
        "time.sleep(600 if os.path.exists(sys.argv[1]) else 0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return "dying"


async def test_a_child_that_is_killed_is_started_again_with_its_flags(dying_module, tmp_path, caplog):
    shown, gate = [], tmp_path / "gate"
    cluster = LocalCluster(Shape(Path("."), Path(".")), lambda name, line: shown.append((name, line)))
    await cluster.start_child("router", dying_module, [str(gate), "--flag"])
    keeping = asyncio.create_task(cluster.keep_running())
    async with asyncio.timeout(WITHIN_S):
        while len(shown) < 2:
            await asyncio.sleep(0.01)
        gate.touch()
        while cluster.children["router"].process.returncode is not None or len(shown) < 3:
            await asyncio.sleep(0.01)
        keeping.cancel()
        cluster.kill()
        await cluster.children["router"].process.wait()
        await cluster.children["router"].log_task
    cluster._forget_lives()
    assert {(name, line.rpartition(" ")[0]) for name, line in shown} == {("router", f"{gate} --flag")}
    assert caplog.messages[0] == (
        'process_ended how="router was killed, probably out of memory" starts_again_in_s=0.5'
    )


async def test_a_child_for_which_there_is_no_process_now_is_tried_again(
    dying_module, tmp_path, caplog, monkeypatch
):
    cluster = LocalCluster(Shape(Path("."), Path(".")), lambda name, line: None)
    first = await cluster.start_child("router", dying_module, [str(tmp_path / "gate")])
    start, refused = LocalCluster.start_child, []

    async def start_child(self, name, module, flags):
        if not refused:
            refused.append(name)
            (tmp_path / "gate").touch()  # the next one stays
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(self, name, module, flags)

    monkeypatch.setattr(LocalCluster, "start_child", start_child)
    keeping = asyncio.create_task(cluster.keep_running())
    async with asyncio.timeout(WITHIN_S):
        while cluster.children["router"] is first:
            assert not keeping.done()
            await asyncio.sleep(0.01)
    keeping.cancel()
    cluster.kill()
    await cluster.children["router"].process.wait()
    await cluster.children["router"].log_task
    cluster._forget_lives()
    assert "router cannot be started: " in caplog.messages[1]


@pytest.fixture
def sleeping_module(tmp_path, monkeypatch):
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return "sleeping"


async def test_a_cluster_whose_routers_somebody_else_answers_for_is_not_ready(sleeping_module, monkeypatch):
    """Another cluster of the same shape listens on the port that ours wants."""
    cluster = LocalCluster(Shape(Path("."), Path(".")), lambda name, line: None, router_ports=(1,))
    asked = asyncio.Queue()

    async def is_whole(self, index=0):
        asked.put_nowait(index)
        return True

    monkeypatch.setattr(LocalCluster, "is_whole", is_whole)
    router = await cluster.start_child("router", sleeping_module, [])
    ready = asyncio.create_task(cluster._until_ready())
    with pytest.raises(TimeoutError):  # it looks ten times a second
        await asyncio.wait_for(asked.get(), 0.5)
    assert not ready.done()
    router.life.enter(ProcessPhase.SERVING)
    async with asyncio.timeout(WITHIN_S):
        await ready
    cluster.kill()
    async with asyncio.timeout(WITHIN_S):
        assert await router.process.wait() == -signal.SIGKILL
        await router.log_task
