"""A router streams to its watchers what happens there.

    request ends --> a ring for each watcher whose it is --+   (when it ended, and every interval)
    ranks, one picture for all --> what has changed -------+--> WatchClusterResponse --> its stream
    requests that run -------------------------------------+

While nobody watches nothing is made of any request.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.router import callers
from services.router.api_keys import WRONG_KEY
from services.router.request.generation import Generator
from services.router.request.progress import Progress
from services.router.watch.pace import Pace
from services.router.watch.request_messages import finished_request, running_request
from services.router.watch.watch_options import WatchOptions, read_watch_options
from services.values.errors import NoCapacity, Unauthenticated, Unavailable
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import RankStatus

_T = TypeVar("_T")


class Ring(Generic[_T]):
    """Keeps the last things that happened, at most `capacity`, for one who may be slow to take them; the
    oldest give way, and are counted."""

    def __init__(self, capacity: int) -> None:
        self._kept: deque[_T] = deque(maxlen=capacity)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, item: _T) -> bool:
        """Return whether there was space."""
        is_full = len(self._kept) == self._kept.maxlen
        self.dropped += is_full
        self._kept.append(item)
        return not is_full

    def take(self) -> list[_T]:
        """Return all that are kept, the oldest first; they are kept no more."""
        taken = list(self._kept)
        self._kept.clear()
        return taken


RankName = tuple[str, int]  # A name is a worker and a rank: a new incarnation is a change.
_SECONDS = ("staleness_s", "unregistered_s")  # They change by themselves.
_SHARES = ("trust", "resume_trust")  # They change by themselves, too.


@dataclass(frozen=True, slots=True)
class Shown:
    """Two states of a rank are the same whose times differ by less than a second or so."""

    status: RankStatus = field(compare=False)
    rough: RankStatus

    @classmethod
    def of(cls, status: RankStatus) -> "Shown":
        rough = RankStatus()
        rough.CopyFrom(status)
        for name in _SECONDS:
            setattr(rough, name, int(getattr(status, name)))
        for name in _SHARES:
            if getattr(status, name):
                setattr(rough, name, round(getattr(status, name), 2))
        return cls(status, rough)


class Changes(NamedTuple):
    changed: list[RankStatus]  # They are as they are now, newcomers too, in the order of now.
    gone: list[RankStatus]  # They are as they were.

    @classmethod
    def between(cls, before: Mapping[RankName, Shown], after: Mapping[RankName, Shown]) -> "Changes":
        changed = [shown.status for name, shown in after.items() if before.get(name) != shown]
        return cls(changed, [shown.status for name, shown in before.items() if name not in after])


class WatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.watchers = Gauge(
            "isthmus_watchers", "Streams of WatchCluster and /v1/cluster/watch.", registry=registry
        )
        self.refused = Counter(
            "isthmus_watchers_refused", "Those that were one too many (--max-watchers).", registry=registry
        )
        self.dropped = Counter(
            "isthmus_watch_dropped",
            "Finished requests that a watcher was not told of because it reads too slowly.",
            registry=registry,
        )


_KEPT = 256  # A watcher may be so many finished requests behind.
_MOST_RUNNING = 1_000  # A response reports so many.
_GATHER_S = 0.05  # More finished requests may go with the first.
_LOOK_S = 0.1  # A watcher that waits for its turn sees so soon that all is over.
_FRESH_S = 0.09  # One picture of the ranks does for all in it; it is below the shortest interval.

_Ranks = Mapping[RankName, Shown]


@dataclass(frozen=True, slots=True)
class _Picture:
    taken_s: float
    listed: generation_pb2.ListRanksResponse
    ranks: _Ranks


class _Watcher:
    def __init__(self, options: WatchOptions) -> None:
        self.options = options
        self.finished: Ring[generation_pb2.FinishedRequest] = Ring(_KEPT)
        self.woken = asyncio.Event()  # A request has finished, or all is over.
        self.ranks: _Ranks = {}  # They were reported to the watcher so.


class Watch:
    """Serves a router's watchers, on its loop. `ranks` tells what ListRanks does; `clock` is the
    generator's, and `now` gives seconds since the epoch."""

    def __init__(
        self,
        model_name: str,
        generator: Generator,
        ranks: Callable[[], generation_pb2.ListRanksResponse],
        metrics: WatchMetrics,
        max_watchers: int,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._model_name = model_name
        self._generator = generator
        self._list_ranks = ranks
        self._metrics = metrics
        self._max_watchers = max_watchers
        self._clock = clock
        self._now = now
        self._watchers: list[_Watcher] = []
        self._stop_listening: Callable[[], None] | None = None
        self._picture: _Picture | None = None
        self._pace = Pace()
        self._closed = False

    def follow(
        self, request: generation_pb2.WatchClusterRequest
    ) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
        """Return responses as in generation.proto, until they are closed, the router stops, or the key that
        was shown is good no more.

        Raises InvalidRequest, Forbidden; at the first response NoCapacity, Unavailable, Unauthenticated.
        """
        responses = self.responses(read_watch_options(request, callers.current()))
        return _while_good(callers.still_good(), responses)

    async def responses(
        self, options: WatchOptions
    ) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
        """Yield responses until the generator is closed, or all is. Raises NoCapacity where too many
        watch, and Unavailable."""
        with self._entered(options) as watcher:
            await self._turn()
            yield self._response(watcher)
            is_last = False
            while not is_last:
                await self._due(watcher)
                is_last = self._closed
                yield self._response(watcher)

    def close(self) -> None:
        """End all streams, each with a last response: who watches would keep a router that stops."""
        self._closed = True
        for watcher in self._watchers:
            watcher.woken.set()

    @contextlib.contextmanager
    def _entered(self, options: WatchOptions) -> Iterator[_Watcher]:
        if self._closed:
            raise Unavailable("this router is stopping")
        if len(self._watchers) >= self._max_watchers:
            self._metrics.refused.inc()
            raise NoCapacity(f"{len(self._watchers)} watch this router already (--max-watchers)")
        watcher = _Watcher(options)
        self._watchers.append(watcher)
        self._follow_watchers()
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)
            self._follow_watchers()

    def _follow_watchers(self) -> None:
        self._metrics.watchers.set(len(self._watchers))
        if self._watchers and self._stop_listening is None:
            self._stop_listening = self._generator.listen(self._ended)
        if not self._watchers and self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = self._picture = None

    def _ended(self, progress: Progress, outcome: str) -> None:
        watchers = [watcher for watcher in self._watchers if watcher.options.sees(progress.request.tenant)]
        if not watchers:
            return
        finished = finished_request(
            progress,
            outcome,
            self._model_name,
            duration_s=self._clock() - progress.began_s,
            ended_at_s=self._now(),
            with_candidates=any(watcher.options.wants_candidates for watcher in watchers),
        )
        for watcher in watchers:
            if not watcher.finished.put(finished):
                self._metrics.dropped.inc()
            watcher.woken.set()

    async def _due(self, watcher: _Watcher) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(watcher.options.interval_s):
                await watcher.woken.wait()
                if not self._closed:
                    await asyncio.sleep(_GATHER_S)
        await self._turn()
        watcher.woken.clear()

    async def _turn(self) -> None:
        while not self._closed and (left_s := self._pace.left_s) > 0:
            await asyncio.sleep(min(left_s, _LOOK_S))

    def _response(self, watcher: _Watcher) -> generation_pb2.WatchClusterResponse:
        with self._pace.turn():
            return self._told(watcher)

    def _told(self, watcher: _Watcher) -> generation_pb2.WatchClusterResponse:
        picture = self._ranks_now()
        changes = Changes.between(watcher.ranks, picture.ranks)
        watcher.ranks = picture.ranks
        now, sees = self._clock(), watcher.options.sees
        seen = [progress for progress in self._generator.running if sees(progress.request.tenant)]
        return generation_pb2.WatchClusterResponse(
            ranks=changes.changed,
            gone=[status.rank for status in changes.gone],
            running=[running_request(each, self._model_name, now) for each in islice(seen, _MOST_RUNNING)],
            num_running=len(seen),
            finished=watcher.finished.take(),
            dropped=watcher.finished.dropped,
            staleness_s=picture.listed.staleness_s,
            degraded=picture.listed.degraded,
        )

    def _ranks_now(self) -> _Picture:
        now, picture = self._clock(), self._picture
        if picture is None or now - picture.taken_s >= _FRESH_S:
            listed = self._list_ranks()
            ranks = {(each.rank.worker, each.rank.rank): Shown.of(each) for each in listed.ranks}
            picture = self._picture = _Picture(now, listed, ranks)
        return picture


async def _while_good(
    is_good: Callable[[], bool], responses: AsyncGenerator[generation_pb2.WatchClusterResponse, None]
) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
    """End as where the router stops: who connects again is told why. Closes `responses`.

    Raises Unauthenticated before the first of them.
    """
    has_begun = False
    async with contextlib.aclosing(responses):
        async for response in responses:
            if not is_good():
                if has_begun:
                    return
                raise Unauthenticated(WRONG_KEY)
            has_begun = True
            yield response
