"""A decision chooses a decode rank, a prefill rank and a plan by price. Pure.

Only the pairs of two shortlists are priced, one of each role. The shortlists use two parts of the price.
Under one bandwidth the price of a pair is

    T = fixed(P) + max(overlapped(P), overlapped(D)) + fixed(D)

where P's computation and D's transfer overlap. So a rank can be left out when another one is no worse in both
`fixed` and `fixed + overlapped`. The best pair is among the few ranks that remain on both sides. Where the
wait of a pair is bounded, the other rank must also be no worse in its wait.

Under several bandwidths the shortlists are made with a typical one and a few spare ranks of each role, and
their pairs are priced with their own bandwidths. Then the choice is the best of these pairs, but not always
of all.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import add
from typing import NamedTuple, TypeVar

from services.router.placement.candidates import (
    Candidate,
    DecodeCandidate,
    PlacementRequest,
    PrefillCandidate,
    Waits,
    refusal,
)
from services.router.placement.exclusion import beside_others, shortest_wait_s
from services.router.placement.price import (
    Bandwidth,
    Option,
    Priced,
    PriceList,
    PriceWeights,
    Receiver,
    Sender,
)
from services.values.errors import Unavailable
from services.values.rank import Plan

_T = TypeVar("_T")

_MAX_SHORTLIST = 32  # of each role; only contrived fleets have a longer exact shortlist


def best_few(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    waits_s: Sequence[float],
    ranks: Sequence[Candidate],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """Return the shortlist of all ranks, extended by the shortlist of this router's share."""
    chosen = shortlist(fixed_s, overlapped_s, waits_s, crowds, tie, spare_ranks)
    own = [index for index, rank in enumerate(ranks) if rank.own]
    if not own or len(own) == len(ranks):
        return chosen
    fixed, overlapped, waits = ([of[index] for index in own] for of in (fixed_s, overlapped_s, waits_s))
    of_own = shortlist(fixed, overlapped, waits, [crowds[index] for index in own], tie, 1)
    return chosen + [own[index] for index in of_own if own[index] not in chosen]


