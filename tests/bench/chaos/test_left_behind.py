import os
import random
import signal
import subprocess
import sys
from multiprocessing import shared_memory as shm

import pytest

from bench.chaos.left_behind import marked_processes, shared_memory, signal_all
from bench.chaos.processes import spoil
from bench.chaos.schedule import Kind
from bench.soak.ranks import Ranks

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


def test_files_of_tiers(subtests, tmp_path):
    ranks = Ranks()
    ranks.note("decode-0", f"rank_started rank=0 pid={os.getpid()}")
    path = tmp_path / "blocks"
    path.write_bytes(bytes(4096))
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "blocks"
    other.touch()
    with subtests.test("one file and two names of one memory are a rank's own, and it may read others' once"):
        opened = [os.memfd_create("isthmus-tier-0") for _ in range(2)] + [os.open(path, os.O_RDWR)]
        opened.append(os.open(other, os.O_RDONLY))
        assert ranks.tier_files_too_many() == {}
        for more in (
            lambda: os.memfd_create("isthmus-tier-0"),
            lambda: os.open(path, os.O_RDWR),
            lambda: os.open(other, os.O_RDONLY),
        ):
            opened.append(more())
            assert ranks.tier_files_too_many()
            os.close(opened.pop())
        assert ranks.tier_files_too_many() == {}
        for fd in opened:
            os.close(fd)
    for kind in (Kind.FLIP, Kind.CUT, Kind.REMOVE):
        with subtests.test("a file is spoilt", kind=kind):
            before = path.read_bytes()
            spoil(path, kind, random.Random(3))
            assert not path.exists() or path.read_bytes() != before
            assert kind is not Kind.FLIP or path.stat().st_size == len(before)
    assert not path.exists()
