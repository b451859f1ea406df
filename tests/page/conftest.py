"""The page in a real Chromium: `make page-test` brings what drives it; elsewhere nothing is collected."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="no chromium on the path: apt-get install chromium")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.page)
            item.add_marker(pytest.mark.timeout(400))
            if shutil.which("chromium") is None:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    from page.up import running

    with running(tmp_path_factory.mktemp("page")) as up:
        yield up


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root there is no sandbox.
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


@pytest.fixture
def visit(chromium, cluster):
    """A function that opens the page in a browser of its own. What that complains of fails the test, but for
    what is refused on purpose."""
    from page.visitor import Visitor

    visitors = []

    def open_page(key="bare-key", **context):
        visitors.append(Visitor(chromium, cluster.url, key, **context))
        return visitors[-1]

    yield open_page
    complaints = [line for visitor in visitors for line in visitor.complaints]
    for visitor in visitors:
        visitor.context.close()
    assert not complaints
