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


async def test_every_error_has_a_status():
    assert len(EVERY_ERROR) == 15
    for cls in EVERY_ERROR:
        assert grpc_errors.status_named(cls.__name__) is grpc_errors.status_of(cls("x"))
        assert grpc_errors.status_of(cls("x")) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK), cls
    assert grpc_errors.status_of(KeyError("x")) is grpc.StatusCode.INTERNAL
    assert grpc_errors.status_named("KeyError") is grpc.StatusCode.INTERNAL


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


async def test_a_long_sentence_is_cut_and_keeps_its_class():
    async with serving(Service(errors.InvalidRequest("ü" * 100_000))) as (_, channel):
        with pytest.raises(errors.InvalidRequest, match=r"^ü{500}"):
            await call(channel)


async def test_nobody_there_is_a_failed_peer():
    async with serving(Service()) as (server, _):
        port = server.port
    async with channels.open_channel(f"localhost:{port}") as channel:
        with pytest.raises(errors.PeerFailed):
            await call(channel)


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