def shortlist(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    waits_s: Sequence[float],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """Return the indices of every rank that can be part of the best pair, and of the `spare_ranks` cheapest
    ones.

    Of ranks that cost the same, the least crowded come first. A rank with the shortest wait is always
    included.
    """
    if len(fixed_s) == 1:
        return [0]
    keys = list(zip(map(add, fixed_s, overlapped_s), fixed_s, waits_s, strict=True))
    order, lowest = sorted(range(len(keys)), key=keys.__getitem__), (min(fixed_s), min(waits_s))
    if len(set(keys)) == len(keys) and (len(keys) <= spare_ranks or keys[order[0]][1:] == lowest):
        return order[: max(1, spare_ranks)]  # This is the usual case: the cheapest is the front.
    chosen: list[int] = []
    front: list[tuple[float, float]] = []  # `fixed` and wait of the useful ones, in ascending price
    for _, equal in groupby(order, keys.__getitem__):
        group = list(equal)
        _, fixed, wait = keys[group[0]]
        is_of_use = all([fixed < other_fixed or wait < other_wait for other_fixed, other_wait in front])
        if is_of_use:
            front.append((fixed, wait))
        wanted = max(spare_ranks - len(chosen), int(is_of_use))
        if wanted > 0:
            chosen += least_crowded_first(group, crowds.__getitem__, tie)[:wanted]
        if len(chosen) >= spare_ranks and (front[-1] == lowest or _is_long(chosen, front, lowest)):
            break
    return chosen


def _is_long(chosen: list[int], front: list[tuple[float, float]], lowest: tuple[float, float]) -> bool:
    return len(chosen) >= _MAX_SHORTLIST and any(wait == lowest[1] for _, wait in front)


def least_crowded_first(members: list[_T], crowd: Callable[[_T], int], tie: float) -> list[_T]:
    """Return the members, the least crowded first; `tie` in [0, 1) rotates the order of the least crowded
    ones."""
    if len(members) == 1:
        return members
    fewest = min(map(crowd, members))
    least = [member for member in members if crowd(member) == fewest]
    others = sorted((member for member in members if crowd(member) > fewest), key=crowd)
    first = int(tie * len(least))
    return [*least[first:], *least[:first], *others]


_SPARE_RANKS = 4  # the least length of a shortlist, where there are so many ranks
_BANDWIDTH_SAMPLES = 5
_MAX_RANKED = 64


@dataclass(frozen=True, slots=True)
class Decision:
    """This is the chosen way to serve a request, with what explains the choice.

    `reason` is one of: pinned or longest_prefix (the home rank, within the slack), share (a computing rank of
    this router's share, within the slack), cheapest, or tie (one of several equally cheap ways, the least
    crowded first).
    """

    chosen: Priced
    excluded: tuple[Candidate, ...]
    reason: str
    longest_decode_hit: int  # the most tokens of the prompt that any candidate holds
    longest_decode_reuse: int  # the most tokens that any candidate would not have to compute
    longest_prefill_reuse: int
    _compared: "tuple[Option, ...]" = field(compare=False, repr=False)
    _pricing: "PriceList" = field(compare=False, repr=False)

    @property
    def excess_wait_s(self) -> float:
        """Return by how much the wait of the rank that computes exceeds the shortest one of its role."""
        prefill, decode, pricing = self.chosen.prefill, self.chosen.decode, self._pricing
        if prefill is None:
            return decode.pending_tokens / decode.prefill_tokens_per_s - pricing.shortest_local_s
        return prefill.pending_tokens / prefill.prefill_tokens_per_s - pricing.shortest_s

    @property
    def longest_reuse(self) -> int:
        return self._pricing.request.paid_tokens

    @property
    def ranked(self) -> tuple[Priced, ...]:
        """Return the cheapest way of each promising (decode rank, plan) and prefill rank, the cheapest first.

        The chosen way is among them.
        """
        chosen = self.chosen
        ways = [chosen]
        shown: set[object] = {chosen.prefill and chosen.prefill.id, (chosen.decode.id, chosen.plan)}
        for option in sorted(self._compared, key=lambda option: option.total_s):
            names = {option.prefill and option.prefill.id, (option.decode.id, option.plan)}
            if not names <= shown | {None} and len(ways) < _MAX_RANKED:
                shown |= names
                ways.append(self._pricing.priced(option))
        return tuple(sorted(ways, key=lambda priced: priced.total_s))


@dataclass(frozen=True, slots=True)
class Nowhere:
    """This replaces a decision where no rank can be chosen; each candidate says why."""

    reason: str
    candidates: tuple[Candidate, ...]


def place(
    request: PlacementRequest,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    bandwidth: Bandwidth,
    weights: PriceWeights,
    tie: float,
    spare_ranks: int = _SPARE_RANKS,
) -> Decision:
    """Decide by price where the request goes.

    Of equally cheap ranks those with the fewest requests come first, and `tie` in [0, 1) chooses among ranks
    that are equal in that too.

    The home is the pinned rank, unless requests wait for pages there. Where no rank is pinned, or the pinned
    one cannot be chosen, the home is the one rank with the longest hit, if that is half of the prompt or
    more. The home wins while its price is within the slack of the best one; otherwise the cheapest rank of
    this router's share wins within the slack. More `spare_ranks` make more options to be compared and shown.
    Under plan remote alone the caller has excluded all decode ranks that cannot receive.

    Raises:
        NoCapacity: the request would wait too long at each rank that could serve it.
        Unavailable: no rank can serve it; the message says why.
    """
    if request.max_wait_s < inf:
        wait_s = shortest_wait_s(request, decodes, prefills)
        if request.max_wait_s < wait_s < inf:
            raise refusal(wait_s, request.max_wait_s)
    decodes, prefills = beside_others(request, decodes, prefills)
    open_decodes = [decode for decode in decodes if not decode.excluded]
    open_prefills = [prefill for prefill in prefills if not prefill.excluded]
    if not open_decodes:
        raise _nowhere("decode", decodes)
    if request.plans == {Plan.REMOTE} and not open_prefills:
        raise _nowhere("prefill", prefills)
    pricing = PriceList(request, weights, bandwidth, open_decodes, open_prefills)
    home = _home(request, open_decodes)
    options = _options(pricing, open_decodes, open_prefills, home and home.decode, tie, spare_ranks)
    chosen, reason = _choose(options, home, weights, tie)
    excluded: list[Candidate] = [decode for decode in decodes if decode.excluded]
    excluded += [prefill for prefill in prefills if prefill.excluded]
    return Decision(
        chosen=pricing.priced(chosen),
        excluded=tuple(excluded),
        reason=reason,
        longest_decode_hit=max([decode.hit_tokens for decode in decodes]),
        longest_decode_reuse=max([decode.reused_tokens for decode in decodes]),
        longest_prefill_reuse=max([prefill.reused_tokens for prefill in prefills], default=0),
        _compared=tuple(options),
        _pricing=pricing,
    )


def _options(
    pricing: PriceList,
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    home: DecodeCandidate | None,
    tie: float,
    spare_ranks: int,
) -> list[Option]:
    request, options = pricing.request, list[Option]()
    waits, max_wait_s = request.waits, request.max_wait_s
    receivers = [pricing.receiver(decode) for decode in decodes]
    if Plan.LOCAL in request.plans:
        in_time = receivers
        if max_wait_s < inf:
            in_time = [each for each in receivers if waits.local_s(each.decode) <= max_wait_s]
        options += _local_options(pricing, in_time, home, tie, spare_ranks) if in_time else []
    if Plan.REMOTE in request.plans and prefills:
        in_time = [each for each in receivers if each.decode.receives]
        if max_wait_s < inf:
            compute_s = min(prefill.compute_wait_s for prefill in prefills)
            in_time = [each for each in in_time if waits.remote_s(each.decode, compute_s) <= max_wait_s]
        senders = pricing.senders(prefills)  # A rank with sources has several entries among them.
        spare_ranks = -(-spare_ranks * len(senders) // len(prefills))
        options += _remote_options(pricing, in_time, senders, home, tie, spare_ranks) if in_time else []
    return options


def _local_options(
    pricing: PriceList,
    receivers: Sequence[Receiver],
    home: DecodeCandidate | None,
    tie: float,
    spare_ranks: int,
) -> list[Option]:
    ways = [pricing.local(receiver) for receiver in receivers]
    local_s = [total_s for total_s, _ in ways]
    decodes = [receiver.decode for receiver in receivers]
    crowds = [decode.running for decode in decodes]
    nothing = [0.0] * len(receivers)
    chosen = best_few(local_s, nothing, nothing, decodes, crowds, tie, spare_ranks)
    return [
        Option(local_s[index], decodes[index], None, source=ways[index][1])
        for index in _with_home(receivers, chosen, home)
    ]


def _remote_options(
    pricing: PriceList,
    receivers: Sequence[Receiver],
    senders: Sequence[Sender],
    home: DecodeCandidate | None,
    tie: float,
    spare_ranks: int,
) -> list[Option]:
    """Return at least one option, since each receiver has a sender with which the wait is short enough."""
    waits, max_wait_s = pricing.request.waits, pricing.request.max_wait_s
    queue_waits_s, compute_waits_s = _waits_that_matter(waits, receivers, senders, max_wait_s)
    chosen = best_few(
        [sender.fixed_s for sender in senders],
        [sender.compute_s for sender in senders],
        compute_waits_s,
        [sender.prefill for sender in senders],
        [sender.prefill.queued for sender in senders],
        _another(tie, 7919),
        spare_ranks,
    )
    senders = _with_sources(senders, chosen)
    bytes_per_s = _typical_bandwidth(pricing.bandwidth, senders[0], receivers)
    prices = [pricing.receiving_s(receiver, bytes_per_s) for receiver in receivers]
    chosen = shortlist(
        [fixed for fixed, _ in prices],
        [moved for _, moved in prices],
        queue_waits_s,
        [receiver.decode.running for receiver in receivers],
        tie,
        spare_ranks,
    )
    options: list[Option] = []
    for index in _with_home(receivers, chosen, home):
        receiver, in_time = receivers[index], senders
        if max_wait_s < inf:
            in_time = [
                sender
                for sender in senders
                if waits.remote_s(receiver.decode, sender.prefill.compute_wait_s) <= max_wait_s
            ]
        options += pricing.remotes(receiver, in_time, bytes_per_s, prices[index])
    return options


def _waits_that_matter(
    waits: Waits, receivers: Sequence[Receiver], senders: Sequence[Sender], max_wait_s: float
) -> tuple[list[float], list[float]]:
    """Return the waits of the receivers and of the senders, or zeros where no pair of them would wait too
    long."""
    if max_wait_s == inf:
        return [0.0] * len(receivers), [0.0] * len(senders)
    queue_waits_s = [receiver.decode.queue_wait_s for receiver in receivers]
    compute_waits_s = [sender.prefill.compute_wait_s for sender in senders]
    fullest = max(receivers, key=lambda receiver: receiver.decode.queue_wait_s)
    if waits.remote_s(fullest.decode, max(compute_waits_s)) <= max_wait_s:
        return [0.0] * len(receivers), [0.0] * len(senders)
    return queue_waits_s, compute_waits_s


def _with_sources(senders: Sequence[Sender], chosen: list[int]) -> list[Sender]:
    few = [senders[index] for index in chosen]
    if not any(sender.source for sender in senders):
        return few
    ranks = {sender.prefill.id for sender in few}
    others = (sender for index, sender in enumerate(senders) if index not in chosen)
    return few + [sender for sender in others if sender.prefill.id in ranks]


def _with_home(receivers: Sequence[Receiver], chosen: list[int], home: DecodeCandidate | None) -> list[int]:
    if home is None or any(receivers[index].decode is home for index in chosen):
        return chosen
    return chosen + [index for index, receiver in enumerate(receivers) if receiver.decode is home]


def _choose(
    options: Sequence[Option],
    home: "_Home | None",
    weights: PriceWeights,
    tie: float,
) -> tuple[Option, str]:
    best_s = min(option.total_s for option in options)
    at_home = [option for option in options if home is not None and option.decode is home.decode]
    if home is not None and at_home:
        home_s = min(option.total_s for option in at_home)
        if weights.is_near(home_s, best_s, home.held_s):
            return _pick(at_home, home_s, tie)[0], home.reason
    lowest_s, others = best_s, [option for option in options if not option.own]
    if others and len(others) < len(options):
        own = [option for option in options if option.own]
        own_s = min(option.total_s for option in own)
        if weights.is_near(own_s, best_s):
            options, lowest_s = own, own_s
    option, num_equal = _pick(options, lowest_s, tie)
    if option.own and any(other.total_s <= lowest_s for other in others):
        return option, "share"
    return option, "tie" if num_equal > 1 else "cheapest"


def _pick(options: Sequence[Option], total_s: float, tie: float) -> tuple[Option, int]:
    equal = [option for option in options if option.total_s == total_s]
    return least_crowded_first(equal, _crowd, _another(tie, 104729))[0], len(equal)


def _crowd(option: Option) -> int:
    return option.decode.running + (option.prefill.queued if option.prefill is not None else 0)


class _Home(NamedTuple):
    decode: DecodeCandidate
    reason: str
    held_s: float  # the time to compute what it holds, where only the pin makes it the home; else infinity


def _home(request: PlacementRequest, decodes: Sequence[DecodeCandidate]) -> _Home | None:
    pinned = request.pinned
    if pinned is not None:
        for decode in decodes:
            if decode.id.key == pinned:
                return _pinned(request, decode) if decode.has_room else None
    # Of those that hold as much, who holds more of it in its pool is the home.
    longest = max((decode.held_tokens, decode.hit_tokens) for decode in decodes)
    holders = [decode for decode in decodes if (decode.held_tokens, decode.hit_tokens) == longest]
    # A hit of less than half may be a system prompt that many share, which is no reason to prefer a rank.
    if 2 * longest[0] >= request.prompt_tokens and len(holders) == 1:
        return _Home(holders[0], "longest_prefix", inf)
    return None


def _pinned(request: PlacementRequest, decode: DecodeCandidate) -> _Home:
    holds_most = 2 * decode.held_tokens >= request.prompt_tokens
    held_s = inf if holds_most else decode.held_tokens / decode.prefill_tokens_per_s
    return _Home(decode, "pinned", held_s)


def _typical_bandwidth(bandwidth: Bandwidth, sender: Sender, receivers: Sequence[Receiver]) -> float:
    step = -(-len(receivers) // _BANDWIDTH_SAMPLES)
    key, some = sender.prefill.id.key, receivers[::step]
    samples = sorted([bandwidth(key, receiver.decode.id.key) for receiver in some])
    return (samples[(len(some) - 1) // 2] + samples[len(some) // 2]) / 2


def _another(tie: float, prime: int) -> float:
    return tie * prime % 1.0


def _nowhere(role: str, candidates: Sequence[Candidate]) -> Unavailable:
    if not candidates:
        return Unavailable(f"there is no {role} rank")
    reasons = Counter(candidate.excluded for candidate in candidates)
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return Unavailable(f"no {role} rank can take the request: {listed}")
