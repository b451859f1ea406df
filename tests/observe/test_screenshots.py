"""The dashboards, drawn by Grafana's own panels in Chromium from what test_live.py has kept."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from observe.boards import BOARDS, REPOSITORY

TOOLS = Path(os.environ.get("OBSERVE_TOOLS", REPOSITORY / ".cache/observe"))
PYTHON = Path(os.environ.get("OBSERVE_PYTHON", REPOSITORY / ".venv-observe/bin/python"))
ANSWERS, SCREENSHOTS = TOOLS / "answers", TOOLS / "screenshots"
_WIDTH, _ROW = 1448, 30  # pixels; as in charts/observe/page/main.tsx
_BELOW = 200  # Chromium does not draw what lies at a high window's bottom

# A palette of its own makes a picture a third of the size.
_SHRINK = """
import sys
from PIL import Image
picture = Image.open(sys.argv[1]).convert("RGB")
picture = picture.crop((0, 0, picture.width, int(sys.argv[3])))
picture.quantize(96, dither=Image.Dither.NONE).save(sys.argv[2], optimize=True)
"""

pytestmark = [pytest.mark.observe, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The URL of the page, with the answers beside it."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(TOOLS / "page/dist", folder, dirs_exist_ok=True)
    shutil.copytree(TOOLS / "node_modules/@grafana/ui/dist/public", folder / "public")
    for answer in ANSWERS.glob("*.json"):
        shutil.copy(answer, folder)
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def chromium(*arguments):
    """What it prints. Its clock runs ahead, so that everything has settled at the end."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--virtual-time-budget=30000", *arguments]
    run = subprocess.run(["chromium", *options], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", BOARDS)
def test_no_panel_is_empty(page, name):
    dom = chromium("--dump-dom", f"{page}?board={name}")
    assert "<title>drawn</title>" in dom
    panels = [panel for panel in BOARDS[name]["panels"] if panel["type"] != "row"]
    drawn = dict(re.findall(r'data-title="([^"]*)" data-series="(\d+)"', dom))
    assert set(drawn) == {panel["title"] for panel in panels}
    assert all(int(count) > 0 for count in drawn.values()), drawn
    # Each graph has its canvas, a sparkline behind a number too, and a legend entry for each line.
    graphs = [p for p in panels if p["type"] == "timeseries" or p["options"].get("graphMode") == "area"]
    assert dom.count('class="u-over"') == len(graphs)
    answer = json.loads((ANSWERS / f"{name}.json").read_text())
    for series in answer["panels"].values():
        for one in series:
            assert one["name"] in dom


@pytest.mark.parametrize("name", BOARDS)
def test_it_makes_a_picture(page, name, tmp_path):
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in BOARDS[name]["panels"])
    height = rows * _ROW + 16
    size = f"{_WIDTH},{height + _BELOW}"
    large, small = tmp_path / "large.png", SCREENSHOTS / f"dashboard-{name}.png"
    chromium(f"--window-size={size}", f"--screenshot={large}", f"{page}?board={name}")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    subprocess.run([PYTHON, "-c", _SHRINK, large, small, str(height)], check=True)
    assert 20_000 < small.stat().st_size < 400_000
