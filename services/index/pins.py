"""Pins record on which ranks a conversation lives. They are advisory, and written after the request.

pin() --changed, or half expired--> queue --up to 100 in one transaction--> etcd --watch--> every mirror
        |--otherwise: nothing              |--etcd away: stays queued; full: dropped

If two routers pin one conversation, the later write wins, and all routers see it. If there are very many
pins, a router's mirror knows the newest:

    begin_listing --put, for each that etcd has--> end_listing: these, and no others

The watch does not remember which pins it has delivered, because they may be millions. So a listing delivers
all of them again, and reports no deletions.
"""

import asyncio
import heapq
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from services.etcd.etcd_client import Etcd, put_op
from services.etcd.etcd_errors import Backoff, EtcdNoSpace, LeaseNotFound
from services.etcd.lease import BucketLease
from services.index.codec import fill, to_bytes
from services.index.keys import ClusterKeys, pin_name
from services.values.errors import IsthmusError
from services.values.rank import RankId
from services.wire import convert
from services.wire.isthmus.v1 import index_pb2

logger = logging.getLogger(__name__)

_MAX_PUTS = 100  # etcd's limit is 128 operations.


@dataclass(frozen=True, slots=True)
class Pin:
    decode: RankId
    prefill: RankId | None = None


@dataclass(frozen=True, slots=True)
class KnownPin:
    pin: Pin
    revision: int  # This is the revision of the pin's last write to etcd.


@dataclass(frozen=True, slots=True)
class _Written:
    pin: Pin
    revision: int
    put_at: float


@dataclass(frozen=True, slots=True)
class PinSettings:
    life_s: float = 1800.0
    bucket_s: float = 120.0  # Pins of this period share a lease.
    gather_s: float = 0.02  # Pins of this period share a transaction.
    recent_s: float = 2.0  # Within this time a written pin comes back through etcd, unless etcd is away.
    max_queued: int = 10_000
    max_remembered: int = 100_000
    max_backoff_s: float = 5.0


def encode_pin(pin: Pin) -> bytes:
    prefill = convert.rank_id_to_proto(pin.prefill) if pin.prefill else None
    return to_bytes(index_pb2.Pin(decode=convert.rank_id_to_proto(pin.decode), prefill=prefill))


def decode_pin(value: bytes) -> Pin:
    pb = index_pb2.Pin()
    fill(pb, value)
    prefill = convert.rank_id_from_proto(pb.prefill) if pb.HasField("prefill") else None
    return Pin(convert.rank_id_from_proto(pb.decode), prefill)


class PinWriter:
    """One event loop owns it. `known` finds a pin in the mirror, by the name of keys.pin_name.

    `written` counts the pins that were written to etcd, `dropped` those that were given up for lack of room.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        known: Callable[[str], KnownPin | None],
        settings: PinSettings | None = None,
    ) -> None:
        self.written = 0
        self.dropped = 0
        self._etcd = etcd
        self._keys = keys
        self._known = known
        self._settings = settings or PinSettings()
        self._lease = BucketLease(etcd, life_s=self._settings.life_s, bucket_s=self._settings.bucket_s)
        self._queue: OrderedDict[str, Pin] = OrderedDict()
        self._remembered: OrderedDict[str, _Written] = OrderedDict()
        self._wake = asyncio.Event()

    def pin(self, conversation: str, decode: RankId, prefill: RankId | None = None) -> None:
        """Record where the conversation lives. It never blocks and never fails."""
        name, pin = pin_name(conversation), Pin(decode, prefill)
        if self._is_fresh(name, pin):
            self._queue.pop(name, None)  # etcd has this pin already.
            return
        self._queue[name] = pin
        self._queue.move_to_end(name)
        if len(self._queue) > self._settings.max_queued:
            self._queue.popitem(last=False)
            self.dropped += 1
        self._wake.set()

    def recent(self, conversation: str) -> Pin | None:
        """Return what was pinned here recently, and may not have come back through etcd yet."""
        name = pin_name(conversation)
        if name in self._queue:
            return self._queue[name]
        written = self._recently_written(name)
        return None if written is None else written.pin

    def _recently_written(self, name: str) -> _Written | None:
        written, known = self._remembered.get(name), self._known(name)
        if written is None or self._etcd.clock() - written.put_at >= self._settings.recent_s:
            return None
        return None if known is not None and known.revision > written.revision else written

    def _is_fresh(self, name: str, pin: Pin) -> bool:
        written = self._remembered.get(name)
        if written is None or written.pin != pin:
            return False
        if self._recently_written(name) is None:
            # By now the mirror knows the pin, unless another router changed it or etcd lost it.
            known = self._known(name)
            if known is None or known.pin != pin:
                return False
        return self._etcd.clock() - written.put_at < self._settings.life_s / 2

    async def run(self) -> None:
        backoff = Backoff(self._etcd.rng, max_s=self._settings.max_backoff_s)
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
                await asyncio.sleep(self._settings.gather_s)
            try:
                await self.write_some()
                backoff.reset()
            except EtcdNoSpace as error:
                # If etcd is full we must write less, and pins are the least important.
                self.dropped += len(self._queue)
                self._queue.clear()
                logger.warning("pins_dropped error=%s", error)
                await backoff.sleep()
            except IsthmusError as error:
                logger.warning("pins_write_failed queued=%d error=%s", len(self._queue), error)
                await backoff.sleep()

    async def write_some(self) -> None:
        batch = dict(itertools.islice(self._queue.items(), _MAX_PUTS))
        if not batch:
            return
        lease_id = await self._lease.id()
        puts = [put_op(self._keys.pin(name), encode_pin(pin), lease_id) for name, pin in batch.items()]
        try:
            result = await self._etcd.txn([], puts, idempotent=True)
        except LeaseNotFound:
            self._lease.forget()
            raise
        for name, pin in batch.items():
            if self._queue.get(name) == pin:
                del self._queue[name]
            self._note_written(name, pin, result.revision)

    def _note_written(self, name: str, pin: Pin, revision: int) -> None:
        self.written += 1
        self._remembered[name] = _Written(pin, revision, self._etcd.clock())
        self._remembered.move_to_end(name)
        if len(self._remembered) > self._settings.max_remembered:
            self._remembered.popitem(last=False)


class PinMirror(Mapping[str, KnownPin]):
    def __init__(self, max_pins: int) -> None:
        self._max_pins = max_pins
        self._pins: OrderedDict[str, KnownPin] = OrderedDict()  # They are sorted by revision.
        # This is a heap with the oldest pin first.
        self._listed: list[tuple[int, str, KnownPin]] | None = None

    def __repr__(self) -> str:
        return f"PinMirror(pins={len(self._pins)}, listing={self._listed is not None})"

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pins)

    def __getitem__(self, name: str) -> KnownPin:
        return self._pins[name]

    def put(self, name: str, pin: KnownPin) -> None:
        """Put a pin. Within a listing, call it once for each name; new pins appear when the listing ends."""
        if self._listed is not None:
            if name in self._pins:
                self._pins[name] = pin
            heapq.heappush(self._listed, (pin.revision, name, pin))
            if len(self._listed) > self._max_pins:
                heapq.heappop(self._listed)
            return
        self.remove(name)
        self._pins[name] = pin
        if len(self._pins) > self._max_pins:
            self._pins.popitem(last=False)

    def remove(self, name: str) -> None:
        self._pins.pop(name, None)

    def begin_listing(self) -> None:
        self._listed = []

    def end_listing(self) -> None:
        assert self._listed is not None, "no listing has begun"
        self._pins = OrderedDict((name, pin) for _, name, pin in sorted(self._listed))
        self._listed = None
