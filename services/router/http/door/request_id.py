"""The id of each HTTP request: the client's own where it can be, and told in every answer.

    x-request-id: a    its tenant has none such  -> a
                       a request of its has it   -> a-1f6e02   proxies hand one id to all requests of a trace
                       absent, or no id          -> drawn

Tenants choose their ids apart, and learn nothing of each other's. Over gRPC a client that gives an id twice
at a time is told so (ALREADY_EXISTS).
"""

import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.dialects.call import REQUEST_ID
from services.values.request import MAX_ID_CHARS, is_id

_SUFFIX_BYTES = 3


class RequestIds:
    """ASGI middleware. What it wraps reads the id from the request's header."""

    def __init__(
        self, app: ASGIApp, is_running: Callable[[str, str], bool], tenant_of: Callable[[Headers], str]
    ) -> None:
        """`is_running`: whether a request of the tenant that came in otherwise has the id. `tenant_of`: whose
        a request is, as far as its headers tell."""
        self._app = app
        self._is_running = is_running
        self._tenant_of = tenant_of
        self._used: set[tuple[str, str]] = set()  # by the requests that are answered now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = self._tenant_of(headers)
        request_id = self._unused(tenant, headers.get(REQUEST_ID, ""))
        header = (REQUEST_ID.encode(), request_id.encode("latin-1"))
        others = [(name, value) for name, value in scope["headers"] if name != header[0]]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        self._used.add((tenant, request_id))
        try:
            await self._app({**scope, "headers": [*others, header]}, receive, send_with_id)
        finally:
            self._used.remove((tenant, request_id))

    def _unused(self, tenant: str, given: str) -> str:
        if not given or not is_id(given):
            return secrets.token_hex(8)
        request_id = given
        while (tenant, request_id) in self._used or self._is_running(tenant, request_id):
            suffix = "-" + secrets.token_hex(_SUFFIX_BYTES)
            request_id = given[: MAX_ID_CHARS - len(suffix)] + suffix
        return request_id
