"""A scheduler of SGLang's reports its load (managers/load_snapshot.py); this is what routers want of it.
Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.values.kv import PageBooks
from services.values.load import RankLoad
from services.values.rank import Role
from services.values.step_histogram import NO_STEPS, StepHistogram

Load = Mapping[str, Any]
_PACE = 0.2  # It is the exponential average's.


def num_pages(load: Load, page_size: int) -> int:
    """Return the pages of the rank's pool; 0 before its scheduler has reported anything."""
    return int(load.get("max_total_num_tokens", 0)) // page_size


def waiting(load: Load, role: Role) -> int:
    """Return how many requests wait for pages.

    On decode SGLang's own number has those as well that have theirs and wait for prefill: its time is not
    this rank's.
    """
    if role is Role.PREFILL:
        return int(load.get("num_waiting_reqs", 0))
    queues = load.get("disaggregation", {})
    names = ("decode_prealloc_queue_reqs", "decode_retracted_queue_reqs")
    return sum(int(queues.get(name, 0)) for name in names)


def rank_load(load: Load, role: Role, page_size: int, pool_pages: int) -> RankLoad:
    """Return the rank's load: `pool_pages` until it has reported; pages that SGLang could evict count as
    free."""
    total = num_pages(load, page_size) or pool_pages
    used_tokens = int(load.get("num_used_tokens", 0))
    used = min(total, -(-used_tokens // page_size))
    waits = waiting(load, role)
    # What waits on a decode rank waits for room: it computes no prompts. SGLang counts whole prompts there,
    # also what its tree has of them.
    uncached = int(load.get("num_waiting_uncached_tokens", 0))
    without_pages = max(0, int(load.get("num_total_tokens", 0)) - used_tokens)
    with_pages = 0 if role is Role.PREFILL else int(load.get("num_waiting_reqs", 0)) - waits
    return RankLoad(
        running=int(load.get("num_running_reqs", 0)) + max(0, with_pages),
        waiting=waits,
        pending_tokens=uncached if role is Role.PREFILL else 0,
        waiting_tokens=uncached if role is Role.PREFILL else without_pages,
        books=PageBooks(total, total - used, 0, 0, used, 0),
        prefill_tokens_per_s=_prefill_rate(load),
    )


def _prefill_rate(load: Load) -> float:
    busy_us = int(load.get("total_prefill_busy_us", 0) or 0)
    return int(load.get("total_prefill_uncached_tokens", 0)) * 1e6 / busy_us if busy_us else 0.0


class MeanStepTimes:
    """Step times are kept while a rank rests: a router wants to know what one sequence more would cost
    there."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[float, float]] = {}  # It has steps and microseconds.
        self._averages_s: dict[int, float] = {}
        self._histograms: dict[int, StepHistogram] = {}

    def note(self, dp_rank: int, moments: Sequence[float] | None) -> None:
        """Take SGLang's running totals in.

        `moments` are, since the rank's start and over all decode steps, how many there were, their batch
        sizes, their microseconds and more; None before the first (sglang.srt.managers.load_snapshot).
        """
        if not moments:
            return
        before = self._totals.get(dp_rank, (0.0, 0.0))
        steps, total_us = self._totals[dp_rank] = float(moments[0]), float(moments[2])
        if steps > before[0]:
            sample_s = (total_us - before[1]) / (steps - before[0]) / 1e6
            average_s = self._averages_s.get(dp_rank, sample_s)
            self._averages_s[dp_rank] = average_s + _PACE * (sample_s - average_s)
            known = self._histograms.get(dp_rank, NO_STEPS)
            self._histograms[dp_rank] = known.with_steps(sample_s, int(steps - before[0]))

    def step_s(self, dp_rank: int) -> float:
        """Return the average in seconds; 0 before the first step."""
        return self._averages_s.get(dp_rank, 0.0)

    def histogram(self, dp_rank: int) -> StepHistogram:
        """Return all steps since the start; of those between two looks their mean is all that is known."""
        return self._histograms.get(dp_rank, NO_STEPS)
