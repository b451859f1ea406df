"""A pace decides when a rank may write within the budget that all ranks of a cluster share. It is pure."""

import math

_MAX_SLOW_S = 1.0


class FlushPace:
    """This only adapts the interval between two writes. Times are seconds on one monotonic clock.

    The interval is at least `flush_s`, and at least the rank's share of `writes_per_s`, which all ranks of
    the cluster share. If etcd is slow, at most half of the time is spent writing. A rank that has not written
    for an interval waits only `flush_s`, for further events.

    Every rank keeps a random phase. Otherwise ranks that have news at the same moment, or were delayed by the
    same slow moment of etcd, would write at the same moments from then on, and delay each other again.
    """

    def __init__(self, flush_s: float, writes_per_s: float) -> None:
        assert flush_s >= 0 and writes_per_s > 0
        self.num_ranks = 1  # This is the number of ranks in the cluster.
        self._flush_s = flush_s
        self._writes_per_s = writes_per_s
        self._took_s = 0.0
        self._next_at = -math.inf

    def __repr__(self) -> str:
        return f"FlushPace(interval_s={self.interval_s:.3f}, num_ranks={self.num_ranks})"

    @property
    def interval_s(self) -> float:
        """Return the time between the beginnings of two writes, if the last one is typical."""
        return max(self._beat_s, self._took_s + min(self._took_s, _MAX_SLOW_S))

    @property
    def _beat_s(self) -> float:
        return max(self._flush_s, self.num_ranks / self._writes_per_s)

    def wait_s(self, now: float, age_s: float) -> float:
        return max(0.0, self._next_at - now, self._flush_s - age_s)

    def scatter(self, now: float, chance: float) -> None:
        """Write next at a random time in the interval, by `chance` in [0, 1): all ranks may write at once."""
        self._next_at = max(self._next_at, now + chance * self._beat_s)

    def tries(self, now: float) -> None:
        if self._next_at == -math.inf:
            self._next_at = now
        # A beat that was missed, or nearly missed, is skipped.
        beats = 1 + math.floor(max(0.0, now - self._next_at) / self._beat_s + 0.5)
        self._next_at += beats * self._beat_s

    def wrote(self, now: float, took_s: float) -> None:
        self._took_s = took_s
        self._next_at = max(self._next_at, now + min(took_s, _MAX_SLOW_S))
