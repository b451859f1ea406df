"""Chooses (decode rank, prefill rank, plan) by price. Pure.

Every rank is priced. Under plan remote each decode rank is priced with the prefill ranks that may be the best
for any (shortlist.py), all of them over a typical link. Where links differ, the pairs of the best few of both
sides are priced with their own: the best of these, not always of all.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np

from services.router.placement.admission import refusal
from services.router.placement.candidates import (
    Candidate,
    DecodeCandidate,
    PlacementRequest,
    PrefillCandidate,
)
from services.router.placement.exclusion import beside_others, shortest_wait_s
from services.router.placement.price import Bandwidth, Priced, PriceList, PriceWeights
from services.router.placement.shortlist import cheapest, front
from services.router.placement.sides import Flags, Numbers, Side, highest
from services.values.errors import Unavailable
from services.values.rank import Plan

_SPARE_RANKS = 4  # a side, at least, where there are so many
_BANDWIDTH_SAMPLES = 5
_MAX_RANKED = 64


class _Option(NamedTuple):
    """One way to serve the request: a decode rank's row, and a prefill rank's under plan remote."""

    total_s: float
    decode: int
    prefill: int | None
    own: bool  # who computes is of this router's share
    crowd: float  # requests there
    bytes_per_s: float = inf  # between the two, as it was when this was priced


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason`: pinned or longest_prefix (the home rank, within the slack), share (a computing rank of this
    router's share, likewise), cheapest, or tie (one of several equally cheap ones, the least crowded first).
    The rest is kept to explain it."""

    chosen: Priced
    reason: str
    longest_decode_hit: int  # tokens held, of all decode ranks
    longest_decode_reuse: int  # tokens that it would not compute, likewise
    longest_prefill_reuse: int
    _market: "_Market" = field(compare=False, repr=False)
    _spare_ranks: int = field(compare=False, repr=False)

    @property
    def excluded(self) -> tuple[Candidate, ...]:
        """Those that could not be chosen, each with its reason."""
        pricing = self._market.pricing
        return (*pricing.decodes.excluded(), *pricing.prefills.excluded())

    @property
    def ranked(self) -> tuple[Priced, ...]:
        """The cheapest way of each promising (decode rank, plan) and prefill rank, cheapest first, `chosen`
        among them."""
        chosen, pricing = self.chosen, self._market.pricing
        ways = [chosen]
        shown: set[object] = {chosen.prefill and chosen.prefill.id, (chosen.decode.id, chosen.plan)}
        for option in sorted(self._market.options(self._spare_ranks), key=lambda option: option.total_s):
            plan = Plan.LOCAL if option.prefill is None else Plan.REMOTE
            prefill = None if option.prefill is None else pricing.prefills.ids[option.prefill]
            names = {prefill, (pricing.decodes.ids[option.decode], plan)}
            if not names <= shown | {None} and len(ways) < _MAX_RANKED:
                shown |= names
                ways.append(_priced(pricing, option))
        return tuple(sorted(ways, key=lambda priced: priced.total_s))


@dataclass(frozen=True, slots=True)
class Nowhere:
    """In the place of a decision where nothing can be chosen: why, and all that was looked at."""

    reason: str
    candidates: tuple[Candidate, ...]


def place(
    request: PlacementRequest,
    decodes: Side,
    prefills: Side,
    bandwidth: Bandwidth | float,
    weights: PriceWeights,
    tie: float,
    spare_ranks: int = 1,
) -> Decision:
    """Where the request goes, by price. Of equally cheap ranks those with the fewest requests come first, and
    `tie` in [0, 1) splits those that are equal in that too.

    The home is the pinned rank, unless requests wait for pages there. Where none is pinned, or it cannot be
    chosen, it is the one rank with the longest hit, if that is half of the prompt or more. It wins while its
    price is within the slack of the best one; then the cheapest one of this router's share does. With more
    `spare_ranks` more is compared, to be shown. Under plan remote alone who does not receive is excluded.
    Rows that the others rule out are closed in both sides.

    Raises:
        NoCapacity: the request would wait longer than it may at each rank that could serve.
        Unavailable: no rank can serve; the message says why.
    """
    if request.max_wait_s < inf:
        wait_s = shortest_wait_s(request, decodes, prefills)
        if request.max_wait_s < wait_s < inf:
            raise refusal(wait_s, request.max_wait_s)
    beside_others(request, decodes, prefills)
    if not decodes.num_open:
        raise _nowhere("decode", decodes)
    if request.plans == {Plan.REMOTE} and not prefills.num_open:
        raise _nowhere("prefill", prefills)
    pricing = PriceList(request, weights, bandwidth, decodes, prefills)
    home = _home(request, decodes)
    market = _Market(pricing, home and home.row, tie)
    chosen, reason = _choose(market.options(spare_ranks), home, weights, tie)
    held = highest(decodes.hit)
    return Decision(
        chosen=_priced(pricing, chosen),
        reason=reason,
        longest_decode_hit=int(held),
        longest_decode_reuse=int(held if decodes.reused is decodes.hit else highest(decodes.reused)),
        longest_prefill_reuse=int(highest(prefills.reused)) if len(prefills) else 0,
        _market=market,
        _spare_ranks=max(spare_ranks, _SPARE_RANKS),
    )


