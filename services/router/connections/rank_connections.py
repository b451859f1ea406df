"""There is a stream to every rank: a decode rank's carries requests, and a prefill rank's reports load.

    follow(the current ranks) --> opened; where that failed, again after _REOPEN_S
                              --> retired where the rank is gone or is a new incarnation

The requests at a retired decode rank may end.

A DecodeClient is the router's end of one decode rank's Attach stream, which all its requests share.

    run:  connect -> read StepOutputs -> (stream lost: every request fails with DecodeRankLost) -> connect ...
    retire:  no new requests -> the running ones end, or the stream is lost -> closed

A rank reports at least every half second, so silence reveals a stopped process as surely as a dead one.

Commands to start and abort requests wait to be sent to a decode rank. A message costs both ends the same for
one command as for ten, and one is written at a time: the commands that arrive meanwhile are joined into the
next.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeVar

import grpc

from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.router.connections.output_stream import Coalescing, OutputStream
from services.router.connections.rank_health import SILENCE_S, PrefillWatch, SilenceLimit
from services.values.errors import ConfigError, InvalidRequest, IsthmusError, PeerFailed, ProtocolError
from services.values.rank import RankAddress, RankKey
from services.values.rank_reports import Coming, RankLoad
from services.values.request import Output
from services.wire import convert, convert_request
from services.wire.generation_messages import PackedIds, length_delimited
from services.wire.isthmus.v1 import decode_pb2

_FURTHER = decode_pb2.Command.FURTHER_FIELD_NUMBER
# These limit the commands that are joined into one. The rank handles them in one iteration of its loop, in
# which it sends no token: a start takes some 60 us there.
_MOST_JOINED = 32
_MOST_JOINED_BYTES = 1 << 20


class Commands:
    """These are serialized Commands in order. `joins` says that the rank reads several at once."""

    def __init__(self) -> None:
        self.joins = False
        self._waiting: deque[bytes] = deque()
        self._came = asyncio.Event()

    def put(self, command: bytes) -> None:
        self._waiting.append(command)
        self._came.set()

    async def message(self) -> bytes:
        await self._came.wait()
        message = self._waiting.popleft()
        if self.joins and self._waiting:
            message = self._joined(message)
        if not self._waiting:
            self._came.clear()
        return message

    def _joined(self, first: bytes) -> bytes:
        parts, size = [first], len(first)
        while (
            self._waiting and len(parts) < _MOST_JOINED and size + len(self._waiting[0]) <= _MOST_JOINED_BYTES
        ):
            further = self._waiting.popleft()
            parts.append(length_delimited(_FURTHER, further))
            size += len(further)
        return b"".join(parts)


log = logging.getLogger(__name__)

_RETRY_S = 0.2
_ATTACH = f"/{decode_pb2.DESCRIPTOR.services_by_name['Decode'].full_name}/Attach"
_START = decode_pb2.Command.START_FIELD_NUMBER
_PROMPT_IDS = decode_pb2.Start.PROMPT_IDS_FIELD_NUMBER
_NO_IDS = PackedIds.of(())


class DecodeRankLost(PeerFailed):
    """The decode rank itself is gone, not its peer."""


class DecodeClient:
    def __init__(
        self,
        address: RankAddress,
        tls: TlsConfig | None,
        on_load: Callable[[RankLoad], None],
        on_lost: Callable[[], None],
        on_coming: Callable[[Coming], None],
        coalescing: Coalescing | None = None,
    ) -> None:
        """`on_coming` is told what other routers have sent. `coalescing` decides how long tokens wait for
        others of their request; with None they never do."""
        self.address = address
        self._coalescing = coalescing
        self._channel = channels.open_channel(address.endpoint, tls)
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_coming = on_coming
        self._commands = Commands()
        self._streams: dict[int, OutputStream] = {}  # The keys are the numbers of the tokens' requests.
        self._numbers: dict[str, int] = {}  # Each request has a number.
        self._next_number = count(1)
        self._suffix = secrets.token_hex(8)  # Requests' names there end with it, which no other client has.
        self._idle = asyncio.Event()  # This is set while no request runs.
        self._idle.set()
        self._silence = SilenceLimit()
        self._task = asyncio.create_task(self._run(), name=f"attach-{address.id}")
        self.connected = asyncio.Event()

    def start(self, start: decode_pb2.Start, prompt: PackedIds = _NO_IDS) -> OutputStream:
        """Send a request to the rank, with the incarnation and with a name and a number of this connection.
        `prompt` is its prompt, where `start` has none. Raises DecodeRankLost while the rank is not connected,
        and InvalidRequest for a request above a message's size, which would break the stream."""
        if not self.connected.is_set():
            raise DecodeRankLost(f"decode rank {self.address.id} is not reachable")
        # The client's id alone is not enough: another request with that id, from this router or another, may
        # still run there, and reports on it must not be taken for reports on this one.
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
        """Close the stream after its requests have ended: the rank is forgotten, or has begun again."""
        self._on_load = _ignore_load  # A report could be taken for the next incarnation's.
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
                reason = str(error)  # The error names the unreadable part.
            grpc_errors.heed_cancellation()
            if self.connected.is_set():
                log.warning("decode_rank_lost rank=%s reason=%r", self.address.id, reason)
                self.connected.clear()
                self._fail_all(reason)
                self._on_lost()
            await asyncio.sleep(_RETRY_S)

    async def _attach(self) -> None:
        self._commands = Commands()  # Commands for the old stream are dropped.
        # There is no stub, as the messages are already serialized.
        call = self._channel.stream_stream(_ATTACH, None, decode_pb2.StepOutputs.FromString)()
        writer = asyncio.create_task(self._write(call))
        try:
            async with self._silence.bounded():
                await self._read(call)
        finally:
            writer.cancel()
            call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._silence.received()
            self.connected.set()
            self._receive(message)
        await _raise_status(call)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        # The reader notices a broken stream, and ends both tasks.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._commands.message())

    def _receive(self, message: decode_pb2.StepOutputs) -> None:
        if message.takes_further:
            self._commands.joins = True
        self._on_load(convert.load_from_proto(message.load))
        for coming in message.coming:
            self._on_coming(convert_request.coming_from_proto(coming))
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


