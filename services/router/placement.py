"""Prices each (decode rank, prefill rank, plan) in seconds to the first token, and picks one. Pure.

    remote  T = wait_prefill + max(compute, transfer) + last_chunk + overhead + at_decode
    local   T = compute + at_decode
    at_decode = wait_decode + wait_room + displace + itl

Not every pair is priced. Under one bandwidth the price of a pair is

    T = fixed(P) + max(overlapped(P), overlapped(D)) + fixed(D)

with P's wait and compute, and D's waits and transfer. So a rank can be left out when another one is no
worse in `fixed` and in `fixed + overlapped`: the best pair lies in what remains on both sides, a handful
of ranks. Under several bandwidths the shortlist is made with a typical one and a few spare ranks a side,
and the pairs in it are priced with their own: the best of these, not always of all.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from services.errors import NoCapacity, Unavailable
from services.kv.types import Plan, RankId, RankKey

FULL = "full"  # the `excluded` of a rank that has no room now

_T = TypeVar("_T")

# Bytes per second from a prefill rank (first) to a decode rank.
Bandwidth = Callable[[RankKey, RankKey], float]

_SPARE_RANKS = 8  # a side, at least, where there are so many
_MAX_SHORTLIST = 32  # a side; the exact shortlist is shorter but for contrived fleets
_BANDWIDTH_SAMPLES = 9
_MAX_RANKED = 8

_REMOTE_TERMS = (
    "wait_prefill",
    "compute",
    "last_chunk",
    "wait_decode",
    "wait_room",
    "displace",
    "itl",
    "overhead",
)
_LOCAL_TERMS = ("wait_decode", "compute", "wait_room", "displace", "itl")


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # predicted decode_prefix_len
    pending_tokens: int  # queued or being computed there
    prefill_tokens_per_s: float
    running: int  # sequences
    step_s: float
    free_tokens: int  # room in free pages
    evictable_tokens: int  # cached, unlocked
    excluded: str = ""  # why it cannot be chosen (draining, suspect, failed, FULL); empty: it can


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # predicted prefill_prefix_len
    pending_tokens: int
    prefill_tokens_per_s: float
    excluded: str = ""


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
    # Of the seconds that others' tokens come later, how much counts as our own waiting.
    itl_weight: float = 0.25
    # Of the seconds to recompute what is evicted for us: what was not asked for in a long time seldom is.
    displace_weight: float = 0.25
    # How much worse than the best price the home rank may be: moving a conversation leaves a copy behind.
    home_slack_ratio: float = 0.2
    home_slack_s: float = 0.05
    # The calls between the two ranks, whatever the size.
    remote_overhead_s: float = 0.005


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
    """`ranked` has the cheapest way of each promising (decode rank, plan), cheapest first, and `chosen`.

    reason: pinned or longest_prefix (the home rank, within its slack), cheapest, or tie (one of several
    equally cheap ones).
    """

    chosen: Priced
    ranked: tuple[Priced, ...]
    excluded: tuple[DecodeCandidate | PrefillCandidate, ...]
    reason: str


def place(
    request: PlacementRequest,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    bandwidth: Bandwidth,
    weights: Weights,
    tie: float,
) -> Decision:
    """Where the request goes. `tie` in [0, 1) splits equal candidates; all else is decided by price.

    The home is the pinned rank if it can be chosen, else the one rank with the longest hit, if that is
    half of the prompt or more. It wins while its price is within the slack of the best one.

    Raises:
        NoCapacity: every rank that could serve is full.
        Unavailable: no rank can serve; the message says why.
    """
    open_decodes = [decode for decode in decodes if not decode.excluded]
    open_prefills = [prefill for prefill in prefills if not prefill.excluded]
    if not open_decodes:
        raise _nowhere("decode", decodes)
    if request.plans == {Plan.REMOTE} and not open_prefills:
        raise _nowhere("prefill", prefills)
    pricing = _Pricing(request, weights, bandwidth, _recompute_tokens_per_s(open_decodes, open_prefills))
    home, home_reason = _home(request, open_decodes)
    options = _options(pricing, open_decodes, open_prefills, home, tie)
    chosen, reason = _choose(options, home, home_reason, weights, tie)
    excluded: list[DecodeCandidate | PrefillCandidate] = [decode for decode in decodes if decode.excluded]
    excluded += [prefill for prefill in prefills if prefill.excluded]
    return Decision(_priced(chosen), _ranked(options, chosen), tuple(excluded), reason)


class _Option(NamedTuple):
    total_s: float
    terms_s: tuple[float, ...]  # in the order of _REMOTE_TERMS or _LOCAL_TERMS
    decode: DecodeCandidate
    prefill: PrefillCandidate | None

    @property
    def plan(self) -> Plan:
        return Plan.LOCAL if self.prefill is None else Plan.REMOTE


class _Share(NamedTuple):
    """What a decode rank adds to the price under either plan; seconds and tokens."""

    decode: DecodeCandidate
    delta_tokens: int
    wait_s: float
    room_s: float  # until the delta has pages
    displace_s: float  # to compute again what is evicted for it


class _Pricing:
    """The price list of one request; every figure is in seconds."""

    def __init__(
        self,
        request: PlacementRequest,
        weights: Weights,
        bandwidth: Bandwidth,
        recompute_tokens_per_s: float,
    ) -> None:
        self.request = request
        self.weights = weights
        self.bandwidth = bandwidth
        self._displace_s_per_token = weights.displace_weight / recompute_tokens_per_s

    def share(self, decode: DecodeCandidate) -> _Share:
        delta = self.request.prompt_tokens - decode.hit_tokens
        delta = delta if delta > 0 else 0
        wait_s = decode.pending_tokens / decode.prefill_tokens_per_s
        lacking = delta - decode.free_tokens
        if lacking <= 0:
            return _Share(decode, delta, wait_s, 0.0, 0.0)
        # Sequences that end free at least as many tokens as were generated, one each in every step.
        shortage = max(0, lacking - decode.evictable_tokens)
        room_s = shortage * decode.step_s / max(1, decode.running)
        displaced = min(lacking, decode.evictable_tokens)
        return _Share(decode, delta, wait_s, room_s, displaced * self._displace_s_per_token)

    def sending(self, prefill: PrefillCandidate) -> tuple[float, float]:
        """Until the rank gets to the prompt, and until it has computed what it lacks."""
        wait_s = prefill.pending_tokens / prefill.prefill_tokens_per_s
        return wait_s, self._uncached_tokens(prefill) / prefill.prefill_tokens_per_s

    def receiving(self, share: _Share, bytes_per_s: float) -> tuple[float, float]:
        """What no computation elsewhere hides, and to move the delta."""
        transfer_s, last_chunk_s = self._transfer(share, bytes_per_s)
        waits_s = share.wait_s + share.room_s + share.displace_s
        return waits_s + last_chunk_s + self._joining(share), transfer_s

    def computing(self, share: _Share) -> tuple[float, float]:
        """To compute the tail on the decode rank, and what the stall costs every sequence running there."""
        compute_s = self._uncached_tokens(share.decode) / share.decode.prefill_tokens_per_s
        return compute_s, self.weights.itl_weight * share.decode.running * compute_s

    def local_s(self, share: _Share) -> float:
        compute_s, stall_s = self.computing(share)
        return share.wait_s + compute_s + share.room_s + share.displace_s + stall_s

    def local(self, share: _Share) -> _Option:
        compute_s, stall_s = self.computing(share)
        terms_s = (share.wait_s, compute_s, share.room_s, share.displace_s, stall_s)
        return _Option(sum(terms_s), terms_s, share.decode, None)

    def remote(self, share: _Share, prefill: PrefillCandidate, bytes_per_s: float) -> _Option:
        wait_prefill_s, compute_s = self.sending(prefill)
        transfer_s, last_chunk_s = self._transfer(share, bytes_per_s)
        terms_s = (
            wait_prefill_s,
            max(compute_s, transfer_s),
            last_chunk_s,
            share.wait_s,
            share.room_s,
            share.displace_s,
            self._joining(share),
            self.weights.remote_overhead_s,
        )
        return _Option(sum(terms_s), terms_s, share.decode, prefill)

    def _uncached_tokens(self, candidate: DecodeCandidate | PrefillCandidate) -> int:
        # The last token is always computed: its logits choose the next one.
        uncached = self.request.prompt_tokens - candidate.hit_tokens
        return uncached if uncached > 1 else 1

    def _transfer(self, share: _Share, bytes_per_s: float) -> tuple[float, float]:
        delta, chunk = share.delta_tokens, self.request.chunk_tokens
        s_per_token = self.request.kv_bytes_per_token / bytes_per_s
        return delta * s_per_token, (delta if delta < chunk else chunk) * s_per_token

    def _joining(self, share: _Share) -> float:
        return self.weights.itl_weight * share.decode.step_s if share.decode.running else 0.0


def _options(
    pricing: _Pricing,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    home: DecodeCandidate | None,
    tie: float,
) -> list[_Option]:
    """What is worth comparing, the home's own among it; at least one option."""
    shares = [pricing.share(decode) for decode in decodes]
    home_shares = [share for share in shares if share.decode is home]
    options: list[_Option] = []
    if Plan.LOCAL in pricing.request.plans:
        local_s = [pricing.local_s(share) for share in shares]
        shortlist = [shares[i] for i in _shortlist(local_s, [0.0] * len(shares), tie)]
        options += [pricing.local(share) for share in _joined(shortlist, home_shares)]
    if Plan.REMOTE in pricing.request.plans and prefills:
        options += _remote_options(pricing, shares, prefills, home_shares, tie)
    return options


