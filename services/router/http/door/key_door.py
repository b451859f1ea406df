"""The door of HTTP that asks for a key, and whose a request is."""

from functools import partial

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.dialects.call import TENANT
from services.router.http.error_answer import answer_error
from services.router.keys.api_keys import ApiKeys
from services.router.keys.callers import ANYBODY, calling
from services.values.errors import Forbidden, Unauthenticated

_NOBODY = "\0"  # no tenant has that name


class HttpDoor:
    """ASGI middleware that asks every request for a key, but for those to `open_paths`. What it wraps asks
    `callers.current` whose it was."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        shown = _key_of(Headers(scope=scope))
        try:
            caller = self._keys.check(shown)
        except Unauthenticated as error:
            self._keys.refusals.note("http", _peer_of(scope), error)
            answer = await answer_error(Request(scope), error)
            await answer(scope, receive, send)
            return
        with calling(caller, partial(self._keys.is_good, shown, caller)):
            await self._app(scope, receive, send)


def tenant_of(keys: ApiKeys | None, headers: Headers) -> str:
    """Whose a request is by its key and its header; with a key that belongs to no tenant its body may still
    name one. Of those who are refused at the door it is nobody."""
    try:
        caller = ANYBODY if keys is None else keys.check(_key_of(headers))
        return caller.tenant_of(headers.get(TENANT, ""))
    except (Unauthenticated, Forbidden):
        return _NOBODY


def _key_of(headers: Headers) -> str | None:
    """As a bearer's; Anthropic's clients have a header of their own for it."""
    own = headers.get("x-api-key")
    return headers.get("authorization") or (None if own is None else f"Bearer {own}")


def _peer_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "-"
