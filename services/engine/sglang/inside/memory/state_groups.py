"""SGLang keeps state beside the KV of every token; here it becomes groups of our layout. All is pure.

SGLang calls it state, in components: lists of buffers, one component per kind. SWA is the pages of windowed
layers (an item is one page of one layer's K or V), MAMBA a slot per request over the convolutions and states
of all recurrent layers. Others are as much a part of each page as its KV, and no group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.engine.sglang.inside.memory.replicas import TpPlace, is_counted
from services.values.kv import GroupKind, KvGroup

# These are sglang.srt.disaggregation.base.conn.StateType's.
WINDOW, RECURRENT = "swa", "mamba"
_KINDS = {WINDOW: GroupKind.SLIDING_WINDOW, RECURRENT: GroupKind.RECURRENT}


@dataclass(frozen=True, slots=True)
class StateComponent:
    kind: str  # It is SGLang's word.
    item_bytes: tuple[int, ...]  # Each buffer has one: a page's, or a request's part.
    layer_ids: tuple[int, ...] = ()  # They are here where SGLang says them.
    sliced: tuple[int, ...] = ()  # It is 0 for a buffer that every process holds whole.
    num_units: int = 0  # These are pages, or slots.

    @property
    def is_carried(self) -> bool:
        return self.kind in _KINDS

    def own_bytes(self) -> int:
        """Return the bytes of a page, or a slot, in this process."""
        return sum(self.item_bytes)

    def whole_bytes(self, num_kv_heads: int, tp_size: int) -> int:
        """Return the bytes of a page, or a slot, in the whole model, however its heads are spread."""
        if self.kind == WINDOW:
            return self.own_bytes() // max(1, num_kv_heads // tp_size) * num_kv_heads
        sliced, replicated = self._state_bytes()
        return sliced * tp_size + replicated

    def written_bytes(
        self, peer_item_bytes: Sequence[int], spread_heads: int, writer: TpPlace, reader: TpPlace
    ) -> int:
        """Return the bytes of a page, or a slot, in a write from here to there.

        Of two sides with different tensor parallelism they are the narrower one's part, and nothing that
        another process writes, too. `spread_heads` are attention's, that the processes share out.
        """
        if self.kind == WINDOW:
            own = self.own_bytes() if is_counted(spread_heads, writer, reader) else 0
        else:
            sliced, replicated = self._state_bytes()
            own = sliced + (replicated if is_counted(1, writer, reader) else 0)
        return min(own, sum(peer_item_bytes))

    def _state_bytes(self) -> tuple[int, int]:
        """Return a slot's bytes in this process: of buffers that the processes share out, and that each holds
        whole."""
        sliced = self.sliced or (1,) * len(self.item_bytes)
        replicated = sum(size for size, parts in zip(self.item_bytes, sliced, strict=True) if not parts)
        return self.own_bytes() - replicated, replicated


def components_of(kv_args: Any) -> tuple[StateComponent, ...]:
    """Return the components in SGLang's order; `kv_args` is sglang.srt.disaggregation.base.conn.KVArgs."""

    def num_units(data_bytes: Any, item_bytes: Any) -> int:
        return int(data_bytes) // int(item_bytes)

    return tuple(
        StateComponent(
            str(kind.value),
            tuple(map(int, kv_args.state_item_lens[index])),
            tuple(map(int, kv_args.state_layer_ids[index])),
            tuple(map(int, kv_args.state_dim_per_tensor[index])),
            min(map(num_units, kv_args.state_data_lens[index], kv_args.state_item_lens[index])),
        )
        for index, kind in enumerate(kv_args.state_types)
    )


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    num_kv_heads: int
    head_dim: int
    dtype: str


def carried_groups(
    components: Sequence[StateComponent], heads: AttentionHeads, tp_size: int, window_size: int
) -> tuple[KvGroup, ...]:
    """Return the groups in SGLang's order, which both sides pair by.

    `window_size` is the number of tokens before its own that a layer sees, as SGLang counts.
    """
    return tuple(
        _group(component, heads, tp_size, window_size) for component in components if component.is_carried
    )


def _group(component: StateComponent, heads: AttentionHeads, tp_size: int, window_size: int) -> KvGroup:
    size = component.whole_bytes(heads.num_kv_heads, tp_size)
    if component.kind == RECURRENT:
        layers = tuple(dict.fromkeys(component.layer_ids)) or tuple(range(len(component.item_bytes)))
        return KvGroup(GroupKind.RECURRENT, layers, 0, 0, heads.dtype, unit_bytes=size)
    layers = tuple(
        range(len(component.item_bytes) // 2)
    )  # They are K and V; SGLang does not say which layers.
    return KvGroup(
        GroupKind.SLIDING_WINDOW,
        layers,
        heads.num_kv_heads,
        heads.head_dim,
        heads.dtype,
        window=window_size + 1,
        unit_bytes=size,
    )
