"""This is the Decode service of one rank, and what makes a rank a decode rank.

A router's Attach stream brings commands in, and sends one StepOutputs per engine step out.

    Start ----> a task that iterates the engine ----> outbox ---+
    Start ----> a task that iterates the engine ----> outbox ---+--> StepOutputs
                                    tokens alone ----^
    Abort ----> cancels its task

The results of an engine step are in the outbox within two iterations of the event loop: tokens alone in the
first, and the outputs of tasks that the step wakes in the second. The writer runs in the third, so each step
is one message. When the stream ends, every task is cancelled.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial

import grpc
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry

from services.decode.prefill_leg import PrefillChannels, PrefillLeg
from services.engine.base import DecodeEngine
from services.engine.choose import decode_engines
from services.net import grpc_errors
from services.net.channels import TlsConfig
from services.observe import log_lines, traces
from services.rank.intake import Intake
from services.rank.rank_config import RankConfig
from services.rank.rank_metrics import DecodeMetrics
from services.rank.rank_role import RankRole, Services
from services.values.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    IsthmusError,
    PeerFailed,
    ProtocolError,
    RankLeaves,
    StaleGeneration,
    Unavailable,
)
from services.values.prompt_logprobs import MAX_BYTES as MAX_PROMPT_BYTES
from services.values.rank import Plan, RankId, Role
from services.values.rank_reports import (
    LENDS,
    NO_CACHE,
    NO_CHECKPOINTS,
    NO_MOVED_PENALTIES,
    NO_TENANT_TURNS,
    PULLS,
    REMOTE_ONLY,
)
from services.values.request import Admitted, FinishReason, Output, StartCommand
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import decode_pb2, decode_pb2_grpc, handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_MOST_COMING = 32  # A router that reads so slowly that more wait for it is told of the last ones alone.


class RunningRequests:
    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self._moves: dict[str, Callable[[], None]] = {}
        intake.move_all = self._move_all

    def add(self, request_id: str, task: asyncio.Task[None], move: Callable[[], None]) -> None:
        """`move` ends the request here, and its router goes on elsewhere."""
        self._moves[request_id] = move
        self.intake.took()
        task.add_done_callback(lambda _: self._remove(request_id))

    def _remove(self, request_id: str) -> None:
        del self._moves[request_id]
        self.intake.left()

    def _move_all(self) -> None:
        for move in self._moves.values():
            move()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._moves


class AttachSession:
    """It serves one stream: `read` consumes commands, and `messages` yields what is sent."""

    def __init__(
        self,
        engine: DecodeEngine,
        own_id: RankId,
        channels: PrefillChannels,
        running: RunningRequests,
        metrics: DecodeMetrics,
        sessions: "set[AttachSession]",
    ) -> None:
        """`sessions` are those of all routers that are attached."""
        self._engine = engine
        self._own_id = own_id
        self._channels = channels
        self._running = running
        self._metrics = metrics
        self._sessions = sessions
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._moving: set[str] = set()
        self._outbox = Outbox()
        self._wake = asyncio.Event()
        self._is_waking = False  # whether `_wake` will be set in the loop's next iteration
        self._num_tokens = 0  # tokens that came and are not counted yet

    async def read(self, commands: AsyncIterator[decode_pb2.Command]) -> None:
        async for command in commands:
            self._obey(command)
            for further in command.further:
                if further.further:
                    raise ProtocolError("an Attach command behind another one that has further ones itself")
                self._obey(further)

    def _obey(self, command: decode_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._start(command.start)
            case "abort":
                self._abort(command.abort.request_id)
            case _:
                raise ProtocolError("an Attach command that is neither start nor abort")

    async def messages(self, idle_report_s: float) -> AsyncGenerator[decode_pb2.StepOutputs, None]:
        """Yield StepOutputs as they come: first one with the load alone, which is repeated after
        `idle_report_s` of silence."""
        with closing(Silence(idle_report_s, self._wake.set)) as silence:
            first = self._message()
            first.takes_further = True
            yield first
            while True:
                silence.begins()
                await self._wake.wait()
                silence.ends()
                yield self._message()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._count_tokens()

    def _message(self) -> decode_pb2.StepOutputs:
        self._wake.clear()
        self._is_waking = False
        self._count_tokens()
        message = self._outbox.take()
        if self._outbox:
            self._wake.set()
        convert.fill_load(message.load, self._engine.load())
        message.load.draining = self._running.intake.draining
        return message

    def _put(self, request_id: str, output: Output, number: int = 0) -> None:
        self._outbox.put(request_id, output, number)
        self._num_tokens += len(output.token_ids)
        self._wake.set()

    def _put_token(self, request_id: str, number: int, token_id: int) -> None:
        self._outbox.put_token(request_id, number, token_id)
        self._num_tokens += 1
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_writer)

    def _wake_writer(self) -> None:
        """Wake the writer one iteration late, when the tasks woken by the same step have put their
        outputs."""
        if self._outbox:
            self._wake.set()

    def _count_tokens(self) -> None:
        self._metrics.generated(self._num_tokens)
        self._num_tokens = 0

    def _put_failure(self, request_id: str, error: IsthmusError) -> None:
        self._outbox.put_message(_failure(request_id, error))
        self._wake.set()

    def _start(self, message: decode_pb2.Start) -> None:
        request_id = message.request_id
        try:
            self._check(message)
            command = convert_request.start_from_proto(message)
            if message.HasField("coming"):  # A wrong one would end the streams of all other routers.
                convert_request.coming_from_proto(message.coming)
        except IsthmusError as error:
            self._put_failure(request_id, error)
            return
        task = asyncio.create_task(self._run(command, message.number), name=f"request-{request_id}")
        self._tasks[request_id] = task
        self._running.add(request_id, task, partial(self._move, request_id))
        if message.HasField("coming"):
            for session in self._sessions - {self}:
                session.tell(message.coming)
        task.add_done_callback(partial(self._ended, request_id))

    def tell(self, coming: decode_pb2.Coming) -> None:
        """Tell this session's router what another one has sent."""
        self._outbox.coming.append(coming)
        self._wake.set()

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[request_id]
        moves = request_id in self._moving
        self._moving.discard(request_id)
        if not task.cancelled():
            return
        if moves:
            self._put_failure(request_id, RankLeaves(f"decode rank {self._own_id} leaves"))
        else:  # It may have been cancelled before it began.
            self._put(request_id, Output(finished=FinishReason.ABORTED))

    def _check(self, message: decode_pb2.Start) -> None:
        if message.decode_generation != self._own_id.generation:
            raise StaleGeneration(f"decode rank {self._own_id} has been restarted since it was chosen")
        if message.request_id in self._running:
            raise AlreadyRunning(f"request_id {message.request_id!r} is running on {self._own_id}")
        self._running.intake.check()

    def _abort(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def _move(self, request_id: str) -> None:
        self._moving.add(request_id)
        self._tasks[request_id].cancel()

    async def _run(self, command: StartCommand, number: int) -> None:
        request_id = command.request.request_id
        with log_lines.request_context(request_id):
            try:
                with (
                    traces.span("decode.generate", command.traceparent) as span,
                    self._metrics.counted(),
                ):
                    async with asyncio.timeout(command.timeout_s):
                        await self._generate(command, number, span)
            except TimeoutError:
                self._put_failure(request_id, DeadlineExceeded("the deadline has passed"))
            except IsthmusError as error:
                self._put_failure(request_id, error)
            except Exception:
                log.exception("request_failed")
                self._put_failure(request_id, Unavailable("the decode rank failed; its log says why"))

    async def _generate(self, command: StartCommand, number: int, span: Span) -> None:
        request_id, began = command.request.request_id, time.monotonic()
        plan = command.request.plan
        span.set_attributes({"request_id": request_id, "rank": str(self._own_id), "plan": plan.value})
        leg = None
        if plan is Plan.REMOTE:
            assert command.prefill is not None, "convert_request refuses such a Start"
            traceparent = traces.traceparent(span)
            leg = PrefillLeg(
                self._channels, command.prefill, command.timeout_s, traceparent, command.sampling
            )
        tell = partial(self._put_token, request_id, number)
        async with aclosing(self._engine.generate(command.request, leg, tell)) as outputs:
            async for output in outputs:
                if output.admitted is not None:
                    output = replace(output, admitted=_completed(output.admitted, time.monotonic() - began))
                self._put(request_id, output, number)
                if output.admitted is not None:
                    self._metrics.admitted(output.admitted, traces.exemplar(span))
                    span.set_attributes(_admitted_attributes(output.admitted))


def _completed(admitted: Admitted, first_token_s: float) -> Admitted:
    """Return the report with the wait for the first decode step.

    It is the time to the first token, minus the times of the engine's stages.
    """
    return replace(admitted, first_decode_step_s=max(0.0, first_token_s - admitted.rank_s))


_ADMITTED = (
    "prompt_tokens",
    "decode_prefix_len",
    "kv_bytes_moved",
    "decode_queue_s",
    "transfer_s",
    "first_decode_step_s",
)


def _admitted_attributes(admitted: Admitted) -> dict[str, int | float]:
    return {name: getattr(admitted, name) for name in _ADMITTED}


def _failure(request_id: str, error: IsthmusError) -> decode_pb2.RequestOutput:
    failure = decode_pb2.RequestError(
        code=grpc_errors.status_of(error).value[0],
        message=str(error),
        peer_failed=isinstance(error, PeerFailed),
        leaves=isinstance(error, RankLeaves),
    )
    return decode_pb2.RequestOutput(request_id=request_id, error=failure)


class Silence:
    """It calls `ring` when a wait has lasted `limit_s`, and again each time that it lasts as long once more.

    Its timer is not set at each wait, because waits are many and mostly brief.
    """

    def __init__(self, limit_s: float, ring: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the wait began; None: nobody waits
        self._timer = self._loop.call_later(limit_s, self._look)

    def begins(self) -> None:
        self._since = self._loop.time()

    def ends(self) -> None:
        self._since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._limit_s
        if self._since is not None:
            left_s += self._since - self._loop.time()
            if left_s <= 0:
                self._ring()
                left_s = self._limit_s
        self._timer = self._loop.call_later(left_s, self._look)


class Outbox:
    """It keeps what is to be sent to a router, in order for each request.

    If a request has a number, its tokens are not sent as outputs when there is nothing else to report: two
    numbers each, in arrays of all requests, cost a tenth of a message.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._outputs: list[decode_pb2.RequestOutput] = []
        self._behind: set[str] = set()  # Tokens of these requests must follow their outputs.
        self.coming: deque[decode_pb2.Coming] = deque(maxlen=_MOST_COMING)

    def __bool__(self) -> bool:
        return bool(self._outputs or self._token_ids)

    def put(self, request_id: str, output: Output, number: int = 0) -> None:
        if number and output.is_tokens_alone and request_id not in self._behind:
            self._numbers += [number] * len(output.token_ids)
            self._token_ids += output.token_ids
        else:
            self.put_message(convert_request.output_to_proto(request_id, output))

    def put_token(self, request_id: str, number: int, token_id: int) -> None:
        if number and request_id not in self._behind:
            self._numbers.append(number)
            self._token_ids.append(token_id)
        else:
            self.put_message(decode_pb2.RequestOutput(request_id=request_id, token_ids=(token_id,)))

    def put_message(self, output: decode_pb2.RequestOutput) -> None:
        self._outputs.append(output)
        self._behind.add(output.request_id)

    def take(self) -> decode_pb2.StepOutputs:
        """Return as much as fits in one message. Logprobs of prompts may be large, but one prompt's fit."""
        outputs, self._outputs = _fitting(self._outputs)
        message = decode_pb2.StepOutputs(outputs=outputs, numbers=self._numbers, token_ids=self._token_ids)
        if self.coming:
            message.coming.extend(self.coming)
            self.coming.clear()
        self._numbers, self._token_ids = [], []
        self._behind = {output.request_id for output in self._outputs}
        return message


def _fitting(
    outputs: list[decode_pb2.RequestOutput],
) -> tuple[list[decode_pb2.RequestOutput], list[decode_pb2.RequestOutput]]:
    size = 0
    for index, output in enumerate(outputs):
        size += output.prompt_logprobs.ByteSize() if output.HasField("prompt_logprobs") else 0
        if size > MAX_PROMPT_BYTES and index:
            return outputs[:index], outputs[index:]
    return outputs, []


# A router that receives nothing for a few of these periods knows that the rank is gone.
IDLE_REPORT_S = 0.5


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        engine: DecodeEngine,
        own_id: RankId,
        tls: TlsConfig | None,
        metrics: DecodeMetrics,
    ) -> None:
        self._engine = engine
        self._own_id = own_id
        self._channels = PrefillChannels(tls)
        self._metrics = metrics
        self.intake = Intake(own_id)
        self._running = RunningRequests(self.intake)
        self._sessions: set[AttachSession] = set()

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Command], context: grpc.aio.ServicerContext
    ) -> None:
        session = AttachSession(
            self._engine, self._own_id, self._channels, self._running, self._metrics, self._sessions
        )
        self._sessions.add(session)
        writer = asyncio.create_task(_write(session, context))
        try:
            await session.read(request_iterator)
        finally:
            self._sessions.discard(session)
            writer.cancel()
            await session.close()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    async def close(self) -> None:
        await self._channels.close()


