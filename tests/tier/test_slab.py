"""A slab's files, whose faults all end in "not held"."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from services.host import memory
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import SlotKind, Stored
from services.kv.tiers.tier_keys import ROOT
from services.tier import slab as slabs
from services.tier.copies import is_whole
from services.tier.slab import FileCalls, SlabFails, SlabInUse, SlabShape
from services.values.errors import ConfigError

SHAPE = SlabShape.fitting(b"layout-1", 256, 16_384)
NOWHERE = Path("/proc/nowhere")


def record(number, parent=ROOT):
    kind = SlotKind(number % 3)
    return Stored(number, bytes([number]) * 16, parent, number, 0, number, kind, number % 2 == 1)


def payload(number):
    return memoryview(bytes([number]) * SHAPE.slot_bytes)


@pytest.fixture
def check_both(tmp_path, subtests):
    """Check a slab of either kind, which one rank opens again and again, as its lives do."""

    def check_both(check):
        with subtests.test("file"):
            check(lambda shape=SHAPE, **calls: slabs.open_file(tmp_path, "d.0", shape, FileCalls(**calls)))
        fd = os.memfd_create("held")  # a supervisor's
        with subtests.test("memory"):
            check(lambda shape=SHAPE, **calls: slabs.open_memory(fd, shape, FileCalls(**calls)))
        os.close(fd)

    return check_both


def test_the_next_life_finds_what_was_written(check_both):
    def check(opening):
        slab = opening()
        digests = [slab.write(number, payload(number), record(number)) for number in (1, 2)]
        with pytest.raises(SlabInUse):
            opening()
        slab.close()

        again = opening()
        assert again.was_kept
        assert [(r.slot, r.key[0], r.digest) for r in again.records()] == [
            (1, 1, digests[0]),
            (2, 2, digests[1]),
        ]
        buffer = memoryview(bytearray(SHAPE.slot_bytes))
        again.read(2, buffer)
        assert buffer == payload(2) and is_whole(buffer, digests[1])
        again.close()

    check_both(check)


def test_what_another_layout_or_size_has_left_is_forgotten(check_both):
    def check(opening):
        slab = opening()
        slab.write(1, payload(1), record(1))
        slab.close()
        for shape in (
            SlabShape(b"layout-2", 256, SHAPE.num_slots),
            SlabShape.fitting(b"layout-2", 256, 9_216),
        ):
            slab = opening(shape)
            assert (slab.was_kept, slab.records()) == (False, [])
            slab.close()

    check_both(check)


def test_a_slot_that_a_killed_process_was_writing_is_an_empty_one(check_both):
    def check(opening):
        def torn(fd, buffers, at):
            if at >= SHAPE.slots_at + SHAPE.slot_bytes and len(buffers[0]) == SHAPE.slot_bytes:
                os.pwritev(fd, [buffers[0][:100]], at)
                raise OSError(errno.EIO, "the process is killed here")
            return os.pwritev(fd, buffers, at)

        slab = opening()
        slab.write(1, payload(1), record(1))
        slab.close()
        slab = opening(pwrite=torn)
        with pytest.raises(OSError, match="killed"):
            slab.write(1, payload(2), record(2))
        slab.close()
        slab = opening()
        assert slab.records() == [] and slab.record(1) is None
        slab.close()

    check_both(check)


def test_a_torn_record_holds_nothing_and_neither_do_its_children(check_both):
    def check(opening):
        def torn(fd, buffers, at):
            is_record = len(buffers[0]) == 64 and bytes(buffers[0][:1]) == b"\2"
            return os.pwritev(fd, [buffers[0][:40]], at) + 24 if is_record else os.pwritev(fd, buffers, at)

        slab = opening(pwrite=torn)
        for number, parent in ((1, ROOT), (2, bytes([1]) * 16), (3, bytes([2]) * 16)):
            slab.write(number, payload(number), record(number, parent))
        slab.close()
        slab = opening()
        books = TierBooks([SHAPE.num_slots])
        books.load([slab.records()])
        books.check()
        assert [r.key[0] for r in slab.records()] == [1, 3] and len(books) == 1
        slab.close()

    check_both(check)


def test_reads_and_writes_that_are_short_or_fail_are_errors(check_both):
    def check(opening):
        slab = opening()
        slab.write(1, payload(1), record(1))
        slab.close()

        def failing(fd, buffers, at):
            raise OSError(errno.EIO, "I/O error")

        buffer = memoryview(bytearray(SHAPE.slot_bytes))
        piecemeal = opening(
            pread=lambda fd, buffers, at: os.preadv(fd, [buffers[0][:50]], at),
            pwrite=lambda fd, buffers, at: os.pwritev(fd, [buffers[0][:50]], at),
        )
        piecemeal.write(3, payload(3), record(3))
        piecemeal.read(1, buffer)
        assert buffer == payload(1)
        piecemeal.read(3, buffer)
        assert buffer == payload(3)
        piecemeal.close()
        slab = opening()
        os.truncate(f"/proc/self/fd/{slab._fd}", SHAPE.slots_at + SHAPE.slot_bytes + 10)
        with pytest.raises(OSError, match="ends at byte"):
            slab.read(1, buffer)
        slab.close()
        with pytest.raises(SlabFails, match="I/O error"):
            opening(pread=failing)
        again = opening()  # the lock went with it
        again.close()

    check_both(check)


def test_a_disk_that_fails_or_is_full_is_told_from_a_wrong_flag_and_left_as_it_was(tmp_path, subtests):
    for code in (errno.EIO, errno.EROFS, errno.ENOSPC, errno.ESTALE):
        with subtests.test(os.strerror(code)):

            def fails(*_, code=code):
                raise OSError(code, os.strerror(code))

            with pytest.raises(SlabFails, match=f"{SHAPE.size_bytes} bytes: {os.strerror(code)}"):
                slabs.open_file(tmp_path, "d.0", SHAPE, FileCalls(allocate=fails))
            (path,) = tmp_path.rglob("blocks")
            assert path.stat().st_size == 0
    slabs.open_file(tmp_path, "d.0", SHAPE).close()  # The lock went with each of them.
    whole_disk = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ConfigError, match="are more than the disk's"):
        slabs.open_file(tmp_path, "d.1", SlabShape.fitting(b"layout-1", 256, 2 * whole_disk))
    with pytest.raises(ConfigError, match="have no room for a block"):
        SlabShape.fitting(b"layout-1", 256, 8_200)
    with pytest.raises(ConfigError, match="no file has"):
        SlabShape.fitting(b"layout-1", 256, 1 << 63)
    with pytest.raises(ConfigError, match="--kv-tier-fd=9999"):
        slabs.open_memory(9999, SHAPE)
    with pytest.raises(ConfigError, match="/proc/nowhere"):
        slabs.open_file(NOWHERE, "d.0", SHAPE)


def test_a_file_in_memory_that_has_no_room_is_left_out_before_it_is_allocated(tmp_path, monkeypatch):
    free = [SHAPE.size_bytes]
    monkeypatch.setattr(memory, "is_in_memory", lambda fd: True)
    monkeypatch.setattr(memory, "available_bytes", lambda: free[0])
    allocated = []
    calls = FileCalls(allocate=lambda *_: allocated.append(1))
    with pytest.raises(SlabFails, match="bytes of memory do not fit into"):
        slabs.open_file(tmp_path, "d.0", SHAPE, calls)
    assert not allocated
    free[0] += 1
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    free[0] = 4096  # It has its own already.
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    monkeypatch.setattr(memory, "is_in_memory", lambda fd: False)
    free[0] = 0
    slabs.open_file(tmp_path, "d.1", SHAPE).close()


def test_files_are_for_their_owner_alone(tmp_path):
    slabs.open_file(tmp_path / "root", "d.0", SHAPE).close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "root").rglob("*")}
    assert modes == {b"layout-1".hex(): 0o700, "d.0": 0o700, "blocks": 0o600}


def test_a_file_that_is_not_ours_is_neither_read_nor_written(tmp_path, monkeypatch):
    path = tmp_path / SHAPE.layout_id.hex() / "d.0" / "blocks"
    path.parent.mkdir(parents=True)
    (tmp_path / "secret").write_text("mine")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="symbolic links"):
        slabs.open_file(tmp_path, "d.0", SHAPE)
    assert (tmp_path / "secret").read_text() == "mine"
    path.unlink()
    path.touch(0o666)
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="no file of the user"):
        slabs.open_file(tmp_path, "d.0", SHAPE)


def test_who_looks_at_a_file_costs_no_rank_its_tier(tmp_path):
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    (path,) = slabs.slab_files(tmp_path)
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        slabs.open_file(tmp_path, "d.0", SHAPE).close()


def test_a_rank_whose_directory_is_removed_as_it_opens_its_file_makes_it_again(tmp_path, monkeypatch):
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    (path,) = slabs.slab_files(tmp_path)
    slabs.remove(path)
    mkdir, removals = Path.mkdir, [1]

    def removed_after(directory, **settings):
        mkdir(directory, **settings)
        if directory == path.parent and removals:
            removals.pop()
            directory.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed_after)
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    assert path.exists()
    removals += [1] * 99
    slabs.remove(path)
    with pytest.raises(SlabInUse, match="removed all the time"):
        slabs.open_file(tmp_path, "d.0", SHAPE)


def test_a_file_that_fails_once_it_is_locked_is_left_out_and_let_go(tmp_path, monkeypatch):
    """A file of NFS does so whose server was replaced."""
    lock, fds = slabs._lock, []

    def locked(name, fd):
        lock(name, fd)
        fds.append(fd)
        monkeypatch.setattr(slabs.os, "fstat", stale)

    def stale(fd):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(slabs, "_lock", locked)
        with pytest.raises(SlabFails, match="Stale"):
            slabs.open_file(tmp_path, "d.0", SHAPE)
        monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fds[0])
    slabs.open_file(tmp_path, "d.0", SHAPE).close()


def test_a_rank_that_comes_while_its_file_is_removed_gets_another(tmp_path, monkeypatch):
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    (path,) = slabs.slab_files(tmp_path)
    lock, removals = slabs._lock, iter([slabs.remove])

    def removed_before(name, fd):
        for remove in removals:
            assert remove(path)
        lock(name, fd)

    monkeypatch.setattr(slabs, "_lock", removed_before)
    slab = slabs.open_file(tmp_path, "d.0", SHAPE)
    assert os.path.samestat(path.stat(), os.fstat(slab._fd))
    slab.close()


def test_a_directory_stays_that_has_more_in_it_and_one_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    (path,) = slabs.slab_files(tmp_path)
    (path.parent / "notes").touch()
    assert slabs.remove(path)
    assert [*path.parent.iterdir()] == [path.parent / "notes"]
    (path.parent / "notes").unlink()
    slabs.open_file(tmp_path, "d.0", SHAPE).close()

    def failing(directory):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rmdir", failing)
    with pytest.raises(OSError, match="Input/output error"):
        slabs.remove(path)
    assert not path.exists()


def test_a_file_that_was_not_allocated_to_its_end_is_before_it_is_used(tmp_path):
    slabs.open_file(tmp_path, "d.0", SHAPE).close()
    (path,) = slabs.slab_files(tmp_path)
    asked = []
    calls = FileCalls(allocate=lambda *arguments: asked.append(arguments[1:]))
    slabs.open_file(tmp_path, "d.0", SHAPE, calls).close()
    assert not asked
    os.truncate(path, 0)
    os.truncate(path, SHAPE.size_bytes)  # A kill right after the first of the two calls leaves this.
    slabs.open_file(tmp_path, "d.0", SHAPE, calls).close()
    assert asked == [(0, SHAPE.size_bytes)]
