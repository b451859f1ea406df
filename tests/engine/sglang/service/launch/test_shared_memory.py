"""What SGLang's processes left in shared memory goes once nobody can need it, and nothing else goes."""

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from services.engine.sglang.service import leftovers
from services.engine.sglang.service.leftovers import remove_of, remove_orphans

DEAD = 2**22 + 1  # above the most that Linux gives
HOUR_S = 3600.0
HERE = "HERE"  # stands for our pid, which is not the same in each worker of pytest-xdist
KEPT_OPEN = [f"sgl_shm_mq_{HERE}_0badcafe", f"sgl_shm_mq_{DEAD}_0badcafe", "sglang_loads_ab12_0badcafe.shm"]
HANDED_OVER = f"sgl_shm_mm_{DEAD}_0badcafe"


@pytest.fixture
def folder(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        monkeypatch.setattr(leftovers, "_FOLDER", Path(made))
        yield Path(made)


def make(folder, name, age_s=0.0):
    path = folder / name.replace(HERE, str(os.getpid()))
    path.write_bytes(bytes(mmap.PAGESIZE))
    made_s = time.time() - age_s
    os.utime(path, (made_s, made_s))
    return path


def test_what_nobody_needs_goes(subtests, folder):
    for name in KEPT_OPEN:
        with subtests.test(name=name):
            path = make(folder, name)
            writer = os.open(path, os.O_RDWR)
            remove_orphans()
            assert path.exists()
            os.close(writer)
            remove_orphans()
            assert not path.exists()
    for name in KEPT_OPEN:
        with subtests.test(name=name):
            path = make(folder, name)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            with path.open("r+b") as writer:  # mmap.mmap would keep a descriptor of its own
                both = mmap.PROT_READ | mmap.PROT_WRITE
                mapped = libc.mmap(None, mmap.PAGESIZE, both, mmap.MAP_SHARED, writer.fileno(), 0)
            remove_orphans()
            assert path.exists()
            assert libc.munmap(ctypes.c_void_p(mapped), mmap.PAGESIZE) == 0
            remove_orphans()
            assert not path.exists()
    for name, age_s, goes in [
        (HANDED_OVER, HOUR_S, True),
        (HANDED_OVER, 0.0, False),  # its maker may be in another container, and who gets it has not come yet
        (f"sgl_shm_mm_{HERE}_0badcafe", HOUR_S, False),
        ("sgl_shm_mm_none_0badcafe", HOUR_S, False),
        ("sgl_shm_dead", HOUR_S, False),
        (f"other_mm_{DEAD}_0badcafe", HOUR_S, False),
    ]:
        with subtests.test(name=name, age_s=age_s, goes=goes):
            path = make(folder, name, age_s)
            remove_orphans()
            assert path.exists() is not goes


def test_of_processes_that_have_ended_only_what_they_made_goes(folder):
    born_s = time.time() - 100.0
    theirs, before_them = make(folder, f"sgl_shm_mm_{DEAD}_1"), make(folder, f"sgl_shm_mm_{DEAD}_2", HOUR_S)
    held, others = make(folder, f"sgl_shm_mq_{DEAD}_3"), make(folder, f"sgl_shm_mq_{HERE}_4")
    with held.open("r+b"):
        remove_of({DEAD: born_s})
    assert set(folder.iterdir()) == {before_them, held, others}
    assert not theirs.exists()


def remove_all():
    remove_orphans()
    remove_of({DEAD: 0.0})


def test_another_users_stays(folder, monkeypatch):
    make(folder, HANDED_OVER, HOUR_S)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    remove_all()
    assert list(folder.iterdir())


def test_one_that_may_not_be_removed_keeps_no_other(folder, monkeypatch):
    """The folder is sticky."""
    removed, really = [], Path.unlink
    make(folder, f"sgl_shm_mq_{DEAD}_1")
    make(folder, f"sgl_shm_mq_{DEAD}_2")

    def unlink(path):
        removed.append(path)
        if len(removed) == 1:
            raise PermissionError(errno.EPERM, "not permitted", str(path))
        really(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    remove_of({DEAD: 0.0})
    assert list(folder.iterdir()) == removed[:1] and len(removed) == 2


def test_what_is_no_file_stays_and_keeps_nobody_waiting(folder):
    os.mkfifo(folder / f"sgl_shm_mq_{DEAD}_1")
    (folder / f"sgl_shm_mq_{DEAD}_2").mkdir()
    (folder / f"sgl_shm_mq_{DEAD}_3").symlink_to(make(folder, "else"))
    remove_all()
    assert len(list(folder.iterdir())) == 4


def test_where_the_kernel_grants_no_lease_all_stay(folder, monkeypatch):
    make(folder, HANDED_OVER, HOUR_S)

    def refuse(descriptor, command, argument):
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    remove_all()
    assert list(folder.iterdir())


def test_who_opens_one_that_is_looked_at_does_not_end_us(folder):
    path, told = make(folder, KEPT_OPEN[0]), []
    before = signal.signal(signal.SIGURG, lambda number, frame: told.append(number))
    looking = os.open(path, os.O_RDONLY)
    try:
        leftovers._take_lease(looking)
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_RDWR | os.O_NONBLOCK)
        assert told == [signal.SIGURG]  # which is ignored where nobody handles it, and SIGIO is not
    finally:
        os.close(looking)
        signal.signal(signal.SIGURG, before)
