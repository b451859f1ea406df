"""A router's copy of the index: ranks, blocks and pins, read from etcd's watch and never from etcd itself.

a rank:  --registration--> LIVE --its key goes (lease lapsed)--> SUSPECT, blocks kept --key comes back--> LIVE
                            |  ^                                   |  ^
                            |  +--------- mark_live ---------------+  |
                            +------------ mark_dead (key is there) ---+
                                                                   +--mark_dead (key is gone)--> forgotten
         --registration of a new generation--> LIVE, blocks of the old life forgotten
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

from services.errors import IsthmusError, ProtocolError
from services.index.etcd import Etcd
from services.index.keys import (
    ClusterKeys,
    HeadKey,
    LogKey,
    PinKey,
    ProbeKey,
    RegistrationKey,
    SnapshotKey,
    pin_name,
)
from services.index.pins import Pin, decode_pin
from services.index.prefix_codec import decode_record
from services.index.prefix_index import PrefixIndex
from services.index.probe import Probe
from services.index.rank_history import RankHistory, Step, Verdict
from services.index.registry import Registration, decode_registration
from services.index.watch import KeyChange, PrefixWatch, WatchBatch
from services.kv.types import RankId, RankKey

logger = logging.getLogger(__name__)

Subscriber = Callable[[RankKey], None]
_RecordKey = HeadKey | SnapshotKey | LogKey


class RankState(Enum):
    LIVE = "live"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class RankView:
    """`since_s`: when it took its state, on the mirror's clock. `registered`: its key is in etcd."""

    registration: Registration
    state: RankState
    since_s: float
    registered: bool = True


