"""One prefill process of SGLang's serves the Handshake.

Hello --> checked --> our Hello --> registration frames --+ KvTicket --> checked --> ACCEPTED --> metadata
frames ----+--> inbox, which SGLang's thread reads Abort --> abort frames -----------------------------------+
Status, AbortAck <-- `send`, by the stream's number <-- SGLang's threads the stream ends --> abort frames for
every transfer of it that is open
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from services.engine.sglang.inside.memory.replicas import check_drafts, check_tensor_parallel
from services.engine.sglang.inside.streams import frames
from services.engine.sglang.inside.streams.frames import Frames, ReturnAddress
from services.kv.ticket import check_ticket, hit_kind
from services.transfer.hello import Hello, check_hello, read_hello
from services.values.errors import IsthmusError, ProtocolError, StaleGeneration
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_Message = handshake_pb2.HandshakeMessage
_Status = handshake_pb2.Status
_HOST = "isthmus"  # SGLang prints it where it would print a decode rank's address.


@dataclass(slots=True)
class _DecodeProcess:
    back: ReturnAddress
    hello: handshake_pb2.Hello
    peer: Hello
    outbox: asyncio.Queue[_Message] = field(default_factory=asyncio.Queue)
    rooms: set[int] = field(default_factory=set)

    def say(self, **word: object) -> None:
        self.outbox.put_nowait(_Message(**word))  # type: ignore[arg-type]


class PrefillStreams(handshake_pb2_grpc.HandshakeServicer):
    """It lives on one asyncio loop; `send` is called there."""

    def __init__(
        self,
        own: Hello,
        own_message: Callable[[], _Message],
        deliver: Callable[[Frames], None],
        refuse: Callable[[int, str], None],
    ) -> None:
        """`deliver` takes frames for SGLang, and raises ProtocolError for what it cannot read.

        `refuse` fails a transfer of which a ticket was turned down.
        """
        self._own = own
        self._own_message = own_message
        self._deliver = deliver
        self._refuse = refuse
        self._numbers = itertools.count(1)
        self._streams: dict[str, _DecodeProcess] = {}

    def send(self, endpoint: str, message: _Message) -> None:
        """Send a last word to the stream whose ReturnAddress has this endpoint, unless it has ended."""
        stream = self._streams.get(endpoint)
        if stream is None:
            log.info("kv_status_undelivered endpoint=%s", endpoint)
            return
        word = message.status if message.HasField("status") else message.abort_ack
        stream.rooms.discard(word.room)
        stream.outbox.put_nowait(message)

    async def Connect(
        self, request_iterator: AsyncIterator[_Message], context: grpc.aio.ServicerContext
    ) -> None:
        stream = await self._greet(request_iterator)
        writer = asyncio.create_task(_write(stream.outbox, context))
        try:
            async for message in request_iterator:
                self._take(stream, message)
        finally:
            self._lose(stream)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _greet(self, messages: AsyncIterator[_Message]) -> _DecodeProcess:
        first = await anext(messages, None)
        if first is None:
            raise ProtocolError("the Handshake stream ended before Hello")
        peer, _ = read_hello(first)
        check_hello(self._own, peer)
        check_tensor_parallel(prefill=self._own.layout, decode=peer.layout)
        check_drafts(prefill=self._own.layout, decode=peer.layout)
        stream = _DecodeProcess(ReturnAddress(_HOST, next(self._numbers)), first.hello, peer)
        self._deliver(frames.registration_frames(first.hello, stream.back))
        self._streams[stream.back.endpoint] = stream
        stream.outbox.put_nowait(self._own_message())
        log.info("kv_link_up decode=%s tp_rank=%d", peer.rank, first.hello.tp_rank)
        return stream

    def _take(self, stream: _DecodeProcess, message: _Message) -> None:
        match message.WhichOneof("message"):
            case "ticket":
                self._take_ticket(stream, message.ticket)
            case "abort":
                stream.rooms.discard(message.abort.room)
                self._deliver(frames.abort_frames(message.abort, stream.back))
            case "renew":
                pass  # SGLang's decode keeps the pages until the last word, so there is no lease.
            case other:
                raise ProtocolError(f"a decode rank does not send {other} after its Hello")

    def _take_ticket(self, stream: _DecodeProcess, ticket: handshake_pb2.KvTicket) -> None:
        try:
            self._check(stream, ticket)
            agent_name = stream.hello.engine_memory.agent_name
            self._deliver(frames.metadata_frames(ticket, agent_name, stream.back))
        except IsthmusError as error:
            log.warning("kv_ticket_refused room=%016x reason=%r", ticket.room, str(error))
            stream.say(status=_Status(room=ticket.room, state=_Status.STATE_REFUSED, reason=str(error)))
            self._refuse(ticket.room, str(error))
            return
        stream.rooms.add(ticket.room)
        stream.say(status=_Status(room=ticket.room, state=_Status.STATE_ACCEPTED))

    def _check(self, stream: _DecodeProcess, ticket: handshake_pb2.KvTicket) -> None:
        own = self._own
        if not ticket.no_pages:
            typed = convert.ticket_from_proto(ticket)
            check_ticket(typed, None, own.layout, stream.peer.memories, own.rank.generation)
            return
        hit_kind(ticket.decode_prefix_len, ticket.prompt_len)
        if ticket.prefill_generation != own.rank.generation:
            raise StaleGeneration(f"the ticket is for another incarnation of {own.rank}")

    def _lose(self, stream: _DecodeProcess) -> None:
        del self._streams[stream.back.endpoint]
        for room in stream.rooms:
            self._deliver(frames.abort_frames(handshake_pb2.Abort(room=room), stream.back))
        log.info("kv_link_lost decode=%s open_rooms=%d", stream.peer.rank, len(stream.rooms))


async def _write(outbox: asyncio.Queue[_Message], context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await outbox.get())
