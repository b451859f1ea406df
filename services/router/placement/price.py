"""What it costs to serve a request somewhere, in seconds by name. Pure.

    remote  T = wait_prefill + max(compute, transfer) + last_chunk + carried + overhead + occupy
                + evict_prefill + at_decode
    local   T = compute + occupy + at_decode
    at_decode = wait_decode + wait_room + evict_decode + itl + outgrow

Transfer is priced by what decode holds, computing by where who computes can go on: where tails and states are
carried beside full attention's pages, that may be less. They cross when the last chunk is computed.

occupy, evict and itl are what a request costs those that come after it or run beside it. Without them
each would take the rank that is best for itself, caches would fill with copies, and all would wait longer.

Ranks are priced by columns: a formula says what it costs at each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.sides import Numbers, Rows, Side, highest, lowest
from services.values.rank import Plan, RankKey

# Bytes per second from a prefill rank (first) to a decode rank.
Bandwidth = Callable[[RankKey, RankKey], float]

_MAX_QUEUE = 20  # requests; a longer queue makes nothing more urgent
_ALL = slice(None)
_NOTHING = 0.0


@dataclass(frozen=True, slots=True)
class PriceWeights:
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
    # a copy behind; where that is less than half of the prompt, a part of the time to compute the copy.
    slack_ratio: float = 0.2
    slack_s: float = 0.05
    # Of answers that may become longer than a rank's pool can hold, a part will: e to the minus (room there
    # over this). So it is the mean length of answers, if they end at any token with the same probability.
    usual_output_tokens: float = 512.0
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

    @property
    def terms_ms(self) -> str:
        """Those that are not nothing, in a log's one word: "compute:164.17,itl:32.83"."""
        return ",".join(f"{name}:{1e3 * seconds:.2f}" for name, seconds in self.terms if seconds)


# A term of the price at each rank; where it is nothing at all of them, the number 0.
_Term = Numbers | float


_Sure = TypeVar("_Sure")  # a number of one rank, or of each
_Perhaps = TypeVar("_Perhaps")  # likewise, or nothing


class Senders(NamedTuple, Generic[_Sure, _Perhaps]):
    """The prefill ranks' parts of the price, in seconds."""

    wait_s: _Sure
    compute_s: _Sure
    occupy_s: _Perhaps
    evict_s: _Perhaps
    fixed_s: _Sure  # all but the computing


class Receivers(NamedTuple, Generic[_Sure, _Perhaps]):
    """The decode ranks' parts, in seconds; `delta` is what they lack, in tokens."""

    wait_s: _Sure
    compute_s: _Sure  # under plan local
    room_s: _Perhaps  # until the delta has pages
    evict_s: _Perhaps
    outgrow_s: _Perhaps  # to go on elsewhere when the pool is at its end, by how likely that is
    late_s: _Sure  # as the tokens of this request come late while prompts are computed there
    itl_s: _Sure  # that those running there suffer under plan remote
    itl_local_s: _Sure  # and under plan local
    at_decode_s: _Sure  # under plan remote, whatever the prefill rank
    delta: _Sure


