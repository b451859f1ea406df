"""A slab is a file of equal slots after a table of records. It has one format, in memory and on a disk.

    header   magic, TIER_FORMAT, layout id, bytes of a slot, slots, XXH3 of these
    table    64 bytes a slot: key 16 | parent 16 | index hash 8 | digest 8 | sequence 7, kind 1 | XXH3 of
             these 56
    slots    the pages of one block each, as they are in the pool, or a part of a checkpoint

The whole file is allocated at the start, so a full disk is noticed then or never. A record is emptied before
its payload is written, and written after it, so a slot that a killed process left incomplete is an empty one.
Nothing is synced: what a power failure left incomplete has another digest than its record. A file has mode
0600, because KV is as secret as the prompt from which it was computed.
"""

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import Any

from services.host import memory
from services.kv.page_digest import digest_of
from services.kv.tiers.records import SlotKind, Stored
from services.kv.tiers.tier_keys import TIER_FORMAT
from services.values.errors import ConfigError

_HEADER = Struct("<8sI8sQQQ")
_MAGIC = b"isthmusT"
_RECORD = Struct("<16s16sQQQQ")
RECORD_BYTES = _RECORD.size
_RECORDED = _RECORD.size - 8  # These bytes are under the record's own digest.
_KIND_AT = 56  # The sequence has so many bits, and then come those of SlotKind and the draft's.
_WITH_DRAFT = 1 << 63
_KIND_BITS = 3
_KINDS = frozenset(SlotKind)
_NAME = "blocks"
_LAYOUT = "[0-9a-f]{16}"
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOKS_END_S = 0.5
_TRIES = 5
_PAGE, _BLOCK = 4096, 512  # stat(2) counts in the latter.
_MOST_BYTES = (1 << 63) - 1
_TABLE_READ = 1 << 20
_ALLOCATED_AT_ONCE = 1 << 30
_AHEAD_AT_ONCE = 128 << 10  # Of a longer range a kernel may read only its beginning ahead.


# These come of what --kv-tier says. Whatever else a kernel says (EIO, EROFS, ENOSPC ...) is the disk's fault.
_OF_THE_FLAG = frozenset(
    (
        errno.EACCES,
        errno.EEXIST,
        errno.EFBIG,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
    )
)


class SlabInUse(Exception):
    """Another incarnation of the rank still uses the slab."""


class SlabFails(Exception):
    """The disk fails, or has no room."""


def slab_fault(name: str, error: OSError, detail: str = "") -> ConfigError | SlabFails:
    """Return what to raise where a slab cannot be opened."""
    wrong = ConfigError if error.errno in _OF_THE_FLAG else SlabFails
    return wrong(f"--kv-tier: {name}: {detail}{error.strerror}")


def will_need(fd: int, at: int, count: int) -> None:
    """Have the kernel read these bytes into its page cache; this does not wait for them. Raises OSError."""
    for start in range(at, at + count, _AHEAD_AT_ONCE):
        piece = min(_AHEAD_AT_ONCE, at + count - start)
        os.posix_fadvise(fd, start, piece, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True, slots=True)
class FileCalls:
    """Tests replace these system calls with some that fail."""

    pread: Callable[[int, Sequence[Any], int], int] = os.preadv
    pwrite: Callable[[int, Sequence[Any], int], int] = os.pwritev
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    will_need: Callable[[int, int, int], None] = will_need


