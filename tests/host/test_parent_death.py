import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.host.child_processes import dying_with_us

pytestmark = pytest.mark.long

_PARENT = """
import subprocess, sys, time
from services.host.child_processes import dying_with_us
program = "print('up', flush=True); import time; time.sleep(60)"
child = subprocess.Popen(dying_with_us([sys.executable, "-c", program]))
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_command_runs_in_the_place_of_its_launcher():
    command = [
        sys.executable,
        "-c",
        "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(3)",
        "a b",
        "$c",
    ]
    child = subprocess.Popen(dying_with_us(command), stdout=subprocess.PIPE, text=True)
    output, _ = child.communicate(timeout=60)
    assert output.split() == [str(child.pid), "a", "b", "$c"]
    assert child.returncode == 3


def test_a_child_of_someone_who_has_ended_is_not_started():
    command = dying_with_us([sys.executable, "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"  # as if its parent had been another
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stdout == b""


async def test_it_dies_with_a_parent_however_that_ends(subtests):
    for number in [signal.SIGKILL, signal.SIGTERM]:
        with subtests.test(number=number):
            parent = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _PARENT, stdout=asyncio.subprocess.PIPE
            )
            assert parent.stdout is not None
            async with asyncio.timeout(60):
                lines = {(await parent.stdout.readline()).strip() for _ in range(2)}
                (pid,) = lines - {b"up"}
                parent.send_signal(number)
                await parent.wait()
                while _runs(int(pid)):
                    await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
