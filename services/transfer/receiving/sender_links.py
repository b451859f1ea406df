"""The receiving side of the handshake has one stream per incarnation of a sending rank, opened on demand.

    link(address) --> connect, Hello, their Hello, checked --> SenderLink
        send_ticket --> TransferWatch (transfer_watch.py) <-- Status, AbortAck <-- the stream's reader
    the stream ends --> every watch of it is lost; while anybody waits for such a writer's end, the
                        endpoint is tried again and again: the same incarnation acknowledges an abort,
                        another incarnation proves that the first is dead

All of it runs on one asyncio loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc

from services.net import channels, grpc_errors
from services.transfer.hello import Hello, check_hello, read_hello
from services.transfer.receiving.transfer_watch import Landed, Renegotiated, TransferWatch
from services.transfer.waits import within
from services.values.errors import IsthmusError, PeerFailed, StaleGeneration, Unavailable
from services.values.kv import KvLayout, KvTicket, PoolMemory, PullGrant, PullRequest
from services.values.rank import RankAddress, RankId, TransferId
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 2.0
# Two monotonic clocks drift apart by up to 1e-4 of this time; the fence margin must be well above that.
_MAX_STAMP_AGE_S = 3600.0

_Message = handshake_pb2.HandshakeMessage
_State = handshake_pb2.Status


class PullRefused(PeerFailed):
    """The source grants nothing. `word` is one of those in common.proto."""

    def __init__(self, word: str, held_tokens: int | None) -> None:
        super().__init__(f"the source grants nothing: {word}")
        self.word = word
        self.held_tokens = held_tokens


class SenderConnections:
    def __init__(
        self,
        own_id: RankId,
        layout: KvLayout,
        memories: tuple[PoolMemory, ...],
        transport: str,
        agent_metadata: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_channel: Callable[[str], grpc.aio.Channel] = channels.open_channel,
    ) -> None:
        """`memories` are the layout's pools, as in `Hello.of`."""
        self._own = Hello.of(own_id, layout, memories, transport, agent_metadata)
        self._clock = clock
        self._open_channel = open_channel
        self._links: dict[RankAddress, SenderLink] = {}
        self._retired: set[SenderLink] = set()
        self._connecting: dict[RankAddress, asyncio.Task[SenderLink]] = {}
        # These watches have lost their streams, and somebody waits for their writers' end.
        self._orphans: dict[RankAddress, set[TransferWatch]] = {}
        self._seekers: dict[RankAddress, asyncio.Task[None]] = {}
        self._closed = False

    async def link(self, address: RankAddress) -> "SenderLink":
        """Return the stream to this incarnation of a rank, and open it if there is none.

        Callers that come while it is being opened share the attempt and its failure, so that nobody waits for
        a silent rank longer than the first caller.

        Raises:
            StaleGeneration: another incarnation, or another rank, answers at the endpoint.
            PeerFailed: nobody answers, or the two ranks do not fit.
            Unavailable: the connections are closed.
        """
        if self._closed:
            raise Unavailable("the connections are closed")
        self._links = {life: link for life, link in self._links.items() if link.alive}
        link = self._links.get(address)
        if link is not None and link.usable:
            return link
        if address not in self._connecting:
            attempt = asyncio.create_task(self._renew_link(address), name=f"connect-{address.id}")
            self._connecting[address] = attempt
            attempt.add_done_callback(lambda ended: self._connected(address, ended))
        return await asyncio.shield(self._connecting[address])

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._seekers.values(), *self._connecting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in [*self._links.values(), *self._retired]))

    async def _renew_link(self, address: RankAddress) -> "SenderLink":
        if (old := self._links.get(address)) is not None:
            self._retire(old)
        self._links[address] = link = await self._connect(address)
        return link

    def _connected(self, address: RankAddress, attempt: "asyncio.Task[SenderLink]") -> None:
        del self._connecting[address]
        if not attempt.cancelled():
            attempt.exception()  # It is read here because all callers may have left.

    def _retire(self, link: "SenderLink") -> None:
        self._retired = {retired for retired in self._retired if retired.alive}
        self._retired.add(link)
        link.close_when_idle()

    async def _connect(self, address: RankAddress) -> "SenderLink":
        stream = _Stream(self._open_channel(address.endpoint))
        try:
            stream.send(self._own.message(self._clock()))
            try:
                peer, stamp_s = read_hello(await within(_CONNECT_TIMEOUT_S, stream.receive()))
            except TimeoutError as error:
                raise PeerFailed(f"{address.endpoint} did not answer in {_CONNECT_TIMEOUT_S:g} s") from error
            received_s = self._clock()
            self._note_life(address.endpoint, peer.rank)
            if peer.rank != address.id:
                who = "another life of it" if peer.rank.key == address.id.key else str(peer.rank)
                raise StaleGeneration(
                    f"prefill rank {address.id} is gone: {who} answers at {address.endpoint}"
                )
            check_hello(self._own, peer)
        except BaseException as error:
            await stream.close()
            if isinstance(error, IsthmusError) and not isinstance(error, StaleGeneration):
                raise PeerFailed(f"no link to {address.id}: {error}") from error
            raise
        log.info("kv_link_up prefill=%s endpoint=%s", address.id, address.endpoint)
        shared = self._own.layout.shared_with(peer.layout)
        return SenderLink(address, shared, stream, stamp_s, received_s, self._clock, self._seek)

    def _note_life(self, endpoint: str, seen: RankId) -> None:
        """Report earlier incarnations of this rank at this endpoint as dead, which its answer proves."""
        for writer in list(self._orphans):
            same_rank = writer.endpoint == endpoint and writer.id.key == seen.key
            if same_rank and writer.id.generation != seen.generation:
                for watch in self._orphans.pop(writer):
                    watch.on_writer_dead()

    def _seek(self, watch: TransferWatch) -> None:
        if self._closed:
            return
        self._orphans.setdefault(watch.writer, set()).add(watch)
        if watch.writer not in self._seekers:
            task = asyncio.create_task(self._find_writer(watch.writer), name=f"seek-{watch.writer.id}")
            self._seekers[watch.writer] = task

    async def _find_writer(self, writer: RankAddress) -> None:
        retry_s = _MIN_RETRY_S
        try:
            while any(watch.is_sought for watch in self._orphans.get(writer, ())):
                try:
                    link = await self.link(writer)
                except IsthmusError as error:
                    log.debug("kv_writer_not_found writer=%s reason=%r", writer.id, str(error))
                else:
                    if link.alive:  # It may have ended since.
                        link.adopt(self._orphans.pop(writer, set()))
                        continue
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
        finally:  # Nothing is awaited after the last check, so no watch is missed.
            self._orphans.pop(writer, None)
            del self._seekers[writer]


