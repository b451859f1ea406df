"""A prefix of etcd as a stream of changes that always adds up to what etcd holds.

    LIST at revision R --> WATCH from R+1 --events--> WATCH
      ^                      |--stream breaks, or or is silent--> WATCH from the last delivered revision + 1
      |                      |--compacted: that revision is gone--+
      |                      |--etcd is younger than we (restored)-+
      +------ the difference to what was delivered is emitted -----+

All events of one revision are in one batch; fragments are joined before they are delivered.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.errors import ConfigError, IsthmusError, Unavailable
from services.index.backoff import Backoff
from services.index.etcd import Etcd, KeyValue, prefix_end
from services.index.etcd_connection import EtcdStream, Method
from services.index.etcd_errors import EtcdCompacted
from services.wire.etcd import etcd_pb2

logger = logging.getLogger(__name__)

_WATCH = Method("/etcdserverpb.Watch/Watch", etcd_pb2.WatchRequest, etcd_pb2.WatchResponse)
_WatchStream = EtcdStream[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]
_OUR_WATCH_ID = 0  # the only watch of its stream; answers to progress requests carry -1


@dataclass(frozen=True, slots=True)
class KeyChange:
    """`value` is None where the key was deleted."""

    key: bytes
    value: bytes | None
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes in etcd's order; after them the prefix is what etcd held at `revision`.

    `listed`: from a listing (in key order), not from the watch. `rewound`: etcd has gone back to an
    earlier revision, so that revisions seen before mean nothing any more.
    """

    revision: int
    changes: tuple[KeyChange, ...]
    listed: bool = False
    rewound: bool = False


class _Silent(IsthmusError):
    """Nothing has come for long, so the stream may be dead."""


class PrefixWatch:
    """Lists and watches one prefix for ever. `trouble` says why it is behind, None while it is not."""

    def __init__(self, etcd: Etcd, prefix: bytes, *, idle_timeout_s: float = 10.0) -> None:
        self.trouble: str | None = "not listed yet"
        self.revision = 0  # the last one delivered
        self.listings = 0
        self._etcd = etcd
        self._prefix = prefix
        self._idle_timeout_s = idle_timeout_s
        self._delivered: dict[bytes, int] = {}  # key -> mod_revision
        self._must_list = True

    async def batches(self) -> AsyncGenerator[WatchBatch, None]:
        """Never ends. Raises ConfigError when etcd refuses us for good."""
        backoff = Backoff(self._etcd.rng)
        while True:
            try:
                if self._must_list:
                    yield await self._list()
                async with aclosing(self._follow(backoff)) as batches:
                    async for batch in batches:
                        yield batch
            except ConfigError:
                raise
            except EtcdCompacted as error:
                self._must_list = True
                logger.info("watch.list_again revision=%d reason=%s", self.revision, error)
            except _Silent as error:
                logger.debug("watch.silent revision=%d error=%s", self.revision, error)
            except IsthmusError as error:
                self.trouble = str(error)
                logger.warning("watch.retry revision=%d error=%s", self.revision, error)
            await backoff.sleep()

    async def _list(self) -> WatchBatch:
        revision, kvs = await self._etcd.snapshot(self._prefix)
        rewound = revision < self.revision
        present = {kv.key: kv.mod_revision for kv in kvs}
        gone = [KeyChange(key, None, revision) for key in self._delivered if key not in present]
        news = [KeyChange(kv.key, kv.value, kv.mod_revision) for kv in kvs if rewound or self._is_new(kv)]
        self._delivered, self.revision, self._must_list = present, revision, False
        self.listings += 1
        return WatchBatch(revision, tuple(gone + news), listed=True, rewound=rewound)

    def _is_new(self, kv: KeyValue) -> bool:
        return self._delivered.get(kv.key) != kv.mod_revision

    async def _follow(self, backoff: Backoff) -> AsyncGenerator[WatchBatch, None]:
        stream = await self._etcd.connection.open_stream(_WATCH)
        try:
            await stream.write(self._create_request())
            events: list[etcd_pb2.Event] = []
            while True:
                response = await self._read(stream)
                self._check(response)
                if response.created:
                    await self._check_not_rewound(response.header.revision)
                    self.trouble = None
                    backoff.reset()
                    continue
                events.extend(response.events)
                if response.fragment:
                    continue
                if events:
                    yield self._deliver(events)
                    events = []
                elif response.watch_id == _OUR_WATCH_ID:
                    self.revision = max(self.revision, response.header.revision)
        finally:
            stream.close()

    def _create_request(self) -> etcd_pb2.WatchRequest:
        return etcd_pb2.WatchRequest(
            create_request=etcd_pb2.WatchCreateRequest(
                key=self._prefix,
                range_end=prefix_end(self._prefix),
                start_revision=self.revision + 1,
                progress_notify=True,
                fragment=True,
            )
        )

    async def _read(self, stream: _WatchStream) -> etcd_pb2.WatchResponse:
        """The next response. Asks for a sign of life when idle; raises _Silent when none comes.

        The answer is a sign of life only: its revision may be ahead of events that are still to come
        (etcd issue 15220), so it never moves `revision`. Newer members give none to a watch that waits
        for its first event (etcd pull request 20229), so silence costs a new stream and is no trouble.
        """
        response = await stream.read(self._idle_timeout_s / 2)
        if response is None:
            await stream.write(etcd_pb2.WatchRequest(progress_request=etcd_pb2.WatchProgressRequest()))
            response = await stream.read(self._idle_timeout_s / 2)
        if response is None:
            raise _Silent(f"etcd's watch was silent for {self._idle_timeout_s} s")
        return response

    def _check(self, response: etcd_pb2.WatchResponse) -> None:
        if response.compact_revision:
            raise EtcdCompacted(f"compacted up to revision {response.compact_revision}")
        if response.canceled:
            self._etcd.connection.distrust_token()
            raise Unavailable(f"etcd cancelled the watch: {response.cancel_reason or 'no reason given'}")

    async def _check_not_rewound(self, revision: int) -> None:
        # A member that lags is behind us, too; only an agreed read tells it from a restored cluster.
        if revision < self.revision and await self._etcd.current_revision() < self.revision:
            raise EtcdCompacted(f"etcd is at revision {revision}, before our {self.revision}")

    def _deliver(self, events: list[etcd_pb2.Event]) -> WatchBatch:
        changes = tuple(_change(event) for event in events)
        for change in changes:
            if change.value is None:
                self._delivered.pop(change.key, None)
            else:
                self._delivered[change.key] = change.mod_revision
        self.revision = max(self.revision, changes[-1].mod_revision)
        return WatchBatch(self.revision, changes)


def _change(event: etcd_pb2.Event) -> KeyChange:
    value = None if event.type == etcd_pb2.Event.DELETE else event.kv.value
    return KeyChange(event.kv.key, value, event.kv.mod_revision)
