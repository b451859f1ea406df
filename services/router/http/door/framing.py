"""A request that gives its length twice is refused, and its connection closed."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.http.error_answer import answer_error
from services.values.errors import InvalidRequest


class OneLength:
    """ASGI middleware. Of Content-Length beside Transfer-Encoding a proxy may heed the one and we the other:
    then what is a body to it is another client's request to us (RFC 9112, 6.1 and 11.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if not {b"content-length", b"transfer-encoding"} <= names:
            await self._app(scope, receive, send)
            return
        error = InvalidRequest("a request must not have both Content-Length and Transfer-Encoding")
        answer = await answer_error(Request(scope), error)
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)
