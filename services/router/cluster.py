"""A router's cluster is the ranks of the mirror, a stream to each of them, and the pins of conversations. It
passes what it knows to the placer, and carries out the placer's decision."""

import asyncio
import logging
import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.index.pins import PinWriter
from services.index.read.block_mirror import RankProgress
from services.index.read.mirror import Mirror, RankState, RankView
from services.kv.block_hash import scope_seed, sequence_hashes
from services.net.channels import TlsConfig
from services.router.connections.output_stream import Coalescing
from services.router.connections.rank_connections import Connections, DecodeClient
from services.router.connections.rank_health import PrefillWatch
from services.router.placement.candidates import Asked
from services.router.placement.decision import Decision, Nowhere
from services.router.placement.outcomes import length_means
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.rank_snapshot import common_adapters, staying
from services.router.ranks.balance import Balance, Liveness, RankNow
from services.router.ranks.rank_order import Share
from services.values.adapter import Adapter
from services.values.errors import NoCapacity, Unavailable
from services.values.kv import BlockHash
from services.values.rank import Plan, PullSource, RankAddress, RankId, RankKey, Role
from services.values.rank_reports import (
    NO_MOVED_PENALTIES,
    NO_TENANT_TURNS,
    REMOTE_ONLY,
    Coming,
    RankLoad,
    Registration,
)
from services.values.request import Admitted, FinishReason

log = logging.getLogger(__name__)

# Hashing fewer tokens takes less than the 5 ms for which a thread would stop the loop, too.
_LONG_PROMPT = 1 << 16
_ROLES = (Role.DECODE, Role.PREFILL)
_MISSED_S = 1800.0  # A rank that went without draining is listed for so long.


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    model_name: str
    plans: frozenset[Plan]
    placer: PlacerSettings


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """This is a prompt to be placed, and what its request will need."""

    ids: "array[int]"  # "I"
    seed: int
    hashes: Sequence[BlockHash]
    most_tokens: int | None = None  # This limits prompt and answer together; None means that it is not known.
    answers: int = 1
    reusable_tokens: float = math.inf  # The rank that computes the prompt may reuse this many from a cache.
    adapter: Adapter | None = None


_SHORTEST = HashedPrompt(array("I", [0]), 0, ())


@dataclass(frozen=True, slots=True)
class Placed:
    decision: Decision
    client: DecodeClient
    prefill: RankAddress | None
    source: PullSource | None
    pinned: RankKey | None
    prompt: HashedPrompt
    degraded: str | None
    best_hit_tokens: Mapping[Role, int]  # This is the longest believed hit of any rank of the role.
    moves_penalties: bool  # Another rank can continue with the tokens generated there.
    coming: Coming | None  # Other routers are to expect this.

    @property
    def plan(self) -> Plan:
        return self.decision.chosen.plan

    @property
    def prefill_name(self) -> str:
        return str(self.prefill.id) if self.prefill is not None else "-"


@dataclass(frozen=True, slots=True)
class Explained:
    decision: Decision | Nowhere
    pinned: RankKey | None
    degraded: str | None
    carried_bytes: int = 0  # A prompt of that length carries this much per-request state.


@dataclass(frozen=True, slots=True)
class RankStatus:
    view: RankView
    num_blocks: int
    num_resumable: int | None  # None means that it can resume after any block.
    progress: RankProgress
    trust: float
    resume_trust: float
    now: RankNow
    excluded: str
    unregistered_s: float
    staleness_s: float


