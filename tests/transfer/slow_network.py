"""This module has what NIXL does over TCP, where a stopped peer keeps a write under way.

Run with UCX_TLS=tcp; prints what was seen.

release in flight:  returns only when every byte has landed
peer killed:        polling ends with PeerFailed
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from conftest import PassiveRank
from services.kv.transfer_plan import PageMove
from services.transfer.open_transport import open_transport
from services.values.errors import PeerFailed
from services.values.kv import PoolMemory

NUM_PAGES, PAGE_BYTES = 16, 2 << 20
EVERYTHING = [PageMove(0, 0, NUM_PAGES)]


def main() -> None:
    pages = np.full((NUM_PAGES, PAGE_BYTES), 7, dtype=np.uint8)
    rank = PassiveRank("nixl", (NUM_PAGES, PAGE_BYTES), seed=1)
    transport = open_transport("nixl")
    transport.register([PoolMemory(pages.ctypes.data, NUM_PAGES)], [PAGE_BYTES])
    peer = transport.add_peer(rank.metadata, rank.memories)

    with rank.stopped():
        write = transport.write(peer, EVERYTHING)
        under_way = not write.poll()
    write.release()
    landed = bool((rank.snapshot()[0] == 7).all())

    with rank.stopped():  # or the write may be over before the signal is there
        write = transport.write(peer, EVERYTHING)
        rank.kill()
    failure, deadline_s = "", time.monotonic() + 10
    while not failure and time.monotonic() < deadline_s:
        try:
            write.poll()
        except PeerFailed as error:
            failure = str(error)
    write.release()
    transport.close()
    print(json.dumps({"under_way": under_way, "landed": landed, "failure": failure}))


main()