class SenderLink:
    """This is one stream to one incarnation of a prefill rank. SenderConnections makes it."""

    def __init__(
        self,
        address: RankAddress,
        layout: KvLayout,
        stream: "_Stream",
        stamp_s: float,
        received_s: float,
        clock: Callable[[], float],
        seek: Callable[[TransferWatch], None],
    ) -> None:
        self.address = address
        self.layout = layout  # This is the part that both sides have.
        self._stream = stream
        self._stamp_s = stamp_s  # This was the peer's clock when it sent its Hello,
        self._received_s = received_s  # and this was ours, a little later, when that came.
        self._clock = clock
        self._seek = seek
        self._watches: dict[TransferId, TransferWatch] = {}
        # No ticket and no `end_grant` has followed these.
        self._asked: dict[TransferId, asyncio.Future[PullGrant]] = {}
        self._closing_when_idle = False
        self.alive = True
        self._reader = asyncio.create_task(self._read(), name=f"handshake-{address.id}")

    def __repr__(self) -> str:
        return f"SenderLink({self.address.id} alive={self.alive} transfers={len(self._watches)})"

    @property
    def usable(self) -> bool:
        """Return whether it may take new tickets: it stands, and the peer's clock was read lately."""
        return self.alive and self._clock() - self._received_s < _MAX_STAMP_AGE_S

    def write_until_s(self, lease_s: float) -> float:
        """Return the end of a lease that begins now, on the peer's clock.

        It is early by the time that the Hello took, and never late: since its stamp the peer's clock has
        advanced at least as far as ours has since the Hello came.
        """
        return self._stamp_s + (self._clock() - self._received_s) + lease_s

    def lease_end_s(self, write_until_s: float) -> float:
        return self._received_s + (write_until_s - self._stamp_s)

    def send_ticket(self, ticket: KvTicket) -> TransferWatch:
        """Send a ticket and return its watch.

        Raises:
            PeerFailed: the stream has ended; nothing was sent.
        """
        if not self.alive:
            raise PeerFailed(f"the handshake stream to {self.address.id} was lost")
        watch = TransferWatch(
            ticket.transfer_id, self.address, self, ticket.write_until_s, self._clock, self._seek
        )
        self._watches[ticket.transfer_id] = watch
        self._asked.pop(ticket.transfer_id, None)
        self._stream.send(_Message(ticket=convert.ticket_to_proto(ticket)))
        return watch

    def ask(self, request: PullRequest) -> asyncio.Future[PullGrant]:
        """Ask the peer what it holds of a prompt; the future has its grant, or PullRefused.

        After a grant the caller sends the ticket, or calls `end_grant`, which it also does if it gives up
        waiting.

        Raises:
            PullRefused: the stream has ended.
        """
        if not self.alive:
            raise PullRefused("gone", None)
        answer: asyncio.Future[PullGrant] = asyncio.get_running_loop().create_future()
        self._asked[request.transfer_id] = answer
        self._stream.send(_Message(pull_request=convert.pull_request_to_proto(request)))
        return answer

    def end_grant(self, transfer_id: TransferId) -> None:
        if (answer := self._asked.pop(transfer_id, None)) is not None:
            answer.cancel()
        if self.alive:
            self.send_abort(transfer_id)
        self._half_close_if_idle()

    def send_renewal(self, transfer_id: TransferId, write_until_s: float) -> None:
        self._stream.send(
            _Message(renew=handshake_pb2.RenewLease(room=transfer_id, write_until_s=write_until_s))
        )

    def send_abort(self, transfer_id: TransferId) -> None:
        self._stream.send(_Message(abort=handshake_pb2.Abort(room=transfer_id)))

    def adopt(self, watches: set[TransferWatch]) -> None:
        for watch in watches:
            self._watches[watch.transfer_id] = watch
            watch.on_linked(self)

    def close_when_idle(self) -> None:
        self._closing_when_idle = True
        self._half_close_if_idle()

    async def close(self) -> None:
        self._stream.half_close()
        _, late = await asyncio.wait([self._reader], timeout=_CLOSE_TIMEOUT_S)
        if late:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._stream.receive())
        except IsthmusError as error:
            log.info("kv_link_lost prefill=%s reason=%r", self.address.id, str(error))
        finally:
            self.alive = False
            watches, self._watches = self._watches, {}
            for watch in watches.values():
                watch.on_lost()
            for transfer_id in list(self._asked):
                self._refused(transfer_id, "gone", None)
            await self._stream.close()

    def _take(self, message: _Message) -> None:
        match message.WhichOneof("message"):
            case "status":
                self._take_status(message.status)
            case "abort_ack":
                if (watch := self._last_word(message.abort_ack.room)) is not None:
                    ended = watch.on_unsettled if message.abort_ack.unsettled else watch.on_last_word
                    ended("the transfer was aborted")
            case "pull_grant":
                grant = convert.pull_grant_from_proto(message.pull_grant)
                if (answer := self._asked.get(grant.transfer_id)) is not None and not answer.done():
                    answer.set_result(grant)
            case other:
                log.warning("kv_unexpected_message prefill=%s message=%s", self.address.id, other)

    def _take_status(self, status: handshake_pb2.Status) -> None:
        if status.state == _State.STATE_ACCEPTED:
            return
        if status.room in self._asked:
            self._refused(TransferId(status.room), status.reason, status.held_tokens)
            return
        if (watch := self._last_word(status.room)) is not None:
            if status.state == _State.STATE_LANDED:
                digests = tuple(status.page_digests)
                group_bytes = tuple(status.group_bytes) or (status.bytes_moved,)
                watch.on_landed(Landed(group_bytes, status.descriptors, digests))
            elif status.state == _State.STATE_RENEGOTIATE:
                watch.on_renegotiated(Renegotiated(status.start))
            else:
                how = "was refused" if status.state == _State.STATE_REFUSED else "failed"
                ended = watch.on_unsettled if status.unsettled else watch.on_last_word
                ended(f"{self.address.id}: the transfer {how}: {status.reason}")

    def _refused(self, transfer_id: TransferId, word: str, held_tokens: int | None) -> None:
        answer = self._asked.pop(transfer_id)
        if not answer.done():
            answer.set_exception(PullRefused(word, held_tokens))
        self._half_close_if_idle()

    def _last_word(self, transfer_id: int) -> TransferWatch | None:
        watch = self._watches.pop(TransferId(transfer_id), None)
        self._half_close_if_idle()
        return watch

    def _half_close_if_idle(self) -> None:
        if self._closing_when_idle and not (self._watches or self._asked):
            self._stream.half_close()


class _Stream:
    """This is a Connect call and its channel. Messages are sent in order, without waiting for the wire."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._outbox: asyncio.Queue[_Message | None] = asyncio.Queue()
        stub = handshake_pb2_grpc.HandshakeStub(channel)
        self._call = stub.Connect(self._words())

    def send(self, message: _Message) -> None:
        self._outbox.put_nowait(message)

    def half_close(self) -> None:
        self._outbox.put_nowait(None)

    async def receive(self) -> _Message:
        """Return the next message.

        Raises:
            IsthmusError: the stream has ended; it is PeerFailed if it ended without an error.
        """
        with grpc_errors.renaming():
            message: _Message = await self._call.read()
        if message is grpc.aio.EOF:
            with grpc_errors.renaming():
                code = await self._call.code()
            raise PeerFailed(f"the stream has ended: {code.name}")
        return message

    async def close(self) -> None:
        self.half_close()
        await self._channel.close()

    async def _words(self) -> AsyncIterator[_Message]:
        while (message := await self._outbox.get()) is not None:
            yield message
