"""Ranks with one directory of --kv-tier may read what the others keep there; only its owner writes a file.

    engine's thread   find: which slot had this key at the last look
    tier's thread     look: list the files, read the tables of those that have changed
                      read: a slot, whose digest is compared with that of its record

A key names layout, salt and tokens, so a block is the same whoever has computed it. An owner may overwrite a
slot at any time, begin another life, or be gone: its file outlives it. It empties a slot's record before it
writes the slot, so bytes with another digest than their record are torn, or the record is another one by now.

The directory has a name of its own, in a file of it, by which routers tell who reads whose files: a path may
be another directory on another machine.

Rule 1: a file is read only where no other user may have written it.
Rule 2: a file that was removed or made anew is noticed at the next look. Until then its slots have other
        digests.
"""

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from services.kv.tiers.records import Stored
from services.tier.slab import RECORD_BYTES, FileCalls, Slab, SlabShape, open_to_read, slab_files, unpacked
from services.values.errors import ProtocolError

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * RECORD_BYTES
_MOST_RECORDS = 8_192  # A look takes in so many changed records of all files; the next one takes in more.
_MOST_FILES = 64
_MOST_KNOWN = 1 << 20  # A record that is known takes 500 bytes of a rank's memory.
_NAME, _NAME_BYTES, _NAME_FORM = "name", 8, rb"[0-9a-f]{16}"
_CLOCK_TICK_NS = 50_000_000  # A file that has just changed may change again at the same time by its clock.


class SlotGone(Exception):
    """The slot's file was removed or made anew."""


class Seen(NamedTuple):
    slot: int  # It counts the slots of all files that were ever open.
    digest: int
    with_draft: bool = False


@dataclass(slots=True)
class _File:
    slab: Slab
    first_slot: int
    inode: int
    changed_ns: int = 0  # All records are known as they were then.
    table: bytearray = field(default_factory=bytearray)
    records: dict[int, bytes] = field(default_factory=dict)  # The keys by slot.


