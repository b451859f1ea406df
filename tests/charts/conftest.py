"""The chart through real Helm: `make chart-test` brings it; elsewhere nothing of this folder is collected."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("helm_python") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.charts)


@pytest.fixture
def chart_copy(tmp_path):
    """A chart to change."""
    from charts.rendering import CHART

    return shutil.copytree(CHART, tmp_path / "isthmus")
