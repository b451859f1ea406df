"""A feed brings a router's news as long as they are wanted: who goes away is asked again."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from services.cli.client import naming
from services.values.errors import (
    DeadlineExceeded,
    Forbidden,
    IsthmusError,
    NoCapacity,
    PeerFailed,
    Unavailable,
)
from services.wire.isthmus.v1.generation_pb2 import WatchClusterRequest, WatchClusterResponse

_AGAIN_S = 1.0
# A router may start again, or a proxy before it. What else it may say will not change by itself.
_PASSING = (Unavailable, PeerFailed, NoCapacity, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class News:
    """`is_first` says that it is a stream's first."""

    response: WatchClusterResponse
    is_first: bool
    of_all: bool  # They are of all tenants.


@dataclass(frozen=True, slots=True)
class Away:
    reason: str


Open = Callable[[WatchClusterRequest], grpc.aio.UnaryStreamCall]


async def follow(
    open_call: Open,
    router: str,
    interval_s: float,
    tenant: str,
    with_candidates: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[News | Away, None]:
    """Follow a tenant; without one all tenants, where the router lets us, else those that it shows.

    Raises what keeps it from beginning, and later what does not pass.
    """
    request = WatchClusterRequest(
        interval_s=interval_s, tenant=tenant, all_tenants=not tenant, no_candidates=not with_candidates
    )
    has_begun = False
    while True:
        reason = f"{router} has ended its stream"
        call = open_call(request)
        try:
            with naming(router):
                is_first = True
                async for response in call:
                    yield News(response, is_first, request.all_tenants)
                    is_first, has_begun = False, True
        except Forbidden:
            if not request.all_tenants:
                raise
            request.all_tenants = False
            continue
        except IsthmusError as error:
            if not has_begun or not isinstance(error, _PASSING):
                raise
            reason = str(error).partition(": `")[0]  # We do what is to be done about it.
        finally:
            call.cancel()
        yield Away(f"{reason}; trying again")
        await sleep(_AGAIN_S)
