"""The tests that claim exactness must fail when the product is deliberately wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutations import MUTATIONS

# What must notice each. The fake engine reads every slot of every page; the torch engine is compared
# with transformers, over NIXL.
FAKE_CONVERSATION = "tests/engine/test_pair.py::test_a_conversation_moves_only_its_delta"
TORCH_CONVERSATION = "tests/cluster/test_exact.py::test_over_nixl[16]"
WATCHDOGS = [
    ("wrong_page", FAKE_CONVERSATION),
    ("wrong_page", TORCH_CONVERSATION),
    ("prefix_off_by_one_page", FAKE_CONVERSATION),
    ("prefix_off_by_one_page", TORCH_CONVERSATION),
    ("stale_generation", "tests/engine/test_pair.py::test_a_stale_generation_is_refused"),
]


def run_pytest(*arguments):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *arguments,
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    root = Path(__file__).parent.parent
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100)


def test_every_mutation_has_its_watchdog():
    assert {name for name, _ in WATCHDOGS} == MUTATIONS.keys()


def test_the_watchdogs_pass_on_the_real_thing():
    result = run_pytest(*sorted({test for _, test in WATCHDOGS}))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("name", "watchdog"), WATCHDOGS)
def test_a_mutation_is_noticed(name, watchdog):
    result = run_pytest(f"--mutate={name}", watchdog)
    assert result.returncode == 1, result.stdout
    assert "1 failed" in result.stdout, result.stdout
