"""These tests show what is said of UCX's log in a process's environment, and what its operator has said
himself."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

NAMES = ("UCX_LOG_FILE", "UCX_PROTO_INFO", "UCX_LOG_LEVEL")
# As a supervisor and its rank do, which inherits what the supervisor named.
SCRIPT = """
import json, os, subprocess, sys
from services.transfer.ucx_log import quieten, ucx_log
if sys.argv[1:]:
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
quieten()
with ucx_log().set_for_ucx():
    told = {name: os.environ[name] for name in %r}
print(json.dumps([told, {name: os.environ[name] for name in told}]))
"""


def environments(parents, **said):
    """(while the first agent is made, later) in a process with so many parents of its kind."""
    script = SCRIPT % (NAMES,)
    inherited = {name: value for name, value in os.environ.items() if "UCX" not in name}
    command = [sys.executable, "-c", script, *[script] * parents]
    ran = subprocess.run(
        command, env=inherited | said, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(ran.stdout)


@pytest.mark.long
def test_whose_word_on_the_log_holds(subtests):
    for parents in [0, 1]:
        with subtests.test("where nobody says anything we read its log", parents=parents):
            told, later = environments(parents)
            assert told["UCX_LOG_FILE"].startswith("/proc/self/fd/") and told["UCX_PROTO_INFO"] == "y"
            assert later == {"UCX_LOG_FILE": "", "UCX_PROTO_INFO": "n", "UCX_LOG_LEVEL": "error"}

    for name, parents in product(["UCX_LOG_FILE", "UCX_PROTO_INFO"], [0, 1]):
        with subtests.test(
            "where its log is said to go it goes whatever that is", name=name, parents=parents
        ):
            for said in ("", "n"):  # ours, too, had nobody said them
                told, later = environments(parents, **{name: said})
                assert told == later and told[name] == said

    for parents in [0, 1]:
        with subtests.test("a level that is said stays", parents=parents):
            told, later = environments(parents, UCX_LOG_LEVEL="warn")
            assert told["UCX_LOG_LEVEL"] == later["UCX_LOG_LEVEL"] == "warn"
            assert told["UCX_LOG_FILE"].startswith("/proc/self/fd/")
