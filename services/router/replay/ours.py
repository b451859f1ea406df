"""The router's own placement in the simulator."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from services.index.pins import PinSettings
from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import scope_seed, sequence_hashes
from services.router.placement.candidates import Asked
from services.router.placement.decision import Decision
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.router.ranks.rank_order import Share
from services.router.replay.events import Events
from services.router.replay.ranks import MODEL, DecodeRank, Rank
from services.router.replay.setting import Timing
from services.router.replay.workload import Job, TraceRequest
from services.values.kv import BlockHash, CacheEvents, GroupKind, KvGroup, KvLayout
from services.values.rank import Plan, RankAddress, RankId, RankKey, Role
from services.values.rank_reports import LENDS, NO_CHECKPOINTS, PULLS, Coming, Registration
from services.values.request import Admitted

_SETTINGS = PinSettings()


@dataclass(frozen=True, slots=True)
class _Pin:
    rank: RankKey
    written_s: float
    seen_s: float  # by the other routers
    router: int


class Pins:
    """These are the pins of all routers, as etcd holds them.

    They are kept by PinWriter's rules in virtual time: written when a conversation moves, and again when half
    of their life is over; gone when it is. A writer sees its own at once.
    """

    def __init__(self, events: Events, staleness_s: float) -> None:
        """The other routers see one `staleness_s` after it was written."""
        self._events = events
        self._delay_s = _SETTINGS.gather_s + staleness_s
        self._pins: dict[str, list[_Pin]] = {}  # the last two of a conversation

    def of(self, conversation: str, router: int) -> RankKey | None:
        pin = self._seen(conversation, router)
        return None if pin is None else pin.rank

    def pin(self, conversation: str, rank: RankKey, router: int) -> None:
        last, now = self._seen(conversation, router), self._events.now
        if last is not None and last.rank == rank and now - last.written_s < _SETTINGS.life_s / 2:
            return
        pins = self._pins.setdefault(conversation, [])
        pins.append(_Pin(rank, now, now + self._delay_s, router))
        del pins[:-2]

    def _seen(self, conversation: str, router: int) -> _Pin | None:
        now = self._events.now
        for pin in reversed(self._pins.get(conversation, ())):
            if pin.router == router or pin.seen_s <= now:
                return pin if now - pin.written_s < _SETTINGS.life_s else None
        return None


_SEED = scope_seed(MODEL)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    decodes: Sequence[DecodeRank]
    prefills: Sequence[Rank]
    timing: Timing
    weights: PriceWeights
    plans: frozenset[Plan]


class Ours:
    """Placer, Balance and PrefixIndex as the router has them, fed by the ranks' reports and cache events."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        events: Events,
        share: Share,
        pins: Pins,
        tells: bool = True,
        pulls: bool = True,
        draw: int = 0,
    ) -> None:
        """Ranks are taken to go on wherever they hold unless `tells` is set, and none is told of a source
        unless `pulls` is. Ties are drawn from the router and `draw`."""
        timing = fleet.timing
        self.index, self.below = PrefixIndex(), PrefixIndex()
        self._balance = Balance(
            events.clock, prior_bandwidth=timing.bytes_per_s, chunk_tokens=timing.chunk_tokens
        )
        settings = PlacerSettings(
            timing.block_tokens, timing.chunk_tokens, fleet.weights, pulls and not timing.state_bytes
        )
        self._deltas: Counter[RankKey] = Counter()  # taken in
        self._placer = Placer(
            settings, self.index, self._balance, self._deltas.__getitem__, lambda _: True, self.below
        )
        self._placer.set_ranks(
            [_registration(rank, Role.DECODE, timing, tells) for rank in fleet.decodes],
            [_registration(rank, Role.PREFILL, timing, tells) for rank in fleet.prefills],
        )
        self._placer.set_share(share)
        for rank in (*fleet.decodes, *fleet.prefills):
            self.index.apply_snapshot(rank.id, ())
            if rank.tier is not None:
                self.below.take_snapshot(rank.id, ())
            self._balance.report(rank.id.key, rank.load())
        self._ranks: dict[RankId, Rank] = {rank.id: rank for rank in (*fleet.decodes, *fleet.prefills)}
        self._block_tokens = timing.block_tokens
        self._plans = fleet.plans
        self._pins = pins
        self._router = share.index
        self._random = Random(share.index + share.of * draw)
        self._placed: dict[int, tuple[Sequence[BlockHash], Decision]] = {}

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        asked = self._asked(request)
        decision = self._placer.place(asked, self._random.random())
        self._placed[request.number] = asked.hashes, decision
        return ranks_of(decision)

    def _asked(self, request: TraceRequest) -> Asked:
        hashes = sequence_hashes(request.blocks, 1, _SEED)
        pinned = self._pins.of(request.session, self._router)
        return Asked(hashes, request.prompt_tokens, self._plans, pinned)

    def sent(self, job: Job) -> None:
        hashes, decision = self._placed[job.request.number]
        if (source := decision.chosen.source) is not None:
            job.source, job.source_blocks = self._ranks[source.id], source.tokens // self._block_tokens
        self._placer.sent(str(job.request.number), hashes, job.request.prompt_tokens, decision)
        decode = decision.chosen.decode.id.key
        self._pins.pin(job.request.session, decode, self._router)

    def coming(self, request: TraceRequest) -> Coming | None:
        _, decision = self._placed[request.number]
        return self._placer.coming(self._asked(request), decision)

    def expect(self, coming: Coming) -> None:
        self._placer.expect(coming)

    def first_token(self, job: Job) -> None:
        hashes, decision = self._placed[job.request.number]
        self._placer.outcomes.admitted(
            str(job.request.number), hashes, decision.chosen, _admitted(job, decision.chosen.plan)
        )

    def ended(self, job: Job) -> None:
        _, decision = self._placed.pop(job.request.number)
        if job.request.answered:  # as Outcomes.finished predicts it, of token ids
            hashes = sequence_hashes(job.request.answered, 1, _SEED)
            self._balance.predict(decision.chosen.decode.id.key, hashes)
        self._placer.outcomes.ended(str(job.request.number))

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        """A delta of the rank's has come."""
        resumable = taken.resumable_stored, taken.resumable_removed
        self.index.apply_delta(rank, taken.stored, taken.removed, *resumable)
        self._deltas[rank.key] += 1

    def told_below(self, rank: RankId, taken: CacheEvents) -> None:
        self.below.apply_delta(rank, taken.stored, taken.removed)

    def loaded(self, rank: Rank) -> None:
        self._balance.report(rank.id.key, rank.load())


