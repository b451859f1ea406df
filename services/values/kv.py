"""KV is spoken of by ranks in these values: pages, blocks, layouts, pools, tickets, and the paths it takes.

README.md has a glossary.
"""

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NewType

from services.values.rank import Generation, Room

PageId = NewType("PageId", int)
BlockHash = NewType("BlockHash", int)  # It is the 64-bit sequence hash of an index block.

HANDSHAKE_VERSION = 1  # This code speaks it.
DRAFT = "draft"  # It stands among the kinds of groups, where bytes are reported by kind, for a draft model's.


@dataclass(frozen=True, slots=True)
class PageRun:
    """The pages [first_page, first_page + num_pages) are neighbours in the pool."""

    first_page: int
    num_pages: int

    def __post_init__(self) -> None:
        if self.first_page < 0 or self.num_pages < 1:
            raise ValueError(f"not a run of pages: {self}")

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class GroupKind(Enum):
    """A group's layers remember this of a sequence."""

    FULL_ATTENTION = "full_attention"  # Such layers keep K and V of every token.
    SLIDING_WINDOW = "sliding_window"  # Such layers keep K and V of the last `window` tokens.
    CHUNKED_WINDOW = "chunked_window"  # Such layers keep K and V since the last multiple of `window`.
    RECURRENT = "recurrent"  # Such layers keep one state of a fixed size.

    @property
    def is_windowed(self) -> bool:
        return self in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that remember alike are a group, with a pool of their own.

    A unit of the pool is a page of `page_size` tokens, or with RECURRENT a slot: one sequence's state.
    """

    kind: GroupKind
    layer_ids: tuple[int, ...]
    num_kv_heads: int  # It is 0 with RECURRENT, and 1 with a latent.
    head_dim: int  # It is of keys, or of the latent.
    # It is float32, bfloat16, float16 or float8_e4m3fn; a state's own is that of the attention beside it.
    dtype: str
    v_head_dim: int | None = None  # None stands for head_dim, and 0 for a latent, which has no values.
    window: int = 0  # It counts tokens, the own one too; 0 says that there is none.
    unit_bytes: int = 0  # It is over all layers; 0 stands for the layout's page_bytes.


@dataclass(frozen=True, slots=True)
class DraftKv:
    """A rank's draft model remembers this of the tokens of each page, in a pool with the same page ids.

    It crosses where it is equal on both sides, and may be missing on either.
    """

    model_fingerprint: int
    group: KvGroup  # It is full attention.


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Two ranks must agree on this before KV may cross between them, but not on `draft`.

    Group 0 is full attention: its pages are what the radix tree and the index know. The others hold
    per-request state: it always comes by wire, whatever prefix decode has.
    """

    page_size: int  # It is in tokens.
    page_bytes: int  # One page has so many bytes over all layers of group 0.
    model_fingerprint: int  # It is a 64-bit hash of the checkpoint's identity.
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
        """Return groups 1, 2, ...: those beside full attention."""
        return self.groups[1:]

    @property
    def draft_group(self) -> tuple[KvGroup, ...]:
        """Return the draft model's group, if there is one: its pool comes behind those of the groups."""
        return (self.draft.group,) if self.draft is not None else ()

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a unit of each pool, by group, and then the draft model's."""
        return (self.page_bytes, *(group.unit_bytes for group in (*self.carried, *self.draft_group)))

    def shared_with(self, peer: "KvLayout") -> "KvLayout":
        """Return what crosses between the two: nothing of the draft model, unless both have the same."""
        return self if self.draft == peer.draft else replace(self, draft=None)


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A pool lies here: unit i is the bytes [base_address + i * unit_bytes, + unit_bytes)."""

    base_address: int
    num_pages: int  # They are units: pages or slots.
    kind: str = "DRAM"  # It may be VRAM, too.
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """The per-request state of one group goes here: to units in token order that hold tokens from
    `start_token` on, to the prompt's end. A state has one unit, and starts at the prompt's end."""

    group: int  # It is the group's place in the layout, 1 or more.
    start_token: int
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class KvTicket:
    """Decode tells prefill by a ticket where the delta [decode_prefix_len, prompt_len) goes."""

    room: Room
    prefill_generation: Generation
    prompt_len: int  # It is in tokens.
    decode_prefix_len: int  # It is in tokens, a multiple of page_size.
    runs: tuple[PageRun, ...]  # They are the destination pages in token order, and cover the delta exactly.
    write_until_s: float  # It is on the writer's monotonic clock; nothing is posted at or past it.
    # There is one for every group of per-request state, in the layout's order.
    targets: tuple[GroupTarget, ...] = ()
    aux_slot: int | None = None
    want_digests: bool = False  # They are wanted of the delta's pages, with the word that they have landed.


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A rank asks another by this for what that one holds of a prompt; see handshake.proto."""

    room: Room
    holder_generation: Generation
    cache_salt: str
    token_ids: tuple[int, ...]  # They are those of [0, the end that is wanted).
    have: int  # It is in tokens, a multiple of page_size.
    least_end: int  # It is in tokens.
    keep_until_s: float  # It is on the holder's monotonic clock.


@dataclass(frozen=True, slots=True)
class PullGrant:
    room: Room
    end: int  # It is in tokens.
    with_draft: bool = False


class HitKind(Enum):
    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """A rank's cache gained and lost this since last asked, as sequence hashes of index blocks.

    A hash appears in at most one of the two: store-then-evict cancels out before it gets here. So it is with
    the resumable ones, at whose end a rank can go on computing. They are held, too; one that is evicted is
    reported in both. A rank of a layout without per-request state reports none: it can go on wherever it
    holds.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False  # Everything earlier is gone, of both kinds: so the stored are all that there is.
    resumable_stored: tuple[BlockHash, ...] = ()
    resumable_removed: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class PageBooks:
    """Every page of a pool is in one of these places; the five add up to `total` when the books balance."""

    total: int
    free: int
    cached: int  # They are in the tree, unlocked (evictable).
    locked: int  # They are in the tree, locked by a running sequence.
    private: int  # A sequence holds them, and the tree does not.
    quarantined: int  # They are given up, but a writer may still write.

    @property
    def balanced(self) -> bool:
        return self.total == self.free + self.cached + self.locked + self.private + self.quarantined


class KvPathKind(StrEnum):
    RDMA = "rdma"
    TCP = "tcp"
    CUDA_IPC = "cuda_ipc"  # It goes from GPU to GPU of one node, over NVLink or PCIe.
    SHARED_MEMORY = "shared_memory"  # It goes between processes of one host, by the kernel's copies too.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KvPath:
    """A transport has chosen it for writes to some of its peers; `lanes` are in its own words."""

    kind: KvPathKind
    reach: str  # It is intra-node or inter-node, and empty where it is not known.
    lanes: str  # It reads like rc_mlx5/mlx5_0:1, or 52% on tcp/lo and 48% on tcp/eth0.