@dataclass(frozen=True, slots=True)
class SlabShape:
    layout_id: bytes
    slot_bytes: int
    num_slots: int

    @classmethod
    def fitting(cls, layout_id: bytes, slot_bytes: int, size_bytes: int) -> "SlabShape":
        """Return the shape with the most slots that fit. Raises ConfigError if not even one fits."""
        if size_bytes > _MOST_BYTES:
            raise ConfigError(f"--kv-tier: no file has {size_bytes} bytes")
        num_slots = max(0, (size_bytes - 2 * _PAGE) // (slot_bytes + _RECORD.size))
        if num_slots == 0:
            raise ConfigError(f"--kv-tier: {size_bytes} bytes have no room for a block of {slot_bytes}")
        return cls(layout_id, slot_bytes, num_slots)

    @classmethod
    def read(cls, header: bytes) -> "SlabShape | None":
        """Return the shape in a file's header, or None where it is not a slab of this format."""
        if len(header) < _HEADER.size:
            return None
        magic, version, layout_id, slot_bytes, num_slots, _ = _HEADER.unpack_from(header)
        shape = cls(layout_id, slot_bytes, num_slots)
        known = (magic, version) == (_MAGIC, TIER_FORMAT) and header[: _HEADER.size] == shape.header
        return shape if known else None

    @property
    def slots_at(self) -> int:
        return _PAGE + -(-self.num_slots * _RECORD.size // _PAGE) * _PAGE

    @property
    def size_bytes(self) -> int:
        return self.slots_at + self.num_slots * self.slot_bytes

    @property
    def header(self) -> bytes:
        fields = (_MAGIC, TIER_FORMAT, self.layout_id, self.slot_bytes, self.num_slots)
        return _HEADER.pack(*fields, digest_of(memoryview(_HEADER.pack(*fields, 0))))


class Slab:
    """Only one thread reads and writes it. `close` releases it for the next incarnation of the rank."""

    def __init__(self, name: str, fd: int, shape: SlabShape, calls: FileCalls = FileCalls()) -> None:
        """Take over a file that is locked and allocated; a table of another layout is emptied.

        Raises OSError.
        """
        self.name = name
        self.shape = shape
        self._fd = fd
        self._calls = calls
        self.was_kept = self._read_header() == shape.header
        if not self.was_kept:
            self._format()

    def __repr__(self) -> str:
        return f"Slab({self.name} {self.shape.num_slots} x {self.shape.slot_bytes})"

    def records(self) -> list[Stored]:
        """Return the records of the table that are neither incomplete nor empty. Raises OSError."""
        found = (unpacked(slot, record) for slot, record in enumerate(_records_of(self.table())))
        return [stored for stored in found if stored is not None]

    def table(self) -> bytearray:
        """Return the table as it is, with RECORD_BYTES a slot. Raises OSError."""
        table = bytearray(self.shape.num_slots * _RECORD.size)
        for start in range(0, len(table), _TABLE_READ):
            self._pread(memoryview(table)[start : start + _TABLE_READ], _PAGE + start)
        return table

    @property
    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    @property
    def has_its_shape(self) -> bool:
        """Return whether the file's header is still what it was when it was opened. Raises OSError."""
        return self._read_header() == self.shape.header

    def write(self, slot: int, payload: memoryview, record: Stored) -> int:
        """Write a slot, then its record, and return the digest. Raises OSError; the slot is empty then."""
        digest = digest_of(payload)
        self._pwrite(bytes(_RECORD.size), _record_at(slot))
        self._pwrite(payload, self._at(slot))
        self._pwrite(_packed(replace(record, digest=digest)), _record_at(slot))
        return digest

    def record(self, slot: int) -> Stored | None:
        """Return a slot's record as it is now, or None where it is incomplete or empty. Raises OSError."""
        record = bytearray(_RECORD.size)
        self._pread(memoryview(record), _record_at(slot))
        return unpacked(slot, memoryview(record))

    def has_changed(self, slot: int, digest: int) -> bool:
        """Return whether another process has changed the slot since its digest was known: nobody may."""
        return False

    def read(self, slot: int, buffer: memoryview) -> None:
        self._pread(buffer, self._at(slot))

    def read_ahead(self, slot: int) -> None:
        """Have the slot read into the kernel's page cache, without waiting for it. Raises OSError."""
        self._calls.will_need(self._fd, self._at(slot), self.shape.slot_bytes)

    def close(self) -> None:
        os.close(self._fd)

    def _at(self, slot: int) -> int:
        return self.shape.slots_at + slot * self.shape.slot_bytes

    def _read_header(self) -> bytes:
        header = bytearray(_HEADER.size)
        self._pread(memoryview(header), 0)
        return bytes(header)

    def _format(self) -> None:
        """Empty the table before the header is written that makes it valid."""
        self._pwrite(bytes(_HEADER.size), 0)
        for start in range(_PAGE, self.shape.slots_at, _TABLE_READ):
            self._pwrite(bytes(min(_TABLE_READ, self.shape.slots_at - start)), start)
        self._pwrite(self.shape.header, 0)

    def _pread(self, buffer: memoryview, at: int) -> None:
        while buffer:
            count = self._calls.pread(self._fd, [buffer], at)
            if count == 0:
                raise OSError(errno.EIO, f"{self.name} ends at byte {at}")
            buffer, at = buffer[count:], at + count

    def _pwrite(self, content: bytes | memoryview, at: int) -> None:
        left = memoryview(content)
        while left:
            count = self._calls.pwrite(self._fd, [left], at)
            if count == 0:
                raise OSError(errno.EIO, f"{self.name} takes nothing at byte {at}")
            left, at = left[count:], at + count


def open_file(directory: Path, rank: str, shape: SlabShape, calls: FileCalls = FileCalls()) -> Slab:
    """Open the slab of one rank and layout, and create it if needed.

    Raises:
        ConfigError: the directory may not be written, no disk of its size can hold it, or the file is not
            this user's.
        SlabFails: the disk fails, or has no room.
        SlabInUse: another process uses it.
    """
    path = directory / shape.layout_id.hex() / rank / _NAME
    try:
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = _opened(path)
    except OSError as error:
        raise slab_fault(str(path), error) from error
    with _closing_unless_opened(str(path), fd):
        _keep_to_ourselves(path, fd)
        _check_disk(path, fd, shape)
        _lock(str(path), fd)
        is_removed = os.fstat(fd).st_nlink == 0
    if is_removed:  # `remove` had the lock before us.
        os.close(fd)
        return open_file(directory, rank, shape, calls)
    return _locked_slab(str(path), fd, shape, calls)


def _opened(path: Path) -> int:
    """Open a rank's file, and create it with its directory. Raises OSError."""
    for _ in range(_TRIES):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # `remove` has removed the directory meanwhile.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    raise SlabInUse(f"{path} is removed all the time")


@contextmanager
def _closing_unless_opened(name: str, fd: int, detail: str = "") -> Iterator[None]:
    """Close the file where an error comes, and turn an OSError into what it means."""
    try:
        yield
    except OSError as error:
        os.close(fd)
        raise slab_fault(name, error, detail) from error
    except BaseException:
        os.close(fd)
        raise


def _check_disk(path: Path, fd: int, shape: SlabShape) -> None:
    """Raise ConfigError where the whole disk, even if it were empty, has no room for the file.

    Raise SlabFails where it is in memory that has no room now: the process would be killed as it allocates.
    """
    disk = os.fstatvfs(fd)
    if 0 < disk.f_blocks * disk.f_frsize < shape.size_bytes:
        size = disk.f_blocks * disk.f_frsize
        raise ConfigError(f"--kv-tier: {path}: {shape.size_bytes} bytes are more than the disk's {size}")
    free_bytes = memory.available_bytes() if memory.is_in_memory(fd) else None
    lacking_bytes = shape.size_bytes - _BLOCK * os.fstat(fd).st_blocks
    if free_bytes is not None and lacking_bytes >= free_bytes:
        message = f"{lacking_bytes} bytes of memory do not fit into {free_bytes} that are free"
        raise SlabFails(f"--kv-tier: {path}: {message}")


def _keep_to_ourselves(path: Path, fd: int) -> None:
    """Allow access to the owner only. Raises ConfigError if it is not a regular file of this user."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"--kv-tier: {path} is no file of the user that the rank runs as")
    os.fchmod(fd, 0o600)


def slab_files(directory: Path) -> list[Path]:
    """Return the ranks' files in a directory of --kv-tier, or in the directory of one layout in it."""
    directory = directory.resolve()
    in_layout = re.fullmatch(_LAYOUT, directory.name) is not None
    found = directory.glob(f"*/{_NAME}" if in_layout else f"*/*/{_NAME}")
    return sorted(
        path
        for path in found
        if re.fullmatch(_LAYOUT, path.parent.parent.name) and path.is_file() and not path.is_symlink()
    )


@contextmanager
def looking_at(path: Path) -> Iterator[tuple[Slab | None, bool]]:
    """Open a rank's file to read it without a lock. Raises OSError.

    It yields the slab, or None if the file is not a slab of this format, and whether a rank uses it.
    """
    fd = os.open(path, _LOOK)
    try:
        shape = SlabShape.read(os.pread(fd, _HEADER.size, 0))
        in_use = not _takes_lock(fd, fcntl.LOCK_SH)
        if not in_use:
            fcntl.flock(fd, fcntl.LOCK_UN)
        yield None if shape is None else Slab(str(path), fd, shape), in_use
    finally:
        os.close(fd)


def open_to_read(path: Path, calls: FileCalls) -> Slab | None:
    """Open another rank's file without a lock.

    Returns None where it is not a slab of this format, or where other users may have written it. Raises
    OSError.
    """
    fd = os.open(path, _LOOK)
    try:
        status, shape = os.fstat(fd), SlabShape.read(os.pread(fd, _HEADER.size, 0))
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if shape is not None and is_ours and not status.st_mode & 0o022:
            return Slab(str(path), fd, shape, calls)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def remove(path: Path) -> bool:
    """Remove a rank's file, and its directory if that is empty then.

    Returns False where a rank uses it, or it is not a slab. Raises OSError, also where only the directory
    cannot be removed.
    """
    fd = os.open(path, _LOOK)
    try:
        is_slab = os.pread(fd, len(_MAGIC), 0) in (_MAGIC, b"", bytes(len(_MAGIC)))
        if not is_slab or not _takes_lock(fd, fcntl.LOCK_EX):
            return False
        path.unlink()  # A rank that opens it now waits for the lock, then finds it removed.
        try:
            path.parent.rmdir()
        except OSError as error:
            # It has something else in it, such as the file of a rank that came since, or another command
            # has removed it.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
        return True
    finally:
        os.close(fd)


def open_memory(fd: int | None, shape: SlabShape, calls: FileCalls = FileCalls()) -> Slab:
    """Open the slab in a memfd that a supervisor holds; with None it is in one that ends with this process.

    Raises as open_file does.
    """
    if fd is None:
        own = os.memfd_create("isthmus-tier", os.MFD_CLOEXEC)
    else:  # A lock belongs to the open file, which the supervisor shares, so it is opened once more.
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"--kv-tier-fd={fd}: {error.strerror}") from error
    with _closing_unless_opened("memory", own):
        _lock("memory", own)
    return _locked_slab("memory", own, shape, calls)


def _takes_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(name: str, fd: int) -> None:
    """Lock the file; wait a moment for a command that reads or removes it. Raises SlabInUse and OSError."""
    deadline_s = time.monotonic() + _LOOKS_END_S
    while not _takes_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= deadline_s:
            raise SlabInUse(f"{name} is another life's still")
        time.sleep(_LOOKS_END_S / 50)


def _locked_slab(name: str, fd: int, shape: SlabShape, calls: FileCalls) -> Slab:
    with _closing_unless_opened(name, fd, f"{shape.size_bytes} bytes: "):
        # An incarnation that was killed before it wrote the header may have left holes in the file.
        if os.fstat(fd).st_size != shape.size_bytes or os.pread(fd, _HEADER.size, 0) != shape.header:
            _allocate(fd, shape.size_bytes, calls)
        return Slab(name, fd, shape, calls)


def _allocate(fd: int, size_bytes: int, calls: FileCalls) -> None:
    try:
        os.ftruncate(fd, size_bytes)
        for start in range(0, size_bytes, _ALLOCATED_AT_ONCE):
            calls.allocate(fd, start, min(_ALLOCATED_AT_ONCE, size_bytes - start))
    except OSError:
        os.ftruncate(fd, 0)
        raise


def _record_at(slot: int) -> int:
    return _PAGE + slot * _RECORD.size


def _records_of(table: bytearray) -> list[memoryview]:
    view = memoryview(table)
    return [view[start : start + _RECORD.size] for start in range(0, len(table), _RECORD.size)]


def _packed(stored: Stored) -> bytes:
    sequence = stored.sequence | stored.kind << _KIND_AT | (_WITH_DRAFT if stored.with_draft else 0)
    fields = (stored.key, stored.parent_key, stored.block_hash, stored.digest, sequence)
    record = _RECORD.pack(*fields, 0)
    return _RECORD.pack(*fields, digest_of(memoryview(record)[:_RECORDED]))


def unpacked(slot: int, record: memoryview) -> Stored | None:
    key, parent_key, block_hash, digest, sequence, own_digest = _RECORD.unpack(record)
    if digest_of(record[:_RECORDED]) != own_digest or sequence >> _KIND_AT & _KIND_BITS not in _KINDS:
        return None
    kind, with_draft = SlotKind(sequence >> _KIND_AT & _KIND_BITS), bool(sequence & _WITH_DRAFT)
    sequence &= (1 << _KIND_AT) - 1
    return Stored(slot, key, parent_key, block_hash, digest, sequence, kind, with_draft)
