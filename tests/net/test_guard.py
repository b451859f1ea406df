import asyncio
import contextlib
import gc
import logging
import weakref
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2_grpc

from net.echo import Service, serving, stub_of, told
from services.net import channels, grpc_errors, guard, servers
from services.values import errors
from services.wire.isthmus.v1 import (
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    prefill_pb2_grpc,
)


async def test_a_message_that_cannot_be_read_is_the_callers_mistake(subtests, caplog):
    for method, kind in [("Abort", "unary_unary"), ("Generate", "unary_stream")]:
        with subtests.test(method=method, kind=kind):
            async with serving(Service()) as (_, channel):
                answer = getattr(channel, kind)(f"/isthmus.v1.Generation/{method}")(
                    b"\x0a\x01\xff"
                )  # is no UTF-8
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


async def test_a_call_that_ends_without_a_message_is_answered(subtests, caplog):
    """grpc.aio lets a handler of one message wait for ever then: neither it nor the client hears anything."""
    for module, service, method in TAKE_ONE_MESSAGE:
        with subtests.test(module=module, service=service, method=method):

            def register(server, module=module, service=service):
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


async def test_how_a_handler_ends(subtests, caplog):
    with subtests.test("an unexpected exception is logged and says nothing outside"):
        async with serving(Service(KeyError("the secret"))) as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub_of(channel).Abort(generation_pb2.AbortRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()
        [record] = [record for record in caplog.records if record.name == "services.net.guard"]
        assert record.levelno == logging.ERROR
        assert "the secret" in caplog.text
        assert "/isthmus.v1.Generation/Abort" in record.getMessage()
    with subtests.test("a handler may abort by itself"):
        async with serving(Service()) as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub_of(channel).ListModels(generation_pb2.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    with subtests.test("a timeout in a handler is a deadline"):
        async with serving(Service()) as (_, channel):
            with pytest.raises(errors.DeadlineExceeded), grpc_errors.renaming():
                await stub_of(channel).Explain(generation_pb2.ExplainRequest())
    with subtests.test("a client that goes away closes the handler stream"):
        service = Service()
        async with serving(service) as (_, channel):
            stream = stub_of(channel).Generate(generation_pb2.GenerateRequest())
            await asyncio.wait_for(service.running.wait(), 10)
            stream.cancel()
            await asyncio.wait_for(service.stream_closed.wait(), 10)
    with subtests.test("an answer to a call that has ended is no error of ours"):

        class Ended:
            async def abort(self, *status):
                raise grpc.aio.InternalError("the call has ended")

        with pytest.raises(asyncio.CancelledError):
            await guard._answer(Ended(), "/m", errors.DeadlineExceeded("the deadline has passed"))


async def test_clients_that_have_left(subtests, caplog):
    with subtests.test("a client that leaves before its message leaves nothing behind"):
        async with serving(Service()) as (_, channel):
            for method in ("Abort", "Generate"):
                call = channel.stream_stream(f"/isthmus.v1.Generation/{method}")()
                await asyncio.sleep(0.05)  # until the server has it
                call.cancel()
            assert (await stub_of(channel).Abort(generation_pb2.AbortRequest(), timeout=10)).found
        assert not told(caplog)
    with subtests.test("what grpc could not send to a call that has ended is not logged as a bug"):
        logger = logging.getLogger("grpc._cython.cygrpc")
        for error in (cygrpc.ExecuteBatchError("execute_batch"), cygrpc.InternalError("another")):
            try:
                raise error
            except cygrpc.BaseError:
                logger.exception("%s raised in core by servicer method", type(error).__name__)
        logger.error("without an exception")
        said = [record.getMessage() for record in caplog.records]
        assert said == ["InternalError raised in core by servicer method", "without an exception"]


async def test_what_stands_around_a_handler_is_made_once():
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: None)

    async def known(details):
        return handler

    interceptor, details = guard.ErrorInterceptor(), SimpleNamespace(method="/echo/Echo")
    first = await interceptor.intercept_service(known, details)
    assert first is not handler and first is await interceptor.intercept_service(known, details)


async def test_of_a_call_that_has_ended_nothing_is_kept_though_its_handler_was_its_own():
    """As a door's is, which knows the caller's key."""
    met = []

    class Door(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            handler = await continuation(details)

            async def of_this_call(request, context):
                return await handler.unary_unary(request, context)

            met.append(weakref.ref(of_this_call))
            parse, write = handler.request_deserializer, handler.response_serializer
            return grpc.unary_unary_rpc_method_handler(of_this_call, parse, write)

    server = await servers.open_server(
        "localhost:0",
        lambda served: generation_pb2_grpc.add_GenerationServicer_to_server(Service(), served),
        interceptors=[Door()],
        service_names=[],
    )
    try:
        async with channels.open_channel(f"localhost:{server.port}") as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            for _ in range(3):
                await stub.Abort(generation_pb2.AbortRequest(request_id="a"), timeout=20)
    finally:
        await server.stop()
    gc.collect()
    assert [known() for known in met] == [None] * 3


async def let_go(error):
    beside_messages = []

    class Beside:
        """Lives in a frame as long as the message does, of which there are no weak references."""

        def __init__(self):
            beside_messages.append(weakref.ref(self))

    class Refusing(Service):
        async def Abort(self, request, context):
            beside = Beside()  # noqa: F841
            refusal = error("no")  # as one that is kept, and named, by who raises it
            raise refusal

        async def Generate(self, request, context):
            beside = Beside()  # noqa: F841
            yield generation_pb2.GenerateResponse()
            refusal = error("no")
            raise refusal

    async with serving(Refusing()) as (_, channel):
        stub = stub_of(channel)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                await stub.Abort(generation_pb2.AbortRequest()).code()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in stub.Generate(generation_pb2.GenerateRequest()):
                        pass
            await asyncio.sleep(0.1)
            assert [beside() for beside in beside_messages] == [None] * 4
        finally:
            gc.enable()


async def test_what_is_refused_is_let_go_without_the_collector(monkeypatch, subtests):
    """An error holds frames, and these the message: of large ones a few circles would fill the memory long
    before the collector has counted enough objects."""
    monkeypatch.setattr(guard.logger, "disabled", True)  # what pytest catches of a log holds its errors
    for error in (errors.InvalidRequest, KeyError):
        with subtests.test(error=error):
            await let_go(error)
