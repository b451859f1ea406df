"""A rank in a process of its own with a pool on the device; says where it is, then answers "snapshot" lines.

Usage: passive_rank.py DEVICE NUM_PAGES PAGE_BYTES
"""

import json
import sys

import torch

from services.transfer.choose import open_transport
from services.values.kv import PoolMemory


def pool_memory(pages: torch.Tensor) -> PoolMemory:
    kind = "VRAM" if pages.device.type == "cuda" else "DRAM"
    return PoolMemory(pages.data_ptr(), len(pages), kind, pages.device.index or 0)


def main() -> None:
    device, num_pages, page_bytes = sys.argv[1], *map(int, sys.argv[2:])
    pages = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
    memory = pool_memory(pages)
    transport = open_transport("nixl")
    transport.register([memory], [page_bytes])
    facts = {"metadata": transport.metadata().hex(), "address": memory.base_address}
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        sys.stdout.buffer.write(pages.cpu().numpy().tobytes())
        sys.stdout.buffer.flush()
    transport.close()


if __name__ == "__main__":
    main()
