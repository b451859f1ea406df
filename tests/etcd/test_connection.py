import asyncio
from typing import Any

import grpc
import pytest

from etcd.real_etcd import until
from services.etcd.connection import _MAX_AHEAD, EtcdStream
from services.values.errors import IsthmusError, Unavailable

ENOUGH_S = 30.0


class ScriptedCall:
    """As much of grpc.aio's StreamStreamCall as a stream needs: yields what the test puts there."""

    def __init__(self, *coming: Any) -> None:
        self.coming: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = 0
        for one in coming:
            self.coming.put_nowait(one)

    async def read(self) -> Any:
        self.reads += 1
        one = await self.coming.get()
        if isinstance(one, BaseException):
            raise one
        return one

    def cancel(self) -> None:
        self.coming.put_nowait(asyncio.CancelledError())


def failed(error: BaseException) -> IsthmusError:
    return error if isinstance(error, IsthmusError) else Unavailable(repr(error))


async def test_how_a_stream_ends(subtests: pytest.Subtests) -> None:
    with subtests.test("what was received is read before the end is told"):
        stream: EtcdStream[str, str] = EtcdStream(ScriptedCall("a", "b", grpc.aio.EOF), failed)
        assert [await stream.read(ENOUGH_S) for _ in "ab"] == ["a", "b"]
        for _ in range(2):
            with pytest.raises(Unavailable, match="ended the stream"):
                await stream.read(ENOUGH_S)
    for error in [asyncio.InvalidStateError("finished"), asyncio.CancelledError("locally")]:
        with subtests.test(error=error):
            stream: EtcdStream[str, str] = EtcdStream(ScriptedCall("a", error), failed)
            assert await stream.read(ENOUGH_S) == "a"
            with pytest.raises(Unavailable, match=type(error).__name__):
                await stream.read(ENOUGH_S)
    with subtests.test("our own mistakes are not taken for a broken stream"):
        stream: EtcdStream[str, str] = EtcdStream(ScriptedCall(ZeroDivisionError()), failed)
        with pytest.raises(ZeroDivisionError):
            await stream.read(ENOUGH_S)


async def test_readers_who_give_up_or_are_slow(subtests: pytest.Subtests) -> None:
    with subtests.test("who gives up waiting loses nothing"):
        call = ScriptedCall()
        stream: EtcdStream[str, str] = EtcdStream(call, failed)
        assert await stream.read(0.0) is None
        impatient = asyncio.create_task(stream.read(ENOUGH_S))
        await until(lambda: call.reads == 1)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        call.coming.put_nowait("a")
        assert await stream.read(ENOUGH_S) == "a"
        stream.close()
    with subtests.test("a reader who is slow holds up the stream"):
        call = ScriptedCall(*range(100))
        stream: EtcdStream[str, int] = EtcdStream(call, failed)
        while call.reads < _MAX_AHEAD:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert call.reads == _MAX_AHEAD
        assert [await stream.read(ENOUGH_S) for _ in range(100)] == list(range(100))
        stream.close()


async def test_a_closed_stream_leaves_nothing_behind_and_waits_for_nobody() -> None:
    before = asyncio.all_tasks()
    stream: EtcdStream[str, str] = EtcdStream(ScriptedCall(), failed)
    reading = asyncio.create_task(stream.read(ENOUGH_S))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(Unavailable):
        await reading
    await until(lambda: asyncio.all_tasks() <= before)
