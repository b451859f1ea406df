"""These formulas give the price of serving a request with given ranks, as named terms in seconds. Pure.

    remote  T = wait_prefill + pull + max(compute, transfer) + last_chunk + carried + overhead + occupy
                + overtake + evict_prefill + lend + at_decode
    local   T = pull + compute + occupy + overtake + lend + at_decode
    at_decode = wait_decode + wait_room + evict_decode + itl + outgrow

Each rank that computes is priced without a source and with each of its sources. A pull runs while the request
would wait anyway, so `pull` is only the time beyond that wait. Without a source a rank brings up what its
tiers hold beyond its pool, and `bring`, likewise, stands in the place of `pull`.

Transfer is priced by the tokens that the decode rank lacks, and compute by where the computing rank can go
on. In models with window tails and states beside full attention's pages, it may have to go on before the end
of its hit. This per-request state (`carried`) is sent after the last chunk is computed.

Many requests may wait at the one rank that holds their prefix, while other ranks are idle. Their waits are
added up, and the sum is taken off the price (`occupy`) of computing that prefix on another rank. So once they
have waited as long as that takes, the next request goes there and leaves a copy.

What a rank evicts will be computed again, or brought up again where its tiers keep it, if that is faster.

occupy, evict, itl and lend are what a request costs the requests that come after it or run beside it. Without
them each request would take the rank that is best for itself, caches would fill with copies, and all would
wait longer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, fsum, inf
from typing import NamedTuple

from services.router.placement.candidates import (
    Brought,
    Candidate,
    DecodeCandidate,
    PlacementRequest,
    PrefillCandidate,
    SourceCandidate,
)
from services.values.rank import Plan, RankKey

# It returns the bytes per second from a prefill rank (the first) to a decode rank.
Bandwidth = Callable[[RankKey, RankKey], float]

_MAX_QUEUE = 20  # Requests beyond so many in a queue do not raise the price.


@dataclass(frozen=True, slots=True)
class PriceWeights:
    """Each weight tells how much a second that others lose counts, compared to a second of this request."""

    # This weighs the seconds for which a rank computes the prompt. They count once for each request in the
    # queue with the shortest wait, as about so many will wait behind this one; with an empty queue they are
    # free.
    occupy_weight: float = 1.0
    # This weighs the seconds that those wait who come while the rank computes the prompt, half of that time
    # each in the mean. Some of them will be served as soon elsewhere.
    later_weight: float = 0.5
    # This weighs the seconds by which the tokens of the sequences running there come later.
    itl_weight: float = 0.05
    # This weighs the seconds to compute again, or to bring up again, what is evicted. Not all of it will be
    # requested again.
    evict_weight: float = 0.5
    # A preferred rank may be worse than the best price by slack_ratio of that price and slack_s. This router
    # prefers the ranks of its share, because other routers may have sent requests to the others that it does
    # not know of yet. It prefers the home, because moving leaves a copy of the KV there. If a pinned home
    # holds less than half of the prompt, slack_ratio applies to the time to compute that copy, where this is
    # less than the best price.
    slack_ratio: float = 0.2
    slack_s: float = 0.05
    # An answer that may outgrow a rank's pool does so with the probability exp(-free tokens there / this). So
    # this is the mean length of answers, if they end at each token with the same probability.
    usual_output_tokens: float = 512.0
    # This is the time of the calls between the two ranks, whatever the size of the KV.
    remote_overhead_s: float = 0.005

    def is_near(self, total_s: float, best_s: float, held_s: float = inf) -> bool:
        """Return whether a price is within the slack of the best one; what the rank holds takes `held_s` to
        compute."""
        return total_s <= best_s + self.slack_ratio * min(best_s, held_s) + self.slack_s


@dataclass(frozen=True, slots=True)
class Priced:
    """This is the price of one way to serve the request, in seconds by name.

    `prefill` is None under plan local, and `source` is None where nothing is pulled.
    """

    decode: DecodeCandidate
    prefill: PrefillCandidate | None
    plan: Plan
    terms: tuple[tuple[str, float], ...]
    source: SourceCandidate | None = None

    @property
    def reused_tokens(self) -> int:
        computing = self.prefill or self.decode
        if self.source is None:
            return computing.found_tokens
        return max(computing.reused_tokens, self.source.tokens)

    @property
    def brought(self) -> Brought | None:
        """Return what the computing rank brings up from its tiers; with a source it asks that instead."""
        return (self.prefill or self.decode).brought if self.source is None else None

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.terms)

    @property
    def terms_ms(self) -> str:
        """Return the nonzero terms in ms as one word for a log: "compute:164.17,itl:32.83"."""
        return ",".join(f"{name}:{1e3 * seconds:.2f}" for name, seconds in self.terms if seconds)


class Option(NamedTuple):
    total_s: float
    decode: DecodeCandidate
    prefill: PrefillCandidate | None
    bytes_per_s: float = inf  # the bandwidth between the two when this was priced
    source: SourceCandidate | None = None

    @property
    def plan(self) -> Plan:
        return Plan.LOCAL if self.prefill is None else Plan.REMOTE

    @property
    def own(self) -> bool:
        return (self.prefill or self.decode).own


class Sender(NamedTuple):
    wait_s: float
    compute_s: float
    occupy_s: float
    evict_s: float
    fixed_s: float  # all terms except compute_s
    prefill: PrefillCandidate
    source: SourceCandidate | None = None


class Receiver(NamedTuple):
    """This is a decode rank's part of the price under either plan, in seconds.

    `delta` is the tokens that it lacks, and `uncached` is the tokens that it would compute.
    """

    wait_s: float
    room_s: float  # the time until the delta has pages
    evict_s: float
    outgrow_s: float  # the time to go on elsewhere when its pool is full, weighted by the probability
    at_decode_s: float  # under plan remote, whatever the prefill rank
    delta: int
    uncached: int
    decode: DecodeCandidate


class PriceList:
    def __init__(
        self,
        request: PlacementRequest,
        weights: PriceWeights,
        bandwidth: Bandwidth,
        decodes: Sequence[DecodeCandidate],
        prefills: Sequence[PrefillCandidate],
    ) -> None:
        self.request = request
        self.weights = weights
        self.bandwidth = bandwidth
        # A request cannot become longer than the largest rank holds.
        self.grows_to = request.longest_tokens if request.most_tokens is None else request.most_tokens
        self.shortest_s, self.occupy = _occupy(weights, prefills)
        self.shortest_local_s, self.occupy_local = _occupy(weights, decodes)
        self.later = weights.later_weight * request.prefill_requests_per_s / 2
        self.later_local = weights.later_weight * request.decode_requests_per_s / 2
        self.paid_s, self.new_tokens = request.paid_s, request.prompt_tokens - request.paid_tokens
        # Evicted KV that no tier keeps will be computed again by any prefill rank, or by a decode rank if
        # there are none.
        rates = [candidate.prefill_tokens_per_s for candidate in (prefills or decodes)]
        self.tokens_per_s = fsum(rates) / len(rates)
        self.evict_s_per_token = weights.evict_weight / self.tokens_per_s

    def evict_s(self, candidate: Candidate, num_tokens: int) -> float:
        """Return the price of what the rank evicts, with the weight."""
        again_s = 1 / self.tokens_per_s
        if candidate.back_s < again_s:
            return num_tokens * self.weights.evict_weight * candidate.back_s
        return num_tokens * self.evict_s_per_token

    def occupy_s(self, compute_s: float, tokens_per_s: float) -> float:
        occupy_s = (self.occupy + self.later * compute_s) * compute_s
        return occupy_s - self.paid_for_s(compute_s, tokens_per_s, self.later) if self.paid_s else occupy_s

    def occupy_local_s(self, compute_s: float, tokens_per_s: float) -> float:
        occupy_s = (self.occupy_local + self.later_local * compute_s) * compute_s
        if self.paid_s:
            occupy_s -= self.paid_for_s(compute_s, tokens_per_s, self.later_local)
        return occupy_s

    def paid_for_s(self, compute_s: float, tokens_per_s: float, later: float) -> float:
        """Return what requests have waited for the lack of a copy, if this one computes it; at most what that
        costs."""
        copy_s = compute_s - self.new_tokens / tokens_per_s
        if copy_s <= 0:
            return 0.0
        costs_s = copy_s * (1 + later * compute_s)
        return costs_s if costs_s < self.paid_s else self.paid_s

    def senders(self, prefills: Sequence[PrefillCandidate]) -> list[Sender]:
        senders = [self.sender(prefill) for prefill in prefills]
        return senders + [self.sender(each, source) for each in prefills for source in each.sources]

    def sender(self, prefill: PrefillCandidate, source: SourceCandidate | None = None) -> Sender:
        rate, prompt = prefill.prefill_tokens_per_s, self.request.prompt_tokens
        reused_tokens = prefill.found_tokens if source is None else source.tokens
        # The last token is always computed: its logits choose the next one.
        compute_s = max(1, prompt - reused_tokens) / rate
        lacking = prompt - prefill.hit_tokens - prefill.free_tokens
        evicted = min(lacking, prefill.evictable_tokens) if lacking > 0 else 0
        wait_s, occupy_s = prefill.pending_tokens / rate, self.occupy_s(compute_s, rate)
        evict_s = self.evict_s(prefill, evicted) if evicted else 0.0
        fixed_s = wait_s + occupy_s + evict_s
        if prefill.passed_prompts:
            fixed_s += prefill.passed_prompts * compute_s
        if source is not None:
            fixed_s += sum(self.pull(source, wait_s))
        elif prefill.brought is not None:
            fixed_s += max(0.0, prefill.bring_s - wait_s)
        return Sender(wait_s, compute_s, occupy_s, evict_s, fixed_s, prefill, source)

    def pull(self, source: SourceCandidate, wait_s: float) -> tuple[float, float]:
        """Return the seconds that a pull adds to the wait, and those that it costs the sequences at its
        source."""
        lend_s = self.weights.itl_weight * source.running * source.pull_s
        return max(0.0, source.pull_s - wait_s), lend_s

    def receiver(self, decode: DecodeCandidate) -> Receiver:
        prompt = self.request.prompt_tokens
        delta, uncached = max(0, prompt - decode.hit_tokens), max(1, prompt - decode.found_tokens)
        wait_s = decode.pending_tokens / decode.prefill_tokens_per_s
        lacking, room_s, evict_s = delta - decode.free_tokens, 0.0, 0.0
        outgrow_s = 0.0 if decode.holds_tokens >= self.grows_to else self.outgrow_s(decode)
        if lacking > 0:
            # Sequences that end free at least as many tokens as all generate: each one token in `token_s`.
            shortage = max(0, lacking - decode.evictable_tokens)
            room_s = shortage * decode.token_s / max(1, decode.running)
            evict_s = self.evict_s(decode, min(lacking, decode.evictable_tokens))
        late_s, itl_s = self.beside(wait_s + decode.passed_tokens / decode.prefill_tokens_per_s, decode)
        at_decode_s = late_s + room_s + evict_s + itl_s + outgrow_s
        return Receiver(wait_s, room_s, evict_s, outgrow_s, at_decode_s, delta, uncached, decode)

    def outgrow_s(self, decode: DecodeCandidate) -> float:
        """Return the price of moving a request to a larger rank, weighted by its probability."""
        holds = decode.holds_tokens
        room = max(0, holds - self.request.prompt_tokens)
        return exp(-room / self.weights.usual_output_tokens) * holds / self.tokens_per_s

    def local_terms(self, receiver: Receiver, source: SourceCandidate | None = None) -> dict[str, float]:
        decode, uncached = receiver.decode, receiver.uncached if source is None else self.uncached(source)
        compute_s, passed_s = (
            uncached / decode.prefill_tokens_per_s,
            decode.passed_tokens / decode.prefill_tokens_per_s,
        )
        return {
            "wait_decode": receiver.wait_s,
            **self.up_terms(decode, source, receiver.wait_s),
            "compute": compute_s,
            "occupy": self.occupy_local_s(compute_s, decode.prefill_tokens_per_s),
            "wait_room": receiver.room_s,
            "evict_decode": receiver.evict_s,
            "itl": self.weights.itl_weight * (decode.running * compute_s + passed_s),
            "overtake": decode.passed_prompts * compute_s,
            "outgrow": receiver.outgrow_s,
        }

    def up_terms(
        self, computing: Candidate, source: SourceCandidate | None, wait_s: float
    ) -> dict[str, float]:
        """Return what it takes until the computing rank has what it need not compute."""
        if source is None:
            brought = computing.brought
            return {} if brought is None else {"bring": max(0.0, brought.bring_s - wait_s)}
        pull_s, lend_s = self.pull(source, wait_s)
        return {"pull": pull_s, "lend": lend_s}

    def uncached(self, source: SourceCandidate) -> int:
        """Return the tokens that a rank computes which pulls from this source."""
        return max(1, self.request.prompt_tokens - source.tokens)

    def remote_terms(self, receiver: Receiver, sender: Sender, bytes_per_s: float) -> dict[str, float]:
        transfer_s, last_chunk_s = self.transfer(receiver, bytes_per_s)
        decode, prefill = receiver.decode, sender.prefill
        beside_s = receiver.wait_s + decode.passed_tokens / decode.prefill_tokens_per_s
        wait_s, itl_s = self.beside(beside_s, decode)
        carried = {"carried": self.carried_s(bytes_per_s)} if self.request.carried_bytes else {}
        return {
            "wait_prefill": sender.wait_s,
            **self.up_terms(sender.prefill, sender.source, sender.wait_s),
            "compute": max(sender.compute_s, transfer_s),
            "last_chunk": last_chunk_s,
            **carried,
            "overhead": self.weights.remote_overhead_s,
            "occupy": sender.occupy_s,
            "overtake": prefill.passed_prompts * sender.compute_s,
            "evict_prefill": sender.evict_s,
            "wait_decode": wait_s,
            "wait_room": receiver.room_s,
            "evict_decode": receiver.evict_s,
            "itl": itl_s,
            "outgrow": receiver.outgrow_s,
        }

    def transfer(self, receiver: Receiver, bytes_per_s: float) -> tuple[float, float]:
        """Return the seconds to move the delta, and those of its last chunk, which no computation hides."""
        s_per_token = self.request.kv_bytes_per_token / bytes_per_s
        return receiver.delta * s_per_token, min(receiver.delta, self.request.chunk_tokens) * s_per_token

    def carried_s(self, bytes_per_s: float) -> float:
        return self.request.carried_bytes / bytes_per_s

    def beside(self, wait_s: float, decode: DecodeCandidate) -> tuple[float, float]:
        """Return what the prompts computed at the decode rank cost this one, and what it costs the sequences
        there.

        Both are weighted seconds. A prompt that was computed elsewhere does not wait for the prompts there,
        but its tokens come later until they are computed.
        """
        itl_weight = self.weights.itl_weight
        return itl_weight * wait_s, itl_weight * decode.running * decode.token_s

    def receiving_s(self, receiver: Receiver, bytes_per_s: float) -> tuple[float, float]:
        request, delta = self.request, receiver.delta
        s_per_token, chunk = request.kv_bytes_per_token / bytes_per_s, request.chunk_tokens
        last_chunk_s = (delta if delta < chunk else chunk) * s_per_token
        carried_s = request.carried_bytes / bytes_per_s
        return receiver.at_decode_s + last_chunk_s + carried_s, delta * s_per_token

    def remotes(
        self, receiver: Receiver, senders: Iterable[Sender], bytes_per_s: float, known: tuple[float, float]
    ) -> Iterator[Option]:
        """Yield one option for each sender. `known` is `receiving_s` at `bytes_per_s`, the usual
        bandwidth."""
        last, (fixed_s, transfer_s), decode = bytes_per_s, known, receiver.decode
        bandwidth, key, overhead_s = self.bandwidth, decode.id.key, self.weights.remote_overhead_s
        for sender in senders:
            prefill, compute_s = sender.prefill, sender.compute_s
            bytes_per_s = bandwidth(prefill.id.key, key)
            if bytes_per_s != last:
                last, (fixed_s, transfer_s) = bytes_per_s, self.receiving_s(receiver, bytes_per_s)
            overlapped_s = compute_s if compute_s > transfer_s else transfer_s
            total_s = sender.fixed_s + overlapped_s + fixed_s + overhead_s
            yield Option(total_s, decode, prefill, bytes_per_s, sender.source)

    def local(self, receiver: Receiver) -> tuple[float, SourceCandidate | None]:
        """Return the lowest price of plan local there, and the source with which it has that."""
        best_s, best, decode = self.local_s(receiver, receiver.uncached), None, receiver.decode
        if decode.brought is not None:
            best_s += max(0.0, decode.bring_s - receiver.wait_s)
        for source in decode.sources:
            total_s = self.local_s(receiver, self.uncached(source)) + sum(self.pull(source, receiver.wait_s))
            if total_s < best_s:
                best_s, best = total_s, source
        return best_s, best

    def local_s(self, receiver: Receiver, uncached: int) -> float:
        """Return the sum of `local_terms` without those of a source, added up in their order."""
        wait_s, room_s, evict_s, outgrow_s, _, _, _, decode = receiver
        rate = decode.prefill_tokens_per_s
        compute_s = uncached / rate
        itl_s = self.weights.itl_weight * (decode.running * compute_s + decode.passed_tokens / rate)
        occupy_s = self.occupy_local_s(compute_s, rate)
        overtake_s = decode.passed_prompts * compute_s
        return wait_s + compute_s + occupy_s + room_s + evict_s + itl_s + overtake_s + outgrow_s

    def priced(self, option: Option) -> Priced:
        receiver, prefill, source = self.receiver(option.decode), option.prefill, option.source
        if prefill is None:
            terms = self.local_terms(receiver, source)
        else:
            terms = self.remote_terms(receiver, self.sender(prefill, source), option.bytes_per_s)
        return Priced(option.decode, prefill, option.plan, tuple(terms.items()), source)


def _occupy(weights: PriceWeights, candidates: Sequence[Candidate]) -> tuple[float, float]:
    """Return the shortest wait of these ranks, and what a second of computing costs those who wait there."""
    waits = [(rank.pending_tokens / rank.prefill_tokens_per_s, rank.queued) for rank in candidates]
    shortest_s, queued = min(waits, default=(0.0, 0))
    return shortest_s, weights.occupy_weight * min(queued, _MAX_QUEUE)
