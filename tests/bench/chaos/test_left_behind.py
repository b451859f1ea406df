import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory as shm

from bench.chaos.left_behind import marked_processes, shared_memory, signal_all

SLEEPS = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


def test_a_process_is_found_by_its_mark_alone():
    environment = os.environ | {"SOME_MARK": "abc"}
    with subprocess.Popen(SLEEPS, env=environment, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert set(marked_processes("SOME_MARK", "abc")) == {process.pid}
        assert not marked_processes("SOME_MARK", "ab")
        assert not marked_processes("OTHER_MARK", "abc")
        signal_all(marked_processes("SOME_MARK", "abc"), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not marked_processes("SOME_MARK", "abc")


def test_shared_memory_counts_once_nobody_has_it_open():
    segment = shm.SharedMemory(create=True, size=4096)
    name = f"/dev/shm/{segment.name}"
    try:
        assert name not in shared_memory()  # we have it
        segment.close()
        assert name in shared_memory()
    finally:
        segment.unlink()
    assert name not in shared_memory()
