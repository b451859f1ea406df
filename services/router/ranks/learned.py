"""A router learns the speeds of ranks and of the connections between them from the times of requests. The
module is pure.

Queueing and other unmeasured delays only ever make a rank look slower. So a sample above the learned value
counts more than one below, and an outlier counts less.

A rank's trust is the share of its predicted hits that it delivered. A rank that evicts faster than the index
learns, or whose publisher lags, is trusted less: a hit there is priced as the part that such hits delivered.
Distrust fades, as the rank would never be tried again otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.values.kv import DRAFT, BlockHash
from services.values.rank import RankKey
from services.values.request import Admitted, Pulled

_RISE, _FALL = 0.3, 0.1
_MAX_RATIO = 4.0  # This limits the ratio of a sample to the learned value, either way.
_SETTLED_WEIGHT = 3.0  # This holds from this weight of samples on.
_HALF_LIFE_S = 60.0  # Old values fade towards the usual; else a rank once slow would never be tried again.
_LN_2 = math.log(2)
_LEAST_COUNTED_S = 10.0  # Requests of a shorter time say little of how many come a second.
_MAX_PAID = 4_096  # This limits the prefixes for which waits are counted.
_FULL_WEIGHT_TOKENS = 256
_MIN_TOKENS = 16  # Fewer measure the cost of a step, not the rate.
_MOST_TOKENS_PER_S = 1e9  # A report of more counts as this.
_MIN_BYTES = 1 << 20  # Fewer measure the calls around a transfer.
_MIN_TRANSFER_S = 1e-4
_BANDWIDTH_LIMITS = (1e6, 1e12)  # These are in bytes per second.
_MAX_LINKS = 256  # This limits the links of one rank that writes.
_PULL_BEGINS_S = 0.005  # The source is asked, matches between two of its steps, and gets a ticket.


@dataclass(slots=True)
class _Learned:
    """This is a mean of the first samples that turns into an exponential one."""

    value: float  # Before the first sample this is the assumed value.
    weight: float = 0.0  # This is of all samples.
    learned_s: float = 0.0

    def add(self, sample: float, weight: float, now: float) -> None:
        if self.weight >= _SETTLED_WEIGHT:
            sample = min(max(sample, self.value / _MAX_RATIO), self.value * _MAX_RATIO)
        self.weight += weight
        pace = _RISE if sample > self.value else _FALL
        self.value += weight * max(pace, 1 / self.weight) * (sample - self.value)
        self.learned_s = now

    def faded(self, now: float, usual: float) -> float:
        kept = math.exp2((self.learned_s - now) / _HALF_LIFE_S)
        return usual + (self.value - usual) * kept


class Arrivals:
    """This counts the requests that come a second, where older ones count less."""

    def __init__(self, now: float) -> None:
        self._began_s = self._counted_s = now
        self._count = 0.0

    def add(self, now: float) -> None:
        self._count, self._counted_s = self._faded(now) + 1, now

    def per_s(self, now: float) -> float:
        # It has not counted for ever: this is the part of the weight of all time that it knows.
        known_s = now - self._began_s
        if known_s < _LEAST_COUNTED_S:
            known_s = _LEAST_COUNTED_S
        known = 1 - math.exp2(-known_s / _HALF_LIFE_S)
        return self._faded(now) * _LN_2 / _HALF_LIFE_S / known

    def _faded(self, now: float) -> float:
        return self._count * math.exp2((self._counted_s - now) / _HALF_LIFE_S)


class PaidWaits:
    """Requests have waited so many seconds at the ranks that hold a prefix, while others had less to do.

    Whoever computes a copy of it elsewhere spends them. The least recently paid prefix is forgotten first.
    """

    def __init__(self) -> None:
        self._paid: dict[BlockHash, tuple[float, float]] = {}  # the seconds, and when they were paid

    def of(self, prefix: BlockHash, now: float) -> float:
        paid = self._paid.get(prefix)
        return 0.0 if paid is None else paid[0] * math.exp2((paid[1] - now) / _HALF_LIFE_S)

    def add(self, prefix: BlockHash, waited_s: float, now: float) -> None:
        if waited_s > 0:
            paid_s = self.of(prefix, now) + waited_s
            self.spend(prefix)
            self._paid[prefix] = paid_s, now
            if len(self._paid) > _MAX_PAID:
                del self._paid[next(iter(self._paid))]

    def spend(self, prefix: BlockHash) -> None:
        self._paid.pop(prefix, None)


@dataclass(slots=True)
class _Sender:
    """These are the links of one rank that writes, the least recently used first."""

    mean: _Learned
    links: dict[RankKey, _Learned] = field(default_factory=dict)

    def add(self, decode: RankKey, sample: float, now: float) -> None:
        self.mean.add(sample, 1.0, now)
        link = self.links.pop(decode, None) or _Learned(sample)
        link.add(sample, 1.0, now)
        self.links[decode] = link
        if len(self.links) > _MAX_LINKS:
            del self.links[next(iter(self.links))]


class PullPace(NamedTuple):
    """A pull of one rank from another takes so long: what its beginning does, and each byte."""

    begins_s: float
    bytes_per_s: float


class Speeds:
    def __init__(self, prior_tokens_per_s: float, prior_bandwidth: float, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._usual_rate = _Learned(prior_tokens_per_s)
        self._usual_bandwidth = _Learned(prior_bandwidth)
        self._reported: dict[RankKey, int] = {}  # These are in tokens per second.
        self._reported_sum = 0  # With floats, what a much larger rate rounds off would be lost for good.
        self._rates: dict[RankKey, _Learned] = {}
        self._senders: dict[RankKey, _Sender] = {}
        self._sources: dict[RankKey, _Sender] = {}
        self._pull_begins: dict[RankKey, _Learned] = {}  # The keys are sources.

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

    def learn_pull(self, source: RankKey, computing: RankKey, pulled: Pulled, now: float) -> None:
        """Learn from a pull that brought something. A small one, or one that took less than pulls usually
        take to begin, measures that; the rest of a larger one is the link's."""
        pace = self.pull_pace(source, computing, now)
        if pulled.bytes < _MIN_BYTES or pulled.seconds <= pace.begins_s:
            begins_s = max(0.0, pulled.seconds - pulled.bytes / pace.bytes_per_s)
            self._pull_begins.setdefault(source, _Learned(begins_s)).add(begins_s, 1.0, now)
            return
        lowest, highest = _BANDWIDTH_LIMITS
        sample = min(highest, max(lowest, pulled.bytes / (pulled.seconds - pace.begins_s)))
        self._sources.setdefault(source, _Sender(_Learned(sample))).add(computing, sample, now)

    def pull_pace(self, source: RankKey, computing: RankKey, now: float) -> PullPace:
        """Return the pace of the pair, else as is usual for that source; of one that was never pulled from,
        as transfers usually are."""
        return self.pull_paces(now)(source, computing)

    def pull_paces(self, now: float) -> Callable[[RankKey, RankKey], PullPace]:
        """Return `pull_pace` as of now, for many pairs."""
        all_begins, sources, usual = self._pull_begins, self._sources, self._usual_bandwidth.value
        unknown = PullPace(_PULL_BEGINS_S, usual)

        def pace(source: RankKey, computing: RankKey) -> PullPace:
            begins, sender = all_begins.get(source), sources.get(source)
            if begins is None and sender is None:
                return unknown
            begins_s = _PULL_BEGINS_S if begins is None else begins.faded(now, _PULL_BEGINS_S)
            return PullPace(begins_s, usual if sender is None else self._of_link(sender, computing, now))

        return pace

    def report_rate(self, rank: RankKey, tokens_per_s: float) -> None:
        """Note the rate that the rank's last report says, or 0 where it has none."""
        self._reported_sum -= self._reported.pop(rank, 0)
        if tokens_per_s > 0:
            self._reported[rank] = rate = max(1, round(min(tokens_per_s, _MOST_TOKENS_PER_S)))
            self._reported_sum += rate

    def knows(self, rank: RankKey) -> bool:
        return rank in self._rates

    def rate(self, rank: RankKey, now: float) -> float:
        """Return the rate learned for a rank that reports none.

        One that has computed nothing yet is taken to be as fast as those that report on average. A router
        measures them slower than they do, by what else takes time, so a new rank would be tried last.
        """
        usual = self._usual_rate.value
        if self._reported:
            usual = self._reported_sum / len(self._reported)
        learned = self._rates.get(rank)
        return usual if learned is None else learned.faded(now, usual)

    def bandwidths(self, now: float) -> Callable[[RankKey, RankKey], float]:
        """Return what tells the bandwidth from a prefill rank to a decode rank."""
        senders, usual = self._senders, self._usual_bandwidth.value

        def bandwidth(prefill: RankKey, decode: RankKey) -> float:
            sender = senders.get(prefill)
            return usual if sender is None else self._of_link(sender, decode, now)

        return bandwidth

    def _of_link(self, sender: _Sender, receiver: RankKey, now: float) -> float:
        usual = self._usual_bandwidth.value
        of_sender = sender.mean.faded(now, usual)
        link = sender.links.get(receiver)
        return of_sender if link is None else link.faded(now, of_sender)

    def forget(self, rank: RankKey) -> None:
        self.report_rate(rank, 0.0)
        self._rates.pop(rank, None)
        self._pull_begins.pop(rank, None)
        for senders in (self._senders, self._sources):
            senders.pop(rank, None)
            for sender in senders.values():
                sender.links.pop(rank, None)


