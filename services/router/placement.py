"""Prices each (decode rank, prefill rank, plan) in seconds, and picks one. Pure.

    remote  T = wait_prefill + max(compute, transfer) + last_chunk + overhead + occupy + evict_prefill
                + at_decode
    local   T = compute + occupy + at_decode
    at_decode = wait_decode + wait_room + evict_decode + itl

occupy, evict and itl are what a request costs those that come after it or run beside it. Without them
each would take the rank that is best for itself, caches would fill with copies, and all would wait longer.

Not every pair is priced. Under one bandwidth the price of a pair is

    T = fixed(P) + max(overlapped(P), overlapped(D)) + fixed(D)

with P's computation and D's transfer overlapped. So a rank can be left out when another one is no
worse in `fixed` and in `fixed + overlapped`: the best pair lies in what remains on both sides, a handful
of ranks. Under several bandwidths the shortlist is made with a typical one and a few spare ranks a side,
and the pairs in it are priced with their own: the best of these, not always of all.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from services.errors import Unavailable
from services.kv.types import Plan, RankId, RankKey

_T = TypeVar("_T")

# Bytes per second from a prefill rank (first) to a decode rank.
Bandwidth = Callable[[RankKey, RankKey], float]

_SPARE_RANKS = 4  # a side, at least, where there are so many
_MAX_SHORTLIST = 32  # a side; the exact shortlist is shorter but for contrived fleets
_BANDWIDTH_SAMPLES = 5
_MAX_RANKED = 64
_MAX_QUEUE = 20  # requests; a longer queue makes nothing more urgent


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # what a predicted decode_prefix_len is worth
    pending_tokens: int  # queued or being computed there
    prefill_tokens_per_s: float
    running: int  # sequences
    step_s: float
    free_tokens: int  # room in free pages
    evictable_tokens: int  # cached, unlocked
    excluded: str = ""  # why it cannot be chosen (draining, failed, ...); empty: it can
    queued: int = 0  # requests whose prompts wait to be computed there
    matched_tokens: int = 0  # what the index says, before trust and predictions
    waiting_tokens: int = 0  # of requests that wait for pages before this one
    own: bool = True  # of this router's share; see shares.py

    @property
    def has_room(self) -> bool:
        """Nobody waits for pages there."""
        return self.waiting_tokens <= self.free_tokens + self.evictable_tokens


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # what a predicted prefill_prefix_len is worth
    pending_tokens: int
    prefill_tokens_per_s: float
    free_tokens: int = 0
    evictable_tokens: int = 0
    excluded: str = ""
    queued: int = 0
    matched_tokens: int = 0
    own: bool = True


Candidate = DecodeCandidate | PrefillCandidate


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    prompt_tokens: int
    kv_bytes_per_token: float
    chunk_tokens: int  # prefill computes, and sends, so many tokens at a time
    pinned: RankKey | None = None  # the conversation's decode rank
    plans: frozenset[Plan] = frozenset(Plan)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.chunk_tokens < 1 or not self.plans:
            raise ValueError(f"a prompt, a chunk and a plan are needed to place a request: {self}")


@dataclass(frozen=True, slots=True)
class Weights:
    """How much of what a request costs others counts as if it waited so long itself. See bench.placement."""

    # Of the seconds for which a rank computes the prompt, counted once for each request that waits even where
    # the wait is shortest: as many will come to wait behind this one. While a rank is idle they are free.
    occupy_weight: float = 1.0
    # Of the seconds by which the tokens of the sequences running there come later.
    itl_weight: float = 0.05
    # Of the seconds to recompute what is evicted: not all of it will be asked for again.
    evict_weight: float = 0.5
    # How much worse than the best price a preferred rank may be: a part of that price, and some. Of this
    # router's share, for others may have sent to the rest what is not known yet. The home, for moving leaves
    # a copy behind: there it is that part of the time to compute the copy, if that is less.
    slack_ratio: float = 0.2
    slack_s: float = 0.05
    # The calls between the two ranks, whatever the size.
    remote_overhead_s: float = 0.005

    def is_near(self, total_s: float, best_s: float, held_s: float = inf) -> bool:
        """Whether a price is within the slack of the best one; `held_s`: to compute what the rank holds."""
        return total_s <= best_s + self.slack_ratio * min(best_s, held_s) + self.slack_s


@dataclass(frozen=True, slots=True)
class Priced:
    """One way to serve the request. `terms` are named seconds; `prefill` is None under plan local."""

    decode: DecodeCandidate
    prefill: PrefillCandidate | None
    plan: Plan
    terms: tuple[tuple[str, float], ...]

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.terms)


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason`: pinned or longest_prefix (the home rank, within the slack), share (a computing rank of this
    router's share, likewise), cheapest, or tie (one of several equally cheap ones, the least crowded first).
    The rest is kept to explain it."""

    chosen: Priced
    excluded: tuple[Candidate, ...]
    reason: str
    longest_decode_hit: int  # tokens, of all ranks that were looked at
    longest_prefill_hit: int
    _compared: "tuple[_Option, ...]" = field(compare=False, repr=False)
    _pricing: "_Pricing" = field(compare=False, repr=False)

    @property
    def ranked(self) -> tuple[Priced, ...]:
        """The cheapest way of each promising (decode rank, plan) and prefill rank, cheapest first, `chosen`
        among them."""
        chosen = self.chosen
        ways = [chosen]
        shown: set[object] = {chosen.prefill and chosen.prefill.id, (chosen.decode.id, chosen.plan)}
        for option in sorted(self._compared, key=lambda option: option.total_s):
            names = {option.prefill and option.prefill.id, (option.decode.id, option.plan)}
            if not names <= shown | {None} and len(ways) < _MAX_RANKED:
                shown |= names
                ways.append(self._pricing.priced(option))
        return tuple(sorted(ways, key=lambda priced: priced.total_s))


