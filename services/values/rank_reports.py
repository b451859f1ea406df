"""A rank reports these of itself: a registration, which holds while it lives, and its present load."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from services.values.adapter import Adapter
from services.values.kv import BlockHash, KvLayout, KvPath, PageBooks
from services.values.rank import RankAddress, RankId, Role

# With this capability a decode rank's engine computes no prompts: plan local does not work there.
REMOTE_ONLY = "remote-only"
# With this one a decode rank's engine counts penalties only over its own output: a request with penalties and
# output from another rank cannot continue there.
NO_MOVED_PENALTIES = "no-moved-penalties"
# With this one a rank of either role has no radix cache: no request finds what an earlier one computed.
NO_CACHE = "no-cache"
# With this one a rank of either role has a layout with tails or states, and an engine that does not report
# where it keeps them: every prefix that it holds counts as resumable, until its answers disprove that.
NO_CHECKPOINTS = "no-resume-points"
# With this one a rank's engine, of either role, does not alternate between tenants: a tenant with few
# requests waits behind another's many.
NO_TENANT_TURNS = "no-tenant-turns"
# With this one a rank of either role writes what it holds of a prompt into pages of a rank that requests it.
LENDS = "lends"
# With this one a rank of either role pulls what a request's source holds before it computes the prompt.
PULLS = "pulls"


@dataclass(frozen=True, slots=True)
class Registration:
    role: Role
    address: RankAddress
    layout: KvLayout
    model: str
    max_context_tokens: int  # The limit is for prompt plus output; on prefill, the prompt.
    total_pages: int
    engine: str
    model_path: str = ""
    capabilities: tuple[str, ...] = ()
    draining: bool = False  # The rank refuses new requests, since it stops or an operator drains it.
    model_context_tokens: int = 0  # This limit does not depend on the pool; 0 means unknown.
    adapters: tuple[Adapter, ...] = ()
    shared_files: str = ""  # It reads the files of all ranks that say the same, which name their directory.

    @property
    def id(self) -> RankId:
        return self.address.id

    @property
    def model_tokens(self) -> int:
        """Return the model's context. An older rank reports none, and then it is what the rank holds."""
        return max(self.model_context_tokens, self.max_context_tokens)

    @property
    def reports_checkpoints(self) -> bool:
        """Return whether the rank reports where it can continue; another may continue anywhere."""
        return bool(self.layout.carried) and NO_CHECKPOINTS not in self.capabilities


# Each edge is inclusive. A decode step takes milliseconds to tenths of a second; one with a long prompt chunk
# takes seconds on a CPU.
EDGES_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 5.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class StepHistogram:
    """`counts` has one number for each edge, and one for steps beyond the last."""

    counts: tuple[int, ...] = (0,) * (len(EDGES_S) + 1)
    sum_s: float = 0.0

    def with_steps(self, took_s: float, steps: int = 1) -> "StepHistogram":
        at = bisect_left(EDGES_S, took_s)
        counts = (*self.counts[:at], self.counts[at] + steps, *self.counts[at + 1 :])
        return StepHistogram(counts, self.sum_s + steps * took_s)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        total = 0
        for edge, count in zip((*map(str, EDGES_S), "+Inf"), self.counts, strict=True):
            total += count
            yield edge, total


NO_STEPS = StepHistogram()


@dataclass(frozen=True, slots=True)
class CarriedPool:
    group: int  # This is the group's index in the layout.
    kind: str  # This is a GroupKind's value.
    total: int  # This counts units.
    free: int  # No sequence and no checkpoint holds these.


@dataclass(frozen=True, slots=True)
class DraftCount:
    source: str  # This is lookup, tree, ngrams or draft.
    drafted: int  # This counts tokens since the rank's start.
    accepted: int  # This counts those of them that were accepted.


@dataclass(frozen=True, slots=True)
class ConstraintCounts:
    # All are counted since the rank's start.
    requests: int = 0  # This counts requests with a constraint.
    compiled: int = 0  # This counts constraints that had to be compiled.
    compile_s: float = 0.0
    masked_tokens: int = 0  # These were chosen or verified under a mask.
    mask_s: float = 0.0  # The masks took this time, apart from the model's computing.


class Overtaken(NamedTuple):
    """A new prompt that has fewer than `below_tokens` to compute goes before these prompts."""

    below_tokens: int
    tokens: int  # They lack so many in all.
    prompts: int