def _bytes_per_s(admitted: Admitted, chunk_tokens: int) -> float:
    """Return the bandwidth with which placement would have predicted this request's time.

    `transfer_s` is the part that the computation did not hide. With C the compute time, D the bytes of the
    delta and L those that are sent last, of its last chunk and of the per-request state, placement assumes
    max(C, D / b) + L / b; this equals C + transfer_s and is solved for b.
    """
    delta_tokens = max(1, admitted.prompt_tokens - admitted.decode_prefix_len)
    # The draft model's KV is paged, too.
    carried_bytes = sum(size for kind, size in admitted.carried_bytes.items() if kind != DRAFT)
    all_bytes = admitted.kv_bytes_moved - carried_bytes
    last_bytes = all_bytes * min(1.0, chunk_tokens / delta_tokens) + carried_bytes
    transfer_s = max(admitted.transfer_s, _MIN_TRANSFER_S)
    took_s = admitted.prefill_compute_s + transfer_s
    lowest, highest = _BANDWIDTH_LIMITS
    return min(highest, max(lowest, last_bytes / transfer_s, (all_bytes + last_bytes) / took_s))


_PRIOR_TOKENS = 8_192.0  # These count as delivered as predicted, before any observation.
_KEPT = 0.95  # Each new observation keeps this part of the past's weight.
_WHOLE = 0.95  # From this trust on a hit counts in full, as blocks and pages end at different tokens.


