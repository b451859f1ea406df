"""Errors cross gRPC unchanged; servers say what they are, stop in order, and speak TLS when told."""

import asyncio
import logging
import os
import signal
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from certificates import make_certificates
from services.host.ports import free_ports
from services.net import channels, grpc_errors, guard, servers
from services.net.tls import TlsConfig
from services.process.signals import stop_on_signals
from services.values import errors
from services.wire.isthmus.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    prefill_pb2_grpc,
)

EVERY_ERROR = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.IsthmusError) and cls is not errors.IsthmusError
]
NAMES = ["isthmus.v1.Generation"]


class Service(generation_pb2_grpc.GenerationServicer):
    """Raises what it was given: from a coroutine (Abort) and after one answer of a stream (Generate)."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.running = asyncio.Event()
        self.release = asyncio.Event()
        self.stream_closed = asyncio.Event()
        self.left_s: float | None = None

    async def Abort(self, request, context):
        self.left_s = servers.remaining_s(context)
        if self.error is not None:
            raise self.error
        return generation_pb2.AbortResponse(found=True)

    async def Generate(self, request, context):
        try:
            yield generation_pb2.GenerateResponse(text=request.text)
            if self.error is not None:
                raise self.error
            self.running.set()
            await self.release.wait()
        finally:
            self.stream_closed.set()

    async def ListModels(self, request, context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "by itself")

    async def Explain(self, request, context):
        async with asyncio.timeout(0):
            await self.release.wait()


@asynccontextmanager
async def serving(service, tls=None, client_tls=None, is_serving=True):
    server = await servers.open_server(
        "localhost:0",
        lambda grpc_server: generation_pb2_grpc.add_GenerationServicer_to_server(service, grpc_server),
        NAMES,
        tls,
        is_serving,
    )
    try:
        async with channels.open_channel(f"localhost:{server.port}", client_tls) as channel:
            yield server, channel
    finally:
        await server.stop()


def told(caplog):
    """What was logged, but for what asyncio says of loops of tests before, to which gRPC still has news."""
    return [record for record in caplog.records if record.name != "asyncio"]


def stub_of(channel):
    return generation_pb2_grpc.GenerationStub(channel)


async def call(channel, timeout_s=10.0):
    with grpc_errors.renaming():
        return await stub_of(channel).Abort(generation_pb2.AbortRequest(), timeout=timeout_s)


async def test_every_error_has_a_status():
    assert len(EVERY_ERROR) == 14
    for cls in EVERY_ERROR:
        assert grpc_errors.status_of(cls("x")) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK), cls
    assert grpc_errors.status_of(KeyError("x")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("cls", EVERY_ERROR)
async def test_an_error_comes_back_as_it_was_raised(cls):
    async with serving(Service(cls("temperature must be less – so it is"))) as (_, channel):
        with pytest.raises(errors.IsthmusError, match="temperature must be less – so it is") as caught:
            await call(channel)
    assert type(caught.value) is cls


async def test_an_error_out_of_a_task_group_is_the_error():
    grouped = ExceptionGroup("of a TaskGroup", [KeyError("later"), errors.NoCapacity("full")])
    async with serving(Service(grouped)) as (_, channel):
        with pytest.raises(errors.NoCapacity, match="full"):
            await call(channel)


async def test_a_stream_ends_in_the_error_after_its_answers():
    async with serving(Service(errors.NoCapacity("full"))) as (_, channel):
        texts = []
        with pytest.raises(errors.NoCapacity, match="full"), grpc_errors.renaming():
            async for response in stub_of(channel).Generate(generation_pb2.GenerateRequest(text="hi")):
                texts.append(response.text)
    assert texts == ["hi"]


@pytest.mark.parametrize(("retry_after_s", "pushback_ms"), [(None, None), (2.5, "2500")])
async def test_a_refusal_says_when_to_come_again(retry_after_s, pushback_ms):
    async with serving(Service(errors.NoCapacity("full", retry_after_s))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub_of(channel).Abort(generation_pb2.AbortRequest())
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refused.value.trailing_metadata()).get("grpc-retry-pushback-ms") == pushback_ms


@pytest.mark.parametrize(("method", "kind"), [("Abort", "unary_unary"), ("Generate", "unary_stream")])
async def test_a_message_that_cannot_be_read_is_the_callers_mistake(method, kind, caplog):
    async with serving(Service()) as (_, channel):
        answer = getattr(channel, kind)(f"/isthmus.v1.Generation/{method}")(b"\x0a\x01\xff")  # is no UTF-8
        assert await answer.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message cannot be read" in await answer.details()
    assert not told(caplog)


TAKE_ONE_MESSAGE = [
    (module, service, method)
    for module, name in (
        (generation_pb2_grpc, "isthmus.v1.Generation"),
        (prefill_pb2_grpc, "isthmus.v1.Prefill"),
        (decode_pb2_grpc, "isthmus.v1.Decode"),
        (health_pb2_grpc, "grpc.health.v1.Health"),
    )
    for service in [Default().FindServiceByName(name)]
    for method in service.methods
    if not method.client_streaming
]


@pytest.mark.parametrize(
    ("module", "service", "method"), TAKE_ONE_MESSAGE, ids=lambda value: getattr(value, "name", "")
)
async def test_a_call_that_ends_without_a_message_is_answered(module, service, method, caplog):
    """grpc.aio lets a handler of one message wait for ever then: neither it nor the client hears anything."""

    def register(server):
        if service.name != "Health":  # every server has it
            servicer = getattr(module, f"{service.name}Servicer")()
            getattr(module, f"add_{service.name}Servicer_to_server")(servicer, server)

    server = await servers.open_server("localhost:0", register, [])
    try:
        async with channels.open_channel(f"localhost:{server.port}") as channel:
            call = channel.stream_stream(f"/{service.full_name}/{method.name}")(timeout=20)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "without a message" in await call.details()
    finally:
        await server.stop()
    assert not told(caplog)


async def test_a_client_that_leaves_before_its_message_leaves_nothing_behind(caplog):
    async with serving(Service()) as (_, channel):
        for method in ("Abort", "Generate"):
            call = channel.stream_stream(f"/isthmus.v1.Generation/{method}")()
            await asyncio.sleep(0.05)  # until the server has it
            call.cancel()
        assert (await stub_of(channel).Abort(generation_pb2.AbortRequest(), timeout=10)).found
    assert not told(caplog)


async def test_an_unexpected_exception_is_logged_and_says_nothing_outside(caplog):
    async with serving(Service(KeyError("the secret"))) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(channel).Abort(generation_pb2.AbortRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    [record] = [record for record in caplog.records if record.name == "services.net.guard"]
    assert record.levelno == logging.ERROR
    assert "the secret" in caplog.text
    assert "/isthmus.v1.Generation/Abort" in record.getMessage()


async def test_a_long_sentence_is_cut_and_keeps_its_class():
    async with serving(Service(errors.InvalidRequest("ü" * 100_000))) as (_, channel):
        with pytest.raises(errors.InvalidRequest, match=r"^ü{500}"):
            await call(channel)


async def test_a_handler_may_abort_by_itself():
    async with serving(Service()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(channel).ListModels(generation_pb2.ListModelsRequest())
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS


async def test_a_timeout_in_a_handler_is_a_deadline():
    async with serving(Service()) as (_, channel):
        with pytest.raises(errors.DeadlineExceeded), grpc_errors.renaming():
            await stub_of(channel).Explain(generation_pb2.ExplainRequest())


async def test_nobody_there_is_a_failed_peer():
    async with serving(Service()) as (server, _):
        port = server.port
    async with channels.open_channel(f"localhost:{port}") as channel:
        with pytest.raises(errors.PeerFailed):
            await call(channel)


async def test_a_new_channel_does_not_wait_out_the_backoff_of_an_old_one():
    (port,) = free_ports("127.0.0.1", 1)
    endpoint = f"127.0.0.1:{port}"
    service = Service()
    async with channels.open_channel(endpoint) as old, channels.open_channel(endpoint) as new:
        with pytest.raises(grpc.aio.AioRpcError):  # by then it waits long before its next try
            await stub_of(old).Abort(generation_pb2.AbortRequest(), timeout=0.5, wait_for_ready=True)
        server = await servers.open_server(
            endpoint, lambda s: generation_pb2_grpc.add_GenerationServicer_to_server(service, s), NAMES
        )
        try:
            assert (await call(new)).found
        finally:
            await server.stop()


async def test_a_client_that_goes_away_closes_the_handler_stream():
    service = Service()
    async with serving(service) as (_, channel):
        stream = stub_of(channel).Generate(generation_pb2.GenerateRequest())
        await asyncio.wait_for(service.running.wait(), 10)
        stream.cancel()
        await asyncio.wait_for(service.stream_closed.wait(), 10)


async def test_remaining_time_is_what_the_caller_gave():
    service = Service()
    async with serving(service) as (_, channel):
        await call(channel, timeout_s=60)
        assert 0 < service.left_s < 61  # gRPC rounds it up on the wire
        await call(channel, timeout_s=None)
        assert service.left_s is None


@pytest.mark.parametrize(("left_s", "told_s"), [(9e9, 365 * 86_400.0), (1e300, 365 * 86_400.0), (5.0, 5.0)])
async def test_a_deadline_that_is_far_away_is_a_year(left_s, told_s):
    class Context:
        def time_remaining(self):
            return left_s

    assert servers.remaining_s(Context()) == told_s


async def test_a_passed_deadline_is_an_error():
    class Context:
        def time_remaining(self):
            return 0.0

    with pytest.raises(errors.DeadlineExceeded):
        servers.remaining_s(Context())


async def test_ten_megabytes_pass_and_too_much_is_an_invalid_request():
    async with serving(Service(errors.Aborted("read"))) as (_, channel):

        async def send(size):
            with grpc_errors.renaming():
                async for _ in stub_of(channel).Generate(generation_pb2.GenerateRequest(text="x" * size)):
                    pass

        with pytest.raises(errors.Aborted):
            await send(10 * 2**20)
        with pytest.raises(errors.InvalidRequest, match="too large"):
            await send(channels.MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    ("code", "peer_failed", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, True, errors.PeerFailed),
        (grpc.StatusCode.UNAVAILABLE, False, errors.Unavailable),
        (grpc.StatusCode.INTERNAL, False, errors.Unavailable),
        (grpc.StatusCode.FAILED_PRECONDITION, False, errors.StaleGeneration),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False, errors.NoCapacity),
        (grpc.StatusCode.INVALID_ARGUMENT, False, errors.InvalidRequest),
    ],
)
def test_a_request_error_on_the_attach_stream_is_named(code, peer_failed, expected):
    pb = decode_pb2.RequestError(code=code.value[0], message="why", peer_failed=peer_failed)
    error = grpc_errors.error_from_request(pb)
    assert type(error) is expected
    assert str(error) == "why"


def test_a_request_error_of_an_unknown_code_is_a_failed_rank():
    assert type(grpc_errors.error_from_request(decode_pb2.RequestError(code=999))) is errors.Unavailable


async def health_of(channel):
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_health_says_what_it_was_told():
    async with serving(Service(), is_serving=False) as (server, channel):
        assert await health_of(channel) == "NOT_SERVING"
        await server.set_serving(True)
        assert await health_of(channel) == "SERVING"
        await server.begin_shutdown()
        await server.set_serving(True)
        assert await health_of(channel) == "NOT_SERVING"


async def test_reflection_lists_the_services():
    async with serving(Service()) as (_, channel):
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        async for response in stream:
            names = {service.name for service in response.list_services_response.service}
    assert names >= {"isthmus.v1.Generation", "grpc.health.v1.Health"}


async def test_a_taken_port_is_refused():
    async with serving(Service()) as (server, _):
        with pytest.raises(errors.ConfigError, match=str(server.port)):
            await servers.open_server(f"localhost:{server.port}", lambda _: None, NAMES)


async def test_stopping_drains_and_then_cancels_what_still_runs():
    service = Service()
    story = []

    async with serving(service) as (server, channel):

        async def drain():
            story.append(await health_of(channel))

        stopping = asyncio.Event()
        serve = asyncio.create_task(servers.serve_until_stopped(server, stopping, 0.05, drain))
        stream = stub_of(channel).Generate(generation_pb2.GenerateRequest())
        await asyncio.wait_for(service.running.wait(), 10)
        stopping.set()
        await asyncio.wait_for(serve, 10)
        assert story == ["NOT_SERVING"]
        assert service.stream_closed.is_set()
        with pytest.raises(errors.IsthmusError), grpc_errors.renaming():
            async for _ in stream:
                pass


async def test_a_stream_that_never_ends_does_not_use_up_the_grace():
    service = Service()
    async with serving(service) as (server, channel):

        async def drained():
            """Nothing runs but the stream."""

        stopping = asyncio.Event()
        serve = asyncio.create_task(servers.serve_until_stopped(server, stopping, 1000.0, drained))
        stream = stub_of(channel).Generate(generation_pb2.GenerateRequest())
        await asyncio.wait_for(service.running.wait(), 10)
        stopping.set()
        await asyncio.wait_for(serve, 10)
        assert service.stream_closed.is_set()
        stream.cancel()


async def test_a_drain_that_never_ends_does_not_hold_the_stop(caplog):
    async with serving(Service()) as (server, _):
        stopping = asyncio.Event()
        stopping.set()
        await asyncio.wait_for(servers.serve_until_stopped(server, stopping, 0.01, asyncio.Event().wait), 10)
    assert "drain_timed_out" in caplog.text


async def test_a_signal_stops():
    stopping = stop_on_signals()
    assert not stopping.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stopping.wait(), 10)


@pytest.fixture(scope="module")
def pem(tmp_path_factory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("pem"), "DNS:localhost")


async def test_tls_serves_those_who_trust_the_ca(pem):
    server_tls = TlsConfig(cert=pem / "cert.pem", key=pem / "key.pem")
    async with serving(Service(), server_tls, TlsConfig(ca=pem / "ca.pem")) as (server, channel):
        assert (await call(channel)).found
        async with channels.open_channel(f"localhost:{server.port}") as plain:
            with pytest.raises(errors.PeerFailed):
                await call(plain)


async def test_a_server_is_known_by_the_name_that_it_was_given(tmp_path):
    folder = make_certificates(tmp_path, "DNS:ranks.isthmus")
    tls = TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    async with serving(Service(), tls, replace(tls, server_name="ranks.isthmus")) as (server, channel):
        assert (await call(channel)).found
        for other in ("", "others.isthmus"):
            other_tls = replace(tls, server_name=other)
            async with channels.open_channel(f"localhost:{server.port}", other_tls) as stranger:
                with pytest.raises(errors.PeerFailed):
                    await call(stranger)


async def test_mutual_tls_refuses_a_client_without_a_certificate(pem):
    tls = TlsConfig(pem / "ca.pem", pem / "cert.pem", pem / "key.pem", mutual=True)
    async with serving(Service(), tls, tls) as (server, channel):
        assert (await call(channel)).found
        async with channels.open_channel(
            f"localhost:{server.port}", TlsConfig(ca=pem / "ca.pem")
        ) as anonymous:
            with pytest.raises(errors.PeerFailed):
                await call(anonymous)


@pytest.mark.parametrize(
    "fields",
    [
        {"cert": Path("c")},
        {"key": Path("k")},
        {"ca": Path("ca"), "mutual": True},
        {"cert": Path("c"), "key": Path("k"), "mutual": True},
    ],
)
def test_half_a_tls_config_is_refused(fields):
    with pytest.raises(errors.ConfigError):
        TlsConfig(**fields)


def test_a_missing_pem_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"none\.pem"):
        channels.open_channel("localhost:1", TlsConfig(ca=tmp_path / "none.pem"))


async def test_an_unreadable_certificate_is_refused(tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    with pytest.raises(errors.ConfigError, match=r"broken\.pem"):
        await servers.open_server("localhost:0", lambda _: None, NAMES, TlsConfig(cert=broken, key=broken))


async def test_a_cancellation_that_a_failing_call_swallows_is_heeded():
    async def call():  # as grpc.aio's do while they are being set up
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def work():
        with grpc_errors.renaming():
            await asyncio.create_task(call())

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_to_a_call_that_has_ended_is_no_error_of_ours():
    class Ended:
        async def abort(self, *status):
            raise grpc.aio.InternalError("the call has ended")

    with pytest.raises(asyncio.CancelledError):
        await guard._answer(Ended(), "/m", errors.DeadlineExceeded("the deadline has passed"))


def test_what_grpc_could_not_send_to_a_call_that_has_ended_is_not_logged_as_a_bug(caplog):
    logger = logging.getLogger("grpc._cython.cygrpc")
    for error in (cygrpc.ExecuteBatchError("execute_batch"), cygrpc.InternalError("another")):
        try:
            raise error
        except cygrpc.BaseError:
            logger.exception("%s raised in core by servicer method", type(error).__name__)
    logger.error("without an exception")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["InternalError raised in core by servicer method", "without an exception"]


async def test_calls_that_wait_for_the_event_loop_are_not_turned_away():
    """gRPC itself would cancel some past 1,000, and all past 3,000."""
    async with serving(Service()) as (server, _):
        with grpc.insecure_channel(f"localhost:{server.port}") as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            # The loop stands still while they are made and sent, by threads of gRPC's; nothing of ours says
            # when the server has them. Too short a sleep shows less, and fails nothing.
            calls = [stub.Abort.future(generation_pb2.AbortRequest(), timeout=60) for _ in range(4_000)]
            time.sleep(1)
            codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
        assert codes == {grpc.StatusCode.OK}
