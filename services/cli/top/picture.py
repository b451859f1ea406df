"""This pure module makes a picture of a cluster of a router's news."""

from collections import deque
from collections.abc import Sequence

from services.cli.top.recent_requests import RankName, RecentRequests, Totals, name_of
from services.wire.isthmus.v1.generation_pb2 import (
    FinishedRequest,
    RankStatus,
    RunningRequest,
    WatchClusterResponse,
)

_KEPT = 200  # So many finished requests are kept to be shown.


class Picture:
    """Times are seconds on one clock, ours: a router's may be another."""

    def __init__(self, window_s: float, now: float) -> None:
        self._ranks: dict[RankName, RankStatus] = {}
        self._window = RecentRequests(window_s, now)
        self._finished: deque[tuple[float, FinishedRequest]] = deque(maxlen=_KEPT)
        self._heard_s = now
        self._last = WatchClusterResponse()
        self.away = ""  # It says why nothing new comes.

    def hear(self, response: WatchClusterResponse, now: float, is_first: bool) -> None:
        """Take news in; a stream's first (`is_first`) has all ranks."""
        if is_first:
            self._ranks.clear()
        for rank in response.gone:
            self._ranks.pop(name_of(rank), None)
        for status in response.ranks:
            self._ranks[name_of(status.rank)] = status
        for finished in response.finished:
            self._window.add(now, finished)
            self._finished.appendleft((now, finished))
        self._last, self._heard_s, self.away = response, now, ""

    @property
    def ranks(self) -> Sequence[RankStatus]:
        """Return decode ranks first, as they get the requests."""
        return sorted(self._ranks.values(), key=lambda s: (-s.role, s.rank.worker, s.rank.rank))

    @property
    def num_running(self) -> int:
        return self._last.num_running

    @property
    def dropped(self) -> int:
        return self._last.dropped

    @property
    def degraded(self) -> str:
        return self._last.degraded

    @property
    def staleness_s(self) -> float:
        return self._last.staleness_s

    @property
    def window_s(self) -> float:
        return self._window.window_s

    def running(self, now: float) -> Sequence[tuple[float, RunningRequest]]:
        """Return each with its age, the oldest first."""
        return [(each.age_s + now - self._heard_s, each) for each in self._last.running]

    def finished(self, now: float) -> Sequence[tuple[float, FinishedRequest]]:
        """Return each with the seconds since it was heard of, the latest first."""
        return [(now - heard_s, each) for heard_s, each in self._finished]

    def totals(self, now: float) -> Totals:
        return self._window.totals(now)

    def hit_rates(self, now: float) -> dict[RankName, float]:
        return self._window.hit_rates(now)
