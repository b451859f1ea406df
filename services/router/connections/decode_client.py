"""The router's end of one decode rank's Attach stream, shared by all its requests.

    run:  connect -> read StepOutputs -> (stream lost: every request fails with DecodeRankLost) -> connect ...
    retire:  no new requests -> those that run end, or the stream is lost -> closed

A rank reports at least every half second, so silence is a sign: a stopped process is found out as
surely as a dead one.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import grpc

from services.net import channels, grpc_errors
from services.net.tls import TlsConfig
from services.router.connections.coalescing import Coalescing
from services.router.connections.commands import Commands
from services.router.connections.output_stream import OutputStream
from services.router.connections.silence import SilenceLimit
from services.values.errors import InvalidRequest, IsthmusError, PeerFailed, ProtocolError
from services.values.load import RankLoad
from services.values.rank import RankAddress
from services.values.request import Output
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import decode_pb2
from services.wire.packed_ids import PackedIds, length_delimited

log = logging.getLogger(__name__)

SILENCE_S = 5.0  # ten missed reports
_RETRY_S = 0.2
_ATTACH = f"/{decode_pb2.DESCRIPTOR.services_by_name['Decode'].full_name}/Attach"
_START = decode_pb2.Command.START_FIELD_NUMBER
_PROMPT_IDS = decode_pb2.Start.PROMPT_IDS_FIELD_NUMBER
_NO_IDS = PackedIds.of(())


class DecodeRankLost(PeerFailed):
    """The decode rank itself is gone, not its peer."""


class DecodeClient:
    """This is one Attach stream to one incarnation of a decode rank."""

    def __init__(
        self,
        address: RankAddress,
        tls: TlsConfig | None,
        on_load: Callable[[RankLoad], None],
        on_lost: Callable[[], None],
        coalescing: Coalescing | None = None,
    ) -> None:
        """`coalescing` says how long tokens wait for others of their request; with None they never do."""
        self.address = address
        self._coalescing = coalescing
        self._channel = channels.open_channel(address.endpoint, tls)
        self._on_load = on_load
        self._on_lost = on_lost
        self._commands = Commands()
        self._streams: dict[int, OutputStream] = {}  # by the number that their tokens come under
        self._numbers: dict[str, int] = {}  # of each request
        self._next_number = count(1)
        self._suffix = secrets.token_hex(8)  # of requests' names there: no other client has it
        self._idle = asyncio.Event()  # no request runs
        self._idle.set()
        self._silence = SilenceLimit()
        self._task = asyncio.create_task(self._run(), name=f"attach-{address.id}")
        self.connected = asyncio.Event()

    def start(self, start: decode_pb2.Start, prompt: PackedIds = _NO_IDS) -> OutputStream:
        """Send a request to the rank, with what is the connection's own.

        That is the incarnation that it is for, and a name and a number there. `prompt` is its prompt, where
        `start` has none.

        Raises:
            DecodeRankLost: the rank is not connected.
            InvalidRequest: the request is larger than a message may be. Its write would break the stream.
        """
        if not self.connected.is_set():
            raise DecodeRankLost(f"decode rank {self.address.id} is not reachable")
        # Not the client's id alone: a request of that name, of this router or another, may not have ended
        # there yet, and what is still said of it must not be taken for this one's.
        number = next(self._next_number)
        request_id = f"{start.request_id}#{self._suffix}{number:x}"
        start.decode_generation = self.address.id.generation
        start.request_id, start.number = request_id, number
        message = length_delimited(_START, start.SerializeToString() + prompt.field(_PROMPT_IDS))
        if len(message) > channels.MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"the request is too large: {len(message)} bytes, "
                f"and a message holds {channels.MAX_MESSAGE_BYTES}"
            )
        stream = OutputStream(self, request_id, start.timeout_s or None, self._coalescing)
        self._streams[number], self._numbers[request_id] = stream, number
        self._idle.clear()
        self._commands.put(message)
        return stream

    def send_abort(self, request_id: str) -> None:
        abort = decode_pb2.AbortCommand(request_id=request_id)
        self._commands.put(decode_pb2.Command(abort=abort).SerializeToString())

    def forget(self, request_id: str) -> None:
        self._streams.pop(self._numbers.pop(request_id, 0), None)
        if not self._streams:
            self._idle.set()

    async def retire(self) -> None:
        """Close, but let the requests that run there end: the rank is forgotten, or begins a new
        incarnation."""
        self._on_load = _unheard  # it may be taken for the next incarnation's
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Close the stream: requests that run there fail with DecodeRankLost."""
        self.connected.clear()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._fail_all("the router is stopping")
        await self._channel.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._attach()
                reason = "it ended its stream"
            except TimeoutError:
                reason = f"it was silent for {SILENCE_S:g} s"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except IsthmusError as error:
                reason = str(error)  # it says what we cannot read
            grpc_errors.heed_cancellation()
            if self.connected.is_set():
                log.warning("decode_rank_lost rank=%s reason=%r", self.address.id, reason)
                self.connected.clear()
                self._fail_all(reason)
                self._on_lost()
            await asyncio.sleep(_RETRY_S)

    async def _attach(self) -> None:
        self._commands = Commands()  # what was meant for the old stream is void
        # No stub: what it would serialize is serialized.
        call = self._channel.stream_stream(_ATTACH, None, decode_pb2.StepOutputs.FromString)()
        writer = asyncio.create_task(self._write(call))
        try:
            async with self._silence.bounded(SILENCE_S):
                await self._read(call)
        finally:
            writer.cancel()
            call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        """Read until the rank has ended the stream with OK."""
        while (message := await call.read()) is not grpc.aio.EOF:
            self._silence.heard()
            self.connected.set()
            self._receive(message)
        await _raise_status(call)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        # A broken stream shows itself to the reader, which ends both.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._commands.message())

    def _receive(self, message: decode_pb2.StepOutputs) -> None:
        if message.takes_further:
            self._commands.joins = True
        self._on_load(convert.load_from_proto(message.load))
        self._receive_tokens(message.numbers, message.token_ids)
        for output in message.outputs:
            if (stream := self._streams.get(self._numbers.get(output.request_id, 0))) is not None:
                stream.put(_item(output))

    def _receive_tokens(self, numbers: Sequence[int], token_ids: Sequence[int]) -> None:
        if len(numbers) != len(token_ids):
            raise ProtocolError(f"a step has {len(numbers)} numbers of requests for {len(token_ids)} tokens")
        streams, now_s = self._streams, 0.0 if self._coalescing is None else self._coalescing.clock()
        for number, token_id in zip(numbers, token_ids, strict=True):
            if (stream := streams.get(number)) is not None:
                stream.put_token(token_id, now_s)

    def _fail_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        self._numbers.clear()
        for stream in streams.values():
            stream.put(DecodeRankLost(f"decode rank {self.address.id} was lost: {reason}"))
        self._idle.set()


def _unheard(load: RankLoad) -> None:
    pass


async def _raise_status(call: grpc.aio.StreamStreamCall) -> None:
    """Raise the status that ended a stream, unless it is OK."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )


def _item(output: decode_pb2.RequestOutput) -> Output | IsthmusError:
    if output.WhichOneof("end") == "error":
        return grpc_errors.error_from_request(output.error)
    return convert_request.output_from_proto(output)
