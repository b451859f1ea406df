"""A rank's load is what it is doing now."""

from dataclasses import dataclass, field

from services.values.kv import PageBooks
from services.values.kv_path import KvPath
from services.values.step_histogram import NO_STEPS, StepHistogram


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
