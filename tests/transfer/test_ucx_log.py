"""What is said of UCX's log in a process's environment, and what its operator has said himself."""

import json
import os
import subprocess
import sys

import pytest

NAMES = ("UCX_LOG_FILE", "UCX_PROTO_INFO", "UCX_LOG_LEVEL")
# As a supervisor and its rank do, which inherits what the supervisor named.
SCRIPT = """
import json, os, subprocess, sys
from services.transfer.ucx_log import quieten, ucx_log
if sys.argv[1:]:
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
quieten()
with ucx_log().told_to_ucx():
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


@pytest.mark.parametrize("parents", [0, 1])
def test_where_nobody_says_anything_we_read_its_log(parents):
    told, later = environments(parents)
    assert told["UCX_LOG_FILE"].startswith("/proc/self/fd/") and told["UCX_PROTO_INFO"] == "y"
    assert later == {"UCX_LOG_FILE": "", "UCX_PROTO_INFO": "n", "UCX_LOG_LEVEL": "error"}


@pytest.mark.parametrize("parents", [0, 1])
@pytest.mark.parametrize("name", ["UCX_LOG_FILE", "UCX_PROTO_INFO"])
def test_where_its_log_is_said_to_go_it_goes_whatever_that_is(name, parents):
    for said in ("", "n"):  # ours, too, had nobody said them
        told, later = environments(parents, **{name: said})
        assert told == later and told[name] == said


@pytest.mark.parametrize("parents", [0, 1])
def test_a_level_that_is_said_stays(parents):
    told, later = environments(parents, UCX_LOG_LEVEL="warn")
    assert told["UCX_LOG_LEVEL"] == later["UCX_LOG_LEVEL"] == "warn"
    assert told["UCX_LOG_FILE"].startswith("/proc/self/fd/")
