"""What one router knows of the ranks beyond the index: how fast they are, what it sent them, who fails.

The owner tells it what happens and asks when it prices a request. The clock is passed in: monotonic,
in seconds. Nothing here does I/O. A request in flight:

    sent --> admitted --> ended      any of them may come twice, `ended` at any time
      |         |
      |         its uncached tokens no longer pend on the rank that computes them
      it runs on its decode rank, and pends
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.kv.types import BlockHash, Plan, RankKey, RankLoad
from services.request import Admitted

# Waiting behind others, and what we do not measure, only ever makes a rank look slower than it is. So a
# sample above what was learned counts for more than one below.
_RISE, _FALL = 0.3, 0.1
_HALF_LIFE_S = 60.0  # an old grudge fades towards the usual, or a rank once slow would never be tried again
_FULL_WEIGHT_TOKENS = 256
_MIN_TOKENS = 16  # fewer measure the cost of a step, not the rate
_MIN_BYTES = 1 << 20  # fewer measure the calls around a transfer
_MIN_TRANSFER_S = 1e-4
_BANDWIDTH_LIMITS = (1e6, 1e12)  # bytes per second
_MAX_LINKS = 256  # a prefill rank

_REPORT_LAG_S = 0.05  # a request and a report that cross each other are at most so far apart
_FIRST_PENALTY_S, _LONGEST_PENALTY_S = 1.0, 30.0
_MAX_PREDICTED_BLOCKS = 1 << 18

_NO_LOAD = RankLoad()


class Balance:
    """Memory is bounded by the requests in flight and the ranks that were not forgotten."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        prior_tokens_per_s: float = 10_000.0,
        prior_bandwidth: float = 1e9,
        chunk_tokens: int = 2048,
    ) -> None:
        """The priors hold until something was measured; `chunk_tokens` is as in PlacementRequest."""
        self._clock = clock
        self._speeds = _Speeds(prior_tokens_per_s, prior_bandwidth, chunk_tokens)
        self._predictions = _Predictions()
        self._flights: dict[str, _Flight] = {}
        self._decoding: dict[RankKey, dict[str, _Flight]] = {}  # until ended
        self._computing: dict[RankKey, dict[str, _Flight]] = {}  # until admitted
        self._reports: dict[RankKey, _Report] = {}
        self._failures: dict[RankKey, _Failure] = {}

    def __repr__(self) -> str:
        ranks = {*self._failures, *self._reports}
        excluded = {str(rank): why for rank in ranks if (why := self.excluded(rank))}
        return f"<Balance in_flight={len(self._flights)} excluded={excluded}>"

    # -- speeds -----------------------------------------------------------------------------------

    def observe_admitted(self, decode: RankKey, prefill: RankKey | None, admitted: Admitted) -> None:
        """Learn from what a request really took. It also ends the penalty of the ranks that served it."""
        now = self._clock()
        self._failures.pop(decode, None)
        if admitted.plan is Plan.LOCAL:
            self._speeds.learn_rate(decode, admitted, now)
        elif prefill is not None:
            self._failures.pop(prefill, None)
            self._speeds.learn_rate(prefill, admitted, now)
            self._speeds.learn_bandwidth(prefill, decode, admitted, now)

    def rate(self, rank: RankKey) -> float:
        """Prompt tokens a second that the rank computes: as it reports, else as learned, else as is usual."""
        return self.load(rank).prefill_tokens_per_s or self._speeds.rate(rank, self._clock())

    def bandwidth(self, prefill: RankKey, decode: RankKey) -> float:
        """Bytes a second between the two, else as is usual for that prefill rank, else for any."""
        return self._speeds.bandwidth(prefill, decode, self._clock())

    # -- in flight --------------------------------------------------------------------------------

    def sent(self, request_id: str, decode: RankKey, prefill: RankKey | None, uncached_tokens: int) -> None:
        """The request is on its way; `uncached_tokens` pend on `prefill`, or on `decode` under plan local.

        Sent again, to other ranks, it is no longer with the first ones.
        """
        self.ended(request_id)
        flight = _Flight(decode, prefill or decode, uncached_tokens, self._clock())
        self._flights[request_id] = flight
        self._decoding.setdefault(flight.decode, {})[request_id] = flight
        self._computing.setdefault(flight.computing, {})[request_id] = flight

    def admitted(self, request_id: str) -> None:
        """Its prompt has been computed. Nothing happens if it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is not None:
            _discard(self._computing, flight.computing, request_id)

    def ended(self, request_id: str) -> None:
        """It left, however that came. Nothing happens if it is not in flight."""
        self.admitted(request_id)
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            _discard(self._decoding, flight.decode, request_id)

    def pending_tokens(self, rank: RankKey) -> int:
        """Tokens queued or being computed there: what it last reported, and what we sent too late for that.

        A report counts every router's requests that had reached the rank, so ours from before it are not
        counted again. Of a rank that reports nothing (prefill) only ours are known, until they are
        admitted or end.
        """
        report = self._reports.get(rank)
        flights = self._computing.get(rank, {}).values()
        if report is None:
            return sum(flight.uncached_tokens for flight in flights)
        seen_s = report.received_s - _REPORT_LAG_S
        unseen_tokens = sum(flight.uncached_tokens for flight in flights if flight.sent_s > seen_s)
        return report.load.pending_tokens + unseen_tokens

    def running(self, rank: RankKey) -> int:
        """Requests of this router there: at a decode rank until ended, at a prefill rank until admitted."""
        return len(self._decoding.get(rank) or self._computing.get(rank) or ())

    # -- health -----------------------------------------------------------------------------------

    def report(self, rank: RankKey, load: RankLoad) -> None:
        self._reports[rank] = _Report(load, self._clock())

    def load(self, rank: RankKey) -> RankLoad:
        """The last report; all zero before the first."""
        report = self._reports.get(rank)
        return _NO_LOAD if report is None else report.load

    def failed(self, rank: RankKey) -> None:
        """Leave the rank alone for a second, and twice as long each time it fails again, up to 30 s.

        What fails during a penalty was sent before it, and is no news.
        """
        now, last = self._clock(), self._failures.get(rank)
        if last is None:
            self._failures[rank] = _Failure(_FIRST_PENALTY_S, now + _FIRST_PENALTY_S)
        elif now >= last.until_s:
            penalty_s = min(2 * last.penalty_s, _LONGEST_PENALTY_S)
            self._failures[rank] = _Failure(penalty_s, now + penalty_s)

    def excluded(self, rank: RankKey) -> str:
        """Why the rank must not be chosen now, "failed" or "draining"; empty: it may."""
        failure = self._failures.get(rank)
        if failure is not None and self._clock() < failure.until_s:
            return "failed"
        return "draining" if self.load(rank).draining else ""

    def forget(self, rank: RankKey) -> None:
        """The rank went away or began a new life: nothing known of it holds any longer.

        Requests in flight there pend and run nowhere, until they are sent again or ended.
        """
        self._failures.pop(rank, None)
        self._reports.pop(rank, None)
        self._decoding.pop(rank, None)
        self._computing.pop(rank, None)
        self._speeds.forget(rank)
        self._predictions.forget(rank)

    # -- soon to be cached ------------------------------------------------------------------------

    def predict(self, rank: RankKey, hashes: Sequence[BlockHash], ttl_s: float = 5.0) -> None:
        """The rank was sent a prompt of these blocks and will soon hold them; a guess that ends by itself.

        It never enters the index: what the rank really holds comes by its own events.
        """
        self._predictions.add(rank, hashes, self._clock(), ttl_s)

    def predicted_match(self, rank: RankKey, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes`, from the first on, are predicted to be there."""
        return self._predictions.match(rank, hashes, self._clock())