class PriceList:
    """The price list of one request: of the ranks that are open, at least one of them a decode rank."""

    def __init__(
        self,
        request: PlacementRequest,
        weights: PriceWeights,
        bandwidth: Bandwidth | float,
        decodes: Side,
        prefills: Side,
    ) -> None:
        """`bandwidth` is a number where all links have the same."""
        self.request = request
        self.weights = weights
        self.bandwidth = bandwidth
        self.decodes, self.prefills = decodes, prefills
        # More than the roomiest rank holds it cannot become.
        self.grows_to = request.longest_tokens if request.most_tokens is None else request.most_tokens
        self.occupy, self.occupy_local = self._occupy(prefills), self._occupy(decodes)
        self.receivers = self._receivers()
        self.senders = self._senders()
        self._received: tuple[float, Numbers, Numbers] | None = (
            None  # the bandwidth, and `_receiving_s` at it
        )

    @cached_property
    def tokens_per_s(self) -> float:
        """What computes evicted KV again: whichever prefill rank is chosen one day, if there are any."""
        side = self.prefills if self.prefills.num_open else self.decodes
        rates = side.rate if side.are_open else side.rate[side.is_open]
        return float(np.add.reduce(rates)) / len(rates)

    def _occupy(self, side: Side) -> float:
        """Return the seconds that others wait for each second of computing, by the shortest queue."""
        if not len(side):
            return 0.0
        waits_s = side.if_open(side.wait_s)
        first = int(waits_s.argmin())
        queued = side.queued.item(first)
        if queued and waits_s.item(first) < inf:
            queued = lowest(side.queued[waits_s == waits_s.item(first)])
        return self.weights.occupy_weight * min(queued, _MAX_QUEUE)

    def _senders(self) -> Senders[Numbers, _Term]:
        side, prompt = self.prefills, self.request.prompt_tokens
        # The last token is always computed: its logits choose the next one.
        compute_s = np.maximum(1.0, prompt - side.reused) / side.rate
        occupy_s = self.occupy * compute_s if self.occupy else _NOTHING
        evict_s = self._evict_s(prompt - side.hit - side.free, side)
        return Senders(side.wait_s, compute_s, occupy_s, evict_s, _sum(side.wait_s, occupy_s, evict_s))

    def _receivers(self) -> Receivers[Numbers, _Term]:
        side, prompt, itl_weight = self.decodes, self.request.prompt_tokens, self.weights.itl_weight
        delta = np.maximum(0.0, prompt - side.hit)
        compute_s = np.maximum(1.0, delta if side.reused is side.hit else prompt - side.reused) / side.rate
        lacking = delta - side.free
        evict_s, room_s = self._evict_s(lacking, side), self._room_s(lacking)
        outgrow_s = self._outgrow_s()
        # What comes computed does not wait for those computed there, but its tokens are late while they last.
        late_s = itl_weight * side.wait_s
        itl_weights = itl_weight * side.running
        itl_s, itl_local_s = itl_weights * side.token_s, itl_weights * compute_s
        at_decode_s = _sum(late_s, room_s, evict_s, itl_s, outgrow_s)
        parts = side.wait_s, compute_s, room_s, evict_s, outgrow_s, late_s, itl_s, itl_local_s
        return Receivers(*parts, at_decode_s, delta)

    def _evict_s(self, lacking: Numbers, side: Side) -> _Term:
        """Return what it costs to compute again what is evicted for tokens that lack free pages."""
        if not len(side) or highest(lacking) <= 0:
            return _NOTHING
        evicted = np.minimum(np.maximum(0.0, lacking), side.evictable)
        return evicted * (self.weights.evict_weight / self.tokens_per_s)

    def _room_s(self, lacking: Numbers) -> _Term:
        # Sequences that end free at least as many tokens as were generated, one each in that time.
        shortage = lacking - self.decodes.evictable
        if highest(shortage) <= 0:
            return _NOTHING
        return np.maximum(0.0, shortage) * self.decodes.token_s / np.maximum(1.0, self.decodes.running)

    def _outgrow_s(self) -> _Term:
        """Of those that do not hold all that it may grow to."""
        holds = self.decodes.holds
        if lowest(holds) >= self.grows_to:
            return _NOTHING
        outgrown = holds < self.grows_to
        outgrow_s, held = np.zeros(len(holds)), holds[outgrown]
        room = np.maximum(0.0, held - self.request.prompt_tokens)
        outgrow_s[outgrown] = np.exp(-room / self.weights.usual_output_tokens) * held / self.tokens_per_s
        return outgrow_s

    # -- totals -----------------------------------------------------------------------------------

    def local_s(self) -> Numbers:
        """Return the sum of `local_terms` of each decode rank, in their order."""
        its = self.receivers
        occupy_s = self.occupy_local * its.compute_s if self.occupy_local else _NOTHING
        return _sum(
            its.wait_s, its.compute_s, occupy_s, its.room_s, its.evict_s, its.itl_local_s, its.outgrow_s
        )

    def with_sender_s(self, sender: int, bytes_per_s: float) -> Numbers:
        """Return the price of each decode rank with the prefill rank of this row."""
        if self._received is None or self._received[0] != bytes_per_s:
            self._received = bytes_per_s, *self._receiving_s(bytes_per_s, _ALL)
        _, fixed_s, transfer_s = self._received
        total_s = np.maximum(self.senders.compute_s.item(sender), transfer_s)
        total_s += self.senders.fixed_s.item(sender)
        total_s += fixed_s
        total_s += self.weights.remote_overhead_s
        return total_s

    def _receiving_s(self, bytes_per_s: _Term, rows: Rows | slice) -> tuple[Numbers, Numbers]:
        """Return `fixed` and `overlapped` of decode ranks, with what is sent at so many bytes a second."""
        request, delta = self.request, self.receivers.delta[rows]
        s_per_token = request.kv_bytes_per_token / bytes_per_s
        last_chunk_s = np.minimum(delta, request.chunk_tokens) * s_per_token
        carried_s = request.carried_bytes / bytes_per_s if request.carried_bytes else _NOTHING
        return _sum(self.receivers.at_decode_s[rows], last_chunk_s, carried_s), delta * s_per_token

    def remote_s(self, decode_rows: Rows, prefill_rows: Rows, bytes_per_s: Numbers) -> Numbers:
        """Return the price of each of these decode ranks (down) with each of these prefill ranks (across)."""
        fixed_s, transfer_s = self._receiving_s(bytes_per_s, decode_rows[:, None])
        overlapped_s = np.maximum(self.senders.compute_s[prefill_rows], transfer_s)
        return self.senders.fixed_s[prefill_rows] + overlapped_s + fixed_s + self.weights.remote_overhead_s

    def bandwidths(self, decode_rows: Sequence[int], prefill_rows: Sequence[int]) -> Numbers:
        """Return the bytes a second between them, in the shape of `remote_s`."""
        if not callable(self.bandwidth):
            return np.full((len(decode_rows), len(prefill_rows)), self.bandwidth)
        decodes = [self.decodes.ids[row].key for row in decode_rows]
        prefills = [self.prefills.ids[row].key for row in prefill_rows]
        bandwidth = self.bandwidth
        return np.array([[bandwidth(prefill, decode) for prefill in prefills] for decode in decodes])

    # -- terms ------------------------------------------------------------------------------------

    def local_terms(self, decode: int) -> dict[str, float]:
        """Return the seconds by name at the decode rank of this row."""
        its = Receivers[float, float](*(_at(term, decode) for term in self.receivers))
        return {
            "wait_decode": its.wait_s,
            "compute": its.compute_s,
            "occupy": self.occupy_local * its.compute_s,
            "wait_room": its.room_s,
            "evict_decode": its.evict_s,
            "itl": its.itl_local_s,
            "outgrow": its.outgrow_s,
        }

    def remote_terms(self, decode: int, prefill: int, bytes_per_s: float) -> dict[str, float]:
        """Return the seconds by name at the ranks of these rows."""
        its = Receivers[float, float](*(_at(term, decode) for term in self.receivers))
        sender = Senders[float, float](*(_at(term, prefill) for term in self.senders))
        s_per_token = self.request.kv_bytes_per_token / bytes_per_s
        carried_bytes = self.request.carried_bytes
        return {
            "wait_prefill": sender.wait_s,
            "compute": max(sender.compute_s, its.delta * s_per_token),
            # No computation hides it.
            "last_chunk": min(its.delta, self.request.chunk_tokens) * s_per_token,
            **({"carried": carried_bytes / bytes_per_s} if carried_bytes else {}),
            "overhead": self.weights.remote_overhead_s,
            "occupy": sender.occupy_s,
            "evict_prefill": sender.evict_s,
            "wait_decode": its.late_s,
            "wait_room": its.room_s,
            "evict_decode": its.evict_s,
            "itl": its.itl_s,
            "outgrow": its.outgrow_s,
        }


def _sum(first: Numbers, *terms: _Term) -> Numbers:
    """Return their sum in this order: another one would move the last digit."""
    total = first
    for term in terms:
        if term is not _NOTHING:
            total = total + term
    return total


def _at(term: _Term, row: int) -> float:
    return float(term.item(row)) if isinstance(term, np.ndarray) else term
