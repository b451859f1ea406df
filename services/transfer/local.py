"""This transport copies between processes of one host and one user with process_vm_writev(2).

A write is over when `write` returns. Nothing is registered with the kernel: the permission is that of ptrace,
which processes of one user have over each other unless Yama forbids it.
"""

import ctypes
import errno
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.kv.transfer_plan import PageMove
from services.transfer.transport import Extents, PeerName, RankPools, pieces_of
from services.values.errors import ConfigError, PeerFailed
from services.values.kv import KvPath, KvPathKind, PoolMemory

_IOV_MAX = 1024  # One call takes no more pieces (UIO_MAXIOV of linux/uio.h).
_MAX_CALL_BYTES = 1 << 30  # It is below MAX_RW_COUNT (2 GiB less a page), where the kernel cuts a call short.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]

_PATH = KvPath(KvPathKind.SHARED_MEMORY, "intra-node", "process_vm_writev")

_REASONS = {
    errno.ESRCH: "its process is gone",
    errno.EFAULT: "its memory is not mapped",
    errno.EPERM: "the kernel does not let us write to it (another user, or Yama's ptrace_scope)",
}


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    pid: int
    start_ticks: int  # This counts since boot, and tells the processes that had one pid apart.
    boot_id: str
    pid_namespace: str  # A pid has no meaning outside of it.

    @classmethod
    def own(cls) -> "_Process":
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            raise ConfigError("the local transport needs /proc")
        return cls(secrets.token_hex(8), pid, start_ticks, *_host())

    @classmethod
    def parse(cls, metadata: bytes) -> "_Process":
        try:
            fields = json.loads(metadata)
            return cls(
                str(fields["name"]),
                int(fields["pid"]),
                int(fields["start_ticks"]),
                str(fields["boot_id"]),
                str(fields["pid_namespace"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise PeerFailed("the peer's metadata is not that of a local transport") from error

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def _host() -> tuple[str, str]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, os.readlink("/proc/self/ns/pid")


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat (proc_pid_stat(5)), or None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in field 2 may hold spaces and parentheses, so fields are counted from its last one.
    return int(stat.rpartition(")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class _LandedWrite:
    group_bytes: tuple[int, ...]

    def poll(self) -> bool:
        return True

    def release(self) -> None:
        pass


class LocalTransport:
    """It implements services.transfer.transport.Transport."""

    name = "local"

    def __init__(self) -> None:
        self._own = _Process.own()
        self._pools: RankPools | None = None
        self._peers: dict[PeerName, tuple[_Process, RankPools]] = {}
        self.paths: tuple[KvPath, ...] = ()

    def register(self, memories: Sequence[PoolMemory], unit_bytes: Sequence[int]) -> None:
        pools = RankPools(tuple(memories), tuple(unit_bytes))
        if pools.kinds != ("DRAM",):
            raise ConfigError(f"the local transport moves DRAM only, not {', '.join(pools.kinds)}; use nixl")
        self._pools = pools

    def metadata(self) -> bytes:
        return json.dumps(asdict(self._own)).encode()

    def add_peer(self, metadata: bytes, memories: Sequence[PoolMemory]) -> PeerName:
        assert self._pools is not None, "register comes first"
        process = _Process.parse(metadata)
        own = self._own
        if (process.boot_id, process.pid_namespace) != (own.boot_id, own.pid_namespace):
            raise PeerFailed("the peer is on another host or in another container; use the nixl transport")
        pools = self._pools.of_peer(memories)
        if pools.kinds != ("DRAM",):
            kinds = ", ".join(pools.kinds)
            raise PeerFailed(f"the local transport moves DRAM only, the peer's pools are {kinds}")
        if not process.alive:
            raise PeerFailed(f"the peer's process {process.pid} is gone")
        peer = PeerName(process.name)
        self._peers[peer] = (process, pools)
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        self._peers.pop(peer, None)

    def write(self, peer: PeerName, moves: Sequence[PageMove]) -> _LandedWrite:
        assert self._pools is not None, "register comes first"
        if peer not in self._peers:
            raise PeerFailed(f"no peer {peer} is known")
        process, pools = self._peers[peer]
        pieces = pieces_of(moves, self._pools, pools)
        group_bytes = pieces.group_bytes(len(pools.memories))
        if not process.alive:  # Another process may have its pid by now.
            raise PeerFailed(f"the peer's process {process.pid} is gone")
        _copy(process.pid, pieces.source, pieces.target)
        self.paths = (_PATH,)
        return _LandedWrite(group_bytes)

    def close(self) -> None:
        self._peers.clear()


def _copy(pid: int, source: Extents, target: Extents) -> None:
    """Copy piece for piece; row i has the same length in both. Both arrays are changed."""
    first = 0
    while first < len(source):
        last = first + _rows_per_call(source[first : first + _IOV_MAX, 1])
        written = _write_once(pid, source[first:last], target[first:last])
        first += _advance(source[first:last], target[first:last], written)


def _rows_per_call(sizes: NDArray[np.uint64]) -> int:
    return max(1, int(np.searchsorted(np.cumsum(sizes), _MAX_CALL_BYTES, side="right")))


def _write_once(pid: int, source: Extents, target: Extents) -> int:
    rows = len(source)
    written = _libc.process_vm_writev(pid, source.ctypes.data, rows, target.ctypes.data, rows, 0)
    if written < 0:
        code = ctypes.get_errno()
        reason = _REASONS.get(code, os.strerror(code))
        raise PeerFailed(f"cannot write to the peer's process {pid}: {reason}")
    if written == 0:
        raise PeerFailed(f"cannot write to the peer's process {pid}: nothing was taken")
    return int(written)


def _advance(source: Extents, target: Extents, written: int) -> int:
    """Return how many rows `written` bytes complete. The row in which they end is cut to its rest."""
    ends = np.cumsum(source[:, 1])
    rows = int(np.searchsorted(ends, written, side="right"))
    if rows < len(source):
        begin = int(ends[rows]) - int(source[rows, 1])
        for extents in (source, target):
            extents[rows, 0] += np.uint64(written - begin)
            extents[rows, 1] -= np.uint64(written - begin)
    return rows
