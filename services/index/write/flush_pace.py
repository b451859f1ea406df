"""A rank writes its index when the cluster's budget, shared by all ranks, lets it. All is pure."""

import math

_MAX_SLOW_S = 1.0


class FlushPace:
    """This adapts the interval between two writes, and nothing else. Times are seconds on one monotonic
    clock.

    It is never below `flush_s`; never below the rank's share of `writes_per_s`, which is what all ranks of
    the cluster may write together; and, where etcd is slow, at most half of the time is spent writing. A rank
    that has not written for so long waits only `flush_s`, for what else may happen.

    Every rank keeps the beat that chance gave it. Many who have news at one moment, or whom a slow moment of
    etcd held up, would otherwise write at one moment from then on, and so hold each other up again.
    """

    def __init__(self, flush_s: float, writes_per_s: float) -> None:
        assert flush_s >= 0 and writes_per_s > 0
        self.num_ranks = 1  # The cluster has so many.
        self._flush_s = flush_s
        self._writes_per_s = writes_per_s
        self._took_s = 0.0
        self._next_at = -math.inf

    def __repr__(self) -> str:
        return f"FlushPace(interval_s={self.interval_s:.3f}, num_ranks={self.num_ranks})"

    @property
    def interval_s(self) -> float:
        """Return the time from the beginning of one write to that of the next, where the last one is
        typical."""
        return max(self._beat_s, self._took_s + min(self._took_s, _MAX_SLOW_S))

    @property
    def _beat_s(self) -> float:
        return max(self._flush_s, self.num_ranks / self._writes_per_s)

    def wait_s(self, now: float, age_s: float) -> float:
        """Return the time until the next write, where the oldest unreported event happened `age_s` ago."""
        return max(0.0, self._next_at - now, self._flush_s - age_s)

    def scatter(self, now: float, chance: float) -> None:
        """Write next anywhere in the interval, by `chance` in [0, 1): all ranks may be about to."""
        self._next_at = max(self._next_at, now + chance * self._beat_s)

    def tries(self, now: float) -> None:
        """Note that a write begins; should it fail, it counts too."""
        if self._next_at == -math.inf:
            self._next_at = now
        # A beat that was missed, or nearly so, is left out.
        beats = 1 + math.floor(max(0.0, now - self._next_at) / self._beat_s + 0.5)
        self._next_at += beats * self._beat_s

    def wrote(self, now: float, took_s: float) -> None:
        """Note that a write took so long and has ended."""
        self._took_s = took_s
        self._next_at = max(self._next_at, now + min(took_s, _MAX_SLOW_S))
