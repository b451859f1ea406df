"""A mirror is a router's copy of the index: ranks, blocks and pins, all read from etcd's watch.

a rank:  --registration--> LIVE --its key goes (lease lapsed)--> SUSPECT, blocks kept --key comes back--> LIVE
                            |  ^                                   |  ^
                            |  +--------- mark_live ---------------+  |
                            +------------ mark_dead (key is there) ---+
                                                                   +--mark_dead (key is gone)--> forgotten
         --registration of a new generation--> LIVE, blocks of the old incarnation forgotten
         --registration says draining--its key goes--> forgotten: the rank has left on purpose

The ranks are listed first, so that they can be used while millions of blocks are still being read.

A probe measures how long etcd takes from a router's own put until its own watch delivers it. Its value is a
number and, after a blank, the fleet that the router places on: the model it serves. By their probes routers
know how many they are.
"""

import asyncio
import gc
import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

from services.etcd.etcd_client import Etcd
from services.etcd.etcd_errors import LeaseNotFound
from services.etcd.lease import BucketLease
from services.etcd.watch import KeyChange, PrefixWatch, WatchBatch
from services.index.degraded import Degraded, reason_of
from services.index.joining import decode_registration
from services.index.keys import (
    ClusterKeys,
    HeadKey,
    LogKey,
    PinKey,
    ProbeKey,
    RegistrationKey,
    SchemaKey,
    SnapshotKey,
    pin_name,
)
from services.index.pins import KnownPin, Pin, PinMirror, decode_pin
from services.index.read.block_mirror import BlockMirror, RankProgress
from services.index.records import Staleness
from services.values.errors import IsthmusError, ProtocolError
from services.values.rank import RankKey
from services.values.rank_reports import Registration

logger = logging.getLogger(__name__)

_MOST_NAME = 160  # This much of a router's name is in those of its further probes.
_GONE_S = 5.0  # The probe of a router that has stopped remains until its lease lapses.


class Probe:
    """It puts a number under the router's probe key periodically. `trouble` is the error of a failed put."""

    def __init__(
        self, etcd: Etcd, keys: ClusterKeys, router: str, *, fleet: str = "", interval_s: float = 1.0
    ) -> None:
        self.trouble: IsthmusError | None = None
        self._etcd = etcd
        self._router = router
        self._keys = keys
        self._fleet = fleet
        self._names = {fleet: router}  # This router has a probe for each fleet, by which that counts it.
        self._joined = Counter({fleet: 1})
        self._interval_s = interval_s
        self._lease = BucketLease(etcd, life_s=60.0, bucket_s=60.0)
        self._number = 0
        # This is when the probe was put that the watch has not delivered yet.
        self._put_at: float | None = None
        self._last_delay_s = 0.0
        self._seen: dict[str, tuple[str, float]] = {}  # Each probe has a fleet, and when it came last.

    @property
    def delay_s(self) -> float:
        """Return the delay of the last probe that came back, or the pending one's age, if that is more."""
        under_way_s = 0.0 if self._put_at is None else self._etcd.clock() - self._put_at
        return max(self._last_delay_s, under_way_s)

    def join(self, fleet: str) -> None:
        """Count among the routers of this fleet, too."""
        self._joined[fleet] += 1
        self._names.setdefault(fleet, f"{self._router[:_MOST_NAME]}@{pin_name(fleet)}")

    def leave(self, fleet: str) -> None:
        """Undo one `join`."""
        self._joined[fleet] -= 1
        if not self._joined[fleet]:
            del self._joined[fleet], self._names[fleet]

    def place_among_routers(self, fleet: str | None = None) -> tuple[int, int]:
        """Return our place, from 0, among the fleet's routers sorted by name, and the number of routers.

        A router counts if its last probe came about as late as ours; thus all stay while etcd is away.
        """
        fleet = self._fleet if fleet is None else fleet
        own = self._names.get(fleet)
        if own is None:  # It has left while a call is not over.
            return 0, 1
        since_s = self._seen.get(self._router, ("", 0.0))[1] - _GONE_S
        others = [
            name
            for name, (its, seen_s) in self._seen.items()
            if its == fleet and seen_s > since_s and name != own
        ]
        return sum(name < own for name in others), len(others) + 1

    def seen(self, router: str, value: bytes | None) -> None:
        """Note that the watch has delivered a probe; None means that it was deleted."""
        if value is None:
            self._seen.pop(router, None)
            return
        fleet = value.partition(b" ")[2].decode(errors="replace")
        self._seen[router] = fleet, self._etcd.clock()
        # An older probe of ours does not measure the present delay.
        if router == self._router and self._put_at is not None and value == self._value(self._fleet):
            self._last_delay_s = self._etcd.clock() - self._put_at
            self._put_at = None

    async def run(self) -> None:
        """Put probes for ever. One that has not come back is put again, and counts from the first put."""
        while True:
            try:
                await self._put()
                self.trouble = None
            except IsthmusError as error:
                self.trouble = error
                logger.warning("probe_failed error=%s", error)
            await asyncio.sleep(self._interval_s)

    async def _put(self) -> None:
        if self._put_at is None:
            self._number += 1
            self._put_at = self._etcd.clock()
        try:
            for fleet, name in tuple(self._names.items()):
                await self._etcd.put(self._keys.probe(name), self._value(fleet), await self._lease.id())
        except LeaseNotFound:
            self._lease.forget()
            raise

    def _value(self, fleet: str) -> bytes:
        return f"{self._number} {fleet}".encode()


