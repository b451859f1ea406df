"""A group's KV pool is one allocation, page-major, so that a page is one run of bytes over all its layers."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.engine.start_fault import start_fault
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.page_reader import PageReader, page_reader
from services.transfer.transport import map_memory
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import KvGroup, PageId, PoolMemory


class KvPool:
    """This owns the memory of a group of attention layers, full or windowed; `kv` is what is in it.

    Where K and V are alike, the bytes are those of [num_pages, num_layers, 2, num_kv_heads, page_size,
    head_dim]. The group's own unit_bytes are not read: they come of its shape.
    """

    def __init__(
        self,
        group: KvGroup,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate and zero the pool. `compute_dtype` is the model's, where it is not the group's.

        Raises:
            ConfigError: it is empty, or larger than all the memory that the device has.
            Unavailable: there is not so much memory now.
        """
        if num_pages < 1 or page_size < 1:
            raise ConfigError(f"a KV pool needs pages: num_pages={num_pages}, page_size={page_size}")
        dtype: torch.dtype = getattr(torch, group.dtype)
        shape = page_shape(group, page_size)
        self.group = group
        self.unit_bytes = shape.page_numbers * dtype.itemsize
        memory = allocate(num_pages * self.unit_bytes, device)
        widened = compute_dtype if compute_dtype is not dtype else None
        self.kv = PagedKv(memory.view(dtype), shape, widened)
        self.read_pages: PageReader = page_reader(memory.view(num_pages, self.unit_bytes))

    @property
    def memory(self) -> PoolMemory:
        return pool_memory(self.kv.numbers, self.kv.num_pages)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.kv.layer(index)

    def close(self) -> None:
        self.kv = replace(self.kv, numbers=self.kv.numbers.new_empty(0))
        self.read_pages = closed_pool


def pool_memory(units: Tensor, num_units: int) -> PoolMemory:
    on_cuda = units.device.type == "cuda"
    kind, device_id = ("VRAM", units.device.index or 0) if on_cuda else ("DRAM", 0)
    return PoolMemory(units.data_ptr(), num_units, kind, device_id)


def page_shape(group: KvGroup, page_size: int) -> PageShape:
    v_head_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
    return PageShape(len(group.layer_ids), group.num_kv_heads, page_size, group.head_dim, v_head_dim)


def closed_pool(pages: Sequence[PageId]) -> Iterator[memoryview]:
    raise ProtocolError(f"{len(pages)} pages are to be read of a pool that is closed")


def allocate(size_bytes: int, device: torch.device, what: str = "a KV pool") -> torch.Tensor:
    """Return zeroed bytes on the device. Raises ConfigError and Unavailable as KvPool does."""
    try:
        if device.type == "cpu":  # the kernel gives zeros, which it does where a page is first written
            return torch.frombuffer(map_memory(size_bytes), dtype=torch.uint8)
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        message = f"{what} of {size_bytes} bytes does not fit on {device}: {error}"
        if size_bytes > _total_bytes(device):
            raise ConfigError(message) from error
        raise start_fault(message, error) from error


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)
