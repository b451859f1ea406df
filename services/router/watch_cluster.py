"""A router streams its events to its watchers.

    request ends --> a ring for each watcher that sees it -+   (at its end, and at every interval)
    ranks, one snapshot for all --> changes since then ----+--> WatchClusterResponse --> its stream
    running requests --------------------------------------+

Requests cost nothing extra while nobody watches. A watcher gets the usage and the ranks of a request, and no
text.

All watchers of a router together get a limited share of its time, as its requests come first.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.net.grpc_errors import status_named
from services.router import callers
from services.router.api_keys import WRONG_KEY
from services.router.callers import Caller
from services.router.cluster_messages import few_candidates
from services.router.models import Models
from services.router.request.progress import Progress
from services.values.errors import Forbidden, InvalidRequest, NoCapacity, Unauthenticated, Unavailable
from services.values.request import MAX_ID_CHARS, FinishReason, is_id
from services.wire import convert
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import RankStatus

_USUAL_INTERVAL_S = 1.0
_SHORTEST_S, _LONGEST_S = 0.1, 60.0


@dataclass(frozen=True, slots=True)
class WatchOptions:
    interval_s: float
    tenant: str | None  # None means all tenants.
    wants_candidates: bool = True

    def sees(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant


def read_watch_options(request: generation_pb2.WatchClusterRequest, caller: Caller) -> WatchOptions:
    interval_s = request.interval_s or _USUAL_INTERVAL_S
    if not _SHORTEST_S <= interval_s <= _LONGEST_S:  # NaN is outside, too.
        raise InvalidRequest(
            "interval_s", f"must be 0 or in [{_SHORTEST_S:g}, {_LONGEST_S:g}], got {request.interval_s:g}"
        )
    if not is_id(request.tenant):
        raise InvalidRequest("tenant", f"must be at most {MAX_ID_CHARS} printable characters")
    if not request.all_tenants:
        return WatchOptions(interval_s, caller.tenant_of(request.tenant), not request.no_candidates)
    if request.tenant:
        raise InvalidRequest("tenant", "must be empty where all_tenants is set")
    if not caller.is_operator:
        raise Forbidden("all_tenants needs an operator's API key")
    return WatchOptions(interval_s, None, not request.no_candidates)


class WatchPace:
    """A report of a thousand requests, or of hundreds of ranks, takes tens of milliseconds, each time and for
    each watcher. After every turn the next one waits so long that watchers get no more than their share of
    the time."""

    def __init__(self, share: float = 0.1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._free_s = 0.0

    @property
    def left_s(self) -> float:
        return self._free_s - self._clock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self._free_s = began_s + (self._clock() - began_s) / self._share


_MOST_CANDIDATES = 16
# The first is the client's own text, and the second would put the answer into a prompt.
_CLIENTS_ALONE = ("matched_stop", "answer_id")


def running_request(progress: Progress, now: float) -> generation_pb2.RunningRequest:
    """Return the message. `now` is on the clock of `began_s`."""
    placed = progress.placed
    chosen = placed.decision.chosen if placed is not None else None
    prefill = chosen.prefill if chosen is not None else None
    return generation_pb2.RunningRequest(
        request_id=progress.request.request_id,
        conversation_id=progress.request.conversation_id,
        tenant=progress.request.tenant,
        model=progress.request.model,
        age_s=now - progress.began_s,
        prompt_tokens=progress.prompt_tokens,
        completion_tokens=progress.completion_tokens,
        answers=len(progress.answers),
        decode=None if chosen is None else convert.rank_id_to_proto(chosen.decode.id),
        prefill=None if prefill is None else convert.rank_id_to_proto(prefill.id),
    )


def finished_request(
    progress: Progress,
    outcome: str,
    *,
    duration_s: float,
    ended_at_s: float,
    with_candidates: bool = True,
) -> generation_pb2.FinishedRequest:
    """Return the message. `outcome` is the Generator's, and `ended_at_s` is in seconds since the epoch."""
    finished = generation_pb2.FinishedRequest(
        request_id=progress.request.request_id,
        conversation_id=progress.request.conversation_id,
        tenant=progress.request.tenant,
        model=progress.request.model,
        outcome=_outcome(progress, outcome),
        ended_at_s=ended_at_s,
        duration_s=duration_s,
        finish=progress.finish,
        tool_calls=sum(answer.num_calls for answer in progress.answers),
        answers=len(progress.answers),
        completion_tokens=progress.completion_tokens,
        constraint=progress.request.constraint,
    )
    if progress.finish is not None:
        for name in _CLIENTS_ALONE:
            finished.finish.ClearField(name)
    if with_candidates and (placed := progress.first_placed) is not None:
        finished.candidates.extend(few_candidates(placed.decision, placed.pinned, _MOST_CANDIDATES))
    return finished


def _outcome(progress: Progress, outcome: str) -> str:
    if outcome == "finished":
        return "aborted" if progress.finish_reason is FinishReason.ABORTED else "ok"
    return "aborted" if outcome == "cancelled" else status_named(outcome).name


_T = TypeVar("_T")


class Ring(Generic[_T]):
    """This keeps at most `capacity` items for a slow reader; the oldest are dropped and counted."""

    def __init__(self, capacity: int) -> None:
        self._kept: deque[_T] = deque(maxlen=capacity)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, item: _T) -> bool:
        is_full = len(self._kept) == self._kept.maxlen
        self.dropped += is_full
        self._kept.append(item)
        return not is_full

    def take(self) -> list[_T]:
        taken = list(self._kept)
        self._kept.clear()
        return taken


