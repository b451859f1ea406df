"""These are the values by which ranks describe KV: pages, blocks, layouts, pools, tickets, and the paths of
its transfers.

README.md has a glossary.
"""

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import NewType

from services.values.rank import Generation, TransferId

PageId = NewType("PageId", int)
BlockHash = NewType("BlockHash", int)  # This is the 64-bit sequence hash of an index block.

HANDSHAKE_VERSION = 1  # This is the version of this code.
DRAFT = "draft"  # Reports of bytes by kind of group use this for a draft model's.


@dataclass(frozen=True, slots=True)
class PageRun:
    first_page: int  # The pages are [first_page, first_page + num_pages).
    num_pages: int

    def __post_init__(self) -> None:
        if self.first_page < 0 or self.num_pages < 1:
            raise ValueError(f"not a run of pages: {self}")

    @property
    def end(self) -> int:
        return self.first_page + self.num_pages


class GroupKind(Enum):
    FULL_ATTENTION = "full_attention"  # Its layers keep K and V of every token.
    SLIDING_WINDOW = "sliding_window"  # Its layers keep K and V of the last `window` tokens.
    CHUNKED_WINDOW = "chunked_window"  # Its layers keep K and V since the last multiple of `window`.
    RECURRENT = "recurrent"  # Its layers keep one state of a fixed size.

    @property
    def is_windowed(self) -> bool:
        return self in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group has the layers that keep the same kind of KV, and a pool of its own.

    A unit of the pool is a page of `page_size` tokens, or with RECURRENT a slot: one sequence's state.
    """

    kind: GroupKind
    layer_ids: tuple[int, ...]
    num_kv_heads: int  # RECURRENT has 0, a latent 1.
    head_dim: int  # This is the dimension of keys, or of the latent.
    # It is float32, bfloat16, float16 or float8_e4m3fn; for a state, that of the attention beside it.
    dtype: str
    v_head_dim: int | None = None  # None means head_dim; a latent, which has no values, has 0.
    window: int = 0  # This is in tokens and includes the present one; 0 means no window.
    unit_bytes: int = 0  # This is for all layers; 0 means the layout's page_bytes.


@dataclass(frozen=True, slots=True)
class DraftKv:
    """This is the KV of a rank's draft model, in a pool with the same page ids.

    It is transferred if both ranks have an equal one, and may be missing on either.
    """

    model_fingerprint: int
    group: KvGroup  # Its kind is full attention.


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Two ranks must have equal layouts, except for `draft`, for a transfer between them.

    Group 0 is full attention: its pages are those of the radix tree and the index. The other groups hold
    per-request state, which is always transferred, whatever prefix decode has.
    """

    page_size: int  # This is in tokens.
    page_bytes: int  # A page has this many bytes over all layers of group 0.
    model_fingerprint: int  # This is a 64-bit hash of the checkpoint's identity.
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
        """Return the groups of per-request state: all but group 0."""
        return self.groups[1:]

    @property
    def draft_group(self) -> tuple[KvGroup, ...]:
        """Return the draft model's group, if there is one; its pool comes after those of the groups."""
        return (self.draft.group,) if self.draft is not None else ()

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a unit of each pool: the groups', then the draft model's."""
        return (self.page_bytes, *(group.unit_bytes for group in (*self.carried, *self.draft_group)))

    def shared_with(self, peer: "KvLayout") -> "KvLayout":
        """Return what is transferred between the two: without the draft model unless both have the same."""
        return self if self.draft == peer.draft else replace(self, draft=None)


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Unit i of the pool has the bytes [base_address + i * unit_bytes, + unit_bytes)."""

    base_address: int
    num_pages: int  # This counts units: pages or slots.
    kind: str = "DRAM"  # This is DRAM or VRAM.
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """One group's per-request state is written to these units, in token order, for the tokens from
    `start_token` to the prompt's end. A recurrent state has one unit, and starts at the prompt's end.
    """

    group: int  # This is the group's index in the layout, 1 or more.
    start_token: int
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class KvTicket:
    """A ticket is decode's request to prefill for the transfer of the delta [decode_prefix_len,
    prompt_len).
    """

    transfer_id: TransferId
    prefill_generation: Generation
    prompt_len: int  # This is in tokens.
    decode_prefix_len: int  # This is in tokens, and a multiple of page_size.
    runs: tuple[PageRun, ...]  # The destination pages are in token order, and cover the delta exactly.
    write_until_s: float  # On the writer's monotonic clock no write is posted at or after this.
    # Every group of per-request state has one, in the layout's order.
    targets: tuple[GroupTarget, ...] = ()
    aux_slot: int | None = None
    want_digests: bool = False  # The report of the transfer's end must have digests of the delta's pages.


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A rank requests with this what another one holds of a prompt; see handshake.proto."""

    transfer_id: TransferId
    holder_generation: Generation
    cache_salt: str
    token_ids: tuple[int, ...]  # These are the ids of [0, the requested end).
    have: int  # This is in tokens, and a multiple of page_size.
    least_end: int  # This is in tokens.
    keep_until_s: float  # This is on the holder's monotonic clock.


@dataclass(frozen=True, slots=True)
class PullGrant:
    transfer_id: TransferId
    end: int  # This is in tokens.
    with_draft: bool = False


class HitKind(Enum):
    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """These are a rank's changes since the last events, as sequence hashes of index blocks.

    A hash is in at most one of `stored` and `removed`: a block that is stored and then evicted is in neither.
    The same holds for the resumable ones, at whose end a rank can continue computing. They are held, too; an
    evicted one is reported in both. A rank whose layout has no per-request state reports none, as it can
    continue wherever it holds blocks.

    What lies below a rank's pool, in its tiers, has events of its own. Of these blocks, too, some are held
    somewhere else than the others: in files.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False  # All earlier blocks of both kinds are gone; only the stored ones are held.
    resumable_stored: tuple[BlockHash, ...] = ()
    resumable_removed: tuple[BlockHash, ...] = ()
    files_stored: tuple[BlockHash, ...] = ()
    files_removed: tuple[BlockHash, ...] = ()


NO_EVENTS = CacheEvents()


@dataclass(frozen=True, slots=True)
class PageBooks:
    """Every page of a pool is in one of these places; the five add up to `total` if the books balance."""

    total: int
    free: int
    cached: int  # These are in the tree, and unlocked, so that they can be evicted.
    locked: int  # These are in the tree, and locked by a running sequence.
    private: int  # A sequence holds these, and the tree does not.
    quarantined: int  # These are given up, but a writer may still write to them.

    @property
    def balanced(self) -> bool:
        return self.total == self.free + self.cached + self.locked + self.private + self.quarantined


class KvPathKind(StrEnum):
    RDMA = "rdma"
    TCP = "tcp"
    CUDA_IPC = "cuda_ipc"  # This connects GPUs of one node, over NVLink or PCIe.
    SHARED_MEMORY = "shared_memory"  # This connects processes of one host, and includes copies by the kernel.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KvPath:
    """A transport writes to some of its peers by this path; `lanes` is the transport's own description."""

    kind: KvPathKind
    reach: str  # This is intra-node or inter-node, or empty if it is unknown.
    lanes: str  # Examples are rc_mlx5/mlx5_0:1, and 52% on tcp/lo and 48% on tcp/eth0.
