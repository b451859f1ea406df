import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory as shm

import pytest

from bench.chaos.left_behind import marked_processes, shared_memory, signal_all

pytestmark = pytest.mark.long


SLEEPS = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


def test_what_is_left_behind(subtests):
    with subtests.test("a process is found by its mark alone"):
        environment = os.environ | {"SOME_MARK": "abc"}
        with subprocess.Popen(SLEEPS, env=environment, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            assert set(marked_processes("SOME_MARK", "abc")) == {process.pid}
            assert not marked_processes("SOME_MARK", "ab")
            assert not marked_processes("OTHER_MARK", "abc")
            signal_all(marked_processes("SOME_MARK", "abc"), signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not marked_processes("SOME_MARK", "abc")
    with subtests.test("shared memory counts once nobody has it open"):
        segment = shm.SharedMemory(create=True, size=4096)
        name = f"/dev/shm/{segment.name}"
        try:
            assert name not in shared_memory()  # we have it
            segment.close()
            assert name in shared_memory()
        finally:
            segment.unlink()
        assert name not in shared_memory()
