"""A rank in a process of its own: registers pools, says where they are, then answers "snapshot" lines.

Usage: passive_rank.py TRANSPORT SEED UNITSxBYTES...
"""

import json
import sys

import numpy as np

from services.transfer.open_transport import open_transport
from services.values.kv import PoolMemory


def main() -> None:
    # NIXL imports torch, which takes more than a second, to ask a torch without CUDA for its CUDA.
    sys.modules["torch"] = None  # type: ignore[assignment]
    name, seed, *shapes = sys.argv[1:]
    rng = np.random.default_rng(int(seed))
    pools = [rng.integers(0, 256, tuple(map(int, shape.split("x"))), dtype=np.uint8) for shape in shapes]
    transport = open_transport(name)
    memories = [PoolMemory(pool.ctypes.data, len(pool)) for pool in pools]
    transport.register(memories, [pool.shape[1] for pool in pools])
    facts = {"metadata": transport.metadata().hex(), "base_addresses": [pool.ctypes.data for pool in pools]}
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        for pool in pools:
            sys.stdout.buffer.write(pool.tobytes())
        sys.stdout.buffer.flush()
    transport.close()


main()