def _priced(pricing: PriceList, option: _Option) -> Priced:
    decode = pricing.decodes.candidate(option.decode, "")
    assert isinstance(decode, DecodeCandidate)
    if option.prefill is None:
        return Priced(decode, None, Plan.LOCAL, tuple(pricing.local_terms(option.decode).items()))
    prefill = pricing.prefills.candidate(option.prefill, "")
    assert isinstance(prefill, PrefillCandidate)
    terms = pricing.remote_terms(option.decode, option.prefill, option.bytes_per_s)
    return Priced(decode, prefill, Plan.REMOTE, tuple(terms.items()))


# -- what is worth comparing ------------------------------------------------------------------------


class _Market:
    """All ways to serve a request by their price; `home` is a decode rank's row."""

    def __init__(self, pricing: PriceList, home: int | None, tie: float) -> None:
        self.pricing = pricing
        self._home = home
        self._tie = tie

    def options(self, count: int) -> list[_Option]:
        """Return the best way, the best one of this router's share and the home's own; at least one.

        Of each side's ranks the `count` cheapest are among them.
        """
        request, options = self.pricing.request, list[_Option]()
        if Plan.LOCAL in request.plans:
            options += self._locals(count)
        if Plan.REMOTE in request.plans and self.pricing.prefills.num_open:
            options += self._remotes(count)
        return options

    def _locals(self, count: int) -> list[_Option]:
        decodes, waits = self.pricing.decodes, self.pricing.request.waits
        prices_s = decodes.if_open(self.pricing.local_s())
        if (max_wait_s := self.pricing.request.max_wait_s) < inf:
            prices_s = _where(waits.local_s(decodes) <= max_wait_s, prices_s)
        rows = cheapest(prices_s, decodes.running, self._tie, count)
        if not all(decodes.own[row] for row in rows):
            rows += _others(rows, cheapest(_where(decodes.own, prices_s), decodes.running, self._tie))
        rows += _others(rows, [self._home])
        return [
            _Option(total_s, row, None, decodes.own.item(row), decodes.running.item(row))
            for row in rows
            if (total_s := prices_s.item(row)) < inf
        ]

    def _remotes(self, count: int) -> list[_Option]:
        pricing, decodes, prefills = self.pricing, self.pricing.decodes, self.pricing.prefills
        senders = self._senders()
        bytes_per_s = pricing.bandwidth
        if callable(bytes_per_s):
            bytes_per_s, count = self._typical_bandwidth(senders[0]), max(count, _SPARE_RANKS)
        prices_s = {sender: self._with_sender_s(sender, bytes_per_s) for sender in senders}
        lowest_s = reduce(np.minimum, prices_s.values())
        rows = cheapest(lowest_s, decodes.running, self._tie, count)
        rows += [row for row in _others(rows, [self._home]) if lowest_s[row] < inf]
        if not rows:
            return []
        if count == 1:
            links = [[bytes_per_s] * len(senders)] * len(rows)
            totals = [[prices_s[sender].item(row) for sender in senders] for row in rows]
        else:
            own_s = prefills.if_open(pricing.senders.fixed_s + pricing.senders.compute_s)
            senders += _others(senders, cheapest(own_s, prefills.queued, _another(self._tie, 7919), count))
            links, totals = self._over_own_links(rows, senders)
        return [
            _Option(
                total_s,
                row,
                sender,
                prefills.own.item(sender),
                decodes.running.item(row) + prefills.queued.item(sender),
                bytes_per_s,
            )
            for row, of_row, row_links in zip(rows, totals, links, strict=True)
            for sender, total_s, bytes_per_s in zip(senders, of_row, row_links, strict=True)
            if total_s < inf
        ]

    def _over_own_links(
        self, rows: Sequence[int], senders: Sequence[int]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Return the bandwidths of these pairs, and their prices; infinite where one would wait too long."""
        pricing, pairs = self.pricing, (np.array(rows), np.array(senders))
        links = pricing.bandwidths(rows, senders)
        prices_s = pricing.remote_s(*pairs, links)
        if (max_wait_s := pricing.request.max_wait_s) < inf:
            at_decode_s = pricing.decodes.queue_wait_s[pairs[0], None]
            prices_s = _where(at_decode_s + pricing.prefills.compute_wait_s[pairs[1]] <= max_wait_s, prices_s)
        return links.tolist(), prices_s.tolist()

    def _senders(self) -> list[int]:
        """Return the prefill ranks that may be the best for some decode rank, and those of this router's."""
        prefills, senders, tie = self.pricing.prefills, self.pricing.senders, _another(self._tie, 7919)
        fixed_s = prefills.if_open(senders.fixed_s)
        waits_s = prefills.compute_wait_s if self.pricing.request.max_wait_s < inf else None
        chosen = front(fixed_s, senders.compute_s, waits_s, prefills.queued, tie)
        if not all(prefills.own[row] for row in chosen):
            own_s = _where(prefills.own, fixed_s)
            chosen += _others(chosen, front(own_s, senders.compute_s, waits_s, prefills.queued, tie))
        return chosen

    def _with_sender_s(self, sender: int, bytes_per_s: float) -> Numbers:
        """Return each decode rank's price with this prefill rank; infinite where it cannot be."""
        pricing, decodes, max_wait_s = self.pricing, self.pricing.decodes, self.pricing.request.max_wait_s
        prices_s = decodes.if_open(pricing.with_sender_s(sender, bytes_per_s))
        if not decodes.all_receive:
            prices_s = _where(decodes.receives, prices_s)
        if max_wait_s < inf:
            waits_s = decodes.queue_wait_s + pricing.prefills.compute_wait_s.item(sender)
            prices_s = _where(waits_s <= max_wait_s, prices_s)
        return prices_s

    def _typical_bandwidth(self, sender: int) -> float:
        receivers = np.flatnonzero(self.pricing.decodes.receives)
        if not len(receivers):
            return 1.0  # nobody's
        step = -(-len(receivers) // _BANDWIDTH_SAMPLES)
        return median(self.pricing.bandwidths(receivers[::step].tolist(), [sender]).ravel().tolist())


def _where(may_be: Flags, prices_s: Numbers) -> Numbers:
    return np.where(may_be, prices_s, inf)


def _others(rows: list[int], more: Sequence[int | None]) -> list[int]:
    return [row for row in more if row is not None and row not in rows]


# -- the choice -------------------------------------------------------------------------------------


class _Home(NamedTuple):
    row: int
    reason: str
    held_s: float  # to compute what it holds, where the pin alone makes it the home


def _home(request: PlacementRequest, decodes: Side) -> _Home | None:
    pinned = request.pinned
    if pinned is not None and (row := decodes.rows.get(pinned)) is not None and decodes.is_open[row]:
        has_room = decodes.waiting[row] <= decodes.free[row] + decodes.evictable[row]
        return _pinned(request, decodes, row) if has_room else None
    hits = decodes.hit if decodes.are_open else np.where(decodes.is_open, decodes.hit, -1)
    row = int(hits.argmax())
    # Less than half is a system prompt that many share: that alone makes nobody's home.
    if 2 * hits[row] >= request.prompt_tokens and np.count_nonzero(hits == hits[row]) == 1:
        return _Home(row, "longest_prefix", inf)
    return None


def _pinned(request: PlacementRequest, decodes: Side, row: int) -> _Home:
    hit_tokens = decodes.hit.item(row)
    holds_most = 2 * hit_tokens >= request.prompt_tokens
    return _Home(row, "pinned", inf if holds_most else hit_tokens / decodes.rate.item(row))


def _choose(
    options: Sequence[_Option], home: _Home | None, weights: PriceWeights, tie: float
) -> tuple[_Option, str]:
    best_s = min(option.total_s for option in options)
    at_home = [option for option in options if home is not None and option.decode == home.row]
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


def _pick(options: Sequence[_Option], total_s: float, tie: float) -> tuple[_Option, int]:
    """Return one of those that cost so much, the least crowded split by the tie, and their number."""
    equal = [option for option in options if option.total_s == total_s]
    fewest = min(option.crowd for option in equal)
    least = [option for option in equal if option.crowd == fewest]
    return least[int(_another(tie, 104729) * len(least))], len(equal)


def _another(tie: float, prime: int) -> float:
    """A number in [0, 1) that is all but independent of `tie`."""
    return tie * prime % 1.0


def _nowhere(role: str, side: Side) -> Unavailable:
    if not len(side):
        return Unavailable(f"there is no {role} rank")
    reasons = Counter(candidate.excluded for candidate in side.excluded())
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return Unavailable(f"no {role} rank can take the request: {listed}")
