"""The values that KV bookkeeping, transport and placement exchange. See the glossary in README.md."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

from services.kv.kv_path import KvPath
from services.kv.step_histogram import NO_STEPS, StepHistogram

PageId = NewType("PageId", int)
BlockHash = NewType("BlockHash", int)  # 64-bit sequence hash of an index block
Generation = NewType("Generation", int)  # 64-bit random id of one life of a rank
Room = NewType("Room", int)  # 64-bit random name of one request between two ranks


class RankKey(NamedTuple):
    """A DP rank over all its lives: worker name and rank number.

    A tuple, for its hash: a router looks ranks up dozens of times to place one request.
    """

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankId:
    """One life of a DP rank."""

    worker: str
    rank: int
    generation: Generation

    @property
    def key(self) -> RankKey:
        return RankKey(self.worker, self.rank)

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where one life of a rank is reached: `endpoint` is HOST:PORT of its gRPC server."""

    id: RankId
    endpoint: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Lets two ranks meet for one request."""

    room: Room
    decode: RankId
    prefill: RankId


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


class Plan(Enum):
    """How the prompt's KV gets to the decode rank."""

    REMOTE = "remote"
    LOCAL = "local"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


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


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a rank is doing now; see common.proto for each field."""

    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0
    books: PageBooks = field(default_factory=lambda: PageBooks(0, 0, 0, 0, 0, 0))
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    draining: bool = False
    waiting_tokens: int = 0
    admitted_per_s: float = 0.0
    stalled: bool = False
    kv_paths: tuple[KvPath, ...] = ()  # of a prefill rank: by what it has written
    # Not told to routers:
    reserved_pages: int = 0  # kept back for the growth of what runs
    retractions: int = 0  # since the rank's start, as `overtakes`
    overtakes: int = 0
    free_runs: int = 0  # of neighbouring free pages
    lent_pages: int = 0  # since the start, several at a time, and
    lent_runs: int = 0  # in how many runs of neighbours they were lent
    open_rooms: int = 0  # transfers of a prefill rank that are not over
    unreadable_events: int = 0  # since the start, of what another's engine told of its cache
    decode_steps: StepHistogram = NO_STEPS  # since the start, of single tokens only
    prompt_steps: StepHistogram = NO_STEPS  # that computed prompts, too

    @property
    def queue_wait_s(self) -> float:
        """Until one who comes now has pages; 0: nobody waits, or it is not known."""
        return self.waiting / self.admitted_per_s if self.admitted_per_s > 0 else 0.0
