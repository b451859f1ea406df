"""How often one rank may write its index: the cluster's budget, shared by all ranks. Pure."""

_MAX_SLOW_S = 1.0


class FlushPace:
    """Adapts the interval between two writes, and nothing else.

    Never below `flush_s`; never below the rank's share of `writes_per_s`, which is what all ranks of the
    cluster may write together; and, where etcd is slow, at most half of the time is spent writing.
    """

    def __init__(self, flush_s: float, writes_per_s: float) -> None:
        assert flush_s >= 0 and writes_per_s > 0
        self.num_ranks = 1  # of the cluster
        self._flush_s = flush_s
        self._writes_per_s = writes_per_s
        self._took_s = 0.0

    def __repr__(self) -> str:
        return f"FlushPace(interval_s={self.interval_s:.3f}, num_ranks={self.num_ranks})"

    @property
    def interval_s(self) -> float:
        return max(self._flush_s, self.num_ranks / self._writes_per_s, min(self._took_s, _MAX_SLOW_S))

    def wrote(self, took_s: float) -> None:
        """A write took so long."""
        self._took_s = took_s
