"""What a rank is doing now. Pure."""

from dataclasses import dataclass, field

from services.values.kv import PageBooks
from services.values.kv_path import KvPath
from services.values.step_histogram import NO_STEPS, StepHistogram


@dataclass(frozen=True, slots=True)
class CarriedPool:
    """Of a group beside full attention: a pool of windows' pages, or of states."""

    group: int  # its place in the layout
    kind: str  # a GroupKind's value
    total: int  # units
    free: int  # held by no sequence and no resume point


@dataclass(frozen=True, slots=True)
class DraftCount:
    """Of one source of drafts."""

    source: str  # lookup, tree, ngrams or draft
    drafted: int  # tokens, since the rank's start
    accepted: int  # of them


@dataclass(frozen=True, slots=True)
class ConstraintCounts:
    """What constraints took, since the rank's start."""

    requests: int = 0  # under a constraint
    compiled: int = 0  # that were not known here, and
    compile_s: float = 0.0
    masked_tokens: int = 0  # chosen under a mask, or verified
    mask_s: float = 0.0  # beside the model


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
    tokens_per_step: float = 0.0  # that a decoding sequence gets lately; 0: not known
    # Not told to routers:
    reserved_pages: int = 0  # kept back for the growth of what runs
    retractions: int = 0  # since the rank's start, as `overtakes`
    overtakes: int = 0
    computed_tokens: int | None = (
        None  # of prompts, since the start, of ended requests too; None: not counted
    )
    free_runs: int = 0  # of neighbouring free pages
    lent_pages: int = 0  # since the start, several at a time, and
    lent_runs: int = 0  # in how many runs of neighbours they were lent
    carried: tuple[CarriedPool, ...] = ()
    resume_points: int = 0  # kept now
    evicted_points: int = 0  # since the start, for others or for sequences
    open_rooms: int = 0  # transfers of a prefill rank that are not over
    unreadable_events: int = 0  # since the start, of what another's engine told of its cache
    drafts: tuple[DraftCount, ...] = ()
    constraints: ConstraintCounts = ConstraintCounts()
    decode_steps: StepHistogram = NO_STEPS  # since the start, of single tokens only
    prompt_steps: StepHistogram = NO_STEPS  # that computed prompts, too

    @property
    def token_s(self) -> float:
        """Between two tokens of a sequence."""
        return self.step_s / max(1.0, self.tokens_per_step)

    @property
    def drafted_tokens(self) -> int:
        return sum(each.drafted for each in self.drafts)

    @property
    def accepted_draft_tokens(self) -> int:
        return sum(each.accepted for each in self.drafts)

    @property
    def queue_wait_s(self) -> float:
        """Until one who comes now has pages; 0: nobody waits, or it is not known."""
        return self.waiting / self.admitted_per_s if self.admitted_per_s > 0 else 0.0