def place(
    request: PlacementRequest,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    bandwidth: Bandwidth,
    weights: Weights,
    tie: float,
    spare_ranks: int = _SPARE_RANKS,
) -> Decision:
    """Where the request goes, by price. Of equally cheap ranks those with the fewest requests come first, and
    `tie` in [0, 1) splits those that are equal in that too.

    The home is the pinned rank, unless requests wait for pages there. Where none is pinned, or it cannot be
    chosen, it is the one rank with the longest hit, if that is half of the prompt or more. It wins while its
    price is within the slack of the best one; then the cheapest one of this router's share does. With more
    `spare_ranks` more is compared, to be shown.

    Raises:
        Unavailable: no rank can serve; the message says why.
    """
    open_decodes = [decode for decode in decodes if not decode.excluded]
    open_prefills = [prefill for prefill in prefills if not prefill.excluded]
    if not open_decodes:
        raise _nowhere("decode", decodes)
    if request.plans == {Plan.REMOTE} and not open_prefills:
        raise _nowhere("prefill", prefills)
    pricing = _Pricing(request, weights, bandwidth, open_decodes, open_prefills)
    home, home_reason = _home(request, open_decodes)
    options = _options(pricing, open_decodes, open_prefills, home, tie, spare_ranks)
    chosen, reason = _choose(options, home, home_reason, weights, tie)
    excluded: list[Candidate] = [decode for decode in decodes if decode.excluded]
    excluded += [prefill for prefill in prefills if prefill.excluded]
    return Decision(
        chosen=pricing.priced(chosen),
        excluded=tuple(excluded),
        reason=reason,
        longest_decode_hit=max(decode.hit_tokens for decode in decodes),
        longest_prefill_hit=max((prefill.hit_tokens for prefill in prefills), default=0),
        _compared=tuple(options),
        _pricing=pricing,
    )


class _Option(NamedTuple):
    total_s: float
    decode: DecodeCandidate
    prefill: PrefillCandidate | None

    @property
    def plan(self) -> Plan:
        return Plan.LOCAL if self.prefill is None else Plan.REMOTE

    @property
    def own(self) -> bool:
        return (self.prefill or self.decode).own


class _Sender(NamedTuple):
    """A prefill rank's part of the price, in seconds."""

    wait_s: float
    compute_s: float
    occupy_s: float
    evict_s: float
    prefill: PrefillCandidate

    @property
    def fixed_s(self) -> float:
        return self.wait_s + self.occupy_s + self.evict_s


class _Receiver(NamedTuple):
    """A decode rank's part under either plan, in seconds; `delta` is what it lacks, in tokens."""

    wait_s: float
    room_s: float  # until the delta has pages
    evict_s: float
    delta: int
    decode: DecodeCandidate