def _ignore_load(load: RankLoad) -> None:
    pass


async def _raise_status(call: grpc.aio.StreamStreamCall) -> None:
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )


def _item(output: decode_pb2.RequestOutput) -> Output | IsthmusError:
    if output.WhichOneof("end") == "error":
        return grpc_errors.error_from_request(output.error)
    return convert_request.output_from_proto(output)


_Connection = TypeVar("_Connection", DecodeClient, PrefillWatch)

_REOPEN_S = 1.0


class Connections:
    """These live on the router's loop. `open_client` and `open_watch` may raise ConfigError."""

    def __init__(
        self,
        open_client: Callable[[RankAddress], DecodeClient],
        open_watch: Callable[[RankAddress], PrefillWatch],
    ) -> None:
        self.clients: dict[RankKey, DecodeClient] = {}
        self.watches: dict[RankKey, PrefillWatch] = {}
        self._open_client = open_client
        self._open_watch = open_watch
        self._decodes: Mapping[RankKey, RankAddress] = {}
        self._prefills: Mapping[RankKey, RankAddress] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._retiring: dict[asyncio.Task[None], DecodeClient | PrefillWatch] = {}

    def follow(self, decodes: Mapping[RankKey, RankAddress], prefills: Mapping[RankKey, RankAddress]) -> None:
        self._decodes, self._prefills = decodes, prefills
        self._connect(self.clients, decodes, self._open_client)
        self._connect(self.watches, prefills, self._open_watch)

    def is_connected(self, rank: RankKey) -> bool:
        client = self.clients.get(rank)
        return client is not None and client.connected.is_set()

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        for connection in (*self.clients.values(), *self.watches.values(), *self._retiring.values()):
            await connection.close()
        await asyncio.gather(*self._retiring)

    def _connect(
        self,
        connections: dict[RankKey, _Connection],
        wanted: Mapping[RankKey, RankAddress],
        open_one: Callable[[RankAddress], _Connection],
    ) -> None:
        for rank, connection in list(connections.items()):
            if wanted.get(rank) != connection.address:
                del connections[rank]
                self._retire(rank, connection)
        for rank, address in wanted.items():
            if rank in connections:
                continue
            try:
                connections[rank] = open_one(address)
            except ConfigError as error:  # A certificate may be about to be replaced.
                log.warning("rank_connect_failed rank=%s error=%s", rank, error)
                self._try_again()

    def _retire(self, rank: RankKey, connection: DecodeClient | PrefillWatch) -> None:
        task = asyncio.create_task(connection.retire(), name=f"retire-{rank}")
        self._retiring[task] = connection
        task.add_done_callback(self._retiring.pop)

    def _try_again(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_REOPEN_S, self._connect_again)

    def _connect_again(self) -> None:
        self._retry = None
        self.follow(self._decodes, self._prefills)