RankName = tuple[str, int]  # A name is a worker and a rank, so a new incarnation is a change.
_SECONDS = ("staleness_s", "unregistered_s")  # These change by themselves.
_SHARES = ("trust", "resume_trust")  # These change by themselves, too.


@dataclass(frozen=True, slots=True)
class Shown:
    """Two states of a rank are equal even where their times differ by less than a second or so."""

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
    changed: list[RankStatus]  # These are the current states, of new ranks too, in the current order.
    gone: list[RankStatus]  # These are the last states.

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
            "isthmus_watchers_refused",
            "Streams that were refused because there were too many (--max-watchers).",
            registry=registry,
        )
        self.dropped = Counter(
            "isthmus_watch_dropped",
            "Finished requests that a watcher did not receive because it reads too slowly.",
            registry=registry,
        )


_KEPT = 256  # A watcher may be this many finished requests behind.
_MOST_RUNNING = 1_000  # A response reports at most this many.
_GATHER_S = 0.05  # More finished requests may be sent with the first.
_LOOK_S = 0.1  # A watcher that waits for its turn notices the end this soon.
_FRESH_S = 0.09  # One snapshot serves all watchers for so long, below the shortest interval.

_Ranks = Mapping[RankName, Shown]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    taken_s: float
    listed: generation_pb2.ListRanksResponse
    ranks: _Ranks


class _Watcher:
    def __init__(self, options: WatchOptions) -> None:
        self.options = options
        self.finished: Ring[generation_pb2.FinishedRequest] = Ring(_KEPT)
        self.woken = asyncio.Event()  # This is set when a request has finished, or at the end.
        self.ranks: _Ranks = {}  # These were last reported to the watcher.


class Watch:
    """This serves a router's watchers, on its loop. `ranks` returns ListRanks' response; `clock` is the
    generator's, and `now` returns seconds since the epoch."""

    def __init__(
        self,
        models: Models,
        ranks: Callable[[], generation_pb2.ListRanksResponse],
        metrics: WatchMetrics,
        max_watchers: int,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._models = models
        self._list_ranks = ranks
        self._metrics = metrics
        self._max_watchers = max_watchers
        self._clock = clock
        self._now = now
        self._watchers: list[_Watcher] = []
        self._stop_listening: Callable[[], None] | None = None
        self._snapshot: _Snapshot | None = None
        self._pace = WatchPace()
        self._closed = False

    def follow(
        self, request: generation_pb2.WatchClusterRequest
    ) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
        """Return responses as in generation.proto, until they are closed, the router stops, or the call's key
        is no longer valid.

        Raises InvalidRequest and Forbidden; the first response raises NoCapacity, Unavailable or
        Unauthenticated.
        """
        responses = self.responses(read_watch_options(request, callers.current()))
        return _while_good(callers.still_good(), responses)

    async def responses(
        self, options: WatchOptions
    ) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
        """Yield responses until the generator or the watch is closed. Raises NoCapacity where too many watch,
        and Unavailable."""
        with self._entered(options) as watcher:
            await self._turn()
            yield self._response(watcher)
            is_last = False
            while not is_last:
                await self._due(watcher)
                is_last = self._closed
                yield self._response(watcher)

    def close(self) -> None:
        """End all streams, each with a last response, so that watchers do not delay the stop."""
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
            self._stop_listening = self._models.listen(self._ended)
        if not self._watchers and self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = self._snapshot = None

    def _ended(self, progress: Progress, outcome: str) -> None:
        watchers = [watcher for watcher in self._watchers if watcher.options.sees(progress.request.tenant)]
        if not watchers:
            return
        finished = finished_request(
            progress,
            outcome,
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
            return self._report(watcher)

    def _report(self, watcher: _Watcher) -> generation_pb2.WatchClusterResponse:
        snapshot = self._ranks_now()
        changes = Changes.between(watcher.ranks, snapshot.ranks)
        watcher.ranks = snapshot.ranks
        now, sees = self._clock(), watcher.options.sees
        seen = [progress for progress in self._models.running if sees(progress.request.tenant)]
        return generation_pb2.WatchClusterResponse(
            ranks=changes.changed,
            gone=[status.rank for status in changes.gone],
            running=[running_request(each, now) for each in islice(seen, _MOST_RUNNING)],
            num_running=len(seen),
            finished=watcher.finished.take(),
            dropped=watcher.finished.dropped,
            staleness_s=snapshot.listed.staleness_s,
            degraded=snapshot.listed.degraded,
        )

    def _ranks_now(self) -> _Snapshot:
        now, snapshot = self._clock(), self._snapshot
        if snapshot is None or now - snapshot.taken_s >= _FRESH_S:
            listed = self._list_ranks()
            ranks = {(each.rank.worker, each.rank.rank): Shown.of(each) for each in listed.ranks}
            snapshot = self._snapshot = _Snapshot(now, listed, ranks)
        return snapshot


async def _while_good(
    is_good: Callable[[], bool], responses: AsyncGenerator[generation_pb2.WatchClusterResponse, None]
) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
    """End the responses when the key becomes invalid, as when the router stops: a client that connects again
    gets the reason. Closes `responses`. Raises Unauthenticated before the first response."""
    has_begun = False
    async with contextlib.aclosing(responses):
        async for response in responses:
            if not is_good():
                if has_begun:
                    return
                raise Unauthenticated(WRONG_KEY)
            has_begun = True
            yield response
