"""The KV pool: one allocation, page-major, so that a page is one run of bytes over all layers."""

import os
from collections.abc import Iterator, Sequence

import torch

from services.engine.start_fault import start_fault
from services.engine.torch.page_reader import PageReader, page_reader
from services.transfer.host_memory import map_memory
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout, PageId, PoolMemory


class KvPool:
    """Owns the pool's memory; `kv` is [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]."""

    def __init__(
        self, group: KvGroup, *, num_pages: int, page_size: int, model_fingerprint: int, device: torch.device
    ) -> None:
        """Allocate and zero the pool.

        Raises:
            ConfigError: it is empty, or larger than all the memory that the device has.
            Unavailable: there is not so much memory now.
        """
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"a KV pool needs pages: num_pages={num_pages}, page_size={page_size}")
        page_shape = (len(group.layer_ids), 2, group.num_kv_heads, page_size, group.head_dim)
        dtype: torch.dtype = getattr(torch, group.dtype)
        page_bytes = torch.Size(page_shape).numel() * dtype.itemsize
        self.layout = KvLayout(page_size, page_bytes, model_fingerprint, groups=(group,))
        memory = _allocate(num_pages * page_bytes, device)
        self.kv = memory.view(dtype).view(num_pages, *page_shape)
        self.read_pages: PageReader = page_reader(memory.view(num_pages, page_bytes))

    @property
    def memory(self) -> PoolMemory:
        on_cuda = self.kv.device.type == "cuda"
        kind, device_id = ("VRAM", self.kv.device.index or 0) if on_cuda else ("DRAM", 0)
        return PoolMemory(self.kv.data_ptr(), self.kv.shape[0], kind, device_id)

    def close(self) -> None:
        """Free the memory; `kv` has no pages afterwards."""
        self.kv = self.kv.new_empty(0, *self.kv.shape[1:])
        self.read_pages = _closed


def _closed(pages: Sequence[PageId]) -> Iterator[memoryview]:
    raise ProtocolError(f"{len(pages)} pages are to be read of a pool that is closed")


def full_attention_group(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvGroup:
    name = str(dtype).removeprefix("torch.")
    return KvGroup(GroupKind.FULL_ATTENTION, tuple(range(num_layers)), num_kv_heads, head_dim, name)


def _allocate(size_bytes: int, device: torch.device) -> torch.Tensor:
    # No slot is read before it is written; zeroed so that page faults come now and not in a step.
    try:
        if device.type == "cpu":
            return torch.frombuffer(map_memory(size_bytes), dtype=torch.uint8).zero_()
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        message = f"a KV pool of {size_bytes} bytes does not fit on {device}: {error}"
        if size_bytes > _total_bytes(device):
            raise ConfigError(message) from error
        raise start_fault(message, error) from error


def _total_bytes(device: torch.device) -> int:
    """Whoever holds them."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)
