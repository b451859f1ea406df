"""A rank reports these of itself: a registration for as long as it lives, and its load, what it does now."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.values.kv import KvLayout, KvPath, PageBooks
from services.values.rank import RankAddress, RankId, Role

# A decode rank with this capability has an engine that computes no prompts: plan local does not work there.
REMOTE_ONLY = "remote-only"
# A decode rank with this one has an engine that counts penalties over its own output alone: a request that
# has penalties and output from elsewhere cannot go on there.
NO_MOVED_PENALTIES = "no-moved-penalties"
# A rank of either role with this one keeps no radix cache: no request will find there what an earlier one
# computed.
NO_CACHE = "no-cache"
# A rank of either role with this one has a layout with tails or states, and an engine that does not tell
# where it keeps them: wherever it holds a prefix counts as resumable, until its answers say otherwise.
NO_RESUME_POINTS = "no-resume-points"
# A rank of either role with this one has an engine that lets no tenants take turns: who asks for little
# beside another's crowd waits for the crowd.
NO_TENANT_TURNS = "no-tenant-turns"
# A rank of either role with this one writes what it holds of a prompt into the pages of a rank that asks.
LENDS = "lends"
# A rank of either role with this one asks the source that a request names before it computes its prompt.
PULLS = "pulls"


@dataclass(frozen=True, slots=True)
class Registration:
    role: Role
    address: RankAddress
    layout: KvLayout
    model: str
    max_context_tokens: int  # The rank can hold so many, prompt and output together; on prefill, the prompt.
    total_pages: int
    engine: str
    model_path: str = ""
    capabilities: tuple[str, ...] = ()
    draining: bool = False  # It takes no new requests: it is being stopped, or an operator wants it so.
    model_context_tokens: int = 0  # This holds whatever its pool holds of it; 0 says that it is not told.

    @property
    def id(self) -> RankId:
        return self.address.id

    @property
    def tells_resume_points(self) -> bool:
        """Return whether the rank reports where it can go on. One that does not can, as far as is known,
        wherever it holds."""
        return bool(self.layout.carried) and NO_RESUME_POINTS not in self.capabilities


# Each is inclusive. A decode step takes milliseconds to tenths; one with a long prompt chunk, on a CPU,
# seconds.
EDGES_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 5.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class StepHistogram:
    """`counts` are by edge, and beyond the last one."""

    counts: tuple[int, ...] = (0,) * (len(EDGES_S) + 1)
    sum_s: float = 0.0

    def with_steps(self, took_s: float, steps: int = 1) -> "StepHistogram":
        at = bisect_left(EDGES_S, took_s)
        counts = (*self.counts[:at], self.counts[at] + steps, *self.counts[at + 1 :])
        return StepHistogram(counts, self.sum_s + steps * took_s)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield (edge, steps that took no longer), as Prometheus has them."""
        total = 0
        for edge, count in zip((*map(str, EDGES_S), "+Inf"), self.counts, strict=True):
            total += count
            yield edge, total


NO_STEPS = StepHistogram()


@dataclass(frozen=True, slots=True)
class CarriedPool:
    group: int  # It is the group's place in the layout.
    kind: str  # It is a GroupKind's value.
    total: int  # It is in units.
    free: int  # No sequence and no checkpoint holds them.


@dataclass(frozen=True, slots=True)
class DraftCount:
    source: str  # It is lookup, tree, ngrams or draft.
    drafted: int  # These are tokens since the rank's start.
    accepted: int  # They are among those.


@dataclass(frozen=True, slots=True)
class ConstraintCounts:
    """Constraints took this since the rank's start."""

    requests: int = 0  # They had a constraint.
    compiled: int = 0  # They were not known here.
    compile_s: float = 0.0
    masked_tokens: int = 0  # They were chosen under a mask, or verified.
    mask_s: float = 0.0  # It passed beside the model.


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank reports this of what it is doing now; see common.proto for each field."""

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
    kv_paths: tuple[KvPath, ...] = ()  # A prefill rank has written by these.
    tokens_per_step: float = 0.0  # A decoding sequence gets so many lately; 0 says that it is not known.
    granted_pages: int = 0  # They are kept for pulls of other ranks.
    # What follows is not reported to routers.
    reserved_pages: int = 0  # They are kept back for the growth of what runs.
    retractions: int = 0  # It counts since the rank's start, as `overtakes` does.
    overtakes: int = 0
    computed_tokens: int | None = (
        # They are of prompts, since the start, of ended requests too; None says that they are not counted.
        None
    )
    free_runs: int = 0  # They are of neighbouring free pages.
    lent_pages: int = 0  # They count since the start, several at a time.
    lent_runs: int = 0  # They were lent in so many runs of neighbours.
    carried: tuple[CarriedPool, ...] = ()
    resume_points: int = 0  # They are kept now.
    evicted_points: int = 0  # They went since the start, for others or for sequences.
    open_rooms: int = 0  # These transfers of a prefill rank are not over.
    unreadable_events: int = 0  # They count since the start, of what another's engine reported of its cache.
    drafts: tuple[DraftCount, ...] = ()
    constraints: ConstraintCounts = ConstraintCounts()
    decode_steps: StepHistogram = NO_STEPS  # They count since the start, and computed single tokens only.
    prompt_steps: StepHistogram = NO_STEPS  # They computed prompts, too.

    @property
    def token_s(self) -> float:
        """Return the seconds between two tokens of a sequence."""
        return self.step_s / max(1.0, self.tokens_per_step)

    @property
    def drafted_tokens(self) -> int:
        return sum(each.drafted for each in self.drafts)

    @property
    def accepted_draft_tokens(self) -> int:
        return sum(each.accepted for each in self.drafts)

    @property
    def queue_wait_s(self) -> float:
        """Return the seconds until one who comes now has pages; 0 says that nobody waits, or that it is
        not known."""
        return self.waiting / self.admitted_per_s if self.admitted_per_s > 0 else 0.0
