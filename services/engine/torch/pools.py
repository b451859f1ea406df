"""A runner has a pool of device memory for each group of its layout.

A KvPool is one allocation, page-major, so that a page is one run of bytes over all its layers. In a SlotPool,
a slot is one run of bytes: the states of all recurrent layers of one sequence. Pools has a pool for each
group and tells attention where each layer lies.

Digests read the bytes of pages in the host's memory. A pool in host memory is read in place. A pool on a GPU
is copied into pinned memory that each reading thread keeps: as many pages at a time as fit, with one copy for
each run of neighbours and one wait for all. These copies have their own stream; on the compute stream they
would wait for steps.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from services.engine.start_fault import start_fault
from services.engine.torch.attention.kernel_choice import choose_in_place, choose_packings, end_threads
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.step_view import LayerPlace, PagedLayers, Reach
from services.engine.torch.model.kv_groups import (
    ProbeResult,
    State,
    StateName,
    attention_groups,
    recurrent_group,
)
from services.kv.tails import PoolSizes
from services.kv.transfer_plan import runs_of
from services.transfer.transport import map_memory
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import KvGroup, KvLayout, PageId, PoolMemory

PageReader = Callable[[Sequence[PageId]], Iterator[memoryview]]

# Each thread keeps so many bytes, or one page if that is larger.
_STAGING_BYTES = 8 << 20


def page_reader(pages: Tensor) -> PageReader:
    """Return a reader of the pool `pages`, uint8 [num_pages, page_bytes] and contiguous.

    See ModelRunner.read_pages.
    """
    if pages.device.type == "cuda":
        return StagedPages(pages, torch.cuda.Stream(pages.device), pinned=True).read
    whole, page_bytes = memoryview(pages.view(-1).numpy()), pages.shape[1]
    return lambda wanted: _slices(whole, wanted, page_bytes)


class StagedPages:
    """Any thread may read, with one read at a time on each thread."""

    def __init__(
        self, pages: Tensor, stream: torch.cuda.Stream, *, pinned: bool, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        self._pages = pages
        self._stream = stream
        self._pinned = pinned
        self._num_staged = max(1, staging_bytes // pages.shape[1])
        self._of_thread = threading.local()

    def read(self, pages: Sequence[PageId]) -> Iterator[memoryview]:
        staging = self._staging()
        staged, page_bytes = memoryview(staging.view(-1).numpy()), self._pages.shape[1]
        for first in range(0, len(pages), self._num_staged):
            wanted = pages[first : first + self._num_staged]
            self._fetch(wanted, staging)
            yield from _slices(staged, range(len(wanted)), page_bytes)

    def _staging(self) -> Tensor:
        if not hasattr(self._of_thread, "staging"):
            shape = (self._num_staged, self._pages.shape[1])
            self._of_thread.staging = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned)
        staging: Tensor = self._of_thread.staging
        return staging

    def _fetch(self, pages: Sequence[PageId], staging: Tensor) -> None:
        end = 0
        with torch.cuda.stream(self._stream):
            for run in runs_of(pages):
                start, end = end, end + run.num_pages
                staging[start:end].copy_(self._pages[run.first_page : run.end], non_blocking=True)
        self._stream.synchronize()


def _slices(whole: memoryview, pages: Sequence[int], page_bytes: int) -> Iterator[memoryview]:
    return (whole[page * page_bytes : (page + 1) * page_bytes] for page in pages)


class KvPool:
    """This owns the memory of a group of attention layers, full or windowed; `kv` is its content.

    Where K and V have equal shapes, the bytes are those of [num_pages, num_layers, 2, num_kv_heads,
    page_size, head_dim]. The pool computes its unit_bytes from the group's shape and ignores the group's own.
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
        """Allocate and zero the pool. `compute_dtype` is the model's, if it differs from the group's.

        Raises ConfigError where the pool is empty or larger than the device's whole memory, and Unavailable
        where too little memory is free now.
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

    @property
    def units(self) -> Tensor:
        return self.kv.numbers.view(torch.uint8).view(self.kv.num_pages, self.unit_bytes)

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
        if device.type == "cpu":  # The kernel zeroes each page at its first write.
            return torch.frombuffer(map_memory(size_bytes), dtype=torch.uint8)
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError.
        message = f"{what} of {size_bytes} bytes does not fit on {device}: {error}"
        if size_bytes > _total_bytes(device):
            raise ConfigError(message) from error
        raise start_fault(message, error) from error


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


_ALIGNMENT = 64  # This is in bytes, so that no two states share a cache line.


class SlotPool:
    """This owns the states' memory; states keep the model's own type, recurrent ones mostly float32."""

    def __init__(self, states: Sequence[State], *, num_slots: int, device: torch.device) -> None:
        """Allocate and zero the pool.

        Raises ConfigError where the pool is empty or larger than the device's whole memory, and Unavailable
        where too little memory is free now.
        """
        if num_slots < 1:
            raise ConfigError(f"a pool of states needs slots: {num_slots=}")
        places, self.slot_bytes = _state_places(states)
        memory = allocate(
            num_slots * self.slot_bytes, device, f"a pool of {num_slots} states (--state-slots)"
        )
        self._slots = memory.view(num_slots, self.slot_bytes)
        self.of_state: dict[StateName, Tensor] = {  # The shape of each is [num_slots, *state.shape].
            state.name: self._slots[:, place].view(state.dtype).unflatten(1, state.shape)
            for state, place in places.items()
        }
        self.read_slots: PageReader = page_reader(self._slots)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def memory(self) -> PoolMemory:
        return pool_memory(self._slots, self.num_slots)

    @property
    def units(self) -> Tensor:
        return self._slots

    def zero(self, slots: Sequence[int]) -> None:
        if slots:  # Most steps begin no sequence, and would launch a copy of no ids and a kernel for none.
            self._slots[list(slots)] = 0

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self._slots[target] = self._slots[source]

    def close(self) -> None:
        self.of_state = {}
        self._slots = self._slots.new_empty(0, self.slot_bytes)
        self.read_slots = closed_pool


def _state_places(states: Sequence[State]) -> tuple[dict[State, slice], int]:
    places, end = {}, 0
    for state in states:
        places[state] = slice(end, end + state.size_bytes)
        end += -(-state.size_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


KvDtype = Literal["fp8_e4m3"]
_KV_DTYPES: Mapping[KvDtype, str] = {"fp8_e4m3": "float8_e4m3fn"}


class Pools:
    """This owns the memory of a model's KV and states.

    Attention finds its KV by `layers`. `slots` is for recurrent layers, and None where the model has none.
    """

    def __init__(
        self,
        probed: ProbeResult,
        *,
        num_pages: int,
        page_size: int,
        sizes: PoolSizes,
        model_fingerprint: int,
        device: torch.device,
        by_kernels: bool = True,
        groups: Sequence[KvGroup] = (),
        kv_dtype: KvDtype | None = None,
    ) -> None:
        """Allocate and zero the pools; full attention's has `num_pages` pages.

        K and V have the type `kv_dtype`, with None the model's. Without `by_kernels` attention gathers pages
        for single tokens, too. `groups` replaces the result of `attention_groups` where it is given.

        Raises ConfigError where a pool is empty or larger than the device's whole memory, or where a latent
        would be stored in another type than the model's. Raises Unavailable where too little memory is free
        now.
        """
        self.calls = probed.calls
        self._paged: list[KvPool] = []
        model_dtype = (groups or attention_groups(probed.calls))[0].dtype
        full, *windowed = _kept_in(groups or attention_groups(probed.calls), kv_dtype)
        for group in (full, *windowed):
            num_units = num_pages if group is full else sizes.num_units(group, page_size, num_pages)
            pool = KvPool(
                group,
                num_pages=num_units,
                page_size=page_size,
                device=device,
                compute_dtype=getattr(torch, model_dtype),
            )
            self._paged.append(pool)
        self.slots: SlotPool | None = None
        units = [full, *(replace(pool.group, unit_bytes=pool.unit_bytes) for pool in self._paged[1:])]
        if probed.states:
            states = recurrent_group(probed.states, model_dtype)
            num_slots = sizes.num_units(states, page_size, num_pages)
            self.slots = SlotPool(probed.states, num_slots=num_slots, device=device)
            units.append(replace(states, unit_bytes=self.slots.slot_bytes))
        page_bytes = self._paged[0].unit_bytes
        self.layout = KvLayout(page_size, page_bytes, model_fingerprint, groups=tuple(units))
        kv = [pool.kv for pool in self._paged]
        heads = [_num_heads(probed, group) for group in (full, *windowed)]
        self._in_place = choose_in_place(kv, heads) if by_kernels else (None,) * len(kv)
        are_capped = [_are_capped(probed, group) for group in (full, *windowed)]
        packings = choose_packings(kv, heads, are_capped) if by_kernels else ()
        self.layers = PagedLayers(kv, self._in_place, _places(probed, self.layout.groups), packings)

    @property
    def memory(self) -> tuple[PoolMemory, ...]:
        states = () if self.slots is None else (self.slots.memory,)
        return (*(pool.memory for pool in self._paged), *states)

    @property
    def units(self) -> tuple[Tensor, ...]:
        """Return the bytes of each group's pool, uint8 [num_units, unit_bytes]."""
        states = () if self.slots is None else (self.slots.units,)
        return (*(pool.units for pool in self._paged), *states)

    def read(self, units: Sequence[PageId], group: int) -> Iterator[memoryview]:
        if not 0 <= group < len(self.layout.groups):
            raise ProtocolError(f"{self.layout} has no group {group}")
        return self._reader(group)(units)

    def _reader(self, group: int) -> PageReader:
        if group < len(self._paged):
            return self._paged[group].read_pages
        assert self.slots is not None
        return self.slots.read_slots

    def close(self) -> None:
        end_threads(self._in_place)
        for pool in self._paged:
            pool.close()
        if self.slots is not None:
            self.slots.close()
        self.layers = replace(self.layers, pools=[pool.kv for pool in self._paged])