class Mirror:
    """Owned by one event loop; `ranks`, `pins` and `index` are for reading.

    `ready` is set after the first listing and stays set. `torn_values` counts values that nobody of
    ours can have written, or not whole; they are skipped.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        router: str,
        *,
        max_pins: int = 100_000,
        idle_timeout_s: float = 10.0,
        probe_interval_s: float = 1.0,
    ) -> None:
        self.index = PrefixIndex()
        self.ranks: dict[RankKey, RankView] = {}
        self.pins: OrderedDict[str, Pin] = OrderedDict()  # by keys.pin_name(conversation)
        self.ready = asyncio.Event()
        self.torn_values = 0
        self.resyncs = 0
        self._etcd = etcd
        self._keys = keys
        self._max_pins = max_pins
        self._watch = PrefixWatch(etcd, keys.prefix, idle_timeout_s=idle_timeout_s)
        self._probe = Probe(etcd, keys, router, interval_s=probe_interval_s)
        self._histories: dict[RankKey, RankHistory] = {}
        self._subscribers: list[Subscriber] = []
        self._delta_age_s = 0.0

    @property
    def revision(self) -> int:
        """Of etcd, up to which the mirror has read."""
        return self._watch.revision

    @property
    def listings(self) -> int:
        return self._watch.listings

    @property
    def degraded(self) -> str | None:
        """Why the mirror may be behind; None while it follows etcd. Routing goes on from memory."""
        trouble = self._watch.trouble or self._probe.trouble
        return trouble if self.ready.is_set() else f"the index has not been read yet: {trouble}"

    @property
    def staleness_s(self) -> float:
        """How far the index is behind the ranks: the last delta's age when written, plus the way here."""
        return self._delta_age_s + self._probe.delay_s

    def is_current(self, rank: RankKey) -> bool:
        """A snapshot of the rank has been read, and no delta is missing."""
        history = self._histories.get(rank)
        return history is not None and history.current

    def match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        """See PrefixIndex.match_all."""
        return self.index.match_all(hashes)

    def pin(self, conversation: str) -> Pin | None:
        return self.pins.get(pin_name(conversation))

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` whenever a rank appears, changes or is forgotten. Returns how to stop that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def mark_live(self, rank: RankKey) -> None:
        """The rank answered a direct health check."""
        view = self.ranks.get(rank)
        if view is not None and view.state is RankState.SUSPECT:
            self._set_view(rank, replace(view, state=RankState.LIVE, since_s=self._etcd.clock()))

    def mark_dead(self, rank: RankKey) -> None:
        """The rank failed a direct health check: suspect while it is registered, forgotten otherwise."""
        view = self.ranks.get(rank)
        if view is None:
            return
        if view.registered:
            self._suspect(rank, view)
        else:
            self.index.remove_rank(rank)
            self._histories.pop(rank, None)
            del self.ranks[rank]
            self._tell(rank)

    async def run(self) -> None:
        """Until cancelled. Raises an ExceptionGroup with ConfigError when etcd refuses us for good."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._probe.run())

    async def _follow(self) -> None:
        async with aclosing(self._watch.batches()) as batches:
            async for batch in batches:
                await self._apply(batch)
                if batch.listed:
                    self.ready.set()

    async def _apply(self, batch: WatchBatch) -> None:
        if batch.rewound:
            for history in self._histories.values():
                history.restart()
        changes: Sequence[KeyChange] = batch.changes
        if batch.listed:
            # One revision, so any order will do: who lives is known before what the dead have left.
            changes = sorted(changes, key=lambda change: not self._is_registration(change))
        for change in changes:
            try:
                await self._apply_change(change)
            except ProtocolError as error:
                self.torn_values += 1
                logger.warning("mirror.skipped key=%s error=%s", change.key, error)

    def _is_registration(self, change: KeyChange) -> bool:
        return isinstance(self._keys.parse(change.key), RegistrationKey)

    async def _apply_change(self, change: KeyChange) -> None:
        match self._keys.parse(change.key):
            case RegistrationKey(rank):
                self._apply_registration(rank, change.value)
            case (HeadKey() | SnapshotKey() | LogKey()) as key:
                # What was deleted has been summed up by a snapshot, or its lease has lapsed.
                if change.value is not None:
                    await self._apply_record(key, change.value, change.mod_revision)
            case PinKey(name):
                self._apply_pin(name, change.value)
            case ProbeKey(router):
                self._probe.seen(router, change.value or b"")
            case None:
                self.torn_values += 1

    def _apply_registration(self, rank: RankKey, value: bytes | None) -> None:
        if value is None:
            if (view := self.ranks.get(rank)) is not None:
                self._suspect(rank, replace(view, registered=False))
            return
        registration = decode_registration(value)
        if registration.id.key != rank:
            raise ProtocolError(f"the registration of {registration.id} lies at {rank}")
        self._history(rank).expect(registration.id.generation)
        if self.index.generation(rank) != registration.id.generation:
            self.index.remove_rank(rank)
        self._set_view(rank, RankView(registration, RankState.LIVE, self._etcd.clock()))

    async def _apply_record(self, key: _RecordKey, value: bytes, revision: int) -> None:
        step = self._history(key.rank).offer(decode_record(key, value), revision)
        self._take(key.rank, step)
        if step.verdict is Verdict.RESYNC:
            await self._read_again(key.rank)
        if isinstance(key, SnapshotKey):
            await asyncio.sleep(0)  # up to 1 MiB was unpacked: let the requests have a turn

    def _take(self, rank: RankKey, step: Step) -> None:
        if step.verdict is not Verdict.APPLY or step.generation is None:
            return
        life = RankId(rank.worker, rank.rank, step.generation)
        if step.snapshot is not None:
            self.index.apply_snapshot(life, step.snapshot)
        for delta in step.deltas:
            self.index.apply_delta(life, delta.added, delta.removed)
            self._delta_age_s = delta.age_s

    async def _read_again(self, rank: RankKey) -> None:
        """A delta is missing. Should it be lost, the rank's next snapshot makes up for it."""
        self.resyncs += 1
        logger.warning("mirror.resync rank=%s", rank)
        try:
            _, kvs = await self._etcd.snapshot(self._keys.rank_prefix(rank))
        except IsthmusError as error:
            logger.warning("mirror.resync_failed rank=%s error=%s", rank, error)
            return
        for kv in kvs:
            key = self._keys.parse(kv.key)
            if isinstance(key, HeadKey | SnapshotKey | LogKey):
                try:
                    self._take(rank, self._history(rank).offer(decode_record(key, kv.value), kv.mod_revision))
                except ProtocolError:
                    continue  # counted when the watch delivered it

    def _apply_pin(self, name: str, value: bytes | None) -> None:
        self.pins.pop(name, None)
        if value is None:
            return
        self.pins[name] = decode_pin(value)
        if len(self.pins) > self._max_pins:
            self.pins.popitem(last=False)

    def _history(self, rank: RankKey) -> RankHistory:
        return self._histories.setdefault(rank, RankHistory())

    def _suspect(self, rank: RankKey, view: RankView) -> None:
        since_s = view.since_s if view.state is RankState.SUSPECT else self._etcd.clock()
        self._set_view(rank, replace(view, state=RankState.SUSPECT, since_s=since_s))

    def _set_view(self, rank: RankKey, view: RankView) -> None:
        if self.ranks.get(rank) != view:
            self.ranks[rank] = view
            self._tell(rank)

    def _tell(self, rank: RankKey) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber(rank)
