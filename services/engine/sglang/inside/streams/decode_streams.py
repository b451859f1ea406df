"""The decode side of the Handshake inside a process of SGLang's has one stream per prefill process.

send(endpoint, message) --> outbox --> [stream made at the first word: Hello, their Hello, checked] --> words
Status, AbortAck --> frames --> deliver the stream ends --> forgotten, `lost(endpoint, reason)`; the next word
makes a new one
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from services.engine.sglang.inside.memory.replicas import check_drafts, check_tensor_parallel
from services.engine.sglang.inside.streams import frames
from services.engine.sglang.inside.streams.frames import Frames
from services.net import grpc_errors
from services.transfer.hello import Hello, check_hello, read_hello
from services.values.errors import IsthmusError, PeerFailed, ProtocolError
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_Message = handshake_pb2.HandshakeMessage
_CONNECT_TIMEOUT_S = 15.0  # A peer that is not there is known at once; this is for a starved one.


class DecodeStreams:
    """It lives on one asyncio loop; every method is called there and returns at once."""

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
        """Send a message; a ticket is given the generation of whoever answers there."""
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
            ):  # It has ended, and read says why.
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
            # A write that fails tells that the stream has ended, which the reader has seen as well.
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
