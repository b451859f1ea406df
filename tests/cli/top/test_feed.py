"""A feed over calls that play a script."""

from contextlib import aclosing

import grpc
import pytest

from services.cli.look.top import Away, News, follow
from services.values.errors import Forbidden, InvalidRequest, PeerFailed, Unauthenticated
from services.wire.isthmus.v1.generation_pb2 import WatchClusterResponse

pytestmark = pytest.mark.long


def failure(code, details="no"):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


DOWN = failure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: x: refused")
GONE = failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")
FORBIDDEN = failure(grpc.StatusCode.PERMISSION_DENIED)


class Call:
    def __init__(self, steps, cancelled):
        self._steps, self._cancelled = steps, cancelled

    async def __aiter__(self):
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            yield WatchClusterResponse(dropped=step)

    def cancel(self):
        self._cancelled.append(self)


class Router:
    """Each call plays one of `scripts`: numbers are responses, the stream ends behind the last step."""

    def __init__(self, *scripts):
        self.scripts, self.asked, self.cancelled, self.slept = list(scripts), [], [], []

    def open(self, request):
        copy = type(request)()
        copy.CopyFrom(request)
        self.asked.append(copy)
        return Call(self.scripts.pop(0), self.cancelled)

    async def sleep(self, seconds):
        self.slept.append(seconds)

    async def told(self, count, tenant=""):
        told = []
        async with aclosing(follow(self.open, "here:1", 2.0, tenant, sleep=self.sleep)) as news:
            async for each in news:
                told.append((each.response.dropped, each.is_first) if isinstance(each, News) else each.reason)
                if len(told) == count:
                    return told


async def test_a_feed(subtests):
    with subtests.test("who goes away is asked again and said to be away"):
        router = Router([1, 2, GONE], [DOWN], [], [3], [4])
        assert await router.told(7) == [
            (1, True),
            (2, False),
            "Socket closed; trying again",
            "no router answers on here:1 (refused); trying again",
            "here:1 has ended its stream; trying again",
            (3, True),
            "here:1 has ended its stream; trying again",
        ]
        assert router.slept == [1.0, 1.0, 1.0]
        assert len(router.cancelled) == len(router.asked) == 4
        assert all(asked.interval_s == 2.0 and asked.all_tenants for asked in router.asked)
    for code, error in [
        (grpc.StatusCode.UNAVAILABLE, PeerFailed),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
    ]:
        with subtests.test("who cannot begin is told why", code=code, error=error):
            details = "failed to connect to all addresses" if error is PeerFailed else "no"
            with pytest.raises(error):
                await Router([failure(code, details)]).told(1)
    with subtests.test("what does not pass ends it later too"), pytest.raises(Unauthenticated):
        await Router([1, GONE], [failure(grpc.StatusCode.UNAUTHENTICATED)]).told(3)
    with subtests.test("who may not see all sees its own"):
        router = Router([FORBIDDEN], [1])
        assert await router.told(1) == [(1, True)]
        assert [(asked.all_tenants, asked.tenant) for asked in router.asked] == [(True, ""), (False, "")]
        assert router.slept == []
    with subtests.test("a tenant that is named is asked for alone"):
        router = Router([1])
        await router.told(1, tenant="acme")
        assert [(asked.all_tenants, asked.tenant) for asked in router.asked] == [(False, "acme")]
        with pytest.raises(Forbidden):
            await Router([FORBIDDEN]).told(1, tenant="acme")
    with subtests.test("it is said whose news they are"):
        for router, of_all in ((Router([1]), True), (Router([FORBIDDEN], [1]), False)):
            async with aclosing(follow(router.open, "here:1", 2.0, "", sleep=router.sleep)) as news:
                first = await anext(news)
                assert isinstance(first, News) and first.of_all is of_all
        assert Away("x") == Away("x")
