"""A runner has a pool for each group of its layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from services.engine.torch.attention.in_place import choose_in_place, choose_packings, end_threads
from services.engine.torch.attention.layers import LayerPlace, PagedLayers, Reach
from services.engine.torch.model.remembered import Remembered, attention_groups, recurrent_group
from services.engine.torch.model.slots import SlotPool
from services.engine.torch.page_reader import PageReader
from services.engine.torch.pool import KvPool
from services.kv.tails import PoolSizes
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import KvGroup, KvLayout, PageId, PoolMemory

KvDtype = Literal["fp8_e4m3"]
_KV_DTYPES: Mapping[KvDtype, str] = {"fp8_e4m3": "float8_e4m3fn"}


class Pools:
    """This owns the memory of what a model remembers.

    Its attention finds it by `layers`. `slots` are for recurrent layers, and None where the model has none.
    """

    def __init__(
        self,
        remembered: Remembered,
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
        """Allocate and zero the pools; full attention's has `num_pages`. K and V are of `kv_dtype`; None: the
        model's.

        Without `by_kernels` single tokens gather.

        `groups` are those of attention, where they are not to be those of `attention_groups`.

        Raises:
            ConfigError: one is empty, or larger than all the memory that the device has; or a latent is to be
                kept in another type than the model's.
            Unavailable: there is not so much memory now.
        """
        self.calls = remembered.calls
        self._paged: list[KvPool] = []
        model_dtype = (groups or attention_groups(remembered.calls))[0].dtype
        full, *windowed = _kept_in(groups or attention_groups(remembered.calls), kv_dtype)
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
        if remembered.states:
            states = recurrent_group(remembered.states, model_dtype)
            num_slots = sizes.num_units(states, page_size, num_pages)
            self.slots = SlotPool(remembered.states, num_slots=num_slots, device=device)
            units.append(replace(states, unit_bytes=self.slots.slot_bytes))
        page_bytes = self._paged[0].unit_bytes
        self.layout = KvLayout(page_size, page_bytes, model_fingerprint, groups=tuple(units))
        kv = [pool.kv for pool in self._paged]
        heads = [_num_heads(remembered, group) for group in (full, *windowed)]
        self._in_place = choose_in_place(kv, heads) if by_kernels else (None,) * len(kv)
        packings = choose_packings(kv, heads) if by_kernels else ()
        self.layers = PagedLayers(kv, self._in_place, _places(remembered, self.layout.groups), packings)

    @property
    def memory(self) -> tuple[PoolMemory, ...]:
        states = () if self.slots is None else (self.slots.memory,)
        return (*(pool.memory for pool in self._paged), *states)

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


def _num_heads(remembered: Remembered, group: KvGroup) -> frozenset[int]:
    """Return the numbers of query heads: layers whose K and V are alike may differ in them."""
    return frozenset(call.num_heads for call in remembered.calls if call.layer_idx in group.layer_ids)


def _places(remembered: Remembered, groups: Sequence[KvGroup]) -> dict[int, LayerPlace]:
    places = {}
    for call in remembered.calls:
        pool = next(
            i for i, group in enumerate(groups) if call.layer_idx in group.layer_ids and group.num_kv_heads
        )
        reach = Reach(pool, call.shape.kind, call.shape.window)
        places[call.layer_idx] = LayerPlace(reach, groups[pool].layer_ids.index(call.layer_idx))
    return places
