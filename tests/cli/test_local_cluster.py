"""Children of a cluster on this machine; here a Python that prints."""

import asyncio
import os
from pathlib import Path

import pytest

from services.cli.local_cluster import Child, LocalCluster, Shape
from services.cli.up import UpConfig
from services.errors import ConfigError

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


@pytest.mark.parametrize(
    ("flags", "timeout_s"),
    [
        ([], 50.0),
        (["--grace-s=5"], 25.0),
        (["--grace-s=5", "--port=1", "--grace-s=600"], 620.0),
        (["--grace-s=soon"], 50.0),
    ],
)
def test_nobody_is_killed_before_its_grace_is_over(flags, timeout_s):
    """The last flag counts, and a supervisor needs 15 s on top."""
    assert Child("decode", ["python", *flags], None, None).stop_timeout_s == timeout_s


def test_up_waits_for_a_model_for_as_long_as_it_loads():
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
        with pytest.raises(ConfigError, match="router ended with exit code 3"):
            await cluster._until_ready()
