"""A router knows more than the index: the speeds of ranks, the requests that it sent them, and their
failures.

Its owner reports events to it and queries it to price a request. The clock is an argument: monotonic, in
seconds. It does no I/O. A request in flight:

    sent --> admitted --> ended      any of them may come twice, `ended` at any time
      |         |
      |         its uncached tokens are no longer pending on the rank that computes them
      it runs on its decode rank, and its tokens are pending
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from services.router.ranks.learned import Pace, PullPace, Speeds, Trust
from services.router.ranks.predictions import Predictions
from services.values.kv import BlockHash
from services.values.rank import Plan, RankKey
from services.values.rank_reports import RankLoad
from services.values.request import Admitted, Pulled

_REPORT_LAG_S = 0.05  # A request and a report that cross each other are at most this far apart.
_FIRST_PENALTY_S, _LONGEST_PENALTY_S = 1.0, 30.0
_CORRUPT_S = 60.0  # A source that sent wrong bytes gets no request for so long.
_LENT_SHARE = 8  # At most this part of a rank's pool is kept for pulls.
_NO_FAULT = "evicted"  # The index was wrong, and learns it; the source is not to blame.

_LEAST_TOKENS_PER_S = 1e-6  # A rank that reports fewer has measured nothing.
_LEAST_WAITED = 0.1  # A request that waited for a greater share of its time says little of a rank's speed.

# Ranks whose measured rates differ by less are taken to be equally fast.
_RATE_NOISE = 0.1

_NO_LOAD = RankLoad()


class RankNow(NamedTuple):
    load: RankLoad  # This was last reported.
    pending_tokens: int  # These are queued or being computed.
    queued: int  # The prompts of these requests wait to be computed.
    running: int  # These requests are at a decode rank until ended, at a prefill rank until admitted.
    tokens_per_s: float  # This is of prompts: as reported, else as learned, else the usual rate.
    is_measured: bool  # The rate was measured.

    @property
    def compute_wait_s(self) -> float:
        """Return the seconds until the rank computes the next prompt, if that is short, or 0 where its rate
        was never measured."""
        return self.before(0)[0] / self.tokens_per_s if self.is_measured else 0.0

    def before(self, tokens: int) -> tuple[int, int, int]:
        """Return the pending tokens before a prompt with so many to compute, those after it, and the prompts
        after it."""
        if not self.load.overtaken:
            return self.pending_tokens, 0, 0
        passed, prompts = self.load.passed_by(tokens)
        passed = min(passed, self.pending_tokens)
        return self.pending_tokens - passed, passed, prompts


def usual_rates(nows: Sequence[RankNow]) -> list[float]:
    """Return how fast each of these ranks computes prompts; those about as fast as most are equally fast.

    Otherwise the rank that measured a little more than other idle ones would be the cheapest again and
    again, and the pools of the others would be of no use.
    """
    rates = [now.tokens_per_s for now in nows]
    usual = sorted(rates)[len(rates) // 2] if rates else 0.0
    least, most = usual * (1 - _RATE_NOISE), usual * (1 + _RATE_NOISE)
    return [usual if least <= rate <= most else rate for rate in rates]


class Liveness(StrEnum):
    LIVE = ""
    SILENT = "silent"  # It no longer reports.
    FAILED = "failed"  # A request failed a moment ago.
    STALLED = "stalled"  # It reports this itself.
    DRAINING = "draining"  # It reports this itself, too.


class Balance:
    """The requests in flight and the known ranks limit the memory.

    `changed` is called with a rank whose load has changed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        prior_tokens_per_s: float = 10_000.0,
        prior_bandwidth: float = 1e9,
        chunk_tokens: int = 2048,
    ) -> None:
        """The priors hold until something was measured; `chunk_tokens` is as in PlacementRequest."""
        self.clock = clock
        self.predictions = Predictions()
        self.there = Predictions()  # Ranks have computed it, and their events have perhaps not come yet.
        self.trust = Trust()
        self.tier_trust = Trust()  # This is of what lies below pools.
        self.shared_trust = Trust()  # This is of what ranks read in others' files.
        self.resume_trust = Trust()  # Only ranks that report checkpoints have this.
        self.pace = Pace()
        self.changed: Callable[[RankKey], None] = _ignore_change
        self._chunk_tokens = chunk_tokens
        self._speeds = Speeds(prior_tokens_per_s, prior_bandwidth, chunk_tokens)
        self._flights: dict[str, _Flight] = {}
        self._ranks: dict[RankKey, _KnownRank] = {}
        self._failures: dict[RankKey, _Failure] = {}
        self._refusals: dict[RankKey, _Failure] = {}  # The keys are sources.
        self._silent: set[RankKey] = set()

    def __repr__(self) -> str:
        ranks = {*self._failures, *self._silent, *self._ranks}
        troubled = {str(rank): why.value for rank in ranks if (why := self.liveness(rank))}
        return f"<Balance in_flight={len(self._flights)} troubled={troubled}>"

    # -- speeds -----------------------------------------------------------------------------------

    def observe_admitted(self, decode: RankKey, prefill: RankKey | None, admitted: Admitted) -> None:
        """Learn from the times that a request took. This also ends the penalty of the ranks that
        served it."""
        now = self.clock()
        self._failures.pop(decode, None)
        if admitted.plan is Plan.LOCAL:
            self._speeds.learn_rate(decode, admitted, now)
        elif prefill is not None:
            self._failures.pop(prefill, None)
            self._speeds.learn_rate(prefill, admitted, now)
            self._speeds.learn_bandwidth(prefill, decode, admitted, now)

    def observe_pace(self, request_id: str, admitted: Admitted) -> None:
        """Learn from the whole time of a request in flight that waited for nothing but computation."""
        flight = self._flights.get(request_id)
        known = None if flight is None else self._ranks.get(flight.computing)
        if flight is None or known is None or request_id not in known.computing:
            return
        waited_s = 0.0 if admitted.pulled is None else admitted.pulled.seconds
        if (tokens := admitted.rank_tokens) is not None:
            room_s = admitted.decode_queue_s - admitted.constraint_s if admitted.plan is Plan.LOCAL else 0.0
            waited_s += room_s
            took_s = room_s + admitted.prefill_queue_s + admitted.prefill_compute_s
        else:
            waited_s += admitted.decode_queue_s
            took_s = self.clock() - flight.sent_s - admitted.transfer_s
            # It may have found more there than was known, or less.
            tokens = flight.until_its_end - flight.uncached_tokens + admitted.computed_tokens
        if known.told_tokens_per_s > 0 and waited_s <= _LEAST_WAITED * took_s and not admitted.brought_tokens:
            expected_s = tokens / known.told_tokens_per_s
            self.pace.observe(flight.computing, expected_s, took_s, self.clock())

    def bandwidth(self, prefill: RankKey, decode: RankKey) -> float:
        """Return the bytes per second between the two, else the usual ones of that prefill rank, else
        of any."""
        return self.bandwidths()(prefill, decode)

    def bandwidths(self) -> Callable[[RankKey, RankKey], float]:
        """Return `bandwidth` as of now, for many pairs."""
        return self._speeds.bandwidths(self.clock())

    # -- pulls ------------------------------------------------------------------------------------

    def observe_pulled(self, source: RankKey, computing: RankKey, pulled: Pulled) -> None:
        """Learn from what came of a source. One that refused, failed or was too slow is left alone for a
        while, as a rank that fails; nothing of it is held against the rank otherwise."""
        now, why = self.clock(), pulled.refused
        if pulled.tokens:
            self._refusals.pop(source, None)
            self._speeds.learn_pull(source, computing, pulled, now)
        elif why == "corrupt":
            self._refusals[source] = _Failure(_LONGEST_PENALTY_S, now + _CORRUPT_S)
        elif why and why != _NO_FAULT:
            _penalize(self._refusals, source, now)

    def pull_pace(self, source: RankKey, computing: RankKey) -> PullPace:
        return self.pull_paces()(source, computing)

    def pull_paces(self) -> Callable[[RankKey, RankKey], PullPace]:
        """Return `pull_pace` as of now, for many pairs."""
        return self._speeds.pull_paces(self.clock())

    def may_lend(self, rank: RankKey) -> bool:
        """Return whether it is worth while to ask the rank for what it holds. It may drain."""
        if self.liveness(rank) not in (Liveness.LIVE, Liveness.DRAINING):
            return False
        refusal = self._refusals.get(rank)
        if refusal is not None and self.clock() < refusal.until_s:
            return False
        load = self.load(rank)
        return not load.granted_pages or _LENT_SHARE * load.granted_pages < load.books.total

    # -- in flight --------------------------------------------------------------------------------

    def sent(
        self,
        request_id: str,
        decode: RankKey,
        prefill: RankKey | None,
        uncached_tokens: int,
        guessed_tokens: int = 0,
    ) -> None:
        """Note that the request was sent; `uncached_tokens` are pending on `prefill`, or on `decode` under
        plan local, which does not hold `guessed_tokens` of the others yet.

        A request that was sent before leaves its first ranks.
        """
        self.ended(request_id)
        computing = prefill or decode
        until_its_end = self.now(computing).pending_tokens + uncached_tokens
        flight = _Flight(decode, computing, uncached_tokens, guessed_tokens, until_its_end, self.clock())
        self._flights[request_id] = flight
        self._of(decode).receive(request_id, flight.sent_s)
        self._of(computing).take(request_id, flight)
        self.changed(computing)
        if computing != decode:
            self.changed(decode)

    def admitted(self, request_id: str) -> None:
        """Note that its prompt has been computed. Nothing happens if it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is not None and (rank := self._ranks.get(flight.computing)) is not None:
            rank.drop(request_id, self.clock())
            self.changed(flight.computing)

    def ended(self, request_id: str) -> None:
        """Note that the request has left, whatever the reason. Nothing happens if it is not in flight."""
        self.admitted(request_id)
        flight = self._flights.pop(request_id, None)
        if flight is not None and (rank := self._ranks.get(flight.decode)) is not None:
            rank.decoding.discard(request_id)
            self.changed(flight.decode)

    def now(self, rank: RankKey) -> RankNow:
        """Return the last report, with our later requests.

        A report counts all routers' requests that had arrived at the rank, so ours from before it are not
        counted again. The rank has computed since the report: one chunk at most, as it reports after every
        step. What prompts have in common counts once: as the rank tells or, if it does not, as far as we
        expected it of ours. Without a report only our requests are known, until they are admitted or end.
        On crowded machines a request may arrive later than assumed, so at least those of our tokens are
        pending that the rank cannot have computed since they were sent.
        """
        known, now = self._ranks.get(rank), self.clock()
        if known is None:
            return RankNow(_NO_LOAD, 0, 0, 0, self._speeds.rate(rank, now), self._speeds.knows(rank))
        load, computing = known.load, known.computing
        is_measured, tokens_per_s = True, load.prefill_tokens_per_s
        if tokens_per_s <= 0:
            is_measured, tokens_per_s = self._speeds.knows(rank), self._speeds.rate(rank, now)
        pending_tokens, queued = known.unseen_tokens, load.waiting + len(known.unseen)
        if load.pending_tokens:
            done = int(min(self._chunk_tokens, (now - known.reported_s) * tokens_per_s))
            if load.common_tokens is not None:
                done += load.common_tokens
            if done < load.pending_tokens:
                pending_tokens += load.pending_tokens - done
            if load.common_tokens is None and load.waiting:
                guessed = known.guessed_tokens - known.unseen_guessed_tokens
                if guessed:
                    least = min(pending_tokens, known.most_pending(now))
                    pending_tokens = max(pending_tokens - guessed, least)
        if computing and (ours := known.least_pending(now, tokens_per_s)) > pending_tokens:
            pending_tokens, queued = ours, max(queued, len(computing) - 1)
        running, ours = load.running, len(known.decoding) or len(computing)
        if running < ours:
            running = ours
        return RankNow(load, pending_tokens, queued, running, tokens_per_s, is_measured)

    def queue_wait_s(self, rank: RankKey, others: int = 0) -> float:
        """Return the seconds until a decode rank has room for the next request after so many others, or 0
        where none waits or it is not known."""
        known = self._ranks.get(rank)
        if known is None or not known.load.waiting or known.load.admitted_per_s <= 0:
            return 0.0
        return (known.load.waiting + len(known.arriving_s) + others) / known.load.admitted_per_s

    def _of(self, rank: RankKey) -> "_KnownRank":
        known = self._ranks.get(rank)
        if known is None:
            known = self._ranks[rank] = _KnownRank()
        return known

    # -- health -----------------------------------------------------------------------------------

    def report(self, rank: RankKey, load: RankLoad) -> None:
        now = self.clock()
        self._silent.discard(rank)
        known = self._of(rank)
        if 0 < load.prefill_tokens_per_s < _LEAST_TOKENS_PER_S:
            load = replace(load, prefill_tokens_per_s=0.0)
        known.told_tokens_per_s = load.prefill_tokens_per_s
        if (pace := self.pace.of(rank, now)) != 1.0:
            load = replace(load, prefill_tokens_per_s=pace * load.prefill_tokens_per_s)
        self._speeds.report_rate(rank, load.prefill_tokens_per_s)
        known.report(load, now, now - _REPORT_LAG_S)
        self.changed(rank)

    def unreported(self, rank: RankKey) -> None:
        """Note that the rank no longer reports: its last report is outdated, and only our requests
        are known."""
        if (known := self._ranks.get(rank)) is not None:
            known.forget_report()
            self._speeds.report_rate(rank, 0.0)
            self.changed(rank)

    def fell_silent(self, rank: RankKey) -> None:
        """Exclude the rank until its next report: it stopped reporting, and a request to it would hang."""
        self._silent.add(rank)

    def load(self, rank: RankKey) -> RankLoad:
        known = self._ranks.get(rank)
        return _NO_LOAD if known is None else known.load

    def failed(self, rank: RankKey) -> None:
        """Exclude the rank for a second, and twice as long each time it fails again, up to 30 s.

        A failure during a penalty is of a request from before it, and changes nothing.
        """
        _penalize(self._failures, rank, self.clock())

    def liveness(self, rank: RankKey) -> Liveness:
        if rank in self._silent:
            return Liveness.SILENT
        failure = self._failures.get(rank)
        if failure is not None and self.clock() < failure.until_s:
            return Liveness.FAILED
        if (known := self._ranks.get(rank)) is None:
            return Liveness.LIVE
        if known.load.stalled:
            return Liveness.STALLED
        return Liveness.DRAINING if known.load.draining else Liveness.LIVE

    def forget(self, rank: RankKey) -> None:
        """Forget a rank that went away or began a new incarnation.

        Requests in flight there are pending and running nowhere, until they are sent again or ended.
        """
        self._failures.pop(rank, None)
        self._refusals.pop(rank, None)
        self._silent.discard(rank)
        self._ranks.pop(rank, None)
        self._speeds.forget(rank)
        self.pace.forget(rank)
        self.predictions.forget(rank)
        self.there.forget(rank)
        self.trust.forget(rank)
        self.resume_trust.forget(rank)
        self.tier_trust.forget(rank)
        self.shared_trust.forget(rank)

    # -- soon to be cached ------------------------------------------------------------------------

    def predict(
        self, rank: RankKey, hashes: Sequence[BlockHash], ttl_s: float = 5.0, resumable: int = 0
    ) -> None:
        """Predict what the rank will soon hold of a prompt; see `Predictions.add`."""
        self.predictions.add(rank, hashes, self.clock(), ttl_s, resumable)


@dataclass(frozen=True, slots=True)
class _Flight:
    decode: RankKey
    computing: RankKey
    uncached_tokens: int
    guessed_tokens: int
    until_its_end: int  # These tokens are computed until its prompt is, those before it included.
    sent_s: float


@dataclass(slots=True)
class _KnownRank:
    """This is one rank's report with our requests there. `unseen` came too late for the report."""

    load: RankLoad = _NO_LOAD
    told_tokens_per_s: float = 0.0  # The load has it times the pace.
    reported_s: float = float("-inf")
    decoding: set[str] = field(default_factory=set)  # These stay until ended.
    computing: dict[str, _Flight] = field(default_factory=dict)  # These stay until admitted.
    computing_tokens: int = 0
    guessed_tokens: int = 0
    first_s: float = float("-inf")  # The first of `computing` has been the first since then.
    unseen: set[str] = field(default_factory=set)
    unseen_tokens: int = 0
    unseen_guessed_tokens: int = 0  # The report does not count these, so nothing is taken off it for them.
    arriving_s: deque[float] = field(default_factory=deque)  # They were sent then, too late for the report.

    def receive(self, request_id: str, now: float) -> None:
        self.decoding.add(request_id)
        self.arriving_s.append(now)

    def take(self, request_id: str, flight: _Flight) -> None:
        if not self.computing:
            self.first_s = flight.sent_s
        self.computing[request_id] = flight
        self.computing_tokens += flight.uncached_tokens
        self.guessed_tokens += flight.guessed_tokens
        self._note_unseen(request_id, flight)

    def drop(self, request_id: str, now: float) -> None:
        is_first = next(iter(self.computing), None) == request_id
        flight = self.computing.pop(request_id, None)
        if flight is None:
            return
        if is_first:
            self.first_s = now
        self.computing_tokens -= flight.uncached_tokens
        self.guessed_tokens -= flight.guessed_tokens
        if request_id in self.unseen:
            self.unseen.remove(request_id)
            self.unseen_tokens -= flight.uncached_tokens
            self.unseen_guessed_tokens -= flight.guessed_tokens

    def least_pending(self, now: float, tokens_per_s: float) -> int:
        """Return our tokens that it cannot have computed since the oldest of our requests was sent; there
        must be one."""
        oldest = next(iter(self.computing.values()))
        return self.computing_tokens - int((now - oldest.sent_s) * tokens_per_s)

    def most_pending(self, now: float) -> int:
        """Return our tokens, less what it has computed of the first request since the one before it left."""
        first = next(iter(self.computing.values()), None)
        if first is None:
            return 0
        done = int((now - self.first_s) * self.load.prefill_tokens_per_s)
        return self.computing_tokens - min(first.uncached_tokens, done)

    def report(self, load: RankLoad, now: float, seen_s: float) -> None:
        self.load, self.reported_s = load, now
        while self.arriving_s and self.arriving_s[0] <= seen_s:
            self.arriving_s.popleft()
        self._see(seen_s)

    def forget_report(self) -> None:
        self.load, self.reported_s = _NO_LOAD, float("-inf")
        self._see(float("-inf"))

    def _see(self, seen_s: float) -> None:
        self.unseen, self.unseen_tokens, self.unseen_guessed_tokens = set(), 0, 0
        for request_id, flight in reversed(self.computing.items()):  # The last one sent comes first.
            if flight.sent_s <= seen_s:
                break
            self._note_unseen(request_id, flight)

    def _note_unseen(self, request_id: str, flight: _Flight) -> None:
        self.unseen.add(request_id)
        self.unseen_tokens += flight.uncached_tokens
        self.unseen_guessed_tokens += flight.guessed_tokens


@dataclass(frozen=True, slots=True)
class _Failure:
    penalty_s: float
    until_s: float


def _penalize(failures: dict[RankKey, _Failure], rank: RankKey, now: float) -> None:
    """Lengthen the rank's penalty, unless it is in one."""
    last = failures.get(rank)
    if last is None:
        failures[rank] = _Failure(_FIRST_PENALTY_S, now + _FIRST_PENALTY_S)
    elif now >= last.until_s:
        penalty_s = min(2 * last.penalty_s, _LONGEST_PENALTY_S)
        failures[rank] = _Failure(penalty_s, now + penalty_s)


def _ignore_change(rank: RankKey) -> None:
    """Do nothing until the owner sets `changed`."""
