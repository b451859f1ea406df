"""UCX prints tables of the protocols that it has chosen (UCX_PROTO_INFO=y); this module parses them.

    [..] | isthmus-1f inter-node cfg#2                              |    our agent, and where the peers are
    [..] | remote memory write by ucp_put*(multi) from host memory  |    the operation: NIXL's WRITE is this
    [..] | Range   | Description | Config                           |
    [..] | 0..2047 | short       | rc_mlx5/mlx5_0:1                 |    bytes of a piece, method, lanes

A table is printed when the first write to a peer of that kind is prepared; peers with the same transports
share one. Seen with the UCX of NIXL 1.5.1.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from services.values.kv import KvPath, KvPathKind

_CELLS = re.compile(r"^(?:\[[^\]]*\] *)*[|+](.*)[|+]$")
_HEAD = re.compile(r"^(\S+) (self|intra-node|inter-node) cfg#\d+")
_WRITE = "remote memory write by ucp_put"
_ROW = re.compile(r"^(\d+)([KMG]?)(?:\.\.(\d+|inf)([KMG]?))?$")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LANE = re.compile(r"\b([a-z]\w*)/")
# Transports are recognised by their prefix (`ucx_info -d`). A write over several transports counts as the
# first of these kinds.
_KINDS = (
    (KvPathKind.TCP, ("tcp",)),
    (KvPathKind.RDMA, ("rc", "dc", "ud", "srd", "gga", "ib")),
    (KvPathKind.CUDA_IPC, ("cuda_ipc", "rocm_ipc", "ze_ipc")),
    (KvPathKind.SHARED_MEMORY, ("cma", "posix", "sysv", "xpmem", "knem", "self", "cuda_copy", "gdr_copy")),
)


def kind_of(lanes: str) -> KvPathKind:
    transports = _LANE.findall(lanes)
    for kind, prefixes in _KINDS:
        if any(re.fullmatch(rf"{prefix}(_\w+)?", name) for name in transports for prefix in prefixes):
            return kind
    return KvPathKind.UNKNOWN


@dataclass(frozen=True, slots=True)
class _LanesRow:
    first_bytes: int
    last_bytes: float
    reach: str
    lanes: str


class UcxTables:
    def __init__(self) -> None:
        self._agent, self._reach, self._is_write = "", "", False
        self._rows: dict[str, list[_LanesRow]] = {}

    def feed(self, lines: Iterable[str]) -> list[str]:
        return [line for line in lines if not self._take(line)]  # These belong to no table.

    def paths(self, agent: str, piece_bytes: int) -> tuple[KvPath, ...]:
        """Return how writes of pieces of that size go, each path once, in the order of UCX's choice."""
        rows = [row for row in self._rows.get(agent, ()) if row.first_bytes <= piece_bytes <= row.last_bytes]
        return tuple(dict.fromkeys(KvPath(kind_of(row.lanes), row.reach, row.lanes) for row in rows))

    def _take(self, line: str) -> bool:
        match = _CELLS.match(line)
        if match is None:
            return False
        cells = [cell.strip() for cell in match[1].split("|")]
        if (head := _HEAD.match(cells[0])) is not None:
            self._agent, self._reach = head[1], head[2]
        elif " by ucp_" in cells[0]:
            self._is_write = cells[0].startswith(_WRITE)
        elif len(cells) == 3 and (size := _ROW.match(cells[0])) is not None:
            self._add(size, cells[2])
        return True

    def _add(self, size: re.Match[str], lanes: str) -> None:
        # An agent also connects to itself, but writes nothing there.
        if not self._is_write or self._reach == "self":
            return
        first = int(size[1]) * _UNITS[size[2]]
        last = first if size[3] is None else _last_bytes(size[3], size[4])
        self._rows.setdefault(self._agent, []).append(_LanesRow(first, last, self._reach, lanes))


def _last_bytes(number: str, unit: str) -> float:
    return math.inf if number == "inf" else int(number) * _UNITS[unit]