class _Pricing:
    """The price list of one request."""

    def __init__(
        self,
        request: PlacementRequest,
        weights: Weights,
        bandwidth: Bandwidth,
        decodes: Sequence[DecodeCandidate],
        prefills: Sequence[PrefillCandidate],
    ) -> None:
        self.request = request
        self.weights = weights
        self.bandwidth = bandwidth
        self.occupy = _occupy(weights, prefills)
        self.occupy_local = _occupy(weights, decodes)
        # Evicted KV will be computed again by whichever prefill rank is chosen one day, if there are any.
        tokens_per_s = fmean([candidate.prefill_tokens_per_s for candidate in (prefills or decodes)])
        self.evict_s_per_token = weights.evict_weight / tokens_per_s

    def sender(self, prefill: PrefillCandidate) -> _Sender:
        rate, prompt = prefill.prefill_tokens_per_s, self.request.prompt_tokens
        # The last token is always computed: its logits choose the next one.
        compute_s = max(1, prompt - prefill.hit_tokens) / rate
        lacking = prompt - prefill.hit_tokens - prefill.free_tokens
        evicted = min(lacking, prefill.evictable_tokens) if lacking > 0 else 0
        return _Sender(
            prefill.pending_tokens / rate,
            compute_s,
            self.occupy * compute_s,
            evicted * self.evict_s_per_token,
            prefill,
        )

    def receiver(self, decode: DecodeCandidate) -> _Receiver:
        delta = max(0, self.request.prompt_tokens - decode.hit_tokens)
        wait_s = decode.pending_tokens / decode.prefill_tokens_per_s
        lacking = delta - decode.free_tokens
        if lacking <= 0:
            return _Receiver(wait_s, 0.0, 0.0, delta, decode)
        # Sequences that end free at least as many tokens as were generated, one each in every step.
        shortage = max(0, lacking - decode.evictable_tokens)
        room_s = shortage * decode.step_s / max(1, decode.running)
        evicted = min(lacking, decode.evictable_tokens)
        return _Receiver(wait_s, room_s, evicted * self.evict_s_per_token, delta, decode)

    def local_terms(self, receiver: _Receiver) -> dict[str, float]:
        decode = receiver.decode
        compute_s = max(1, receiver.delta) / decode.prefill_tokens_per_s
        return {
            "wait_decode": receiver.wait_s,
            "compute": compute_s,
            "occupy": self.occupy_local * compute_s,
            "wait_room": receiver.room_s,
            "evict_decode": receiver.evict_s,
            "itl": self.weights.itl_weight * decode.running * compute_s,
        }

    def remote_terms(self, receiver: _Receiver, sender: _Sender, bytes_per_s: float) -> dict[str, float]:
        transfer_s, last_chunk_s = self.transfer(receiver, bytes_per_s)
        wait_s, itl_s = self.beside(receiver)
        return {
            "wait_prefill": sender.wait_s,
            "compute": max(sender.compute_s, transfer_s),
            "last_chunk": last_chunk_s,
            "overhead": self.weights.remote_overhead_s,
            "occupy": sender.occupy_s,
            "evict_prefill": sender.evict_s,
            "wait_decode": wait_s,
            "wait_room": receiver.room_s,
            "evict_decode": receiver.evict_s,
            "itl": itl_s,
        }

    def transfer(self, receiver: _Receiver, bytes_per_s: float) -> tuple[float, float]:
        """To move the delta, and its last chunk, which no computation hides."""
        s_per_token = self.request.kv_bytes_per_token / bytes_per_s
        return receiver.delta * s_per_token, min(receiver.delta, self.request.chunk_tokens) * s_per_token

    def beside(self, receiver: _Receiver) -> tuple[float, float]:
        """What a prompt that comes computed suffers from those computed there, and does to those running.

        It does not wait for them, but its tokens come late while they last.
        """
        decode, itl_weight = receiver.decode, self.weights.itl_weight
        return itl_weight * receiver.wait_s, itl_weight * decode.step_s if decode.running else 0.0

    def receiving_s(self, receiver: _Receiver, bytes_per_s: float) -> tuple[float, float]:
        """`fixed` and `overlapped` of a decode rank."""
        transfer_s, last_chunk_s = self.transfer(receiver, bytes_per_s)
        wait_s, itl_s = self.beside(receiver)
        return wait_s + receiver.room_s + receiver.evict_s + itl_s + last_chunk_s, transfer_s

    def remote_s(self, receiver: _Receiver, sender: _Sender) -> float:
        bytes_per_s = self.bandwidth(sender.prefill.id.key, receiver.decode.id.key)
        fixed_s, transfer_s = self.receiving_s(receiver, bytes_per_s)
        overlapped_s = max(sender.compute_s, transfer_s)
        return sender.fixed_s + overlapped_s + fixed_s + self.weights.remote_overhead_s

    def local_s(self, receiver: _Receiver) -> float:
        return sum(self.local_terms(receiver).values())

    def priced(self, option: _Option) -> Priced:
        receiver, prefill = self.receiver(option.decode), option.prefill
        if prefill is None:
            terms = self.local_terms(receiver)
        else:
            bytes_per_s = self.bandwidth(prefill.id.key, option.decode.id.key)
            terms = self.remote_terms(receiver, self.sender(prefill), bytes_per_s)
        return Priced(option.decode, prefill, option.plan, tuple(terms.items()))


