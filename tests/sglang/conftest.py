"""Real SGLang on CPU: one cluster for all tests of the folder, and one aggregated engine to compare with.

`make test-sglang` runs this in an environment of its own; anywhere else it is skipped.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from engine.sglang.real_cluster import RANK_FLAGS, SglangCluster
from exactness.adapters import ATTENTION, adapter_of
from services.cli.model.make_model import make_model

# These import what is only installed with SGLang.
_WITH_SGLANG = [
    "test_carried.py",
    "test_nodes.py",
    "test_process.py",
    "test_requests.py",
    "test_start.py",
    "test_unreadable.py",
    "test_whose_fault.py",
]
collect_ignore = [] if find_spec("aiohttp") else _WITH_SGLANG


def pytest_collection_modifyitems(items):
    missing = find_spec("sglang") is None or find_spec("sglang.srt") is None
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.sglang)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
        if missing:
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed here: make test-sglang"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(checkpoint, tmp_path_factory):
    """It serves an adapter beside the model, which must not notice."""
    adapter = adapter_of(checkpoint, "half", ATTENTION, rank=3, seed=2)
    flags = (*RANK_FLAGS, f"--lora=half={adapter}", f"--lora-dir={adapter.parent}")
    async with SglangCluster(checkpoint, tmp_path_factory.mktemp("cluster"), flags) as opened:
        opened.adapter = adapter
        opened.note_start()
        yield opened
