"""KV as ranks speak of it: pages, blocks, layouts, pools, tickets. Pure. See the glossary in README.md."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType

from services.values.rank import Generation, Room

PageId = NewType("PageId", int)
BlockHash = NewType("BlockHash", int)  # 64-bit sequence hash of an index block

HANDSHAKE_VERSION = 1  # that this code speaks
DRAFT = "draft"  # among the kinds of groups, where bytes are told by kind: a draft model's


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages [first_page, first_page + num_pages), neighbours in the pool."""

    first_page: int
    num_pages: int

    def __post_init__(self) -> None:
        if self.first_page < 0 or self.num_pages < 1:
            raise ValueError(f"not a run of pages: {self}")

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class GroupKind(Enum):
    """What a group's layers remember of a sequence."""

    FULL_ATTENTION = "full_attention"  # K and V of every token
    SLIDING_WINDOW = "sliding_window"  # K and V of the last `window` tokens
    CHUNKED_WINDOW = "chunked_window"  # K and V since the last multiple of `window`
    RECURRENT = "recurrent"  # one state of a fixed size

    @property
    def is_windowed(self) -> bool:
        return self in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that remember alike, with a pool of their own.

    A unit of the pool is a page of `page_size` tokens, or with RECURRENT a slot: one sequence's state.
    """

    kind: GroupKind
    layer_ids: tuple[int, ...]
    num_kv_heads: int  # 0 with RECURRENT, 1 with a latent
    head_dim: int  # of keys, or of the latent
    dtype: str  # float32, bfloat16, float16; of a state that has several: of the attention's beside it
    v_head_dim: int | None = None  # None: as head_dim; 0: a latent, which has no values
    window: int = 0  # tokens, the own one counted; 0: not windowed
    unit_bytes: int = 0  # over all layers; 0: the layout's page_bytes


@dataclass(frozen=True, slots=True)
class DraftKv:
    """What a rank's draft model remembers of the tokens of each page, in a pool with the same page ids.

    It crosses where it is equal on both sides, and may be missing on either.
    """

    model_fingerprint: int
    group: KvGroup  # full attention


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two ranks must agree on before KV may cross between them, and `draft`, on which they need not.

    Group 0 is full attention: its pages are what the radix tree and the index know. What the others hold
    is *carried*: it always comes by wire, whatever prefix decode has.
    """

    page_size: int  # tokens
    page_bytes: int  # one page over all layers of group 0
    model_fingerprint: int  # 64-bit hash of the checkpoint's identity
    tp_size: int = 1
    groups: tuple[KvGroup, ...] = ()
    handshake_version: int = HANDSHAKE_VERSION
    draft: DraftKv | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_bytes < 1:
            raise ValueError(f"page_size and page_bytes must be positive: {self}")
        if any(group.unit_bytes < 1 for group in (*self.carried, *self.draft_group)):
            raise ValueError(f"units of groups beside the first must have bytes: {self}")

    @property
    def carried(self) -> tuple[KvGroup, ...]:
        """Groups 1, 2, ...: those beside full attention."""
        return self.groups[1:]

    @property
    def draft_group(self) -> tuple[KvGroup, ...]:
        """The draft model's, if there is one: its pool comes behind those of the groups."""
        return (self.draft.group,) if self.draft is not None else ()

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Of each pool: by group, then the draft model's."""
        return (self.page_bytes, *(group.unit_bytes for group in (*self.carried, *self.draft_group)))

    def shared_with(self, peer: "KvLayout") -> "KvLayout":
        """What crosses between the two: of the draft model nothing, unless both have the same."""
        return self if self.draft == peer.draft else replace(self, draft=None)


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Where a pool lies: unit i is the bytes [base_address + i * unit_bytes, + unit_bytes)."""

    base_address: int
    num_pages: int  # units: pages or slots
    kind: str = "DRAM"  # or VRAM
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """Where what is carried of one group goes: units in token order that hold tokens from `start_token` on,
    to the prompt's end. A state has one unit, and starts at the prompt's end."""

    group: int  # its place in the layout, 1 or more
    start_token: int
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class KvTicket:
    """Decode's word to prefill: where the delta [decode_prefix_len, prompt_len) goes."""

    room: Room
    prefill_generation: Generation
    prompt_len: int  # tokens
    decode_prefix_len: int  # tokens, a multiple of page_size
    runs: tuple[PageRun, ...]  # destination pages in token order, covering the delta exactly
    write_until_s: float  # on the writer's monotonic clock; nothing is posted at or past it
    targets: tuple[GroupTarget, ...] = ()  # of every carried group, in the layout's order
    aux_slot: int | None = None
    want_digests: bool = False  # of the delta's pages, with the word that they have landed


class HitKind(Enum):
    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What a radix tree gained and lost since last asked, as sequence hashes of index blocks.

    A hash appears in at most one of the two: store-then-evict cancels out before it gets here. So of the
    resumable ones, those at whose end a rank can go on computing. They are held, too; one that is evicted is
    told in both. A rank of a layout that carries nothing tells none: it can go on wherever it holds.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False  # everything earlier is gone, of both kinds
    resumable_stored: tuple[BlockHash, ...] = ()
    resumable_removed: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class PageBooks:
    """Where every page of a pool is; the five add up to `total` when the books balance."""

    total: int
    free: int
    cached: int  # in the tree, unlocked (evictable)
    locked: int  # in the tree, locked by a running sequence
    private: int  # held by a sequence, not in the tree
    quarantined: int  # given up, but a writer may still write

    @property
    def balanced(self) -> bool:
        return self.total == self.free + self.cached + self.locked + self.private + self.quarantined
