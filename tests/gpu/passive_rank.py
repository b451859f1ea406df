"""A rank in a process of its own with pools on the device; says where, then answers "snapshot" lines.

Usage: passive_rank.py DEVICE UNITSxBYTES...
"""

import json
import sys

import torch

from services.transfer.open_transport import open_transport
from services.values.kv import PoolMemory


def pool_memory(pages: torch.Tensor) -> PoolMemory:
    kind = "VRAM" if pages.device.type == "cuda" else "DRAM"
    return PoolMemory(pages.data_ptr(), len(pages), kind, pages.device.index or 0)


def main() -> None:
    device, *shapes = sys.argv[1:]
    pools = [torch.zeros(*map(int, s.split("x")), dtype=torch.uint8, device=device) for s in shapes]
    memories = [pool_memory(pool) for pool in pools]
    transport = open_transport("nixl")
    transport.register(memories, [pool.shape[1] for pool in pools])
    addresses = [memory.base_address for memory in memories]
    facts = {"metadata": transport.metadata().hex(), "addresses": addresses}
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        for pool in pools:
            sys.stdout.buffer.write(pool.cpu().numpy().tobytes())
        sys.stdout.buffer.flush()
    transport.close()


if __name__ == "__main__":
    main()
