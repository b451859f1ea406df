"""The placer decides by what one router knows; outcomes.py feeds the results back into what it knows next.

It has no I/O, no clock and no random numbers of its own (see Balance), so bench.placement can run it
unchanged.

Of a role with many ranks only those are priced that may win. In ascending order of load, a rank may win if it
holds more of the prompt than all before it, or if it can go on computing further into the prompt: a rank that
holds no more and waits no less cannot be cheaper. The index names the ranks that may hold the next block. The
first few in the order, the first few of this router's share, and the pinned rank are always priced.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import TypeVar

from services.index.read.prefix_index import Held, PrefixIndex
from services.kv.tails import carried_bytes
from services.kv.ticket import difference
from services.router.placement import exclusion
from services.router.placement.candidates import (
    Asked,
    Candidate,
    DecodeCandidate,
    PlacementRequest,
    PrefillCandidate,
    bound_s,
    refusal,
    waits_of,
)
from services.router.placement.decision import Decision, Nowhere, place
from services.router.placement.outcomes import Outcomes
from services.router.placement.price import PriceWeights
from services.router.placement.rank_snapshot import (
    Found,
    Hits,
    Queue,
    RankSnapshot,
    Seen,
    as_decodes,
    as_prefills,
    back_s,
    common_layout,
)
from services.router.placement.sources import Holder, PullSources
from services.router.ranks.balance import Balance, usual_rates
from services.router.ranks.learned import Arrivals, PaidWaits
from services.router.ranks.rank_order import Load, LoadOrder, Share
from services.values.errors import IsthmusError, NoCapacity, Unavailable
from services.values.kv import BlockHash, KvLayout
from services.values.rank import Plan, RankKey, Role
from services.values.rank_reports import NO_CACHE, Coming, Registration

_FEW = 16  # Up to so many ranks of a role are all priced.
_LEAST_LOADED = 6  # So many of the least loaded ranks are always priced.
_OWN_REACH = 64  # This router's own ranks are looked for among so many of the least loaded.
_PREDICTED = 6  # So many of the ranks that will soon hold the most of a prompt are always priced.
_DEEPEST = 128  # So many blocks of a prompt with a checkpoint after them are checked, the deepest first.
_USUAL_TOKENS = 4_096  # A rank should have free pages for a prompt of this length.
_SOME = 128  # Up to so many holders of a block are sorted; among more of them the order soon has one.
_LONGEST_COMING_S = 600.0  # What another router expects counts for no longer: it may be wrong.
_LEAST_COMING_S = 0.25  # Other routers are told of a prompt that a rank computes for so long.
_EXPLAINED = 64  # So many ranks of each role are shown at most.


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    index_block: int  # tokens
    chunk_tokens: int
    weights: PriceWeights
    pulls: bool = True  # whether a computing rank may pull what others hold


_SHORTEST = Asked((), 1, frozenset(Plan))
_Candidate = TypeVar("_Candidate", DecodeCandidate, PrefillCandidate)


@dataclass(frozen=True, slots=True)
class _Side:
    """These are the ranks of one role and, if they are many, their orders of load: for a prompt of usual
    length, and for one that goes before no other. `own` is this router's share."""

    ranks: dict[RankKey, Registration] = field(default_factory=dict)
    order: LoadOrder | None = None
    last_order: LoadOrder | None = None
    own: frozenset[RankKey] = frozenset()


