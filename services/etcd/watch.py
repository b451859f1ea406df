"""A watch turns a prefix of etcd into a stream of changes that always adds up to what etcd holds.

    LIST at revision R, page by page --> WATCH from R+1 --events--> WATCH
      ^                      |--stream breaks, or is silent--> WATCH from the last delivered revision + 1
      |                      |--that revision is compacted---------+
      |                      |--etcd was restored from a backup-----+
      +------ the difference to what was delivered is emitted -----+

All events of one revision are in one batch; fragments are joined before they are delivered. A listing is
delivered page by page, so that millions of entries are never in memory twice.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.etcd.connection import EtcdStream, Method
from services.etcd.etcd_client import Etcd, KeyValue, key_value, prefix_end
from services.etcd.etcd_errors import Backoff, EtcdCompacted
from services.values.errors import ConfigError, IsthmusError, Unavailable
from services.wire.etcd import etcd_pb2

logger = logging.getLogger(__name__)

_WATCH = Method("/etcdserverpb.Watch/Watch", etcd_pb2.WatchRequest, etcd_pb2.WatchResponse)
_WatchStream = EtcdStream[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]
_OLD_HISTORY = -1  # This replaces the revision of a key from before a restore.
_OUR_WATCH_ID = 0  # A stream has only this watch; answers to progress requests have the id -1.


@dataclass(frozen=True, slots=True)
class KeyChange:
    key: bytes
    value: bytes | None  # None means that the key was deleted.
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """A batch has changes in etcd's order; after them the prefix is what etcd held at `revision`.

    `listed` marks a page of a listing; only after its last page, `complete`, is the prefix as etcd held it.
    `first` marks a page of the prefix that is listed before the rest. `rewound`, on a first page, means that
    etcd was restored from a backup, so that earlier revisions mean nothing any more.
    """

    revision: int
    changes: tuple[KeyChange, ...]
    listed: bool = False
    complete: bool = True
    first: bool = False
    rewound: bool = False


class NotListed(IsthmusError):
    pass


class _Silent(IsthmusError):
    pass


class PrefixWatch:
    """A watch lists and follows one prefix for ever. `trouble` says why it is behind, or is None.

    `first` is a prefix within the prefix, and is listed before the rest. `unremembered` is another, which may
    have very many keys. The watch keeps no trace of these: a later listing contains all of them, changed or
    not, and does not report deletions in the meantime.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: bytes,
        *,
        first: bytes | None = None,
        unremembered: bytes | None = None,
        idle_timeout_s: float = 10.0,
    ) -> None:
        self.trouble: IsthmusError | None = NotListed("not listed yet")
        self.revision = 0  # This revision was delivered last.
        self.listings = 0
        self._etcd = etcd
        self._prefix = prefix
        self._has_first = first is not None
        self._ranges = _ranges(prefix, first)
        self._unremembered = () if unremembered is None else (unremembered,)
        self._idle_timeout_s = idle_timeout_s
        self._delivered: dict[bytes, int] = {}  # This maps remembered keys to their mod_revision.
        self._newest: KeyValue | None = None  # The watch delivered this last.
        self._must_list = True
        self._rewound = False
        self._interrupted = False  # A stream has been opened since the last listing.

    async def batches(self) -> AsyncGenerator[WatchBatch, None]:
        """Yield batches without end. Raises ConfigError if etcd refuses us from the start."""
        backoff = Backoff(self._etcd.rng)
        while True:
            try:
                if self._must_list:
                    async with aclosing(self._list()) as pages:
                        async for page in pages:
                            yield page
                async with aclosing(self._follow(backoff)) as batches:
                    async for batch in batches:
                        yield batch
            except ConfigError as error:
                if self.listings == 0:
                    raise
                self.trouble = error  # The watch has worked before, so it may work again.
                logger.error("watch_refused revision=%d error=%s", self.revision, error)
            except EtcdCompacted as error:
                self._must_list, self.trouble = True, NotListed(str(error))
                logger.info("watch_relisted revision=%d reason=%s", self.revision, error)
            except _Silent as error:
                logger.debug("watch_silent revision=%d error=%s", self.revision, error)
            except IsthmusError as error:
                self.trouble = error
                logger.warning("watch_failed revision=%d error=%s", self.revision, error)
            await backoff.sleep()

    async def _list(self) -> AsyncGenerator[WatchBatch, None]:
        revision, rewound = 0, False
        present: set[bytes] = set()
        for number, (start, end) in enumerate(self._ranges):
            first = self._has_first and number == 0
            async with aclosing(self._etcd.pages(start, end, revision)) as pages:
                async for page in pages:
                    if revision == 0:
                        revision, rewound = page.revision, self._begin_listing(page.revision)
                    present.update(kv.key for kv in page.kvs if self._remembers(kv.key))
                    news = self._news(page.kvs)
                    yield WatchBatch(revision, news, True, complete=False, first=first, rewound=rewound)
                    rewound = False
        gone = tuple(KeyChange(key, None, revision) for key in self._delivered.keys() - present)
        for change in gone:
            del self._delivered[change.key]
        self._must_list = self._interrupted = False
        self._newest = None  # Compaction can remove it before another write; then it proves nothing.
        self.listings += 1
        yield WatchBatch(revision, gone, listed=True)

    def _begin_listing(self, revision: int) -> bool:
        rewound = self._rewound or revision < self.revision
        if rewound:
            # Revisions of the new history differ from those of the old one, even with equal numbers.
            self._delivered = dict.fromkeys(self._delivered, _OLD_HISTORY)
            self._newest = None
        self.revision, self._rewound = revision, False
        return rewound

    def _news(self, kvs: list[KeyValue]) -> tuple[KeyChange, ...]:
        news = [kv for kv in kvs if self._delivered.get(kv.key) != kv.mod_revision]
        self._delivered.update((kv.key, kv.mod_revision) for kv in news if self._remembers(kv.key))
        return tuple(KeyChange(kv.key, kv.value, kv.mod_revision) for kv in news)

    def _remembers(self, key: bytes) -> bool:
        return not key.startswith(self._unremembered)

    async def _follow(self, backoff: Backoff) -> AsyncGenerator[WatchBatch, None]:
        first_since_listing, self._interrupted = not self._interrupted, True
        stream = await self._etcd.connection.open_stream(_WATCH)
        try:
            await stream.write(self._create_request())
            events: list[etcd_pb2.Event] = []
            created = False
            while True:
                response = await self._read(stream, created)
                self._check(response)
                if response.created:
                    created = True
                    if not first_since_listing or response.header.revision < self.revision:
                        await self._check_not_rewound()
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

    async def _read(self, stream: _WatchStream, created: bool) -> etcd_pb2.WatchResponse:
        """Return the next response. When idle, request progress; raise _Silent if no answer comes.

        The answer only shows that the stream works: its revision may be ahead of events that are still to
        come (etcd issue 15220), so it never changes `revision`. Newer members do not answer a watch that
        waits for its first event (etcd pull request 20229), so silence costs a new stream and counts as no
        trouble. Only if a member does not even confirm that the watch is `created`, we go to another one.
        """
        response = await stream.read(self._idle_timeout_s / 2)
        if response is None:
            await stream.write(etcd_pb2.WatchRequest(progress_request=etcd_pb2.WatchProgressRequest()))
            response = await stream.read(self._idle_timeout_s / 2)
        if response is None:
            error = _Silent(f"etcd's watch was silent for {self._idle_timeout_s} s")
            raise error if created else stream.silent(error)
        return response

    def _check(self, response: etcd_pb2.WatchResponse) -> None:
        if response.compact_revision:
            raise EtcdCompacted(f"compacted up to revision {response.compact_revision}")
        if response.canceled:
            self._etcd.connection.distrust_token()
            raise Unavailable(f"etcd cancelled the watch: {response.cancel_reason or 'no reason given'}")

    async def _check_not_rewound(self) -> None:
        """Raise EtcdCompacted if etcd was restored and lacks the history that it reported to us."""
        # A lagging member is behind us, too; only an agreed read distinguishes it from a restored cluster.
        now = await self._etcd.current_revision(self._prefix)
        if now < self.revision:
            self._rewound = True
            raise EtcdCompacted(f"etcd is at revision {now}, before our {self.revision}")
        if self._newest is None:
            return
        # The restored etcd may have overtaken us since. Then its revision of our newest write is another one:
        # perhaps with the same key and value, as a rank's first record has, but under another lease.
        newest = self._newest
        try:
            found = await self._etcd.get(newest.key, newest.mod_revision)
        except EtcdCompacted:
            self._rewound = True  # More cannot be known.
            raise
        if found != newest:
            self._rewound = True
            raise EtcdCompacted(
                f"etcd wrote something else at revision {newest.mod_revision} than it reported to us"
            )

    def _deliver(self, events: list[etcd_pb2.Event]) -> WatchBatch:
        changes = tuple(_change(event) for event in events)
        for event, change in zip(events, changes, strict=True):
            if change.value is None:
                self._delivered.pop(change.key, None)
            else:
                if self._remembers(change.key):
                    self._delivered[change.key] = change.mod_revision
                self._newest = key_value(event.kv)
        self.revision = max(self.revision, changes[-1].mod_revision)
        return WatchBatch(self.revision, changes)


def _ranges(prefix: bytes, first: bytes | None) -> list[tuple[bytes, bytes]]:
    whole = (prefix, prefix_end(prefix))
    if first is None:
        return [whole]
    ranges = [(first, prefix_end(first)), (prefix, first), (prefix_end(first), prefix_end(prefix))]
    return [(start, end) for start, end in ranges if start != end]


def _change(event: etcd_pb2.Event) -> KeyChange:
    value = None if event.type == etcd_pb2.Event.DELETE else event.kv.value
    return KeyChange(event.kv.key, value, event.kv.mod_revision)
