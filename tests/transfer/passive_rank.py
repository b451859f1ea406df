"""A rank in a process of its own: registers a pool, says where it is, then answers "snapshot" lines.

Usage: passive_rank.py TRANSPORT NUM_PAGES PAGE_BYTES SEED
"""

import json
import sys

import numpy as np

from services.transfer.choose import open_transport
from services.values.kv import PoolMemory


def main() -> None:
    name, num_pages, page_bytes, seed = sys.argv[1], *map(int, sys.argv[2:])
    pages = np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
    transport = open_transport(name)
    transport.register(PoolMemory(pages.ctypes.data, num_pages), page_bytes)
    facts = {"metadata": transport.metadata().hex(), "base_address": pages.ctypes.data}
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        sys.stdout.buffer.write(pages.tobytes())
        sys.stdout.buffer.flush()
    transport.close()


main()