# It has an entry for each bit length of a number of tokens, which has 64 bits at most in a message.
MOST_OVERTAKEN = 64


def overtaken_of(prompts: Iterable[tuple[float, int]]) -> tuple[Overtaken, ...]:
    """Return the report of prompts, each with what a new one has fewer tokens than, and what it lacks itself.

    Those of about the same length are one entry, so that a report stays short.
    """
    groups: dict[int, Overtaken] = {}
    for fewer_than, tokens in prompts:
        if (below := int(fewer_than)) > 0 and tokens > 0:
            kind = below.bit_length()
            known = groups.get(kind)
            least = below if known is None else min(below, known.below_tokens)
            others = (0, 0) if known is None else (known.tokens, known.prompts)
            groups[kind] = Overtaken(least, tokens + others[0], 1 + others[1])
    return tuple(groups.values())


@dataclass(frozen=True, slots=True)
class RankLoad:
    """This is a rank's present load; common.proto describes each field."""

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
    kv_paths: tuple[KvPath, ...] = ()  # A prefill rank has written by these paths.
    tokens_per_step: float = 0.0  # A decoding sequence recently got this many; 0 means unknown.
    granted_pages: int = 0  # These are reserved for pulls of other ranks.
    memory_tier_bytes_per_s: float = 0.0  # Its tiers were read so fast of late; 0 means unknown, or none.
    file_tier_bytes_per_s: float = 0.0
    shared_tier_bytes_per_s: float = 0.0  # These are other ranks' files.
    tiers_off: bool = False  # A tier failed, or was slower than computing, and is left alone for a while.
    common_tokens: int | None = (
        None  # Of the pending tokens others bring these; None means that it is unknown.
    )
    overtaken: tuple[Overtaken, ...] = ()  # These are among the pending tokens.
    # The following fields are not reported to routers.
    reserved_pages: int = 0  # These are reserved for the growth of running sequences.
    retractions: int = 0  # This is counted since the rank's start, as `overtakes` is.
    overtakes: int = 0
    # These are prompt tokens since the start, of ended requests too; None means that they are not counted.
    computed_tokens: int | None = None
    free_runs: int = 0  # This counts runs of neighbouring free pages.
    lent_pages: int = 0  # These pages were lent since the start, in groups.
    lent_runs: int = 0  # These are the runs of neighbours that the lent pages made.
    carried: tuple[CarriedPool, ...] = ()
    checkpoints: int = 0  # This counts the checkpoints that are kept now.
    evicted_points: int = 0  # These were evicted since the start, for others or for sequences.
    open_transfers: int = 0  # This counts a prefill rank's unfinished transfers.
    unreadable_events: int = 0  # Another engine reported these of its cache since the start.
    drafts: tuple[DraftCount, ...] = ()
    constraints: ConstraintCounts = ConstraintCounts()
    decode_steps: StepHistogram = NO_STEPS  # These steps since the start computed only single tokens.
    prompt_steps: StepHistogram = NO_STEPS  # These steps computed prompts, too.

    def passed_by(self, tokens: int) -> tuple[int, int]:
        """Return the pending tokens and the number of the prompts that a new one with so many tokens to
        compute goes before."""
        passed, prompts = 0, 0
        for each in self.overtaken:
            if each.below_tokens > tokens:
                passed, prompts = passed + each.tokens, prompts + each.prompts
        return passed, prompts

    @property
    def token_s(self) -> float:
        return self.step_s / max(1.0, self.tokens_per_step)

    @property
    def drafted_tokens(self) -> int:
        return sum(each.drafted for each in self.drafts)

    @property
    def accepted_draft_tokens(self) -> int:
        return sum(each.accepted for each in self.drafts)

    @property
    def queue_wait_s(self) -> float:
        """Return the seconds until a new request gets pages; 0 means that none waits, or is unknown."""
        return self.waiting / self.admitted_per_s if self.admitted_per_s > 0 else 0.0


MAX_COMING_BLOCKS = 4_096  # Routers tell others of so many blocks of a prompt at most.


@dataclass(frozen=True, slots=True)
class Coming:
    """A rank was sent a prompt, and will hold these blocks of it once it has computed them."""

    rank: RankId
    blocks: tuple[BlockHash, ...]  # They are its first ones.
    for_s: float  # This is to be expected for so many seconds.
    resumable: int = 0  # The rank will keep a checkpoint after so many blocks; 0 means none.
