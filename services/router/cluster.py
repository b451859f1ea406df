"""The cluster as a router sees it: the ranks of the mirror, a stream to each decode rank, what was
learned of their speed, and where conversations are pinned. `place` turns all that into one decision.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from services import rpc
from services.errors import Unavailable
from services.index.mirror import Mirror, RankState, RankView
from services.index.pins import PinWriter
from services.index.registry import REMOTE_ONLY
from services.kv.block_hash import extend_hash, scope_seed, sequence_hashes
from services.kv.ticket import same_kv
from services.kv.types import BlockHash, KvLayout, Plan, RankAddress, RankId, RankKey, RankLoad, Role
from services.request import Admitted
from services.router.balance import Balance
from services.router.decode_client import DecodeClient
from services.router.placement import (
    Decision,
    DecodeCandidate,
    PlacementRequest,
    PrefillCandidate,
    Weights,
    place,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    model_name: str
    index_block: int  # tokens
    plans: frozenset[Plan]
    chunk_tokens: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request goes, and with what."""

    decision: Decision
    client: DecodeClient
    prefill: RankAddress | None
    pinned: RankKey | None
    hashes: tuple[BlockHash, ...]  # of the prompt's index blocks
    degraded: str | None
    best_hit_tokens: Mapping[Role, int]  # of all ranks of the role, as believed

    @property
    def plan(self) -> Plan:
        return self.decision.chosen.plan

    @property
    def prefill_name(self) -> str:
        return str(self.prefill.id) if self.prefill is not None else "-"