def _remote_options(
    pricing: _Pricing,
    shares: Sequence[_Share],
    prefills: Sequence[PrefillCandidate],
    home_shares: Sequence[_Share],
    tie: float,
) -> list[_Option]:
    fixed_s, overlapped_s = zip(*map(pricing.sending, prefills), strict=True)
    senders = [prefills[i] for i in _shortlist(fixed_s, overlapped_s, _another(tie, 7919))]
    bytes_per_s = _typical_bandwidth(pricing.bandwidth, senders[0], shares)
    fixed_s, overlapped_s = zip(*(pricing.receiving(share, bytes_per_s) for share in shares), strict=True)
    receivers = _joined([shares[i] for i in _shortlist(fixed_s, overlapped_s, tie)], home_shares)
    sender_keys = [sender.id.key for sender in senders]
    return [
        pricing.remote(receiver, sender, pricing.bandwidth(sender_key, receiver_key))
        for receiver, receiver_key in [(receiver, receiver.decode.id.key) for receiver in receivers]
        for sender, sender_key in zip(senders, sender_keys, strict=True)
    ]


def _joined(shortlist: Sequence[_Share], home_shares: Sequence[_Share]) -> list[_Share]:
    return [*shortlist, *(share for share in home_shares if share not in shortlist)]


def _shortlist(fixed_s: Sequence[float], overlapped_s: Sequence[float], tie: float) -> list[int]:
    """Indices of every rank that some other side can make the best, and of the cheapest few.

    Of ranks that cost the same, those come first that follow `tie` round their circle.
    """
    keys = [(fixed + overlapped, fixed) for fixed, overlapped in zip(fixed_s, overlapped_s, strict=True)]
    lowest_fixed = min(fixed_s)
    chosen: list[int] = []
    front = float("inf")  # the lowest `fixed` so far; the walk is in ascending `fixed + overlapped`
    for (_, fixed), group in groupby(sorted(range(len(keys)), key=keys.__getitem__), key=keys.__getitem__):
        wanted = max(_SPARE_RANKS - len(chosen), 1 if fixed < front else 0)
        front = min(front, fixed)
        if wanted > 0:
            chosen += _from_tie(list(group), tie)[:wanted]
        if len(chosen) >= _MAX_SHORTLIST or (front == lowest_fixed and len(chosen) >= _SPARE_RANKS):
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
    if at_home:
        home_s = min(option.total_s for option in at_home)
        if home_s <= best_s * (1 + weights.home_slack_ratio) + weights.home_slack_s:
            return _pick(at_home, home_s, tie)[0], home_reason
    option, num_equal = _pick(options, best_s, tie)
    return option, "tie" if num_equal > 1 else "cheapest"


