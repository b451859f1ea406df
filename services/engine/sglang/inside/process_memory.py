"""This module describes the memory of one SGLang process by our layout. It is pure.

SGLang's kv_item_lens has a page's bytes in each buffer, a layer's K, V or latent: first the model's buffers,
then the draft's. Its state_* are lists of such, one for each component.

Each of a DP rank's processes has some of the heads, and several may have the same one; a layout describes the
whole model, however its heads are spread. The draft's buffers, if the process speculates, have the same page
ids, and are transferred with the pages.

State is SGLang's word for what it stores beside the KV of every token, in components: lists of buffers, one
component per kind. SWA is the pages of windowed layers (an item is one page of one layer's K or V), MAMBA a
slot per request for the convolutions and states of all recurrent layers: these become groups of our layout.
Others belong to each page like its KV, and are no group.
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from services.values.errors import ProtocolError
from services.values.kv import DraftKv, GroupKind, KvGroup, KvLayout


@dataclass(frozen=True, slots=True)
class TpPlace:
    rank: int
    size: int


def is_counted(num_kv_heads: int, writer: TpPlace, reader: TpPlace) -> bool:
    """Return whether this is the first of the writes of the same head.

    `num_kv_heads` is the whole model's. With more processes than heads SGLang gives each process one, so
    neighbours have the same, and each of them is written. MLA's latent is one head, which every process has.
    """
    wider = writer if writer.size >= reader.size else reader
    replicas = max(1, wider.size // num_kv_heads)
    return wider.rank % replicas == 0


def check_drafts(prefill: KvLayout, decode: KvLayout) -> None:
    """Raise ProtocolError for a pair whose transfers fail, or would write a draft's KV into another draft's.

    SGLang sends all that prefill has, by position. Decode alone may have a draft.
    """
    if prefill.draft is None:
        return
    if decode.draft is None:
        raise ProtocolError(
            "prefill speculates and decode does not: the draft's KV that SGLang sends has no place there"
        )
    if prefill.draft != decode.draft:
        both = f"{_described(prefill.draft)}; {_described(decode.draft)}"
        raise ProtocolError(f"prefill and decode speculate with different drafts: {both}")


def _described(draft: DraftKv) -> str:
    group = draft.group
    return (
        f"{draft.model_fingerprint:016x} with {len(group.layer_ids)} layers, {group.num_kv_heads} heads of "
        f"{group.head_dim} in {group.dtype}, {group.unit_bytes} bytes a page"
    )


def check_tensor_parallel(prefill: KvLayout, decode: KvLayout) -> None:
    """Raise ProtocolError for a pair between which SGLang 0.5.23 writes wrong KV without an error.

    This happened at TP 2:1 with a model of one KV head, where decode's greedy output was not the model's.
    """
    attention = [group.num_kv_heads for group in prefill.groups if group.kind is not GroupKind.RECURRENT]
    heads = min(attention, default=prefill.tp_size)
    if prefill.tp_size > max(heads, decode.tp_size):
        raise ProtocolError(
            f"prefill has {heads} KV heads over {prefill.tp_size} processes, decode over {decode.tp_size}: "
            f"a wider prefill can have no more than {heads}"
        )


# These are the values of sglang.srt.disaggregation.base.conn.StateType.
WINDOW, RECURRENT = "swa", "mamba"
_KINDS = {WINDOW: GroupKind.SLIDING_WINDOW, RECURRENT: GroupKind.RECURRENT}


@dataclass(frozen=True, slots=True)
class StateComponent:
    kind: str  # This is SGLang's word.
    item_bytes: tuple[int, ...]  # Each buffer has one: a page's bytes, or a request's.
    layer_ids: tuple[int, ...] = ()  # This is empty where SGLang does not list them.
    sliced: tuple[int, ...] = ()  # It is 0 for a buffer that every process has whole.
    num_units: int = 0  # These are pages, or slots.

    @property
    def is_carried(self) -> bool:
        return self.kind in _KINDS

    def own_bytes(self) -> int:
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
        """Return the bytes of a page, or a slot, in a write from this side to the peer.

        With different tensor parallelism they are the narrower side's part, without what another process
        writes, too. `spread_heads` are attention's heads, which the processes divide.
        """
        if self.kind == WINDOW:
            own = self.own_bytes() if is_counted(spread_heads, writer, reader) else 0
        else:
            sliced, replicated = self._state_bytes()
            own = sliced + (replicated if is_counted(1, writer, reader) else 0)
        return min(own, sum(peer_item_bytes))

    def _state_bytes(self) -> tuple[int, int]:
        """Return a slot's bytes in this process: of buffers that processes divide, and of whole ones."""
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
    """Return the groups in SGLang's order, by which both sides pair them.

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
    )  # They are K and V; SGLang does not report which layers.
    return KvGroup(
        GroupKind.SLIDING_WINDOW,
        layers,
        heads.num_kv_heads,
        heads.head_dim,
        heads.dtype,
        window=window_size + 1,
        unit_bytes=size,
    )


@dataclass(frozen=True, slots=True)
class Buffers:
    item_bytes: tuple[int, ...]  # These are a page's bytes.
    heads: AttentionHeads  # These are the whole model's.
    is_latent: bool = False  # A latent is one vector for all heads, which every process has.

    @property
    def own_bytes(self) -> int:
        return sum(self.item_bytes)

    @property
    def spread_heads(self) -> int:
        return 1 if self.is_latent else self.heads.num_kv_heads

    def whole_bytes(self, tp_size: int) -> int:
        """Return a page's bytes in all processes, with each head once."""
        return self.own_bytes // max(1, self.spread_heads // tp_size) * self.spread_heads

    def written_bytes(self, peer_item_bytes: Sequence[int], writer: TpPlace, reader: TpPlace) -> int:
        """Return a page's bytes in a write from this side to the peer.

        With different tensor parallelism they are the narrower side's heads. They are 0 where another process
        writes the same, since copies of the model's KV do not count.
        """
        counts = is_counted(self.spread_heads, writer, reader)
        return min(self.own_bytes, sum(peer_item_bytes)) if counts else 0

    def group(self, num_layers: int, unit_bytes: int = 0) -> KvGroup:
        heads = self.heads
        layers = tuple(range(num_layers))
        return KvGroup(
            GroupKind.FULL_ATTENTION,
            layers,
            heads.num_kv_heads,
            heads.head_dim,
            heads.dtype,
            unit_bytes=unit_bytes,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    buffers: Buffers
    model_fingerprint: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    page_size: int  # This is in tokens.
    num_pages: int
    tp_size: int
    buffers: Buffers
    layer_ids: tuple[int, ...]  # Each of the model's buffers has one, where SGLang lists them.
    components: tuple[StateComponent, ...]
    window_size: int = 0  # A windowed layer sees so many tokens before its own.
    draft: Draft | None = None

    @property
    def page_bytes(self) -> int:
        return self.buffers.whole_bytes(self.tp_size)

    @property
    def num_layers(self) -> int:
        return len(set(self.layer_ids)) or _num_layers(self.buffers)

    @property
    def carried_places(self) -> list[int]:
        return [place for place, component in enumerate(self.components) if component.is_carried]

    def layout(self, model_fingerprint: int) -> KvLayout:
        carried = carried_groups(self.components, self.buffers.heads, self.tp_size, self.window_size)
        groups = (self.buffers.group(self.num_layers), *carried)
        draft = self._draft_kv(self.draft) if self.draft is not None else None
        return KvLayout(self.page_size, self.page_bytes, model_fingerprint, self.tp_size, groups, draft=draft)

    def _draft_kv(self, draft: Draft) -> DraftKv:
        whole_bytes = draft.buffers.whole_bytes(self.tp_size)
        return DraftKv(draft.model_fingerprint, draft.buffers.group(_num_layers(draft.buffers), whole_bytes))

    def written_bytes(
        self, peer_item_bytes: Sequence[int], writer: TpPlace, reader: TpPlace
    ) -> tuple[int, int]:
        """Return a page's written bytes, of the model and of the draft.

        The peer may have a draft's buffers that this process lacks: SGLang writes none of them.
        """
        count = len(self.buffers.item_bytes)
        of_model = self.buffers.written_bytes(peer_item_bytes[:count], writer, reader)
        if self.draft is None:
            return of_model, 0
        return of_model, self.draft.buffers.written_bytes(peer_item_bytes[count:], writer, reader)

    def written_states(
        self,
        indices: Sequence[Sized | None],
        peer_item_bytes: Sequence[Sequence[int]],
        writer: TpPlace,
        reader: TpPlace,
    ) -> Iterator[tuple[str, int]]:
        """Yield SGLang's word and the bytes of each component with per-request state.

        `indices` has for each component the pages or slots that are written; SGLang writes nothing for
        components with None, or beyond the end of the list.
        """
        heads = self.buffers.spread_heads
        for component, units, peer in zip(self.components, indices, peer_item_bytes, strict=False):
            if component.is_carried and units is not None:
                yield component.kind, len(units) * component.written_bytes(peer, heads, writer, reader)


def _num_layers(buffers: Buffers) -> int:
    return len(buffers.item_bytes) // (1 if buffers.is_latent else 2)  # They are K and V.


def read_item_bytes(item_bytes: Sequence[int], num_draft: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the model's sizes, and the draft's, which are the last ones."""
    count = len(item_bytes) - num_draft
    return tuple(map(int, item_bytes[:count])), tuple(map(int, item_bytes[count:]))


class Posted:
    def __init__(self) -> None:
        self.num_pages = 0
        self.size_bytes = 0
        self.carried_bytes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Posted(pages={self.num_pages} bytes={self.size_bytes} carried={self.carried_bytes})"

    def pages(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages += num_pages
        self.size_bytes += num_pages * page_bytes

    def carried(self, kind: str, size_bytes: int) -> None:
        """Count per-request state; `kind` is SGLang's word, or DRAFT."""
        self.carried_bytes[kind] = self.carried_bytes.get(kind, 0) + size_bytes


class HostAgent:
    """All memory is the host's to this NIXL agent: SGLang calls the memory of states VRAM wherever it is."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def register_memory(self, *args: Any, **kwargs: Any) -> Any:
        return self._agent.register_memory(*map(_on_host, args), **kwargs)

    def get_xfer_descs(self, *args: Any, **kwargs: Any) -> Any:
        return self._agent.get_xfer_descs(*map(_on_host, args), **kwargs)

    def prep_xfer_dlist(self, *args: Any, **kwargs: Any) -> Any:
        return self._agent.prep_xfer_dlist(*map(_on_host, args), **kwargs)


def _on_host(argument: Any) -> Any:
    return "DRAM" if isinstance(argument, str) and argument == "VRAM" else argument