_PRIOR_PACE_S = 2.0  # So long counts as taken as expected, before any observation.
_PACE_HALF_LIFE_S = 300.0  # A wrong report stays so, and long prompts, which show it, may be minutes apart.
_MOST_OF_PAST = 0.25  # A slow request counts for no more than this part of all before it, or the prior.
_LEAST_PACED_S = 0.25  # What takes less measures the calls around it.
_PACE_NOISE = 1.3  # A pace that differs by less is that of the report.


class Pace:
    """A rank's pace is how fast it computes what was sent to it, compared with the speed that it reports.

    It is learned from the whole time of requests, as their own computation may be in turns with others'. A
    record has the seconds that they took (`predicted`), and those of their tokens at the reported speed.
    """

    def __init__(self) -> None:
        self._records: dict[RankKey, _Record] = {}

    def observe(self, rank: RankKey, expected_s: float, took_s: float, now: float) -> None:
        """Compare a request's time with that of all tokens until its end, at the reported speed.

        One that took longer may have stalled. No stall makes one faster, so that counts in full.
        """
        if took_s <= 0 or max(took_s, expected_s) < _LEAST_PACED_S:  # A report may be wrong.
            return
        record = self._records.setdefault(rank, _Record(_PRIOR_PACE_S, _PRIOR_PACE_S, now))
        record.fade(_PRIOR_PACE_S, _PACE_HALF_LIFE_S, now)
        pace = min(max(expected_s / took_s, 1 / _MAX_RATIO), _MAX_RATIO)
        counted_s = took_s
        if pace < 1:
            counted_s = min(took_s, max(_PRIOR_PACE_S, _MOST_OF_PAST * record.predicted))
        record.predicted += counted_s
        record.delivered += counted_s * pace

    def of(self, rank: RankKey, now: float) -> float:
        """Return what the reported speed is multiplied with."""
        record = self._records.get(rank)
        if record is None:
            return 1.0
        learned = math.log(record.delivered / record.predicted)
        pace = math.exp(learned * math.exp2((record.seen_s - now) / _PACE_HALF_LIFE_S))
        return pace if max(pace, 1 / pace) > _PACE_NOISE else 1.0

    def forget(self, rank: RankKey) -> None:
        self._records.pop(rank, None)


@dataclass(slots=True)
class _Record:
    predicted: float
    delivered: float
    seen_s: float

    def fade(self, prior: float, half_life_s: float, now: float) -> None:
        """Forget a part of it, which neither hurts nor helps the rank."""
        kept = _KEPT * math.exp2((self.seen_s - now) / half_life_s)
        self.predicted = kept * self.predicted + (1 - kept) * prior
        self.delivered = kept * self.delivered + (1 - kept) * prior
        self.seen_s = now


class Trust:
    """Each rank has a trust in [0, 1]; it is 1 without any observation."""

    def __init__(self) -> None:
        self._records: dict[RankKey, _Record] = {}

    def observe(self, rank: RankKey, predicted_tokens: int, delivered_tokens: int, now: float) -> None:
        """Compare the index's prediction of a hit with the delivered one. Without a prediction nothing
        is learned."""
        if predicted_tokens <= 0:
            return
        record = self._records.setdefault(rank, _Record(_PRIOR_TOKENS, _PRIOR_TOKENS, now))
        record.fade(_PRIOR_TOKENS, _HALF_LIFE_S, now)
        record.predicted += predicted_tokens
        record.delivered += min(predicted_tokens, delivered_tokens)

    def of(self, rank: RankKey, now: float) -> float:
        record = self._records.get(rank)
        if record is None:
            return 1.0
        distrust = 1 - record.delivered / record.predicted
        return 1 - distrust * math.exp2((record.seen_s - now) / _HALF_LIFE_S)

    def worth(self, rank: RankKey, matched_tokens: int, now: float) -> int:
        """Return the tokens that a hit of so many counts as."""
        record = self._records.get(rank)
        if matched_tokens == 0 or record is None or record.delivered >= record.predicted:
            return matched_tokens
        trust = self.of(rank, now)
        return matched_tokens if trust >= _WHOLE else int(trust * matched_tokens)

    def forget(self, rank: RankKey) -> None:
        self._records.pop(rank, None)