class Cluster:
    """Lives on the router's loop. `start` before use, `close` after."""

    def __init__(
        self,
        settings: ClusterSettings,
        mirror: Mirror,
        pins: PinWriter,
        balance: Balance,
        tls: rpc.TlsConfig | None,
        tie: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._mirror = mirror
        self._pins = pins
        self._balance = balance
        self._tls = tls
        self._tie = tie
        self._clients: dict[RankKey, DecodeClient] = {}
        self._lives: dict[RankKey, RankId] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._mirror.subscribe(self._refresh)
        self._refresh()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        await asyncio.gather(*self._closing)

    @property
    def degraded(self) -> str | None:
        """Why placement goes by load alone, if it does."""
        return self._mirror.degraded

    def ranks(self, role: Role) -> list[RankView]:
        """Registered ranks of our model, in a fixed order."""
        views = self._mirror.ranks.items()
        model = self._settings.model_name
        return [
            view
            for _, view in sorted(views, key=lambda item: item[0])
            if view.registration.role is role and view.registration.model == model
        ]

    def is_up(self, view: RankView) -> bool:
        """Whether the rank is registered or speaks, and has not just failed; it may be full or draining."""
        rank = view.registration.id.key
        client = self._clients.get(rank)
        if view.registration.role is Role.DECODE and (client is None or not client.connected.is_set()):
            return False
        return view.state is RankState.LIVE and self._balance.excluded(rank) != "failed"

    def max_context_tokens(self) -> int:
        """Of the roomiest decode rank. Raises Unavailable when there is none."""
        sizes = [view.registration.max_context_tokens for view in self.ranks(Role.DECODE)]
        if not sizes:
            raise Unavailable("no decode rank is registered")
        return max(sizes)

    # -- placement --------------------------------------------------------------------------------

    def place(
        self, ids: tuple[int, ...], tenant: str, conversation_id: str, excluded: frozenset[RankKey]
    ) -> Placed:
        """Choose the ranks and the plan for a prompt.

        Raises:
            Unavailable, NoCapacity: no rank can take it now; the message says why.
        """
        settings = self._settings
        hashes = sequence_hashes(ids, settings.index_block, scope_seed(settings.model_name, tenant))
        hits = self._mirror.index.match_all(hashes)
        layout = self._common_layout()
        decodes = [
            self._decode_candidate(view, hashes, hits, self._exclusion(view, len(ids), excluded))
            for view in self.ranks(Role.DECODE)
        ]
        prefills = [
            self._prefill_candidate(view, hashes, hits, self._exclusion(view, len(ids), excluded), layout)
            for view in self.ranks(Role.PREFILL)
        ]
        request = PlacementRequest(
            prompt_tokens=len(ids),
            kv_bytes_per_token=layout.page_bytes / layout.page_size if layout else 0.0,
            chunk_tokens=settings.chunk_tokens,
            pinned=self._pinned(conversation_id),
            plans=self._plans(),
        )
        decision = place(request, decodes, prefills, self._balance.bandwidth, settings.weights, self._tie())
        chosen = decision.chosen
        prefill = None
        if chosen.prefill is not None:
            prefill = self._mirror.ranks[chosen.prefill.id.key].registration.address
        client = self._clients[chosen.decode.id.key]
        best = {
            Role.DECODE: max((candidate.hit_tokens for candidate in decodes), default=0),
            Role.PREFILL: max((candidate.hit_tokens for candidate in prefills), default=0),
        }
        return Placed(decision, client, prefill, request.pinned, tuple(hashes), self.degraded, best)

    def sent(self, request_id: str, conversation_id: str, placed: Placed) -> None:
        """A request went out: count it, and pin its conversation."""
        chosen = placed.decision.chosen
        prefill = chosen.prefill
        computing_hit = prefill.hit_tokens if prefill is not None else chosen.decode.hit_tokens
        self._balance.sent(
            request_id,
            chosen.decode.id.key,
            prefill.id.key if prefill is not None else None,
            max(0, len(placed.hashes) * self._settings.index_block - computing_hit),
        )
        if conversation_id:
            self._pins.pin(conversation_id, chosen.decode.id, prefill.id if prefill is not None else None)

    def admitted(self, request_id: str, placed: Placed, admitted: Admitted) -> None:
        """The decode rank said what it really had: learn from it, and correct the index."""
        chosen = placed.decision.chosen
        decode = chosen.decode.id.key
        self._balance.admitted(request_id)
        prefill = chosen.prefill.id.key if chosen.prefill is not None else None
        self._balance.observe_admitted(decode, prefill, admitted)
        if admitted.decode_prefix_len < chosen.decode.hit_tokens:
            believed = placed.hashes[: chosen.decode.hit_tokens // self._settings.index_block]
            present = admitted.decode_prefix_len // self._settings.index_block
            self._mirror.index.correct(decode, believed, present)
        for rank in (decode, prefill):
            if rank is not None:
                self._balance.predict(rank, placed.hashes)

    def finished(self, placed: Placed, all_ids: tuple[int, ...], tenant: str) -> None:
        """A request ended well: its decode rank will soon say that it holds prompt and answer."""
        block, seed = self._settings.index_block, scope_seed(self._settings.model_name, tenant)
        hashes = list(placed.hashes)  # of the prompt; a long one takes tens of milliseconds to hash again
        # The newest token's KV was never computed.
        for end in range((len(hashes) + 1) * block, len(all_ids), block):
            parent = hashes[-1] if hashes else None
            hashes.append(extend_hash(parent, all_ids[end - block : end], seed))
        self._balance.predict(placed.decision.chosen.decode.id.key, hashes)

    def ended(self, request_id: str) -> None:
        """However it ended, it is in flight no more."""
        self._balance.ended(request_id)

    def failed(self, life: RankId) -> None:
        """A request failed because of this rank. What an earlier life did says nothing of the next one."""
        rank = life.key
        view = self._mirror.ranks.get(rank)
        if view is None or view.registration.id != life:
            return
        self._balance.failed(rank)
        if not view.registered:
            self._mirror.mark_dead(rank)  # its lease has lapsed and it does not work: forget it

    def _plans(self) -> frozenset[Plan]:
        """Those that may be chosen and that every decode rank's engine knows. Raises Unavailable."""
        plans = self._settings.plans
        if any(REMOTE_ONLY in view.registration.capabilities for view in self.ranks(Role.DECODE)):
            plans -= {Plan.LOCAL}
        if not plans:
            raise Unavailable("only plan local may be chosen, and the decode ranks compute no prompts")
        return plans

    # -- internals --------------------------------------------------------------------------------

    def _hit_tokens(self, rank: RankKey, hashes: list[BlockHash], hits: dict[RankKey, int]) -> int:
        blocks = max(hits.get(rank, 0), self._balance.predicted_match(rank, hashes))
        return blocks * self._settings.index_block

    def _decode_candidate(
        self,
        view: RankView,
        hashes: list[BlockHash],
        hits: dict[RankKey, int],
        exclusion: str,
    ) -> DecodeCandidate:
        rank = view.registration.address.id
        load = self._balance.load(rank.key)
        page_size = view.registration.layout.page_size
        return DecodeCandidate(
            id=rank,
            hit_tokens=self._hit_tokens(rank.key, hashes, hits),
            pending_tokens=self._balance.pending_tokens(rank.key),
            prefill_tokens_per_s=self._balance.rate(rank.key),
            running=max(load.running, self._balance.running(rank.key)),
            step_s=load.step_s,
            free_tokens=load.books.free * page_size,
            evictable_tokens=load.books.cached * page_size,
            excluded=exclusion,
        )

    def _prefill_candidate(
        self,
        view: RankView,
        hashes: list[BlockHash],
        hits: dict[RankKey, int],
        exclusion: str,
        layout: KvLayout | None,
    ) -> PrefillCandidate:
        rank = view.registration.address.id
        if not exclusion and layout is not None and not same_kv(view.registration.layout, layout):
            exclusion = "its KV layout differs from the decode ranks'"
        return PrefillCandidate(
            id=rank,
            hit_tokens=self._hit_tokens(rank.key, hashes, hits),
            pending_tokens=self._balance.pending_tokens(rank.key),
            prefill_tokens_per_s=self._balance.rate(rank.key),
            excluded=exclusion,
        )

    def _exclusion(self, view: RankView, prompt_tokens: int, excluded: frozenset[RankKey]) -> str:
        """Why a rank cannot be chosen; empty when it can."""
        rank = view.registration.address.id.key
        if rank in excluded:
            return "it failed this request"
        if view.draining:
            return "draining"
        # A decode rank needs room for one more token.
        room = view.registration.max_context_tokens - (view.registration.role is Role.DECODE)
        if prompt_tokens > room:
            return "the prompt is longer than its context"
        client = self._clients.get(rank)
        if client is None and view.registration.role is Role.DECODE:
            return "not connected"
        if client is not None and not client.connected.is_set():
            return "not connected"
        # A lapsed lease alone excludes nobody: a decode rank whose stream is up is alive, and a
        # prefill rank that fails is left alone for a while by the balance.
        return self._balance.excluded(rank)

    def _common_layout(self) -> KvLayout | None:
        layouts = [view.registration.layout for view in self.ranks(Role.DECODE)]
        return max(layouts, key=layouts.count) if layouts else None

    def _pinned(self, conversation_id: str) -> RankKey | None:
        if not conversation_id:
            return None
        pin = self._pins.recent(conversation_id) or self._mirror.pin(conversation_id)
        if pin is None:
            return None
        view = self._mirror.ranks.get(pin.decode.key)
        # A new life of the rank holds nothing of the conversation.
        return pin.decode.key if view is not None and view.registration.id == pin.decode else None

    def _refresh(self, _changed: RankKey | None = None) -> None:
        """Open a stream to every decode rank that appeared, close those of lives that ended."""
        lives = {key: view.registration.id for key, view in self._mirror.ranks.items()}
        for rank, life in self._lives.items():
            if lives.get(rank) != life:
                self._balance.forget(rank)  # a new life has no past
        self._lives = lives
        wanted = {v.registration.address.id.key: v.registration.address for v in self.ranks(Role.DECODE)}
        for rank, client in list(self._clients.items()):
            if wanted.get(rank) != client.address:
                del self._clients[rank]
                task = asyncio.create_task(client.close(), name=f"close-{rank}")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for rank, address in wanted.items():
            if rank not in self._clients:
                self._clients[rank] = DecodeClient(
                    address, self._tls, partial(self._report, rank), partial(self.failed, address.id)
                )

    def _report(self, rank: RankKey, load: RankLoad) -> None:
        self._balance.report(rank, load)
        self._mirror.mark_live(rank)  # a stream that speaks is a health check passed
