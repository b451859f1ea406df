"""A request's body off the wire, and the time that its client gives it."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from services.router.dialects.errors import BodyTooLong
from services.router.http.encodings import decoded
from services.router.http.event_stream import ClientLeft
from services.values.errors import InvalidRequest

_T = TypeVar("_T")

_TIMEOUT_HEADER = "x-isthmus-timeout-s"
_LONG_BODY = 64 << 10  # bytes; reading a longer one would be felt by every stream on the loop


class BodyReader:
    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    async def read(
        self, request: Request, read: Callable[[Mapping[str, object], Mapping[str, str]], _T]
    ) -> _T:
        """What `read` makes of the body's fields and the headers; in a thread where the body is long. Raises
        InvalidRequest, ClientLeft."""
        body = await self._received(request)
        encoding = request.headers.get("content-encoding", "")

        def read_fields() -> _T:
            plain = decoded(body, encoding, self._max_body_bytes)
            return read(_fields_of(plain), request.headers)

        is_short = len(body) < _LONG_BODY and not encoding
        return read_fields() if is_short else await asyncio.to_thread(read_fields)

    async def _received(self, request: Request) -> bytearray:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self._max_body_bytes:
                    raise BodyTooLong(f"the body must be at most {self._max_body_bytes} bytes")
        except ClientDisconnect as error:
            raise ClientLeft("the client closed the connection") from error
        return body


def _fields_of(body: bytes | bytearray) -> Mapping[str, object]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def read_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Of gRPC every client sends its deadline; HTTP has no header for it. Raises InvalidRequest."""
    value = headers.get(_TIMEOUT_HEADER)
    if value is None:
        return None
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < math.inf:
        raise InvalidRequest(
            f"the header {_TIMEOUT_HEADER} must be a number of seconds above 0, got {value!r}"
        )
    return timeout_s
