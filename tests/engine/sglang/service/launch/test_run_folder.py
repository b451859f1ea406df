"""No worker leaves its temporary files behind for long, however it ends."""

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from services.engine.sglang.service import leftovers
from services.engine.sglang.service.leftovers import RunFolder

CHILD = """
import tempfile
from services.engine.sglang.service.leftovers import RunFolder
folder = RunFolder.open()
(folder.path / "tmpx").mkdir()
(folder.path / "tmpx" / "counter_1.db").write_text("")
print(folder.path, flush=True)
input()
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(root):
    """A worker in another process, and its folder."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child, Path(child.stdout.readline().strip())
    finally:
        child.kill()
        child.communicate()


def test_folders_are_made_and_removed(subtests, root, monkeypatch):
    with subtests.test("what is closed is gone"):
        folder = RunFolder.open()
        (folder.path / "deep").mkdir()
        (folder.path / "deep" / "counter_7.db").write_text("x")
        folder.close()
        assert not list(root.iterdir())
    with subtests.test("a new folder that is taken for a dead workers is made again"):
        # Another worker looks between the making and the locking.
        locks, really = [], fcntl.flock

        def flock(descriptor, how):
            if how == fcntl.LOCK_EX:
                locks.append(descriptor)
                if len(locks) == 1:
                    (new,) = root.iterdir()
                    new.rmdir()
            really(descriptor, how)

        monkeypatch.setattr(leftovers.fcntl, "flock", flock)
        folder = RunFolder.open()
        assert len(locks) == 2 and folder.path.is_dir()
        folder.close()


def test_a_living_worker_keeps_its_folder_and_of_a_killed_one_the_next_removes_it(root, other):
    child, theirs = other
    RunFolder.open().close()
    assert (theirs / "tmpx").is_dir()
    child.kill()
    child.wait()
    assert theirs.is_dir()  # nobody was left to remove it
    folder = RunFolder.open()
    assert list(root.iterdir()) == [folder.path]
    folder.close()


def test_a_child_of_a_dead_worker_does_not_keep_its_folder(root):
    folder = RunFolder.open()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        os.close(folder.lock)  # as the worker's end does
        deadline_s = time.monotonic() + 10.0
        while folder.path.exists() and time.monotonic() < deadline_s:
            RunFolder.open().close()  # Popen returns shortly before the kernel closes what is not inherited
        assert not folder.path.exists()
    finally:
        child.communicate()


def test_what_only_looks_like_a_workers_folder_is_left_alone(root):
    kept = root / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (root / "isthmus-worker-link").symlink_to(kept)
    (root / "isthmus-worker-file").write_text("x")
    RunFolder.open().close()
    assert sorted(path.name for path in root.iterdir()) == [
        "isthmus-worker-file",
        "isthmus-worker-link",
        "kept",
    ]
    assert (kept / "file").exists()


def test_a_childs_temporary_files_lie_in_it_and_what_it_compiles_does_not(root):
    folder = RunFolder.open()
    environment = folder.environment({"HOME": "/h", "TMPDIR": "/elsewhere"})
    assert next(iter(environment)) == "HOME" and environment["HOME"] == "/h"
    script = "import tempfile; print(tempfile.NamedTemporaryFile(delete=False).name)"
    made = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True).strip()
    assert Path(made).parent == folder.path
    assert Path(environment["TORCHINDUCTOR_CACHE_DIR"]).parent == root
    assert folder.environment({"TORCHINDUCTOR_CACHE_DIR": "/c"})["TORCHINDUCTOR_CACHE_DIR"] == "/c"
    folder.close()
    assert not list(root.iterdir())