def ranks_of(decision: Decision) -> tuple[int, int | None]:
    chosen = decision.chosen
    return chosen.decode.id.rank, None if chosen.prefill is None else chosen.prefill.id.rank


def _registration(rank: Rank, role: Role, timing: Timing, tells: bool) -> Registration:
    groups = (
        KvGroup(GroupKind.FULL_ATTENTION, (1,), 1, 1, "bfloat16"),
        KvGroup(GroupKind.RECURRENT, (0,), 0, 0, "bfloat16", unit_bytes=timing.state_bytes),
    )
    carried = groups if timing.state_bytes else ()
    return Registration(
        role=role,
        address=RankAddress(rank.id, "sim:1"),
        layout=KvLayout(timing.block_tokens, timing.block_bytes, 1, groups=carried),
        model=MODEL,
        max_context_tokens=1 << 20,
        total_pages=rank.cache.num_pages,
        engine=MODEL,
        capabilities=(LENDS, PULLS) if tells else (LENDS, PULLS, NO_CHECKPOINTS),
    )


def _admitted(job: Job, plan: Plan) -> Admitted:
    remote = plan is Plan.REMOTE
    tokens, timing = job.request.prompt_tokens, job.decode.timing
    block_tokens = timing.block_tokens
    carried_bytes = timing.state_bytes if remote else 0
    return Admitted(
        prompt_tokens=tokens,
        decode_prefix_len=min((job.decode_blocks if remote else job.resumed_blocks) * block_tokens, tokens),
        prefill_prefix_len=min(job.resumed_blocks * block_tokens, tokens) if remote else 0,
        computed_tokens=job.computed_tokens,
        kv_bytes_moved=job.delta_tokens * timing.kv_bytes_per_token + carried_bytes,
        kv_bytes_prompt=tokens * timing.kv_bytes_per_token + carried_bytes,
        carried_bytes={GroupKind.RECURRENT.value: carried_bytes} if carried_bytes else {},
        decode_queue_s=job.decode_queue_s,
        prefill_queue_s=job.prefill_queue_s,
        prefill_compute_s=job.computed_s - job.began_s,
        transfer_s=job.transfer_s,
        plan=plan,
        brought_tokens=job.brought_blocks * block_tokens,
        pulled=job.pulled,
        rank_tokens=job.rank_tokens,
    )
