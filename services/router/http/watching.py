"""The watch of the cluster is sent as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from google.protobuf import json_format
from starlette.requests import Request
from starlette.responses import Response

from services.router.dialects.dialect_answer import Event
from services.router.dialects.dialect_call import TENANT
from services.router.dialects.json_body import InvalidParameter
from services.router.http.event_stream import EventStream, sse
from services.router.watch.cluster_watch import Watch
from services.router.watch.pace import Pace
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import WatchClusterRequest, WatchClusterResponse

_MEDIA_TYPE = "text/event-stream"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Watching:
    """An endpoint."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pace = Pace()  # of all streams

    async def stream(self, request: Request) -> Response:
        asked = read_watch(request.query_params, request.headers)
        try:
            responses = self._watch.follow(asked)
        except InvalidRequest as error:
            if not error.field:
                raise
            raise InvalidParameter(error.field, error.problem) from error
        if request.method == "HEAD":
            return Response(media_type=_MEDIA_TYPE)
        return EventStream(_events(responses, self._pace))


def read_watch(query: Mapping[str, str], headers: Mapping[str, str]) -> WatchClusterRequest:
    watch = WatchClusterRequest(tenant=headers.get(TENANT, ""))
    for name, value in query.items():
        if name not in _READERS:
            raise InvalidParameter(name, f"is not known here; {', '.join(_READERS)} are")
        setattr(watch, name, _READERS[name](name, value))
    named = headers.get(TENANT, "")
    if named and watch.tenant != named:
        raise InvalidParameter("tenant", f"differs from the header {TENANT}; leave one of them out")
    return watch


def _read_seconds(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidParameter(name, f"must be a number of seconds, got {value!r}") from None


def _read_boolean(name: str, value: str) -> bool:
    if value not in _BOOLEANS:
        raise InvalidParameter(name, f"must be one of {', '.join(_BOOLEANS)}, got {value!r}")
    return _BOOLEANS[value]


_READERS: Mapping[str, Callable[[str, str], object]] = {
    "interval_s": _read_seconds,
    "tenant": lambda name, value: value,
    "all_tenants": _read_boolean,
    "no_candidates": _read_boolean,
}


async def _events(
    responses: AsyncGenerator[WatchClusterResponse, None], pace: Pace
) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        async for response in responses:
            while (left_s := pace.left_s) > 0:
                await asyncio.sleep(left_s)
            with pace.turn():
                event = _event(response)
            yield event


def _event(response: WatchClusterResponse) -> bytes:
    return sse(Event(json_format.MessageToDict(response, preserving_proto_field_name=True)))