def _occupy(weights: Weights, candidates: Sequence[Candidate]) -> float:
    waits = [(rank.pending_tokens / rank.prefill_tokens_per_s, rank.queued) for rank in candidates]
    _, queued = min(waits, default=(0.0, 0))
    return weights.occupy_weight * min(queued, _MAX_QUEUE)


def _options(
    pricing: _Pricing,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    home: DecodeCandidate | None,
    tie: float,
    spare_ranks: int,
) -> list[_Option]:
    """What is worth comparing, the home's own among it; at least one option."""
    receivers = [pricing.receiver(decode) for decode in decodes]
    at_home = [receiver for receiver in receivers if receiver.decode is home]
    options: list[_Option] = []
    if Plan.LOCAL in pricing.request.plans:
        local_s = [pricing.local_s(receiver) for receiver in receivers]
        crowds = [decode.running for decode in decodes]
        chosen = _best_few(local_s, [0.0] * len(local_s), decodes, crowds, tie, spare_ranks)
        wanted = _joined([receivers[i] for i in chosen], at_home)
        options += [_Option(pricing.local_s(receiver), receiver.decode, None) for receiver in wanted]
    if Plan.REMOTE in pricing.request.plans and prefills:
        senders = [pricing.sender(prefill) for prefill in prefills]
        options += _remote_options(pricing, receivers, senders, at_home, tie, spare_ranks)
    return options


def _remote_options(
    pricing: _Pricing,
    receivers: Sequence[_Receiver],
    senders: Sequence[_Sender],
    at_home: Sequence[_Receiver],
    tie: float,
    spare_ranks: int,
) -> list[_Option]:
    chosen = _best_few(
        [sender.fixed_s for sender in senders],
        [sender.compute_s for sender in senders],
        [sender.prefill for sender in senders],
        [sender.prefill.queued for sender in senders],
        _another(tie, 7919),
        spare_ranks,
    )
    senders = [senders[i] for i in chosen]
    bytes_per_s = _typical_bandwidth(pricing.bandwidth, senders[0], receivers)
    prices = [pricing.receiving_s(receiver, bytes_per_s) for receiver in receivers]
    chosen = _shortlist(
        [fixed for fixed, _ in prices],
        [moved for _, moved in prices],
        [receiver.decode.running for receiver in receivers],
        tie,
        spare_ranks,
    )
    return [
        _Option(pricing.remote_s(receiver, sender), receiver.decode, sender.prefill)
        for receiver in _joined([receivers[i] for i in chosen], at_home)
        for sender in senders
    ]


def _joined(shortlist: list[_Receiver], at_home: Iterable[_Receiver]) -> list[_Receiver]:
    return shortlist + [
        receiver for receiver in at_home if all(receiver.decode is not other.decode for other in shortlist)
    ]


