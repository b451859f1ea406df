"""KV as ranks speak of it: pages, blocks, layouts, pools, tickets. Pure. See the glossary in README.md."""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from services.values.rank import Generation, Room

PageId = NewType("PageId", int)
BlockHash = NewType("BlockHash", int)  # 64-bit sequence hash of an index block

HANDSHAKE_VERSION = 1  # that this code speaks


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
    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a KV shape."""

    kind: GroupKind
    layer_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str  # float32, bfloat16, float16


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two ranks must agree on before KV may cross between them."""

    page_size: int  # tokens
    page_bytes: int  # one page over all layers of all groups
    model_fingerprint: int  # 64-bit hash of the checkpoint's identity
    tp_size: int = 1
    groups: tuple[KvGroup, ...] = ()
    handshake_version: int = HANDSHAKE_VERSION

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_bytes < 1:
            raise ValueError(f"page_size and page_bytes must be positive: {self}")


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Where a pool lies: page i is the bytes [base_address + i * page_bytes, + page_bytes)."""

    base_address: int
    num_pages: int
    kind: str = "DRAM"  # or VRAM
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class KvTicket:
    """Decode's word to prefill: where the delta [decode_prefix_len, prompt_len) goes."""

    room: Room
    prefill_generation: Generation
    prompt_len: int  # tokens
    decode_prefix_len: int  # tokens, a multiple of page_size
    runs: tuple[PageRun, ...]  # destination pages in token order, covering the delta exactly
    write_until_s: float  # on the writer's monotonic clock; nothing is posted at or past it
    state_slots: tuple[int, ...] = ()
    aux_slot: int | None = None
    want_digests: bool = False  # of the delta's pages, with the word that they have landed


class HitKind(Enum):
    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What a radix tree gained and lost since last asked, as sequence hashes of index blocks.

    A hash appears in at most one of the two: store-then-evict cancels out before it gets here.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False  # everything earlier is gone


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