def _pick(options: Sequence[_Option], total_s: float, tie: float) -> tuple[_Option, int]:
    equal = [option for option in options if option.total_s == total_s]
    return _from_tie(equal, _another(tie, 104729))[0], len(equal)


def _home(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate]
) -> tuple[DecodeCandidate | None, str]:
    pinned = request.pinned
    if pinned is not None:
        for decode in decodes:
            if decode.id.rank == pinned.rank and decode.id.worker == pinned.worker:
                return decode, "pinned"
    longest = max(decode.hit_tokens for decode in decodes)
    holders = [decode for decode in decodes if decode.hit_tokens == longest]
    # Less than half is a system prompt that many share: that alone makes nobody's home.
    if 2 * longest >= request.prompt_tokens and len(holders) == 1:
        return holders[0], "longest_prefix"
    return None, ""


def _ranked(options: Iterable[_Option], chosen: _Option) -> tuple[Priced, ...]:
    cheapest: dict[tuple[RankId, Plan], _Option] = {(chosen.decode.id, chosen.plan): chosen}
    for option in sorted(options, key=lambda option: option.total_s):
        cheapest.setdefault((option.decode.id, option.plan), option)
    ranked = sorted(cheapest.values(), key=lambda option: option.total_s)
    shown = ranked[:_MAX_RANKED]
    if chosen not in shown:
        shown[-1] = chosen
    return tuple(_priced(option) for option in shown)


