"""A fuzz that could not fail would be worth nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUND = "tests/fuzz/test_fuzz.py::test_a_short_fuzz[tight]"


@pytest.mark.exact
def test_a_wrong_page_is_seen():
    command = (sys.executable, "-m", "pytest", "-q", "-m", "long", "-p", "no:cacheprovider", "-p", "no:xdist")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [*command, "--mutate=wrong_page", ROUND], cwd=root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stdout
    assert "1 failed" in run.stdout
