"""The Handshake service of a sending rank passes the receiver's messages on to the sender.

Hello --> checked --> our Hello --> KvTicket | RenewLease | Abort ... --> link_lost when the stream ends
                          Status | AbortAck <-- queue <-- the sender's thread

When that thread is given up it answers nothing any more, so every stream is ended: decode then gets its pages
back after fence time, without waiting for an answer.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from services.transfer.hello import check_hello, read_hello
from services.transfer.sending.sender import KvSender
from services.transfer.sending.sending_transfer import Send
from services.values.errors import ProtocolError, Unavailable
from services.values.kv import PullRequest
from services.values.rank import RankId, TransferId
from services.wire import convert
from services.wire.fields import finite
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_GONE = "the rank sends no KV any more"

# It gets the link, the asking rank and its request, and answers through the sender.
Lend = Callable[[int, RankId, PullRequest], None]
_Messages = AsyncIterator[handshake_pb2.HandshakeMessage]
_Outbox = asyncio.Queue[handshake_pb2.HandshakeMessage]


class HandshakeService(handshake_pb2_grpc.HandshakeServicer):
    """It is to be served with net/guard.ErrorInterceptor, which turns exceptions into gRPC statuses."""

    def __init__(
        self, sender: KvSender, sender_gone: asyncio.Event | None = None, lend: Lend | None = None
    ) -> None:
        """`sender_gone` is set when nobody waits for the sender's thread any more.

        Without `lend` every pull is refused.
        """
        self._sender = sender
        self._lend = lend
        self._sender_gone = sender_gone or asyncio.Event()
        self._link_ids = itertools.count()

    async def Connect(
        self,
        request_iterator: _Messages,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serve one decode rank's stream.

        Raises:
            ProtocolError: the two ranks do not fit, or decode breaks the protocol.
            Unavailable: the sender's thread was given up.
        """
        if self._sender_gone.is_set():
            raise Unavailable(_GONE)
        link_id = next(self._link_ids)
        outbox: _Outbox = asyncio.Queue()
        peer = await self._greet(link_id, request_iterator, outbox)
        writer = asyncio.create_task(_write(outbox, context), name=f"handshake-{link_id}")
        try:
            await self._read_while_it_lasts(link_id, peer, request_iterator)
        finally:
            self._sender.link_lost(link_id)
            writer.cancel()
            # A write fails only if the stream has ended, which the reader has seen as well.
            await asyncio.gather(writer, return_exceptions=True)

    async def DescribeRanks(
        self, request: handshake_pb2.DescribeRanksRequest, context: grpc.aio.ServicerContext
    ) -> handshake_pb2.DescribeRanksResponse:
        raise ProtocolError("this rank serves Connect at this endpoint; its engine has no processes beside")

    async def _greet(self, link_id: int, messages: _Messages, outbox: _Outbox) -> RankId:
        first = await anext(messages, None)
        if first is None:
            raise ProtocolError("the Handshake stream ended before Hello")
        peer, _ = read_hello(first)
        own = self._sender.own_hello
        check_hello(own, peer)
        outbox.put_nowait(own.message(self._sender.clock()))
        self._sender.hello(link_id, peer, _send_into(outbox))
        log.info("kv_link_up decode=%s link=%d", peer.rank, link_id)
        return peer.rank

    async def _read_while_it_lasts(self, link_id: int, peer: RankId, messages: _Messages) -> None:
        reading = asyncio.ensure_future(self._read(link_id, peer, messages))
        gone = asyncio.ensure_future(self._sender_gone.wait())
        try:
            await asyncio.wait([reading, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise Unavailable(_GONE)
            await reading
        finally:
            reading.cancel()
            gone.cancel()

    async def _read(self, link_id: int, peer: RankId, messages: _Messages) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "ticket":
                    self._pass_ticket(link_id, message.ticket)
                case "renew":
                    until_s = finite("renew.write_until_s", message.renew.write_until_s)
                    self._sender.renew(link_id, TransferId(message.renew.room), until_s)
                case "abort":
                    self._sender.abort(link_id, TransferId(message.abort.room))
                case "pull_request":
                    self._pass_pull(link_id, peer, message.pull_request)
                case other:
                    raise ProtocolError(f"a decode rank does not send {other} after its Hello")

    def _pass_ticket(self, link_id: int, pb: handshake_pb2.KvTicket) -> None:
        try:
            ticket = convert.ticket_from_proto(pb)
        except ProtocolError as error:
            self._sender.refuse(link_id, TransferId(pb.room), str(error))
        else:
            self._sender.ticket(link_id, ticket)

    def _pass_pull(self, link_id: int, puller: RankId, pb: handshake_pb2.PullRequest) -> None:
        try:
            request = convert.pull_request_from_proto(pb)
        except ProtocolError as error:
            log.warning("kv_pull_unreadable puller=%s reason=%r", puller, str(error))
            self._sender.refuse_pull(link_id, TransferId(pb.room), "failed")
            return
        if self._lend is None:
            self._sender.refuse_pull(link_id, request.transfer_id, "gone")
        else:
            self._lend(link_id, puller, request)


def _send_into(outbox: _Outbox) -> Send:
    loop = asyncio.get_running_loop()

    def send(message: handshake_pb2.HandshakeMessage) -> None:
        try:
            loop.call_soon_threadsafe(outbox.put_nowait, message)
        except RuntimeError:  # The loop is closed, and so is the stream.
            log.debug("kv_status_undelivered message=%s", message.WhichOneof("message"))

    return send


async def _write(outbox: _Outbox, context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await outbox.get())
