"""From what one router knows of the ranks to a decision; outcomes.py has the way back, to what it knows next.

It has no I/O, no clock and no chance of its own (see Balance), so that bench.placement runs it as it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.index.read.prefix_index import PrefixIndex
from services.kv.tails import carried_bytes
from services.kv.ticket import difference
from services.router.placement import exclusion
from services.router.placement.admission import bound_s, refusal
from services.router.placement.candidates import PlacementRequest, PromptToPlace
from services.router.placement.decision import Decision, Nowhere, place
from services.router.placement.layouts import common_layout
from services.router.placement.outcomes import Outcomes
from services.router.placement.price import Bandwidth, PriceWeights
from services.router.placement.sides import Side
from services.router.placement.table import RankTable
from services.router.ranks.balance import Balance
from services.router.ranks.shares import Share
from services.values.errors import NoCapacity, Unavailable
from services.values.kv import BlockHash, KvLayout
from services.values.rank import Plan, RankKey
from services.values.registration import NO_CACHE, Registration

_EXPLAINED = 64  # a side; more are not shown


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    index_block: int  # tokens
    chunk_tokens: int
    weights: PriceWeights


_SHORTEST = PromptToPlace((), 1, frozenset(Plan))


class Placer:
    """One router's; `index` is its mirror's. `progress` of a rank changes with every record of it that the
    index takes in; `is_connected`: whether the stream to a decode rank is up."""

    def __init__(
        self,
        settings: PlacerSettings,
        index: PrefixIndex,
        balance: Balance,
        progress: Callable[[RankKey], object],
        is_connected: Callable[[RankKey], bool],
    ) -> None:
        self._settings = settings
        self._index = index
        self._balance = balance
        self._is_connected = is_connected
        self._decodes: Sequence[Registration] = ()
        self._prefills: Sequence[Registration] = ()
        self._table = self._new_table()
        self._layout: KvLayout | None = None
        self._longest_tokens = 0  # that a decode rank holds of one request
        self._draining: frozenset[RankKey] = frozenset()
        self._share = Share()
        self.outcomes = Outcomes(index, balance, progress, settings.index_block)
        balance.changed = self.changed

    def set_ranks(self, decodes: Sequence[Registration], prefills: Sequence[Registration]) -> None:
        """Those that there are now, of each role in the order of their keys."""
        self._decodes, self._prefills = decodes, prefills
        self._table = self._new_table()
        self._longest_tokens = max(
            (rank.max_context_tokens for rank in decodes if not rank.draining), default=0
        )
        self._note_share()
        self._note_layout()
        ranks = self._table.ranks
        self.outcomes.cacheless = frozenset(rank.id.key for rank in ranks if NO_CACHE in rank.capabilities)
        self.outcomes.telling = frozenset(self._table.telling)

    def _new_table(self) -> RankTable:
        block = self._settings.index_block
        return RankTable(self._decodes, self._prefills, self._balance, self._index, self._is_connected, block)

    def set_share(self, share: Share) -> None:
        """This router's, of the ranks that all routers place on."""
        if share != self._share:
            self._share = share
            self._note_share()

    def _note_share(self) -> None:
        sides = ([rank.id.key for rank in side] for side in (self._decodes, self._prefills))
        self._table.set_own(frozenset[RankKey]().union(*map(self._share.own, sides)))

    def changed(self, key: RankKey) -> None:
        """Something else is known of the rank, or the stream to it is up or down."""
        row = self._table.rows.get(key)
        if row is None:
            return
        self._table.update(key)
        if self._drains(self._table.ranks[row]) is not (key in self._draining):
            self._note_layout()

    # -- placing ----------------------------------------------------------------------------------

    def place(self, asked: PromptToPlace, tie: float) -> Decision:
        """Choose the ranks and the plan. Raises as placement.place."""
        decodes, prefills = self._table.sides(asked)
        request = self._request(asked, decodes, prefills)
        decision = place(request, decodes, prefills, self._bandwidth(), self._settings.weights, tie)
        return decision if asked.at is None else replace(decision, reason="same_prompt")

    def explain(self, asked: PromptToPlace, tie: float) -> Decision | Nowhere:
        """As `place`, with enough of the ranks compared to be shown."""
        decodes, prefills = self._table.sides(asked)
        request = self._request(asked, decodes, prefills)
        bandwidth, weights = self._bandwidth(), self._settings.weights
        try:
            return place(request, decodes, prefills, bandwidth, weights, tie, spare_ranks=_EXPLAINED)
        except (NoCapacity, Unavailable) as error:
            exclusion.beside_others(request, decodes, prefills)
            return Nowhere(str(error), (*decodes.all(), *prefills.all()))

    def check_waits(self, asked: PromptToPlace) -> None:
        """Raises NoCapacity if it would wait too long wherever it can go."""
        if asked.max_wait_s == math.inf:
            return
        decodes, prefills = self._table.sides(asked, with_hits=False)
        wait_s = exclusion.shortest_wait_s(self._request(asked, decodes, prefills), decodes, prefills)
        if asked.max_wait_s < wait_s < math.inf:
            raise refusal(wait_s, asked.max_wait_s)

    def exclusion(self, rank: Registration) -> str:
        """Why the rank cannot be chosen by the shortest prompt; empty: it can."""
        row = self._table.rows.get(rank.id.key)
        return "" if row is None else self._table.exclusion(row, _SHORTEST)

    def sent(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        prompt_tokens: int,
        decision: Decision,
        reusable_tokens: float = math.inf,
    ) -> None:
        """The request went out. What becomes of it is for `outcomes`."""
        self.outcomes.sent(request_id, hashes, prompt_tokens, decision.chosen, reusable_tokens)

    def carried_bytes(self, prompt_tokens: int) -> int:
        """Tails and states at a prompt's end."""
        return carried_bytes(self._layout, prompt_tokens) if self._layout else 0

    def _bandwidth(self) -> Bandwidth | float:
        only = self._balance.only_bandwidth
        return self._balance.bandwidth if only is None else only

    def _request(self, asked: PromptToPlace, decodes: Side, prefills: Side) -> PlacementRequest:
        layout, most = self._layout, asked.most_tokens
        return PlacementRequest(
            prompt_tokens=asked.prompt_tokens,
            kv_bytes_per_token=layout.page_bytes / layout.page_size if layout else 0.0,
            chunk_tokens=self._settings.chunk_tokens,
            pinned=asked.pinned,
            plans=asked.plans,
            max_wait_s=bound_s(asked.max_wait_s, decodes, prefills.compute_wait_s),
            most_tokens=most if most is not None and most <= self._longest_tokens else None,
            longest_tokens=self._longest_tokens,
            carried_bytes=self.carried_bytes(asked.prompt_tokens),
        )

    # -- the layout of plan remote ----------------------------------------------------------------

    def _note_layout(self) -> None:
        ranks = self._table.ranks
        self._draining = frozenset(rank.id.key for rank in ranks if self._drains(rank))
        self._layout = layout = common_layout(self._decodes, self._prefills, self._draining)
        found = ((rank.id.key, difference(rank.layout, layout)) for rank in ranks if layout)
        self._table.set_apart({key: what for key, what in found if what})

    def _drains(self, rank: Registration) -> bool:
        """Its load says so too, which needs no etcd."""
        return rank.draining or self._balance.load(rank.id.key).draining