@dataclass(frozen=True, slots=True)
class _Flight:
    decode: RankKey
    computing: RankKey
    uncached_tokens: int
    sent_s: float


@dataclass(frozen=True, slots=True)
class _Report:
    load: RankLoad
    received_s: float


@dataclass(frozen=True, slots=True)
class _Failure:
    penalty_s: float
    until_s: float


def _discard(table: dict[RankKey, dict[str, _Flight]], rank: RankKey, request_id: str) -> None:
    flights = table.get(rank)
    if flights is not None:
        flights.pop(request_id, None)
        if not flights:
            del table[rank]


@dataclass(slots=True)
class _Learned:
    """A mean of the first samples that turns into an exponential one."""

    value: float  # before the first sample: what is assumed
    weight: float = 0.0  # of all samples
    learned_s: float = 0.0

    def add(self, sample: float, weight: float, now: float) -> None:
        self.weight += weight
        pace = _RISE if sample > self.value else _FALL
        self.value += weight * max(pace, 1 / self.weight) * (sample - self.value)
        self.learned_s = now

    def faded(self, now: float, usual: float) -> float:
        kept = math.exp2((self.learned_s - now) / _HALF_LIFE_S)
        return usual + (self.value - usual) * kept


@dataclass(slots=True)
class _Sender:
    """What was learned of the links of one prefill rank, the one not used for longest first."""

    mean: _Learned
    links: dict[RankKey, _Learned] = field(default_factory=dict)

    def add(self, decode: RankKey, sample: float, now: float) -> None:
        self.mean.add(sample, 1.0, now)
        link = self.links.pop(decode, None) or _Learned(sample)
        link.add(sample, 1.0, now)
        self.links[decode] = link
        if len(self.links) > _MAX_LINKS:
            del self.links[next(iter(self.links))]


