"""`isthmus tier` looks at the files of --kv-tier on this machine.

ls DIR           each layout and rank: size, blocks, whether a rank has it open, or why none can
check DIR        compare every block with its digest
rm DIR/LAYOUT    remove what no rank has open; ranks never remove another layout's files themselves
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from services.cli.table import format_table
from services.settings.flags import load, setting
from services.tier.copies import is_whole
from services.tier.slab import Slab, looking_at, remove, slab_files
from services.values.errors import ConfigError

_ACTIONS = ("ls", "check", "rm")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Look at the files of --kv-tier: `ls DIRECTORY`, `check DIRECTORY`, `rm DIRECTORY/LAYOUT`.

    Exit code 1 where a block differs from its digest, a file fails, or a rank has what was to be removed.
    """

    words: tuple[str, ...] = setting(help="ls, check or rm, and a directory", positional=True)

    def __post_init__(self) -> None:
        if len(self.words) != 2 or self.words[0] not in _ACTIONS:
            raise ConfigError(f"isthmus tier takes {', '.join(_ACTIONS)}, and a directory")
        if not Path(self.words[1]).is_dir():
            raise ConfigError(f"{self.words[1]} is no directory")


def run(argv: list[str]) -> int:
    config = load(TierConfig, argv, prog="isthmus tier")
    action, directory = config.words[0], Path(config.words[1])
    try:
        return {"ls": _list, "check": _check, "rm": _remove}[action](directory)
    except OSError as error:
        _say_failing(directory, error)
        return 1


def _say_failing(path: Path, error: OSError) -> None:
    """Say what is somebody else's, has been truncated, or lies on a disk that fails."""
    print(f"isthmus tier: {error.filename or path}: {error.strerror}", file=sys.stderr)


def _list(directory: Path) -> int:
    rows = [(path.parent.parent.name, path.parent.name, *_listed(path)) for path in slab_files(directory)]
    print(format_table(["layout", "rank", "MiB", "slots", "blocks", ""], rows) if rows else "no tiers here")
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        print("the file system is read-only: a rank that starts leaves its tier here out")
    return 0


def _listed(path: Path) -> tuple[int, int, int, str]:
    try:
        size = path.stat().st_size
        with looking_at(path) as (slab, in_use):
            if slab is None:
                left = "empty: its rank found no room" if size == 0 else "of another format"
                return size // _MIB, 0, 0, left
            return size // _MIB, slab.shape.num_slots, len(slab.records()), "in use" if in_use else ""
    except OSError as error:
        return 0, 0, 0, f"fails: {error.strerror}"


def _check(directory: Path) -> int:
    num_wrong = 0
    for path in slab_files(directory):
        try:
            num_wrong += _num_wrong(path)
        except OSError as error:
            _say_failing(path, error)
            num_wrong += 1
    return 1 if num_wrong else 0


def _num_wrong(path: Path) -> int:
    with looking_at(path) as (slab, in_use):
        if slab is None:
            return 0
        wrong, total = _differing(slab)
    note = " (a rank writes it meanwhile)" if in_use else ""
    print(f"{path}: {total} blocks, {wrong} differ from their digests{note}")
    return wrong


def _differing(slab: Slab) -> tuple[int, int]:
    buffer, records = memoryview(bytearray(slab.shape.slot_bytes)), slab.records()
    wrong = 0
    for record in records:
        slab.read(record.slot, buffer)
        # A rank may have written the slot meanwhile; then it has emptied or replaced the record first.
        wrong += not is_whole(buffer, record.digest) and slab.record(record.slot) == record
    return wrong, len(records)


def _remove(directory: Path) -> int:
    found, left = slab_files(directory), list[Path]()
    for path in found:
        try:
            if remove(path):
                print(f"removed {path}")
                continue
            print(f"isthmus tier: a rank has {path} open, or it is no tier's", file=sys.stderr)
        except OSError as error:
            _say_failing(path, error)
        left.append(path)
    if not found:
        print(f"isthmus tier: no tiers in {directory}", file=sys.stderr)
    return 1 if left or not found else 0