async def _write(session: AttachSession, context: grpc.aio.ServicerContext) -> None:
    async with contextlib.aclosing(session.messages(IDLE_REPORT_S)) as messages:
        async for message in messages:
            await context.write(message)


def decode_roles(config: RankConfig, own_ids: Sequence[RankId]) -> list[RankRole]:
    """Return the roles of all ranks of this process. Raises ConfigError if the engine's settings cannot
    work."""
    engines = decode_engines(config, own_ids)
    return [_role(config, own_id, engine) for own_id, engine in zip(own_ids, engines, strict=True)]


def _role(config: RankConfig, own_id: RankId, engine: DecodeEngine) -> RankRole:
    def make_services(registry: CollectorRegistry) -> Services:
        metrics = DecodeMetrics(registry, engine)
        service = DecodeService(engine, own_id, config.tls(), metrics)
        names = [decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name]
        if (handshake := engine.handshake()) is not None:
            names.append(handshake_pb2.DESCRIPTOR.services_by_name["Handshake"].full_name)

        def register(server: grpc.aio.Server) -> None:
            decode_pb2_grpc.add_DecodeServicer_to_server(service, server)
            if handshake is not None:
                handshake_pb2_grpc.add_HandshakeServicer_to_server(handshake, server)

        return Services(register, names, service.intake, metrics.digests, service.close)

    capabilities = {
        LENDS: engine.lends,
        PULLS: engine.pulls,
        REMOTE_ONLY: Plan.LOCAL not in engine.plans,
        NO_CACHE: config.decode_cache == "off",
        NO_MOVED_PENALTIES: not engine.moves_penalties,
        NO_CHECKPOINTS: not engine.reports_checkpoints,
        NO_TENANT_TURNS: not engine.takes_turns,
    }
    return RankRole(
        Role.DECODE, engine, make_services, tuple(name for name in capabilities if capabilities[name])
    )
