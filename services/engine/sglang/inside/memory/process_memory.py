"""The memory of one process, as SGLang lists it for a transfer, is put in the words of our layout.

kv_item_lens   | the model's buffers | the draft's |   a page's bytes in each: a layer's K, V or latent
state_*        lists of such, one for each component (state_groups.py)

Of a DP rank's processes each has some of the heads; a layout is of the whole model, however they are spread.
The draft's buffers, where the process speculates, have the same page ids, and cross with the pages.
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from services.engine.sglang.inside.memory.replicas import TpPlace, is_counted
from services.engine.sglang.inside.memory.state_groups import AttentionHeads, StateComponent, carried_groups
from services.values.kv import DraftKv, GroupKind, KvGroup, KvLayout


@dataclass(frozen=True, slots=True)
class Buffers:
    item_bytes: tuple[int, ...]  # They are a page's.
    heads: AttentionHeads  # They are the whole model's.
    is_latent: bool = False  # A latent is one vector for all heads, which every process has.

    @property
    def own_bytes(self) -> int:
        """Return a page's bytes in this process."""
        return sum(self.item_bytes)

    @property
    def spread_heads(self) -> int:
        return 1 if self.is_latent else self.heads.num_kv_heads

    def whole_bytes(self, tp_size: int) -> int:
        """Return a page's bytes in all processes, with each head once."""
        return self.own_bytes // max(1, self.spread_heads // tp_size) * self.spread_heads

    def written_bytes(self, peer_item_bytes: Sequence[int], writer: TpPlace, reader: TpPlace) -> int:
        """Return a page's bytes in a write from here to there.

        Of two sides with different tensor parallelism they are the narrower one's heads; 0 where another
        process writes the same: what is due is the model's KV, not its copies.
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
    page_size: int  # It counts tokens.
    num_pages: int
    tp_size: int
    buffers: Buffers
    layer_ids: tuple[int, ...]  # Each of the model's buffers has one, where SGLang says them.
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
        """Return a page's bytes, of the model and of the draft.

        The peer may have a draft's buffers that this process has not: SGLang writes none of them.
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
        """Yield SGLang's word and bytes of each component with per-request state.

        `indices` are by component the pages or slots that are written; SGLang writes nothing of components
        for which there are none, or that the list is too short for.
        """
        heads = self.buffers.spread_heads
        for component, units, peer in zip(self.components, indices, peer_item_bytes, strict=False):
            if component.is_carried and units is not None:
                yield component.kind, len(units) * component.written_bytes(peer, heads, writer, reader)


def _num_layers(buffers: Buffers) -> int:
    return len(buffers.item_bytes) // (1 if buffers.is_latent else 2)  # They are K and V.


def read_item_bytes(item_bytes: Sequence[int], num_draft: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the model's, and the draft's, which are the last ones."""
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
    """All memory is the host's for this agent of NIXL's: SGLang calls the memory of states VRAM wherever it
    is."""

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
