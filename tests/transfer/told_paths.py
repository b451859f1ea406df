"""This module has what a NIXL transport tells of the way by which it has written to another process; prints
it as JSON."""

import ctypes
import json
import logging
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from conftest import PassiveRank
from services.kv.transfer_plan import PageMove
from services.transfer.nixl_settings import NixlSettings
from services.transfer.open_transport import open_transport
from services.values.kv import PoolMemory

NUM_PAGES, PAGE_BYTES = 4, 1 << 20


def environment() -> int | None:
    """Where the C library has the process's: another thread may be reading there."""
    return ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in passive_rank.py
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    pages = np.full((NUM_PAGES, PAGE_BYTES), 7, dtype=np.uint8)
    rank = PassiveRank("nixl", (NUM_PAGES, PAGE_BYTES), seed=1)
    named, lies_at = set(os.environ), environment()
    transport = open_transport("nixl", NixlSettings(expects_rdma=True, writes=True))
    is_left_alone = set(os.environ) == named and environment() == lies_at
    transport.register([PoolMemory(pages.ctypes.data, NUM_PAGES)], [PAGE_BYTES])
    peer = transport.add_peer(rank.metadata, rank.memories)
    before = list(transport.paths)
    for _ in range(2):
        write = transport.write(peer, [PageMove(0, 0, NUM_PAGES)])
        while not write.poll():
            pass
        write.release()
    (path,) = transport.paths or (None,)
    landed = bool((rank.snapshot()[0] == 7).all())
    inherited = {name: os.environ.get(name, "") for name in ("UCX_LOG_FILE", "UCX_PROTO_INFO")}
    transport.close()
    rank.kill()
    told = {"before": before, "path": path and [path.kind, path.reach, path.lanes]}
    print(json.dumps(told | {"landed": landed, "inherited": inherited, "is_left_alone": is_left_alone}))


main()