class _Speeds:
    """Rates of ranks and bandwidths of links, from what requests took."""

    def __init__(self, prior_tokens_per_s: float, prior_bandwidth: float, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._usual_rate = _Learned(prior_tokens_per_s)
        self._usual_bandwidth = _Learned(prior_bandwidth)
        self._rates: dict[RankKey, _Learned] = {}
        self._senders: dict[RankKey, _Sender] = {}

    def learn_rate(self, rank: RankKey, admitted: Admitted, now: float) -> None:
        tokens, compute_s = admitted.computed_tokens, admitted.prefill_compute_s
        if tokens < _MIN_TOKENS or compute_s <= 0:
            return
        sample, weight = tokens / compute_s, min(1.0, tokens / _FULL_WEIGHT_TOKENS)
        self._rates.setdefault(rank, _Learned(sample)).add(sample, weight, now)
        self._usual_rate.add(sample, weight, now)

    def learn_bandwidth(self, prefill: RankKey, decode: RankKey, admitted: Admitted, now: float) -> None:
        if admitted.kv_bytes_moved < _MIN_BYTES:
            return
        sample = _bytes_per_s(admitted, self._chunk_tokens)
        self._senders.setdefault(prefill, _Sender(_Learned(sample))).add(decode, sample, now)
        self._usual_bandwidth.add(sample, 1.0, now)

    def rate(self, rank: RankKey, now: float) -> float:
        learned, usual = self._rates.get(rank), self._usual_rate.value
        return usual if learned is None else learned.faded(now, usual)

    def bandwidth(self, prefill: RankKey, decode: RankKey, now: float) -> float:
        sender, usual = self._senders.get(prefill), self._usual_bandwidth.value
        if sender is None:
            return usual
        of_sender = sender.mean.faded(now, usual)
        link = sender.links.get(decode)
        return of_sender if link is None else link.faded(now, of_sender)

    def forget(self, rank: RankKey) -> None:
        self._rates.pop(rank, None)
        self._senders.pop(rank, None)
        for sender in self._senders.values():
            sender.links.pop(rank, None)


def _bytes_per_s(admitted: Admitted, chunk_tokens: int) -> float:
    """The bandwidth with which placement would have foretold what this request took.

    `transfer_s` is what the computation did not hide. With C the compute time, D all bytes and L those of
    the last chunk, placement says max(C, D / b) + L / b; set equal to C + transfer_s and solved for b.
    """
    delta_tokens = max(1, admitted.prompt_tokens - admitted.decode_prefix_len)
    all_bytes = admitted.kv_bytes_moved
    last_bytes = all_bytes * min(1.0, chunk_tokens / delta_tokens)
    transfer_s = max(admitted.transfer_s, _MIN_TRANSFER_S)
    took_s = admitted.prefill_compute_s + transfer_s
    lowest, highest = _BANDWIDTH_LIMITS
    return min(highest, max(lowest, last_bytes / transfer_s, (all_bytes + last_bytes) / took_s))


class _Predictions:
    """Blocks that ranks will soon hold, oldest guess first out."""

    def __init__(self) -> None:
        self._until_s: dict[RankKey, dict[BlockHash, float]] = {}
        self._guesses: deque[tuple[float, RankKey, Sequence[BlockHash]]] = deque()  # until_s, rank, blocks
        self._num_blocks = 0  # in the guesses

    def add(self, rank: RankKey, hashes: Sequence[BlockHash], now: float, ttl_s: float) -> None:
        blocks, until_s = tuple(hashes[:_MAX_PREDICTED_BLOCKS]), now + ttl_s
        table = self._until_s.setdefault(rank, {})
        for block in blocks:
            table[block] = max(until_s, table.get(block, until_s))
        self._guesses.append((until_s, rank, blocks))
        self._num_blocks += len(blocks)
        while self._guesses and (self._guesses[0][0] <= now or self._num_blocks > _MAX_PREDICTED_BLOCKS):
            self._drop_oldest()

    def match(self, rank: RankKey, hashes: Sequence[BlockHash], now: float) -> int:
        table = self._until_s.get(rank)
        if table is None:
            return 0
        for num_blocks, block in enumerate(hashes):
            if table.get(block, now) <= now:
                return num_blocks
        return len(hashes)

    def forget(self, rank: RankKey) -> None:
        self._until_s.pop(rank, None)

    def _drop_oldest(self) -> None:
        until_s, rank, blocks = self._guesses.popleft()
        self._num_blocks -= len(blocks)
        table = self._until_s.get(rank, {})
        for block in blocks:
            if block in table and table[block] <= until_s:
                del table[block]
        if not table:
            self._until_s.pop(rank, None)