class Placer:
    """Each router has one placer; `index` is that of its mirror.

    `progress` of a rank changes with each of its records that the index reads. `is_connected` tells whether
    the stream to a decode rank is up.
    """

    def __init__(
        self,
        settings: PlacerSettings,
        index: PrefixIndex,
        balance: Balance,
        progress: Callable[[RankKey], object],
        is_connected: Callable[[RankKey], bool],
        below: PrefixIndex | None = None,
    ) -> None:
        """`below` is the index of what lies below the ranks' pools."""
        self._settings = settings
        self._index = index
        self._below = below
        self._balance = balance
        self._is_connected = is_connected
        self._decodes = self._prefills = _Side()
        self._layout: KvLayout | None = None
        # These are the most tokens of one request that the largest and the smallest decode rank hold.
        self._longest_tokens = self._shortest_tokens = 0
        self._draining: frozenset[RankKey] = frozenset()
        self._apart: dict[RankKey, str] = {}  # in what the layout of each of these differs
        self._share = Share()
        self._hits = Hits(index, balance, settings.index_block)
        self._sources = PullSources(index, balance, settings.index_block, is_connected)
        self.outcomes = Outcomes(index, balance, progress, settings.index_block)
        balance.changed = self._changed
        self._paid = PaidWaits()
        self._decode_arrivals, self._prefill_arrivals = Arrivals(balance.clock()), Arrivals(balance.clock())

    def set_ranks(self, decodes: Sequence[Registration], prefills: Sequence[Registration]) -> None:
        """Take these as the ranks that there are now, of each role in the order of their keys."""
        self._decodes, self._prefills = self._side(decodes), self._side(prefills)
        staying = [rank.max_context_tokens for rank in decodes if not rank.draining]
        self._longest_tokens, self._shortest_tokens = max(staying, default=0), min(staying, default=0)
        self._note_layout()
        ranks = (*decodes, *prefills)
        self.outcomes.cacheless = frozenset(rank.id.key for rank in ranks if NO_CACHE in rank.capabilities)
        telling = frozenset(rank.id.key for rank in ranks if rank.reports_checkpoints)
        self._hits.telling = self.outcomes.telling = telling
        self._hits.sharing = {rank.id.key: rank.shared_files for rank in ranks if rank.shared_files}
        self.outcomes.lending = self._sources.set_ranks(ranks if self._settings.pulls else ())

    @property
    def _has_many(self) -> bool:
        return self._decodes.order is not None or self._prefills.order is not None

    def set_share(self, share: Share) -> None:
        if share != self._share:
            self._share = share
            self._decodes, self._prefills = (
                replace(side, own=share.own(side.ranks)) for side in (self._decodes, self._prefills)
            )

    # -- placing ----------------------------------------------------------------------------------

    def place(self, asked: Asked, tie: float) -> Decision:
        """Choose the ranks and the plan; raise the errors of `decision.place`."""
        snapshot = self._snapshot(asked)
        if self._has_many:  # Otherwise all ranks are checked, and their waits with them.
            self._check_waits(snapshot)
        if asked.at is not None:
            return replace(self._place(snapshot, tie, self._few), reason="same_prompt")
        fitting = self._where_it_fits(asked)
        try:
            return self._place(snapshot if fitting is asked else self._snapshot(fitting), tie, self._few)
        except IsthmusError:
            if fitting is asked and not self._has_many:
                raise
            # The checked ranks are excluded, so check all of them, and tell what is wrong with each.
            return self._place(snapshot, tie, self._all)

    def _snapshot(self, asked: Asked) -> RankSnapshot:
        return RankSnapshot(asked, self._balance, self._index, self._is_connected, self._apart, self._below)

    def _where_it_fits(self, asked: Asked) -> Asked:
        """Return the request limited to ranks that can hold all of it, where some can and others cannot.

        Of many ranks only a few are checked, and ranks that can hold it must be among them.
        """
        most = asked.most_tokens
        if most is None or not self._shortest_tokens < most <= self._longest_tokens:
            return asked
        return replace(asked, must_hold=most)

    def check_waits(self, asked: Asked) -> None:
        """Raise NoCapacity if a quick estimate says that the request would wait too long at every rank."""
        self._check_waits(self._snapshot(asked))

    def _check_waits(self, snapshot: RankSnapshot) -> None:
        asked = snapshot.asked
        if asked.max_wait_s == inf:
            return
        decodes, prefills = self._queues(self._decodes, snapshot), self._queues(self._prefills, snapshot)
        wait_s = waits_of(asked.plans).about_s(decodes, prefills, asked.max_wait_s)
        if asked.max_wait_s < wait_s < inf:
            raise refusal(wait_s, asked.max_wait_s)

    def _queues(self, side: _Side, snapshot: RankSnapshot) -> Iterator[Queue]:
        keys = side.ranks if side.order is None else side.order
        return (Queue(snapshot, key) for key in keys if not snapshot.exclusion(key, side.ranks[key]))

    def exclusion(self, rank: Registration) -> str:
        """Return why the rank cannot be chosen even for the shortest prompt, or an empty text."""
        return self._snapshot(_SHORTEST).exclusion(rank.id.key, rank)

    def explain(self, asked: Asked, tie: float) -> Decision | Nowhere:
        """Decide as `place` does, but look at every rank and compare enough of them to be shown."""
        snapshot = self._snapshot(asked)
        request, decodes, prefills, holders = self._looked_at(snapshot, self._all)
        bandwidth, weights = self._balance.bandwidths(), self._settings.weights
        try:
            decision = place(request, decodes, prefills, bandwidth, weights, tie, spare_ranks=_EXPLAINED)
            return self._insured(decision, holders)
        except (NoCapacity, Unavailable) as error:
            all_decodes, all_prefills = exclusion.beside_others(request, decodes, prefills)
            return Nowhere(str(error), (*all_decodes, *all_prefills))

    def _place(
        self, snapshot: RankSnapshot, tie: float, find: Callable[[_Side, RankSnapshot], list[Found]]
    ) -> Decision:
        request, decodes, prefills, holders = self._looked_at(snapshot, find)
        bandwidth, weights = self._balance.bandwidths(), self._settings.weights
        return self._insured(place(request, decodes, prefills, bandwidth, weights, tie), holders)

    def _insured(self, decision: Decision, holders: Sequence[Holder]) -> Decision:
        """Add a source to a decision that has none because it relies on a prediction.

        The index does not say yet that the computing rank holds the prompt. If it does, the source is not
        used.
        """
        chosen = decision.chosen
        computing = chosen.prefill or chosen.decode
        if chosen.source is not None or computing.reused_tokens <= computing.indexed_reused_tokens:
            return decision
        if holders and (sources := self._sources.of([computing.as_indexed], holders)[0]):
            return replace(decision, chosen=replace(chosen, source=sources[0]))
        return decision

    def _looked_at(
        self, snapshot: RankSnapshot, find: Callable[[_Side, RankSnapshot], list[Found]]
    ) -> tuple[PlacementRequest, list[DecodeCandidate], list[PrefillCandidate], Sequence[Holder]]:
        """Return the request, the candidates of both roles, and the ranks that one may pull from."""
        asked = snapshot.asked
        receivers = find(self._receiving(asked), snapshot)
        senders = find(self._prefills, snapshot) if Plan.REMOTE in asked.plans else []
        decodes = as_decodes(self._seen(receivers, snapshot), snapshot, self._decodes.own)
        prefills = as_prefills(self._seen(senders, snapshot), snapshot, self._prefills.own)
        if holders := self._sources.holders(snapshot):
            prefills = self._with_sources(prefills, holders)
            if Plan.LOCAL in asked.plans:
                decodes = self._with_sources(decodes, holders)
        max_wait_s = bound_s(asked.max_wait_s, decodes, prefills)
        candidates: list[Candidate] = [*decodes, *prefills]
        holding = [rank for rank in candidates if rank.hit_tokens and not rank.excluded]
        longest = max([rank.reused_tokens for rank in holding], default=0)
        return self._request(asked, max_wait_s, longest), decodes, prefills, holders

    def _with_sources(self, candidates: Sequence[_Candidate], holders: Sequence[Holder]) -> list[_Candidate]:
        both = zip(candidates, self._sources.of(candidates, holders), strict=True)
        return [rank._replace(sources=sources) if sources else rank for rank, sources in both]

    def _request(self, asked: Asked, max_wait_s: float, longest: int) -> PlacementRequest:
        layout, most, now = self._layout, asked.most_tokens, self._balance.clock()
        blocks = longest // self._settings.index_block
        return PlacementRequest(
            prompt_tokens=asked.prompt_tokens,
            kv_bytes_per_token=layout.page_bytes / layout.page_size if layout else 0.0,
            chunk_tokens=self._settings.chunk_tokens,
            pinned=asked.pinned,
            plans=asked.plans,
            max_wait_s=max_wait_s,
            most_tokens=most if most is not None and most <= self._longest_tokens else None,
            longest_tokens=self._longest_tokens,
            carried_bytes=self.carried_bytes(asked.prompt_tokens),
            prefill_requests_per_s=self._a_rank(self._prefill_arrivals.per_s(now), self._prefills),
            decode_requests_per_s=self._a_rank(self._decode_arrivals.per_s(now), self._decodes),
            paid_tokens=longest,
            paid_s=self._paid.of(asked.hashes[blocks - 1], now) if blocks else 0.0,
        )

    def _pay(self, hashes: Sequence[BlockHash], decision: Decision) -> None:
        """Count the wait for what a rank holds. What it has yet to compute could not have been elsewhere."""
        chosen, block = decision.chosen, self._settings.index_block
        blocks = decision.longest_reuse // block
        if blocks and chosen.source is None:
            computing = chosen.prefill or chosen.decode
            if computing.reused_tokens // block < blocks:
                self._paid.spend(hashes[blocks - 1])
            elif computing.indexed_reused_tokens // block >= blocks:
                self._paid.add(hashes[blocks - 1], decision.excess_wait_s, self._balance.clock())

    def _a_rank(self, requests_per_s: float, side: _Side) -> float:
        """Return the prompts that come to be computed at one rank, if the other routers send as many each."""
        return self._share.of * requests_per_s / (len(side.ranks) or 1)

    def _receiving(self, asked: Asked) -> _Side:
        if (at := asked.at) is None:
            return self._decodes
        rank = self._decodes.ranks.get(at.key)
        return _Side() if rank is None or rank.id != at else _Side({at.key: rank})

    def _all(self, side: _Side, snapshot: RankSnapshot) -> list[Found]:
        return self._found(side.ranks, side, snapshot)

    def _few(self, side: _Side, snapshot: RankSnapshot) -> list[Found]:
        if side.order is None:
            return self._all(side, snapshot)
        promising = dict.fromkeys(self._promising(side, side.order, snapshot))
        last, is_long = side.last_order, snapshot.asked.prompt_tokens > _USUAL_TOKENS
        if last is not None and is_long and any(snapshot.now(key).load.overtaken for key in promising):
            # It may wait for what a usual one goes before; without such ranks both orders begin alike.
            promising |= dict.fromkeys(self._promising(side, last, snapshot))
        return self._found((key for key in promising if key in side.ranks), side, snapshot)

    def _found(self, keys: Iterable[RankKey], side: _Side, snapshot: RankSnapshot) -> list[Found]:
        ranks, held = side.ranks, snapshot.held()
        return [(key, ranks[key], held.depth(key)) for key in keys]

    def _promising(self, side: _Side, order: LoadOrder, snapshot: RankSnapshot) -> Iterator[RankKey]:
        if snapshot.asked.pinned is not None:
            yield snapshot.asked.pinned
        yield from snapshot.guessed().deepest()[:_PREDICTED]
        least_loaded = (key for key in order if snapshot.may_serve(key, side.ranks[key]))
        few = list(islice(least_loaded, _LEAST_LOADED))
        yield from few
        if self._shortest_tokens < self._longest_tokens:  # The few may all be too small.
            roomiest = (key for key in order if self._holds_most(side.ranks[key]))
            serving = (key for key in roomiest if snapshot.may_serve(key, side.ranks[key]))
            yield from islice(serving, _LEAST_LOADED)
        if self._apart:  # The few may all be among these, and plan remote must be priced too.
            yield from islice((key for key in least_loaded if key not in self._apart), _LEAST_LOADED)
        if self._share.of > 1:
            own = (key for key in islice(order, _OWN_REACH) if key in side.own)
            yield from islice((key for key in own if snapshot.may_serve(key, side.ranks[key])), _LEAST_LOADED)
        if self._hits.telling and few:
            yield from self._resuming(side, order, snapshot, few[0])
        if (shared := snapshot.shared(self._hits.sharing)) is not None:
            yield from shared.readers(order, lambda key: snapshot.may_serve(key, side.ranks[key]))
        held, below = snapshot.held(), snapshot.below()
        searched = [(held, 0)]
        if below is not None:
            # Who keeps no more below than the pool of the least loaded rank holds cannot win by that.
            searched.append((below, self._sure_blocks(few[0], held) if few else 0))
        for each, least in searched:
            yield from self._holding(side, order, snapshot, each, least, frozenset())
            if self._apart:  # One of these may hide a rank that holds as much and can be sent KV.
                yield from self._holding(side, order, snapshot, each, least, self._apart)

    def _sure_blocks(self, key: RankKey, held: Held) -> int:
        """Return how many blocks the rank goes on after for sure; 0 where it needs a checkpoint, or KV cannot
        be sent to it."""
        if key in self._apart or key in self._hits.telling:
            return 0
        matched = held.depth(key) * self._settings.index_block
        trusted = self._balance.trust.worth(key, matched, self._balance.clock())
        return trusted // self._settings.index_block

    def _holding(
        self,
        side: _Side,
        order: LoadOrder,
        snapshot: RankSnapshot,
        held: Held,
        least: int,
        without: Collection[RankKey],
    ) -> Iterator[RankKey]:
        """Yield the ranks, without some, that hold more of the prompt than all before them, and more than
        `least` blocks."""
        longest, ranks = least, iter(order)
        while num_deeper := held.num_beyond(longest):
            if num_deeper <= min(_SOME, len(order) // 2):
                ranks = order.ascending(held.beyond(longest))
            for key in ranks:  # Where many hold it, one of the next in the order does.
                depth = held.depth(key)
                if depth > longest and key not in without and snapshot.may_serve(key, side.ranks[key]):
                    longest = depth
                    yield key
                    break
            else:
                return

    def _resuming(
        self, side: _Side, order: LoadOrder, snapshot: RankSnapshot, least: RankKey
    ) -> Iterator[RankKey]:
        """Yield the ranks that can go on, or soon will, further into the prompt than all before them.

        `least` is the first rank in the order that may serve.
        """
        for found in (snapshot.guessed().resumable(), self._index.checkpoints.along(snapshot.asked.hashes)):
            taken, seen = None, set[RankKey]()
            for _, ranks in islice(found, _DEEPEST):
                # Ranks seen before need no second look: the first of them was chosen, or none may serve.
                unseen = order.ascending(ranks - seen, taken)
                first = next((key for key in unseen if snapshot.may_serve(key, side.ranks[key])), None)
                seen |= ranks
                if first is not None:
                    taken = first
                    yield first
                if taken == least:
                    break

    def _seen(self, found: Sequence[Found], snapshot: RankSnapshot) -> Iterator[Seen]:
        nows = [snapshot.now(key) for key, _, _ in found]
        return zip(found, self._hits.of(found, snapshot), nows, usual_rates(nows), strict=True)

    def _holds_most(self, rank: Registration) -> bool:
        return rank.role is Role.DECODE and rank.max_context_tokens == self._longest_tokens

    def sent(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        prompt_tokens: int,
        decision: Decision,
        reusable_tokens: float = inf,
    ) -> None:
        arrivals = self._decode_arrivals if decision.chosen.prefill is None else self._prefill_arrivals
        arrivals.add(self._balance.clock())
        self._pay(hashes, decision)
        self.outcomes.sent(request_id, hashes, prompt_tokens, decision.chosen, reusable_tokens)

    def coming(self, asked: Asked, decision: Decision) -> Coming | None:
        """Return what the other routers, if there are any, should expect of a prompt that is sent; None
        where little of it is to be computed."""
        if self._share.of == 1:
            return None
        chosen = decision.chosen
        tokens, computing = asked.prompt_tokens - chosen.reused_tokens, chosen.prefill or chosen.decode
        if tokens < _LEAST_COMING_S * computing.prefill_tokens_per_s:
            return None
        return self.outcomes.coming(asked.hashes, asked.prompt_tokens, chosen)

    def expect(self, coming: Coming) -> None:
        """Predict what another router has sent, as if this one had sent it. What an ended life of a rank was
        sent is left out."""
        key = coming.rank.key
        rank = self._decodes.ranks.get(key) or self._prefills.ranks.get(key)
        if rank is not None and rank.id == coming.rank:
            for_s = min(coming.for_s, _LONGEST_COMING_S)
            self._balance.predict(key, coming.blocks, for_s, coming.resumable)

    def carried_bytes(self, prompt_tokens: int) -> int:
        return carried_bytes(self._layout, prompt_tokens) if self._layout else 0

    # -- the layout of plan remote ----------------------------------------------------------------

    def _note_layout(self) -> None:
        decodes, prefills = self._decodes.ranks.values(), self._prefills.ranks.values()
        ranks = (*decodes, *prefills)
        self._draining = frozenset(rank.id.key for rank in ranks if self._drains(rank))
        self._layout = layout = common_layout(decodes, prefills, self._draining)
        found = ((rank.id.key, difference(rank.layout, layout)) for rank in ranks if layout)
        self._apart = {key: what for key, what in found if what}

    def _drains(self, rank: Registration) -> bool:
        """Return whether it drains, by its registration or by its load, which does not need etcd."""
        return rank.draining or self._balance.load(rank.id.key).draining

    # -- the order of load ------------------------------------------------------------------------

    def _side(self, ranks: Sequence[Registration]) -> _Side:
        by_key = {rank.id.key: rank for rank in ranks}
        own = self._share.own(by_key)
        if len(ranks) <= _FEW:
            return _Side(by_key, own=own)
        loads = {key: self._loads(key, rank) for key, rank in by_key.items()}
        order, last_order = (LoadOrder((key, load[at]) for key, load in loads.items()) for at in (0, 1))
        return _Side(by_key, order, last_order, own)

    def _changed(self, key: RankKey) -> None:
        for side in (self._decodes, self._prefills):
            if (rank := side.ranks.get(key)) is None:
                continue
            if self._drains(rank) is not (key in self._draining):
                self._note_layout()
            if side.order is not None and side.last_order is not None:
                load, last_load = self._loads(key, rank)
                side.order.update(key, load)
                side.last_order.update(key, last_load)

    def _loads(self, key: RankKey, rank: Registration) -> tuple[Load, Load]:
        """Return the load for each order, which includes the cost of a prompt of usual length that hits
        nothing there."""
        now = self._balance.now(key)
        before, passed, _ = now.before(_USUAL_TOKENS)
        load_s = before / now.tokens_per_s
        books, page_size = now.load.books, rank.layout.page_size
        if books.total > 0:
            lacking = max(0, _USUAL_TOKENS - books.free * page_size)
            evicted = min(lacking, books.cached * page_size)
            again_s = min(1 / now.tokens_per_s, back_s(self._below, rank, now.load)) if evicted else 0.0
            load_s += self._settings.weights.evict_weight * evicted * again_s
            if rank.role is Role.DECODE:
                load_s += (lacking - evicted) * now.load.token_s / max(1, now.running)
        return (load_s, now.running), (load_s + passed / now.tokens_per_s, now.running)
