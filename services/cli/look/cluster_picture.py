"""This pure module builds a picture of a cluster from a router's reports: its ranks, and recent requests."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from services.wire.isthmus.v1.common_pb2 import RankId
from services.wire.isthmus.v1.generation_pb2 import (
    Finish,
    FinishedRequest,
    RankStatus,
    RunningRequest,
    WatchClusterResponse,
)

RankName = tuple[str, int]  # It consists of the worker and the number of the rank.
_MOST = 20_000  # A window counts at most this many requests.


@dataclass(frozen=True, slots=True)
class Totals:
    """`hit_rate` is the share of prompt tokens that decode ranks held already, or None without prompts."""

    requests_per_s: float = 0.0
    failed: int = 0
    hit_rate: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None


class RecentRequests:
    def __init__(self, window_s: float, began_s: float) -> None:
        self.window_s = window_s
        self._began_s = began_s
        self._ended: deque[tuple[float, FinishedRequest]] = deque(maxlen=_MOST)

    def add(self, now: float, finished: FinishedRequest) -> None:
        self._ended.append((now, finished))

    def totals(self, now: float) -> Totals:
        self._forget(now)
        if not self._ended:
            return Totals()
        # A window that began a short time ago is not full yet.
        spanned_s = max(1.0, min(self.window_s, now - self._began_s))
        prefixes = [(found_at_decode(f), f.usage.prompt_tokens) for f in self._finishes()]
        ttfts = sorted(s for finish in self._finishes() if (s := finish.stages.first_token_s))
        return Totals(
            len(self._ended) / spanned_s,
            sum(finished.outcome not in ("ok", "aborted") for _, finished in self._ended),
            _share(prefixes) if prefixes else None,
            percentile(ttfts, 0.5),
            percentile(ttfts, 0.99),
        )

    def hit_rates(self, now: float) -> dict[RankName, float]:
        """Return for each rank that got prompts the share of their tokens that it held already."""
        self._forget(now)
        found: dict[RankName, list[tuple[int, int]]] = {}
        for finish in self._finishes():
            usage, placement = finish.usage, finish.placement
            found.setdefault(name_of(placement.decode), []).append(
                (found_at_decode(finish), usage.prompt_tokens)
            )
            if placement.HasField("prefill"):
                found.setdefault(name_of(placement.prefill), []).append(
                    (usage.prefill_prefix_len - usage.pulled_tokens, usage.prompt_tokens)
                )
        return {name: _share(pairs) for name, pairs in found.items()}

    def _finishes(self) -> Iterator[Finish]:
        return (finished.finish for _, finished in self._ended if finished.finish.usage.prompt_tokens)

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now - self.window_s:
            self._ended.popleft()


def percentile(ascending: Sequence[float], share: float) -> float | None:
    return ascending[max(0, ceil(share * len(ascending)) - 1)] if ascending else None


def found_at_decode(finish: Finish) -> int:
    """Return the prompt's tokens that the decode rank itself had."""
    pulled = 0 if finish.placement.HasField("prefill") else finish.usage.pulled_tokens
    return finish.usage.decode_prefix_len - pulled


def came_to_decode(finish: Finish) -> int:
    """Return the prompt's tokens whose KV others wrote there: its prefill rank, or the source of a pull."""
    is_remote = finish.placement.HasField("prefill")
    return finish.usage.delta_tokens if is_remote else finish.usage.pulled_tokens


def name_of(rank: RankId) -> RankName:
    return rank.worker, rank.rank


def _share(parts: Iterable[tuple[int, int]]) -> float:
    founds, wholes = zip(*parts, strict=True)
    return float(sum(founds) / sum(wholes))


_KEPT = 200  # At most this many finished requests are shown.


class Picture:
    """`last` is the last report. Times are seconds on our own clock: a router's may be another."""

    def __init__(self, window_s: float, now: float) -> None:
        self._ranks: dict[RankName, RankStatus] = {}
        self.window = RecentRequests(window_s, now)
        self._finished: deque[tuple[float, FinishedRequest]] = deque(maxlen=_KEPT)
        self._received_s = now
        self.last = WatchClusterResponse()
        self.away = ""  # This is the reason if no reports arrive.

    def add(self, response: WatchClusterResponse, now: float, is_first: bool) -> None:
        """Add a report. The first one of a stream (`is_first`) contains all ranks."""
        if is_first:
            self._ranks.clear()
        for rank in response.gone:
            self._ranks.pop(name_of(rank), None)
        for status in response.ranks:
            self._ranks[name_of(status.rank)] = status
        for finished in response.finished:
            self.window.add(now, finished)
            self._finished.appendleft((now, finished))
        self.last, self._received_s, self.away = response, now, ""

    @property
    def ranks(self) -> Sequence[RankStatus]:
        # Decode ranks come first.
        return sorted(self._ranks.values(), key=lambda s: (-s.role, s.rank.worker, s.rank.rank))

    def running(self, now: float) -> Sequence[tuple[float, RunningRequest]]:
        return [(each.age_s + now - self._received_s, each) for each in self.last.running]

    def finished(self, now: float) -> Sequence[tuple[float, FinishedRequest]]:
        return [(now - received_s, each) for received_s, each in self._finished]
