"""What a NIXL transport tells of the way by which it has written to another process; prints it as JSON."""

import json
import logging
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from conftest import PassiveRank
from services.kv.transfer_plan import PageMove
from services.transfer.choose import open_transport
from services.transfer.nixl_settings import NixlSettings
from services.values.kv import PoolMemory

NUM_PAGES, PAGE_BYTES = 4, 1 << 20


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    pages = np.full((NUM_PAGES, PAGE_BYTES), 7, dtype=np.uint8)
    rank = PassiveRank("nixl", (NUM_PAGES, PAGE_BYTES), seed=1)
    transport = open_transport("nixl", NixlSettings(expects_rdma=True, writes=True))
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
    inherited = sorted(name for name in os.environ if name in ("UCX_LOG_FILE", "UCX_PROTO_INFO"))
    transport.close()
    rank.kill()
    told = {"before": before, "path": path and [path.kind, path.reach, path.lanes]}
    print(json.dumps(told | {"landed": landed, "inherited": inherited}))


main()