def _best_few(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    ranks: Sequence[Candidate],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """The shortlist of all, and that of this router's share where it has not all."""
    chosen = _shortlist(fixed_s, overlapped_s, crowds, tie, spare_ranks)
    own = [index for index, rank in enumerate(ranks) if rank.own]
    if not own or len(own) == len(ranks):
        return chosen
    fixed, overlapped = ([side[index] for index in own] for side in (fixed_s, overlapped_s))
    of_own = [own[index] for index in _shortlist(fixed, overlapped, [crowds[index] for index in own], tie, 1)]
    return chosen + [index for index in of_own if index not in chosen]


def _shortlist(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """Indices of every rank that some other side can make the best, and of the cheapest few.

    Of ranks that cost the same, the least crowded come first.
    """
    keys = [(fixed + overlapped, fixed) for fixed, overlapped in zip(fixed_s, overlapped_s, strict=True)]
    lowest_fixed = min(fixed_s)
    chosen: list[int] = []
    front = float("inf")  # the lowest `fixed` so far; the walk is in ascending `fixed + overlapped`
    for (_, fixed), group in groupby(sorted(range(len(keys)), key=keys.__getitem__), key=keys.__getitem__):
        wanted = max(spare_ranks - len(chosen), 1 if fixed < front else 0)
        front = min(front, fixed)
        if wanted > 0:
            chosen += _from_tie(list(group), crowds.__getitem__, tie)[:wanted]
        if len(chosen) >= max(spare_ranks, _MAX_SHORTLIST) or (
            front == lowest_fixed and len(chosen) >= spare_ranks
        ):
            break
    return chosen


def _choose(
    options: Sequence[_Option],
    home: DecodeCandidate | None,
    home_reason: str,
    weights: Weights,
    tie: float,
) -> tuple[_Option, str]:
    best_s = min(option.total_s for option in options)
    at_home = [option for option in options if option.decode is home]
    if home is not None and at_home:
        home_s = min(option.total_s for option in at_home)
        if weights.is_near(home_s, best_s, home.hit_tokens / home.prefill_tokens_per_s):
            return _pick(at_home, home_s, tie)[0], home_reason
    own = [option for option in options if option.own]
    if own and weights.is_near(min(option.total_s for option in own), best_s):
        options = own
    lowest_s = min(option.total_s for option in options)
    option, num_equal = _pick(options, lowest_s, tie)
    if lowest_s > best_s:
        return option, "share"
    return option, "tie" if num_equal > 1 else "cheapest"


def _pick(options: Sequence[_Option], total_s: float, tie: float) -> tuple[_Option, int]:
    equal = [option for option in options if option.total_s == total_s]
    return _from_tie(equal, _crowd, _another(tie, 104729))[0], len(equal)


def _crowd(option: _Option) -> int:
    return option.decode.running + (option.prefill.queued if option.prefill is not None else 0)


def _home(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate]
) -> tuple[DecodeCandidate | None, str]:
    pinned = request.pinned
    if pinned is not None:
        for decode in decodes:
            if decode.id.key == pinned:
                return (decode, "pinned") if decode.has_room else (None, "")
    longest = max(decode.hit_tokens for decode in decodes)
    holders = [decode for decode in decodes if decode.hit_tokens == longest]
    # Less than half is a system prompt that many share: that alone makes nobody's home.
    if 2 * longest >= request.prompt_tokens and len(holders) == 1:
        return holders[0], "longest_prefix"
    return None, ""


def _typical_bandwidth(bandwidth: Bandwidth, sender: _Sender, receivers: Sequence[_Receiver]) -> float:
    step = -(-len(receivers) // _BANDWIDTH_SAMPLES)
    sender_key = sender.prefill.id.key
    return median(bandwidth(sender_key, receiver.decode.id.key) for receiver in receivers[::step])


def _from_tie(members: list[_T], crowd: Callable[[_T], int], tie: float) -> list[_T]:
    """The least crowded first, those as `tie` goes round their circle."""
    fewest = min(map(crowd, members))
    least = [member for member in members if crowd(member) == fewest]
    others = sorted((member for member in members if crowd(member) > fewest), key=crowd)
    first = int(tie * len(least))
    return [*least[first:], *least[:first], *others]


def _another(tie: float, prime: int) -> float:
    """A number in [0, 1) that is all but independent of `tie`."""
    return tie * prime % 1.0


def _nowhere(role: str, candidates: Sequence[Candidate]) -> Unavailable:
    if not candidates:
        return Unavailable(f"there is no {role} rank")
    reasons = Counter(candidate.excluded for candidate in candidates)
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return Unavailable(f"no {role} rank can take the request: {listed}")