def _kept_in(groups: Sequence[KvGroup], kv_dtype: KvDtype | None) -> Sequence[KvGroup]:
    if kv_dtype is None:
        return groups
    if any(group.v_head_dim == 0 for group in groups):
        raise ConfigError("--kv-dtype: a latent, of which keys and values are made, is kept as it is")
    return [replace(group, dtype=_KV_DTYPES[kv_dtype]) for group in groups]


def _num_heads(probed: ProbeResult, group: KvGroup) -> frozenset[int]:
    """Return the counts of query heads, which may differ between layers whose K and V have equal shapes."""
    return frozenset(call.num_heads for call in probed.calls if call.layer_idx in group.layer_ids)


def _are_capped(probed: ProbeResult, group: KvGroup) -> bool:
    return any(call.is_capped for call in probed.calls if call.layer_idx in group.layer_ids)


def _places(probed: ProbeResult, groups: Sequence[KvGroup]) -> dict[int, LayerPlace]:
    places = {}
    for call in probed.calls:
        pool = next(
            i for i, group in enumerate(groups) if call.layer_idx in group.layer_ids and group.num_kv_heads
        )
        reach = Reach(pool, call.shape.kind, call.shape.window)
        places[call.layer_idx] = LayerPlace(reach, groups[pool].layer_ids.index(call.layer_idx))
    return places