def _priced(option: _Option) -> Priced:
    names = _LOCAL_TERMS if option.plan is Plan.LOCAL else _REMOTE_TERMS
    terms = tuple(zip(names, option.terms_s, strict=True))
    return Priced(option.decode, option.prefill, option.plan, terms)


def _recompute_tokens_per_s(
    decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> float:
    """Evicted KV will be computed again by whichever prefill rank is chosen one day, if there are any."""
    return fmean(candidate.prefill_tokens_per_s for candidate in (prefills or decodes))


def _typical_bandwidth(bandwidth: Bandwidth, sender: PrefillCandidate, shares: Sequence[_Share]) -> float:
    step = -(-len(shares) // _BANDWIDTH_SAMPLES)
    sender_key = sender.id.key
    return median(bandwidth(sender_key, share.decode.id.key) for share in shares[::step])


def _from_tie(members: list[_T], tie: float) -> list[_T]:
    first = int(tie * len(members))
    return members[first:] + members[:first]


def _another(tie: float, prime: int) -> float:
    """A number in [0, 1) that is all but independent of `tie`."""
    return tie * prime % 1.0


def _nowhere(
    role: str, candidates: Sequence[DecodeCandidate] | Sequence[PrefillCandidate]
) -> NoCapacity | Unavailable:
    if not candidates:
        return Unavailable(f"there is no {role} rank")
    reasons = Counter(candidate.excluded for candidate in candidates)
    if set(reasons) == {FULL}:
        return NoCapacity(f"every {role} rank is full ({len(candidates)})")
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return Unavailable(f"no {role} rank can take the request: {listed}")
