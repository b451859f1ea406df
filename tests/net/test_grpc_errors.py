import asyncio
from contextlib import suppress

import grpc
import pytest

from net.echo import Service, call, serving, stub_of
from services.net import channels, grpc_errors
from services.values import errors
from services.wire.isthmus.v1 import (
    decode_pb2,
    generation_pb2,
)

EVERY_ERROR = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.IsthmusError) and cls is not errors.IsthmusError
]


async def test_an_error_comes_back_as_it_was_raised(subtests):
    with subtests.test("every error has a status"):
        assert len(EVERY_ERROR) == 17
        for cls in EVERY_ERROR:
            assert grpc_errors.status_named(cls.__name__) is grpc_errors.status_of(cls("x"))
            assert grpc_errors.status_of(cls("x")) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK), cls
        assert grpc_errors.status_of(KeyError("x")) is grpc.StatusCode.INTERNAL
        assert grpc_errors.status_named("KeyError") is grpc.StatusCode.INTERNAL
    for cls in EVERY_ERROR:
        with subtests.test("an error comes back as it was raised", cls=cls):
            async with serving(Service(cls("temperature must be less – so it is"))) as (_, channel):
                with pytest.raises(
                    errors.IsthmusError, match="temperature must be less – so it is"
                ) as caught:
                    await call(channel)
            assert type(caught.value) is cls
    with subtests.test("an error out of a task group is the error"):
        grouped = ExceptionGroup("of a TaskGroup", [KeyError("later"), errors.NoCapacity("full")])
        async with serving(Service(grouped)) as (_, channel):
            with pytest.raises(errors.NoCapacity, match="full"):
                await call(channel)
    with subtests.test("a stream ends in the error after its answers"):
        async with serving(Service(errors.NoCapacity("full"))) as (_, channel):
            texts = []
            with pytest.raises(errors.NoCapacity, match="full"), grpc_errors.renaming():
                async for response in stub_of(channel).Generate(generation_pb2.GenerateRequest(text="hi")):
                    texts.append(response.text)
        assert texts == ["hi"]
    for retry_after_s, pushback_ms in [(None, None), (2.5, "2500")]:
        with subtests.test(
            "a refusal says when to come again", retry_after_s=retry_after_s, pushback_ms=pushback_ms
        ):
            async with serving(Service(errors.NoCapacity("full", retry_after_s))) as (_, channel):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub_of(channel).Abort(generation_pb2.AbortRequest())
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(refused.value.trailing_metadata()).get("grpc-retry-pushback-ms") == pushback_ms
    with subtests.test("a long sentence is cut and keeps its class"):
        async with serving(Service(errors.InvalidRequest("ü" * 100_000))) as (_, channel):
            with pytest.raises(errors.InvalidRequest, match=r"^ü{500}"):
                await call(channel)


async def test_other_errors(subtests):
    with subtests.test("nobody there is a failed peer"):
        async with serving(Service()) as (server, _):
            port = server.port
        async with channels.open_channel(f"localhost:{port}") as channel:
            with pytest.raises(errors.PeerFailed):
                await call(channel)
    for code, peer_failed, expected in [
        (grpc.StatusCode.UNAVAILABLE, True, errors.PeerFailed),
        (grpc.StatusCode.UNAVAILABLE, False, errors.Unavailable),
        (grpc.StatusCode.INTERNAL, False, errors.Unavailable),
        (grpc.StatusCode.FAILED_PRECONDITION, False, errors.StaleGeneration),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False, errors.NoCapacity),
        (grpc.StatusCode.INVALID_ARGUMENT, False, errors.InvalidRequest),
    ]:
        with subtests.test(
            "a request error on the attach stream is named",
            code=code,
            peer_failed=peer_failed,
            expected=expected,
        ):
            pb = decode_pb2.RequestError(code=code.value[0], message="why", peer_failed=peer_failed)
            error = grpc_errors.error_from_request(pb)
            assert type(error) is expected
            assert str(error) == "why"
    with subtests.test("a request error of an unknown code is a failed rank"):
        assert type(grpc_errors.error_from_request(decode_pb2.RequestError(code=999))) is errors.Unavailable


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