class SharedFiles:
    """`find` and `forget` are for any thread, the other methods for the tier's thread."""

    def __init__(
        self, layout_directory: Path | None, own_rank: str, shape: SlabShape, calls: FileCalls, name: str = ""
    ) -> None:
        """`name` is the directory's, as `name_of` gives it; where it is empty, looks try to learn it. Without
        a directory there is nothing to look at until `begin`."""
        self.name = name
        self._directory = layout_directory
        self._own_rank = own_rank
        self._shape = shape
        self._calls = calls
        self._files: dict[Path, _File] = {}
        self._failing: set[Path] = set()
        self._next_slot = 0
        self._num_known = 0  # This counts the records of all files.
        self._is_full = False  # It was said that records of others are left out.
        self._left = 0  # So many records may yet be taken in by this look.
        self._seen: dict[bytes, Seen] = {}
        self._forgotten: deque[bytes] = deque()
        self._also: dict[bytes, dict[int, Seen]] = {}  # Further places, by slot; for the tier's thread alone.

    def __repr__(self) -> str:
        return f"SharedFiles(files={len(self._files)} blocks={len(self._seen)})"

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    def begin(self, layout_directory: Path) -> None:
        """Look at the files of this directory from now on, if there was none. Any thread may call it."""
        self._directory = self._directory or layout_directory

    def find(self, key: bytes) -> Seen | None:
        return self._seen.get(key)

    def forget(self, key: bytes, slot: int) -> None:
        """Note that a block is not in this slot, as the last look but one may have said, or came changed from
        there. From the next look on it is found where else it is."""
        if (seen := self._seen.get(key)) is not None and seen.slot == slot:
            self._seen.pop(key, None)
            self._forgotten.append(key)

    def look(self) -> None:
        """Learn what has changed. A file that fails is done without, and said once. Raises OSError."""
        if self._directory is None:
            return
        self._left = _MOST_RECORDS
        while self._forgotten:
            self._find_elsewhere(self._forgotten.popleft())
        if not self.name:
            with suppress(OSError):  # It was said at the start; routers do not know who reads what is here.
                self.name = name_of(self._directory)
        paths = [path for path in slab_files(self._directory) if path.parent.name != self._own_rank]
        for path in self._files.keys() - set(paths[:_MOST_FILES]):
            self._drop(path)
        for path in paths[:_MOST_FILES]:
            try:
                self._look_at(path)
                self._failing.discard(path)
            except OSError as error:
                self._drop(path)
                if path not in self._failing:
                    self._failing.add(path)
                    log.warning("kv_tier_shared_fails where=%s why=%s", path, error.strerror)

    def read(self, slot: int, buffer: memoryview) -> None:
        """Read the slot into the buffer. Raises SlotGone and OSError."""
        file = self._file_of(slot)
        file.slab.read(slot - file.first_slot, buffer)

    def read_ahead(self, slot: int) -> None:
        """Have the kernel read the slot. Raises SlotGone and OSError."""
        file = self._file_of(slot)
        file.slab.read_ahead(slot - file.first_slot)

    def has_changed(self, slot: int, digest: int) -> bool:
        """Return whether the owner has changed the slot since its digest was known. Raises as `read` does."""
        file = self._file_of(slot)
        record = file.slab.record(slot - file.first_slot)
        return record is None or record.digest != digest

    def write(self, slot: int, payload: memoryview, record: Stored) -> int:
        raise ProtocolError(f"slot {slot} is another rank's, which alone writes it")

    def close(self) -> None:
        for path in tuple(self._files):
            self._drop(path)

    def _look_at(self, path: Path) -> None:
        status, file = path.stat(follow_symlinks=False), self._files.get(path)
        if file is not None and (file.inode != status.st_ino or not file.slab.has_its_shape):
            self._drop(path)
            file = None
        if file is None:
            if (file := self._open(path)) is None:
                return
        elif file.changed_ns == status.st_mtime_ns:
            return
        is_settled = time.time_ns() - status.st_mtime_ns > _CLOCK_TICK_NS
        file.changed_ns = status.st_mtime_ns if self._take_in(file) and is_settled else 0

    def _open(self, path: Path) -> _File | None:
        slab = open_to_read(path, self._calls)
        if slab is None:
            return None
        if (slab.shape.layout_id, slab.shape.slot_bytes) != (self._shape.layout_id, self._shape.slot_bytes):
            slab.close()
            return None
        file = self._files[path] = _File(slab, self._next_slot, slab.inode)
        file.table = bytearray(slab.shape.num_slots * RECORD_BYTES)
        self._next_slot += slab.shape.num_slots
        return file

    def _take_in(self, file: _File) -> bool:
        """Take in the records that have changed, and return whether these were all."""
        new = file.slab.table()
        for slot in _changed_slots(file.table, new):
            if self._left == 0:
                return False
            self._left -= 1
            at = slice(slot * RECORD_BYTES, (slot + 1) * RECORD_BYTES)
            file.table[at] = new[at]
            self._forget_slot(file, slot)
            if (stored := unpacked(slot, memoryview(new)[at])) is not None and self._may_know_more():
                file.records[slot] = stored.key
                self._num_known += 1
                self._note(stored.key, Seen(file.first_slot + slot, stored.digest, stored.with_draft))
        return True

    def _may_know_more(self) -> bool:
        if self._num_known < _MOST_KNOWN:
            return True
        if not self._is_full:
            self._is_full = True
            log.warning("kv_tier_shared_full where=%s blocks=%d", self._directory, self._num_known)
        return False

    def _note(self, key: bytes, seen: Seen) -> None:
        if (before := self._seen.get(key)) is not None and before.slot != seen.slot:
            self._also.setdefault(key, {})[before.slot] = before
        self._seen[key] = seen

    def _forget_slot(self, file: _File, slot: int) -> None:
        """Forget what the slot had. Where another file has that too, it is found there from now on."""
        if (key := file.records.pop(slot, None)) is None:
            return
        self._num_known -= 1
        at, also = file.first_slot + slot, self._also.get(key, {})
        also.pop(at, None)
        if (seen := self._seen.get(key)) is not None and seen.slot == at:
            self._seen.pop(key, None)
        self._find_elsewhere(key)

    def _find_elsewhere(self, key: bytes) -> None:
        """Let a block be found where else it is, if it is not found now."""
        also = self._also.get(key, {})
        if also and key not in self._seen:
            self._seen[key] = also.popitem()[1]
        if not also:
            self._also.pop(key, None)

    def _drop(self, path: Path) -> None:
        if (file := self._files.pop(path, None)) is not None:
            file.slab.close()
            for slot in tuple(file.records):
                self._forget_slot(file, slot)

    def _file_of(self, slot: int) -> _File:
        for file in self._files.values():
            if file.first_slot <= slot < file.first_slot + file.slab.shape.num_slots:
                return file
        raise SlotGone


def name_of(layout_directory: Path) -> str:
    """Return what names the directory wherever it is mounted. The first rank that asks chooses it.

    Raises OSError, also where the name is not this user's own.
    """
    path, own = layout_directory / _NAME, layout_directory / f".{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):
        return _read_name(path)
    fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(secrets.token_hex(_NAME_BYTES))
        with suppress(FileExistsError):  # Another rank has chosen meanwhile.
            os.link(own, path)
    finally:
        own.unlink()
    return _read_name(path)


def _read_name(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        status, name = os.fstat(file.fileno()), file.read(3 * _NAME_BYTES)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may have written it", str(path))
    if re.fullmatch(_NAME_FORM, name) is None:
        raise OSError(errno.EINVAL, "it is no name of a directory", str(path))
    return name.decode()


def _changed_slots(old: bytearray, new: bytearray) -> Iterator[int]:
    for start in range(0, len(new), _CHUNK_BYTES):
        if old[start : start + _CHUNK_BYTES] == new[start : start + _CHUNK_BYTES]:
            continue
        for at in range(start, min(start + _CHUNK_BYTES, len(new)), RECORD_BYTES):
            if old[at : at + RECORD_BYTES] != new[at : at + RECORD_BYTES]:
                yield at // RECORD_BYTES
