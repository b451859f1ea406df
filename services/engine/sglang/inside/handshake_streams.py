"""A process of SGLang's uses the Handshake: its control messages become ours, over gRPC.

The decode side has one stream per prefill process. `send(endpoint, message)` puts a message into the stream's
outbox. The first message opens the stream: both sides send a Hello, and each checks the other's. Status and
AbortAck become frames for `deliver`. When the stream ends it is forgotten, and `lost(endpoint, reason)` is
called; the next message opens a new one.

One prefill process serves many streams. It checks a Hello, answers with its own, and turns it into
registration frames. It checks a KvTicket, answers ACCEPTED, and turns it into metadata frames; an Abort
becomes abort frames. All frames go to the inbox, which SGLang's thread reads. SGLang's threads `send` Status
and AbortAck by the stream's number. When a stream ends, every open transfer of it gets abort frames.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from services.engine.sglang.inside import frames
from services.engine.sglang.inside.frames import Frames, ReturnAddress
from services.engine.sglang.inside.process_memory import check_drafts, check_tensor_parallel
from services.kv.ticket import check_ticket, hit_kind
from services.net import grpc_errors
from services.transfer.hello import Hello, check_hello, read_hello
from services.values.errors import IsthmusError, PeerFailed, ProtocolError, StaleGeneration
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_Message = handshake_pb2.HandshakeMessage
_CONNECT_TIMEOUT_S = 15.0  # A missing peer is known at once; this is for one that gets no CPU time.


class DecodeStreams:
    """This belongs to one asyncio loop; every method is called there and returns at once."""

    def __init__(
        self,
        own: Hello,
        own_message: Callable[[], _Message],
        open_channel: Callable[[str], grpc.aio.Channel],
        deliver: Callable[[Frames], None],
        lost: Callable[[str, str], None],
    ) -> None:
        self._own = own
        self._own_message = own_message
        self._open_channel = open_channel
        self._deliver = deliver
        self._lost = lost
        self._outboxes: dict[str, asyncio.Queue[_Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, endpoint: str) -> None:
        if endpoint in self._outboxes:
            return
        outbox = self._outboxes[endpoint] = asyncio.Queue()
        task = asyncio.create_task(self._run(endpoint, outbox), name=f"handshake-{endpoint}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send(self, endpoint: str, message: _Message) -> None:
        """Send a message; a ticket gets the generation of the rank that answers there."""
        self.open(endpoint)
        self._outboxes[endpoint].put_nowait(message)

    async def _run(self, endpoint: str, outbox: asyncio.Queue[_Message]) -> None:
        reason = "the stream has ended"
        try:
            async with self._open_channel(endpoint) as channel:
                await self._converse(channel, outbox)
        except IsthmusError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer in {_CONNECT_TIMEOUT_S:g} s"
        finally:
            if self._outboxes.get(endpoint) is outbox:
                del self._outboxes[endpoint]
        log.warning("kv_link_lost endpoint=%s reason=%r", endpoint, reason)
        self._lost(endpoint, reason)

    async def _converse(self, channel: grpc.aio.Channel, outbox: asyncio.Queue[_Message]) -> None:
        call = handshake_pb2_grpc.HandshakeStub(channel).Connect()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            with (
                grpc_errors.renaming(),
                contextlib.suppress(asyncio.InvalidStateError),
            ):  # The stream has ended, and _read raises the reason.
                await call.write(self._own_message())
            first = await _read(call)
        peer, _ = read_hello(first)
        check_hello(self._own, peer)
        check_tensor_parallel(prefill=peer.layout, decode=self._own.layout)
        check_drafts(prefill=peer.layout, decode=self._own.layout)
        hello = first.hello
        log.info("kv_link_up prefill=%s tp_rank=%d", peer.rank, hello.tp_rank)
        writer = asyncio.create_task(_write(call, outbox, hello.rank.generation))
        try:
            while True:
                self._take(await _read(call), hello.writer_rank)
        finally:
            writer.cancel()
            # A failed write shows that the stream has ended, which the reader has seen as well.
            await asyncio.gather(writer, return_exceptions=True)

    def _take(self, message: _Message, writer_rank: int) -> None:
        match message.WhichOneof("message"):
            case "status":
                if message.status.state != handshake_pb2.Status.STATE_ACCEPTED:
                    self._deliver(frames.status_frames(message.status, writer_rank))
            case "abort_ack":
                self._deliver(frames.abort_ack_frames(message.abort_ack, writer_rank))
            case other:
                raise ProtocolError(f"a prefill rank does not send {other} after its Hello")


async def _write(
    call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[_Message], prefill_generation: int
) -> None:
    while True:
        message = await outbox.get()
        if message.HasField("ticket"):
            message.ticket.prefill_generation = prefill_generation
        await call.write(message)


async def _read(call: grpc.aio.StreamStreamCall) -> _Message:
    with grpc_errors.renaming():
        message: _Message = await call.read()
        if message is grpc.aio.EOF:
            code = await call.code()
            raise PeerFailed(f"the stream has ended: {code.name}")
    return message


_Status = handshake_pb2.Status
_HOST = "isthmus"  # SGLang prints this in place of a decode rank's address.


@dataclass(slots=True)
class _DecodeProcess:
    back: ReturnAddress
    hello: handshake_pb2.Hello
    peer: Hello
    outbox: asyncio.Queue[_Message] = field(default_factory=asyncio.Queue)
    transfers: set[int] = field(default_factory=set)

    def send(self, **word: object) -> None:
        self.outbox.put_nowait(_Message(**word))  # type: ignore[arg-type]


class PrefillStreams(handshake_pb2_grpc.HandshakeServicer):
    """This belongs to one asyncio loop; `send` is called there."""

    def __init__(
        self,
        own: Hello,
        own_message: Callable[[], _Message],
        deliver: Callable[[Frames], None],
        refuse: Callable[[int, str], None],
    ) -> None:
        """`deliver` takes frames for SGLang, and raises ProtocolError for frames that it cannot read.

        `refuse` fails a transfer whose ticket was refused.
        """
        self._own = own
        self._own_message = own_message
        self._deliver = deliver
        self._refuse = refuse
        self._numbers = itertools.count(1)
        self._streams: dict[str, _DecodeProcess] = {}

    def send(self, endpoint: str, message: _Message) -> None:
        """Send a final message to the stream whose ReturnAddress has this endpoint, unless it has ended."""
        stream = self._streams.get(endpoint)
        if stream is None:
            log.info("kv_status_undelivered endpoint=%s", endpoint)
            return
        word = message.status if message.HasField("status") else message.abort_ack
        stream.transfers.discard(word.room)
        stream.outbox.put_nowait(message)

    async def Connect(
        self, request_iterator: AsyncIterator[_Message], context: grpc.aio.ServicerContext
    ) -> None:
        stream = await self._greet(request_iterator)
        writer = asyncio.create_task(_write_answers(stream.outbox, context))
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
                stream.transfers.discard(message.abort.room)
                self._deliver(frames.abort_frames(message.abort, stream.back))
            case "renew":
                pass  # SGLang's decode keeps the pages until the final message, so there is no lease.
            case other:
                raise ProtocolError(f"a decode rank does not send {other} after its Hello")

    def _take_ticket(self, stream: _DecodeProcess, ticket: handshake_pb2.KvTicket) -> None:
        try:
            self._check(stream, ticket)
            agent_name = stream.hello.engine_memory.agent_name
            self._deliver(frames.metadata_frames(ticket, agent_name, stream.back))
        except IsthmusError as error:
            log.warning("kv_ticket_refused room=%016x reason=%r", ticket.room, str(error))
            stream.send(status=_Status(room=ticket.room, state=_Status.STATE_REFUSED, reason=str(error)))
            self._refuse(ticket.room, str(error))
            return
        stream.transfers.add(ticket.room)
        stream.send(status=_Status(room=ticket.room, state=_Status.STATE_ACCEPTED))

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
        for transfer_id in stream.transfers:
            self._deliver(frames.abort_frames(handshake_pb2.Abort(room=transfer_id), stream.back))
        log.info("kv_link_lost decode=%s open_rooms=%d", stream.peer.rank, len(stream.transfers))


async def _write_answers(outbox: asyncio.Queue[_Message], context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await outbox.get())