class Cluster:
    """A cluster lives on the router's loop; it must be started before use."""

    def __init__(
        self,
        settings: ClusterSettings,
        mirror: Mirror,
        pins: PinWriter,
        balance: Balance,
        tls: TlsConfig | None,
        tie: Callable[[], float] = random.random,
        coalesce_s: float = 0.0,
    ) -> None:
        """Let tokens wait at most `coalesce_s` for others of their request (connections/output_stream.py)."""
        self.settings = settings
        self._mirror = mirror
        self._pins = pins
        self._balance = balance
        self._tls = tls
        self._tie = tie
        self._coalescing = Coalescing(coalesce_s) if coalesce_s else None
        self._connections = Connections(self._open_client, self._open_watch)
        is_connected, below = self._connections.is_connected, mirror.below.index
        self._placer = Placer(settings.placer, mirror.index, balance, mirror.progress, is_connected, below)
        self._lives: dict[RankKey, RankId] = {}
        self._ranks: dict[Role, list[RankView]] = {Role.DECODE: [], Role.PREFILL: []}
        self._placeable: list[list[Registration]] = []
        self._max_context_tokens = 0
        self._model_context_tokens = 0
        self._adapters: Mapping[str, Adapter] = {}
        self._known_plans = settings.plans
        self._takes_turns = True
        self._missed: dict[RankKey, tuple[Role, float]] = {}  # The time is when they went.
        self._outdated = False
        self._stop_listening: Callable[[], None] | None = None

    async def start(self) -> None:
        self._stop_listening = self._mirror.subscribe(self._changed)
        self._outdated = True
        self._refresh()

    async def close(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
        self._outdated = False
        await self._connections.close()

    @property
    def degraded(self) -> str | None:
        """Return why etcd is not followed, or None where it is. Without etcd placement uses the last known
        state, and load."""
        return self._mirror.degraded

    @property
    def staleness_s(self) -> float:
        return self._mirror.staleness_s

    def ranks(self, role: Role) -> Sequence[RankView]:
        """Return the registered ranks of our model, in a fixed order."""
        self._refresh()
        return self._ranks[role]

    def has(self, incarnation: RankId) -> bool:
        return any(view.registration.id == incarnation for role in _ROLES for view in self.ranks(role))

    def missed(self) -> list[tuple[Role, RankKey]]:
        """Return the ranks that went within the last half hour without draining."""
        self._refresh()
        now = self._balance.clock()
        self._missed = {k: (role, at) for k, (role, at) in self._missed.items() if now - at < _MISSED_S}
        return [(role, key) for key, (role, _) in self._missed.items()]

    def is_up(self, view: RankView) -> bool:
        """Return whether the rank is registered or connected, and is healthy; it may be full or draining."""
        rank = view.registration.id.key
        if view.registration.role is Role.DECODE and not self._connections.is_connected(rank):
            return False
        is_well = self._balance.liveness(rank) in (Liveness.LIVE, Liveness.DRAINING)
        return is_well and view.state is RankState.LIVE

    def status(self) -> list[RankStatus]:
        return [self._status(view) for role in (Role.DECODE, Role.PREFILL) for view in self.ranks(role)]

    def trust(self, rank: RankKey) -> float:
        """Return how far the index can be trusted about the blocks of the rank, from 0 to 1; see Trust."""
        return self._balance.trust.of(rank, self._balance.clock())

    def resume_trust(self, rank: RankKey) -> float:
        """Return how far the index can be trusted about the checkpoints of the rank, from 0 to 1."""
        return self._balance.resume_trust.of(rank, self._balance.clock())

    def num_resumable(self, rank: Registration) -> int | None:
        """Return how many index blocks end in a checkpoint, or None where the rank can resume anywhere."""
        if not rank.reports_checkpoints:
            return None
        return self._mirror.index.checkpoints.num_blocks(rank.id.key)

    def max_context_tokens(self) -> int:
        """Return the longest context of any decode rank; where decode ranks compute no prompts, at most one
        more than the longest prompt of any prefill rank. Raises Unavailable where there is no decode rank."""
        if not self.ranks(Role.DECODE):
            raise Unavailable("no decode rank is registered")
        return self._max_context_tokens

    @property
    def takes_turns(self) -> bool:
        """Return whether at every rank a tenant with few requests goes before another's many."""
        self._refresh()
        return self._takes_turns

    def length_means(
        self, num_tokens: int, output_tokens: int, max_tokens: int | None
    ) -> FinishReason | None:
        """Return what a decode rank's LENGTH means to the client, or None where another rank holds more than
        these tokens of prompt and output together, so that the request can continue there."""
        self._refresh()
        return length_means(
            num_tokens=num_tokens,
            output_tokens=output_tokens,
            max_tokens=max_tokens,
            model_tokens=self._model_context_tokens,
            longest_tokens=self._max_context_tokens,
        )

    def adapters(self) -> Mapping[str, Adapter]:
        self._refresh()
        return self._adapters

    async def hash(self, ids: "array[int]", scope: str, more_tokens: int | None = None) -> HashedPrompt:
        """Hash a prompt, off the loop where it is long. At most `more_tokens` are to be generated."""
        if len(ids) < _LONG_PROMPT:
            return self._hash(ids, scope, more_tokens)
        return await asyncio.to_thread(self._hash, ids, scope, more_tokens)

    def check_room(self, max_wait_s: float, answers: int = 1) -> None:
        """Raise NoCapacity if this many answers would wait longer than `max_wait_s` on every rank."""
        self._refresh()
        plans = self._known_plans
        self._placer.check_waits(Asked(_SHORTEST.hashes, 1, plans, max_wait_s=max_wait_s, answers=answers))

    def check_usable(self, adapter: Adapter | None = None) -> None:
        """Raise Unavailable, with the reason, while no request could be placed. Full ranks are usable."""
        try:
            self.place(replace(_SHORTEST, adapter=adapter), "", frozenset())
        except NoCapacity as error:
            raise Unavailable(str(error)) from error

    def place(
        self,
        prompt: HashedPrompt,
        conversation_id: str,
        excluded: frozenset[RankId],
        max_wait_s: float = math.inf,
    ) -> Placed:
        """Choose the ranks and the plan for a prompt that may wait at most `max_wait_s`. Raises NoCapacity,
        with how long it would wait, or Unavailable, with why no rank can take it now."""
        asked = self._asked(prompt, conversation_id, excluded, max_wait_s)
        return self._placed(asked, prompt, self._placer.place(asked, self._tie()))

    def place_at(
        self, prompt: HashedPrompt, conversation_id: str, excluded: frozenset[RankId], rank: RankId
    ) -> Placed:
        """Place a prompt at this decode rank only, however long it waits there. Raises Unavailable."""
        asked = replace(self._asked(prompt, conversation_id, excluded), at=rank)
        return self._placed(asked, prompt, self._placer.place(asked, self._tie()))

    def siblings(self, ranks: Iterable[RankId]) -> frozenset[RankId]:
        """Return these ranks and all known ranks of their workers."""
        workers, known = {rank.worker for rank in ranks}, self._mirror.ranks.items()
        return frozenset(ranks).union(view.registration.id for key, view in known if key.worker in workers)

    def explain(self, prompt: HashedPrompt, conversation_id: str, max_wait_s: float) -> Explained:
        """Compare every rank for a prompt. Raises Unavailable where the ranks have no plan in common."""
        asked = self._asked(prompt, conversation_id, frozenset(), max_wait_s)
        carried = self._placer.carried_bytes(asked.prompt_tokens)
        return Explained(self._placer.explain(asked, self._tie()), asked.pinned, self.degraded, carried)

    def sent(self, request_id: str, conversation_id: str, placed: Placed) -> None:
        """Count a request that was sent, and pin its conversation."""
        chosen = placed.decision.chosen
        prompt = placed.prompt
        self._placer.sent(request_id, prompt.hashes, len(prompt.ids), placed.decision, prompt.reusable_tokens)
        if conversation_id:
            prefill = chosen.prefill
            name, prefill_id = self._pin_name(conversation_id), prefill.id if prefill is not None else None
            self._pins.pin(name, chosen.decode.id, prefill_id)

    def admitted(self, request_id: str, placed: Placed, admitted: Admitted) -> None:
        """Learn from the hit that the decode rank really had, and correct the index."""
        self._placer.outcomes.admitted(request_id, placed.prompt.hashes, placed.decision.chosen, admitted)

    def finished(self, placed: Placed, all_ids: "array[int]") -> None:
        """Note that its decode rank will soon report that it holds the prompt and the whole answer."""
        prompt = placed.prompt
        self._placer.outcomes.finished(prompt.hashes, placed.decision.chosen, all_ids, prompt.seed)

    def ended(self, request_id: str) -> None:
        self._placer.outcomes.ended(request_id)

    def failed(self, incarnation: RankId) -> None:
        """Penalize this rank for a failed request. A later incarnation is not affected."""
        if self._view_of(incarnation) is not None:
            self._balance.failed(incarnation.key)

    def dead(self, incarnation: RankId) -> None:
        """Forget a rank whose lease has expired and that fails health checks, unless its stream still
        reports. A rank that is stopped while it has no key answers that it does not serve, and cannot
        register as draining; its running requests must be able to end."""
        view = self._view_of(incarnation)
        if view is not None:
            self._balance.failed(incarnation.key)
            if not view.registered and not self._speaks(incarnation):
                self._mirror.mark_dead(incarnation.key)

    def _speaks(self, incarnation: RankId) -> bool:
        client = self._connections.clients.get(incarnation.key)
        return client is not None and client.address.id == incarnation and client.connected.is_set()

    def _view_of(self, incarnation: RankId) -> RankView | None:
        view = self._mirror.ranks.get(incarnation.key)
        return view if view is not None and view.registration.id == incarnation else None

    def _hash(self, ids: "array[int]", scope: str, more_tokens: int | None) -> HashedPrompt:
        seed, index_block = scope_seed(self.settings.model_name, scope), self.settings.placer.index_block
        hashes = tuple(sequence_hashes(ids, index_block, seed))
        return HashedPrompt(ids, seed, hashes, None if more_tokens is None else len(ids) + more_tokens)

    def _asked(
        self,
        prompt: HashedPrompt,
        conversation_id: str,
        excluded: frozenset[RankId],
        max_wait_s: float = math.inf,
    ) -> Asked:
        self._refresh()
        self._placer.set_share(Share(*self._mirror.place_among_routers(self.settings.model_name)))
        return Asked(
            prompt.hashes,
            len(prompt.ids),
            self._plans(),
            pinned=self._pinned(conversation_id),
            tried=excluded,
            max_wait_s=max_wait_s,
            most_tokens=self._most_tokens(prompt),
            answers=prompt.answers,
            reusable_tokens=prompt.reusable_tokens,
            adapter=prompt.adapter,
        )

    def _most_tokens(self, prompt: HashedPrompt) -> int | None:
        """Return the limit of prompt and answer, which the model's context limits, too."""
        most = prompt.most_tokens
        return None if most is None else min(most, self._model_context_tokens)

    def _placed(self, asked: Asked, prompt: HashedPrompt, decision: Decision) -> Placed:
        chosen = decision.chosen
        prefill, source = None, None
        if chosen.prefill is not None:
            prefill = self._mirror.ranks[chosen.prefill.id.key].registration.address
        if chosen.source is not None:
            address = self._mirror.ranks[chosen.source.id.key].registration.address
            source = PullSource(address, chosen.source.tokens)
        decode = chosen.decode.id.key
        client = self._connections.clients[decode]
        moves_penalties = NO_MOVED_PENALTIES not in self._mirror.ranks[decode].registration.capabilities
        held, reused = decision.longest_decode_hit, decision.longest_decode_reuse
        best = {
            Role.DECODE: reused if prefill is None else held,
            Role.PREFILL: decision.longest_prefill_reuse,
        }
        told = best, moves_penalties, self._placer.coming(asked, decision)
        return Placed(decision, client, prefill, source, asked.pinned, prompt, self.degraded, *told)

    def _plans(self) -> frozenset[Plan]:
        plans = self._known_plans
        if not plans:
            raise Unavailable("only plan local may be chosen, and the decode ranks compute no prompts")
        return plans

    def _status(self, view: RankView) -> RankStatus:
        key, balance = view.registration.id.key, self._balance
        return RankStatus(
            view,
            self._mirror.index.num_blocks(key),
            self.num_resumable(view.registration),
            self._mirror.progress(key),
            self.trust(key),
            self.resume_trust(key),
            balance.now(key),
            self._placer.exclusion(view.registration),
            self._mirror.unregistered_s(view),
            self._mirror.rank_staleness_s(key),
        )

    def _pin_name(self, conversation_id: str) -> str:
        """Include the model's name, as routers of other models keep their pins in the same place."""
        return f"{self.settings.model_name}\0{conversation_id}"

    def _pinned(self, conversation_id: str) -> RankKey | None:
        if not conversation_id:
            return None
        name = self._pin_name(conversation_id)
        pin = self._pins.recent(name) or self._mirror.pin(name)
        if pin is None:
            return None
        view = self._mirror.ranks.get(pin.decode.key)
        # A new incarnation of the rank holds nothing of the conversation.
        return pin.decode.key if view is not None and view.registration.id == pin.decode else None

    def _changed(self, _rank: RankKey) -> None:
        if not self._outdated:
            self._outdated = True
            asyncio.get_running_loop().call_soon(self._refresh)

    def _refresh(self) -> None:
        """Open a stream to every new rank, and retire those of ended incarnations: a draining rank is
        forgotten when its lease expires, and so is an earlier incarnation, but either may still report."""
        if not self._outdated:
            return
        self._outdated = False
        lives = {key: view.registration.id for key, view in self._mirror.ranks.items()}
        for rank, incarnation in self._lives.items():
            if lives.get(rank) != incarnation:
                self._balance.forget(rank)  # A new incarnation has no past.
        self._lives = lives
        self._note_missed()
        for role in self._ranks:
            self._ranks[role] = self._views(role)
        self._note_ranks(*([view.registration for view in self._ranks[role]] for role in _ROLES))
        self._connections.follow(self._wanted(Role.DECODE), self._wanted(Role.PREFILL))
        placeable = [[view.registration for view in self._ranks[role]] for role in _ROLES]
        if placeable != self._placeable:
            self._placeable = placeable
            self._placer.set_ranks(*placeable)

    def _note_ranks(self, decodes: Sequence[Registration], prefills: Sequence[Registration]) -> None:
        """Note the limits that all ranks that stay have in common: a draining rank takes nothing new."""
        if decodes:  # Without one it stays as it was.
            self._model_context_tokens = max(rank.model_tokens for rank in decodes)
        decodes, prefills = staying(decodes), staying(prefills)
        self._adapters = common_adapters(decodes, prefills)
        self._takes_turns = not any(NO_TENANT_TURNS in rank.capabilities for rank in (*decodes, *prefills))
        only_remote = any(REMOTE_ONLY in rank.capabilities for rank in decodes)
        self._known_plans = self.settings.plans - {Plan.LOCAL} if only_remote else self.settings.plans
        self._max_context_tokens = max((rank.max_context_tokens for rank in decodes), default=0)
        if self._known_plans == {Plan.REMOTE} and prefills:
            longest_prompt = max(rank.max_context_tokens for rank in prefills)
            self._max_context_tokens = min(self._max_context_tokens, longest_prompt + 1)

    def _note_missed(self) -> None:
        now = self._balance.clock()
        for role, views in self._ranks.items():
            for view in views:
                if view.registration.id.key not in self._lives and not view.draining:
                    self._missed[view.registration.id.key] = role, now
        for rank in self._lives.keys() & self._missed.keys():
            del self._missed[rank]

    def _views(self, role: Role) -> list[RankView]:
        model = self.settings.model_name
        views = sorted(self._mirror.ranks.items(), key=lambda item: item[0])
        return [v for _, v in views if v.registration.role is role and v.registration.model == model]

    def _wanted(self, role: Role) -> dict[RankKey, RankAddress]:
        return {view.registration.id.key: view.registration.address for view in self._ranks[role]}

    def _open_client(self, address: RankAddress) -> DecodeClient:
        rank = address.id.key
        on_load, on_lost = partial(self._report, rank), partial(self.failed, address.id)
        return DecodeClient(address, self._tls, on_load, on_lost, self._placer.expect, self._coalescing)

    def _open_watch(self, address: RankAddress) -> PrefillWatch:
        rank = address.id.key
        on_lost, on_silent = partial(self._balance.unreported, rank), partial(self._balance.fell_silent, rank)
        return PrefillWatch(address, self._tls, partial(self._report, rank), on_lost, on_silent)

    def _report(self, rank: RankKey, load: RankLoad) -> None:
        self._balance.report(rank, load)
        self._mirror.mark_live(rank)  # A stream that reports counts as a passed health check.
