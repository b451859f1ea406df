"""An index that notes how old what it is told really is when it takes effect; of simulated ranks only."""

import time
from collections.abc import Collection, Iterable

import numpy as np

from bench.index.simulated_ledger import newest_of, stamped_s
from services.index.read.prefix_index import IndexDraft, PrefixIndex
from services.values.rank import RankId


class TimedIndex(PrefixIndex):
    """Seconds since the oldest block was stored that a delta or a snapshot is the first to tell.

    All blocks that one record is the first to tell bear the same stamp; in a snapshot that is the newest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timing = False
        self._began_s = 0.0
        self.delta_ages_s: list[float] = []
        self.snapshot_ages_s: list[float] = []
        self._num_new = 0
        self._drafted: list[int] = []

    def begin(self) -> None:
        self._timing, self._began_s, self._num_new = True, time.monotonic(), 0
        self.delta_ages_s.clear()
        self.snapshot_ages_s.clear()

    def new_blocks_per_s(self) -> float:
        """Blocks that were told for the first time, since `begin`."""
        return self._num_new / (time.monotonic() - self._began_s)

    def apply_delta(
        self,
        rank: RankId,
        added: Collection[int],
        removed: Collection[int],
        resumable_added: Iterable[int] = (),
        resumable_removed: Iterable[int] = (),
        files_added: Collection[int] = (),
        files_removed: Collection[int] = (),
    ) -> bool:
        marks = resumable_added, resumable_removed, files_added, files_removed
        applied = super().apply_delta(rank, added, removed, *marks)
        if self._timing and added and applied:
            self.delta_ages_s.append(time.monotonic() - stamped_s(next(iter(added))))
            self._num_new += len(added)
        return applied

    def add_to_draft(self, draft: IndexDraft, hashes: Iterable[int]) -> None:
        super().add_to_draft(draft, hashes)
        self._drafted += list(hashes)

    def show_draft(self, draft: IndexDraft, rank: RankId) -> None:
        super().show_draft(draft, rank)
        drafted, self._drafted = self._drafted, []
        if self._timing and drafted:
            stamp_s, num_new = newest_of(np.array(drafted, np.uint64))
            self.snapshot_ages_s.append(time.monotonic() - stamp_s)
            self._num_new += num_new