Subscriber = Callable[[RankKey], None]
_CHANGE_COST = 64  # One change costs as much as this many hashes.
_BEHIND_S = 10.0
_OF_LATE_S = 10.0
_NOBODY = "nobody"  # This name's probe is never written.


class RankState(Enum):
    LIVE = "live"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class RankView:
    """`since_s` is when it entered its state, on the mirror's clock.

    `registered` means that its key is in etcd; otherwise the key has been missing since `gone_s`.
    """

    registration: Registration
    state: RankState
    since_s: float
    registered: bool = True
    gone_s: float = 0.0

    @property
    def draining(self) -> bool:
        return self.registration.draining

    @property
    def condition(self) -> str:
        return "draining" if self.draining else self.state.value


class Mirror:
    """One event loop owns it; `ranks`, `pins` and `index` are for reading.

    `ranks_known` is set once the registrations have been read, `ready` once everything has. Without a
    `router` it only reads: nothing is written, and etcd's delay is not measured.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        router: str | None,
        *,
        fleet: str = "",
        max_pins: int = 100_000,
        probe_interval_s: float = 1.0,
        observe_staleness: Callable[[float], None] = lambda staleness_s: None,
    ) -> None:
        self.blocks = BlockMirror(etcd, keys, self._reported)
        self.index = self.blocks.index
        # Its records come once a second, and do not count in what `staleness_s` says.
        self.below = BlockMirror(etcd, keys.below, lambda rank, age_s: None)
        self.ranks: dict[RankKey, RankView] = {}
        self.pins = PinMirror(max_pins)
        self.ranks_known = asyncio.Event()
        self.ready = asyncio.Event()
        # This counts values that are damaged or not from our programs; they are skipped.
        self.torn_values = 0
        self._etcd = etcd
        self._keys = keys
        self._observe_staleness = observe_staleness
        self._watch = PrefixWatch(
            etcd,
            keys.prefix,
            first=keys.registrations,
            unremembered=keys.pins,
        )
        self._probe = Probe(etcd, keys, router or _NOBODY, fleet=fleet, interval_s=probe_interval_s)
        self._is_router = router is not None
        self._subscribers: list[Subscriber] = []
        self._staleness = Staleness(_OF_LATE_S)
        self._reported_at: dict[RankKey, float] = {}  # This is when a record of the rank last took effect.

    @property
    def revision(self) -> int:
        return self._watch.revision

    @property
    def listings(self) -> int:
        return self._watch.listings

    @property
    def degraded_reason(self) -> Degraded | None:
        if (trouble := self._watch.trouble or self._probe.trouble) is not None:
            return reason_of(trouble)
        return Degraded.BEHIND if self._probe.delay_s > _BEHIND_S else None

    @property
    def degraded(self) -> str | None:
        """Return `degraded_reason` as a sentence. Routing continues with what is in memory."""
        reason = self.degraded_reason
        if reason is None:
            return None
        trouble = self._watch.trouble or self._probe.trouble or f"no news for {self._probe.delay_s:.0f} s"
        unread = "" if self.ready.is_set() else "the index has not been read yet: "
        return f"{reason.value}: {unread}{trouble}"

    @property
    def staleness_s(self) -> float:
        """Return how far the index is behind the ranks: the greatest age reported, plus etcd's delay."""
        return self._staleness.age_s(self._etcd.clock()) + self._probe.delay_s

    def rank_staleness_s(self, rank: RankKey) -> float:
        """Return how far our knowledge of a rank is behind it.

        This is the age of its last record, if that is recent, or the time for which its records have been
        missing, plus etcd's delay.
        """
        view, progress, now = self.ranks.get(rank), self.progress(rank), self._etcd.clock()
        if view is None:
            return 0.0
        reported_at = self._reported_at.get(rank, -math.inf)
        age_s = progress.age_s if now - reported_at < _OF_LATE_S else 0.0
        missing_s = self.unregistered_s(view) if progress.current else now - max(reported_at, view.since_s)
        return max(age_s, missing_s) + self._probe.delay_s

    def join_fleet(self, fleet: str) -> None:
        """Let the routers of this fleet count this one, too, until `leave_fleet`."""
        self._probe.join(fleet)

    def leave_fleet(self, fleet: str) -> None:
        self._probe.leave(fleet)

    def place_among_routers(self, fleet: str | None = None) -> tuple[int, int]:
        """Return this router's place among those of a fleet that it has joined, and their number."""
        return self._probe.place_among_routers(fleet)

    def progress(self, rank: RankKey) -> RankProgress:
        return self.blocks.progress(rank)

    def pin(self, conversation: str) -> Pin | None:
        known = self.known_pin(pin_name(conversation))
        return known.pin if known else None

    def known_pin(self, name: str) -> KnownPin | None:
        return self.pins.get(name)

    def unregistered_s(self, view: RankView) -> float:
        """Return how long the rank's key, and so its records, have been missing from etcd, or 0."""
        return 0.0 if view.registered else self._etcd.clock() - view.gone_s

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def mark_live(self, rank: RankKey) -> None:
        view = self.ranks.get(rank)
        if view is not None and view.state is RankState.SUSPECT:
            self._set_view(rank, replace(view, state=RankState.LIVE, since_s=self._etcd.clock()))

    def mark_dead(self, rank: RankKey) -> None:
        """Note that the rank failed a direct health check: forget it if its key is gone, else suspect it.

        While etcd is away it is only suspected, because the rank could not register again.
        """
        view = self.ranks.get(rank)
        if view is None:
            return
        if view.registered or self._watch.trouble is not None:
            self._suspect(rank, view)
        else:
            self._forget(rank)

    async def run(self) -> None:
        """Follow etcd until cancelled. Raises an ExceptionGroup of ConfigError if it refuses us at first."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                if self._is_router:
                    group.create_task(self._probe.run())
        finally:
            self.blocks.close()
            self.below.close()

    async def _follow(self) -> None:
        async with aclosing(self._watch.batches()) as batches:
            async for batch in batches:
                async with self.blocks.lock, self.below.lock:
                    await self._apply(batch)
                if not batch.first:
                    self.ranks_known.set()
                if batch.listed and batch.complete:
                    self.ready.set()

    async def _apply(self, batch: WatchBatch) -> None:
        if batch.rewound:
            self.blocks.restart()
            self.below.restart()
        if batch.first:  # This is the first page of a listing.
            self.pins.begin_listing()
        for change in batch.changes:
            try:
                await self._apply_change(change)
            except ProtocolError as error:
                self.torn_values += 1
                logger.warning("index_value_skipped key=%s error=%s", change.key, error)
            await self.blocks.give_way(_CHANGE_COST)
        if batch.complete:
            self.blocks.look_for_gaps()
            self.below.look_for_gaps()
            if batch.listed:
                self.pins.end_listing()

    async def _apply_change(self, change: KeyChange) -> None:
        match self._keys.parse(change.key):
            case (HeadKey() | SnapshotKey() | LogKey()) as key:
                # A deletion needs no handling: a snapshot has replaced the record, or its lease has lapsed.
                await (self.below if key.below else self.blocks).apply(key, change)
                if isinstance(key, HeadKey) and change.value is None and key.rank not in self.ranks:
                    self._forget(key.rank)
            case PinKey(name):
                self._apply_pin(name, change)
            case RegistrationKey(rank):
                self._apply_registration(rank, change.value)
            case ProbeKey(router):
                self._probe.seen(router, change.value)
            case SchemaKey():
                pass  # joining.py compares the schema.
            case None:
                self.torn_values += change.value is not None

    def _reported(self, rank: RankKey, age_s: float) -> None:
        self._reported_at[rank] = self._etcd.clock()
        if self.ready.is_set():  # Records of the first listing may be hours old.
            self._staleness.reported(age_s, self._etcd.clock())
            self._observe_staleness(age_s + self._probe.delay_s)

    # -- ranks ------------------------------------------------------------------------------------

    def _apply_registration(self, rank: RankKey, value: bytes | None) -> None:
        if value is None:
            self._deregistered(rank)
            return
        registration = decode_registration(value)
        if registration.id.key != rank:
            raise ProtocolError(f"the registration of {registration.id} lies at {rank}")
        self.blocks.expect(rank, registration.id.generation)
        self.below.expect(rank, registration.id.generation)
        self._set_view(rank, RankView(registration, RankState.LIVE, self._etcd.clock()))

    def _deregistered(self, rank: RankKey) -> None:
        view = self.ranks.get(rank)
        if view is None:
            return
        if view.draining:
            self._forget(rank)
        else:
            gone_s = self._etcd.clock() if view.registered else view.gone_s
            self._suspect(rank, replace(view, registered=False, gone_s=gone_s))

    def _suspect(self, rank: RankKey, view: RankView) -> None:
        since_s = view.since_s if view.state is RankState.SUSPECT else self._etcd.clock()
        self._set_view(rank, replace(view, state=RankState.SUSPECT, since_s=since_s))

    def _set_view(self, rank: RankKey, view: RankView) -> None:
        if self.ranks.get(rank) != view:
            self.ranks[rank] = view
            self._notify(rank)

    def _forget(self, rank: RankKey) -> None:
        self.blocks.forget(rank)
        self.below.forget(rank)
        self._reported_at.pop(rank, None)
        if self.ranks.pop(rank, None) is not None:
            self._notify(rank)

    def _notify(self, rank: RankKey) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber(rank)

    # -- pins -------------------------------------------------------------------------------------

    def _apply_pin(self, name: str, change: KeyChange) -> None:
        if change.value is None:
            self.pins.remove(name)
            return
        try:
            pin = decode_pin(change.value)
        except ProtocolError:
            self.pins.remove(name)
            raise
        self.pins.put(name, KnownPin(pin, change.mod_revision))


async def keep_from_garbage_collector(mirror: Mirror) -> None:
    """Freeze all objects, including modules and tokenizers, once the index has been read; then return.

    A full collection takes 46 ms for all of them, in which no request is served; after the freeze it only
    visits objects made since. The index adds little: 2.6 million blocks take 1.2 ms of the 46.
    """
    await mirror.ready.wait()
    gc.freeze()
