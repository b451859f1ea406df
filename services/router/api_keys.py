"""The keys of a router's clients are in a file. The gRPC service requires one here, and HTTP in
http/middleware.py.

    Authorization: Bearer KEY    in the file  -> accepted, as the caller of this key (callers.py)
                                 otherwise    -> Unauthenticated, counted and logged (KeyRefusals)

A line of the file is a key and its permissions:

    s3cret-of-everybody                      Its requests may name any tenant.
    s3cret-of-acme     tenant=acme           Its requests are acme's, and it watches only acme's.
    s3cret-of-ours     operator              It may watch everybody's requests.

The file is read again when it changes. If it is gone, unreadable or has no key, nobody is accepted: a key
that was removed must stop working. So replace the file by moving a new one into its place, as the kubelet
does; writing into it refuses everybody for a moment.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health

from services.observe import log_lines
from services.router.callers import Caller, calling, enter
from services.router.followed_file import FollowedFile
from services.values.errors import ConfigError, Unauthenticated
from services.values.request import MAX_ID_CHARS, is_id

log = logging.getLogger(__name__)

NO_KEY = "no API key was given; send it as `Authorization: Bearer KEY`"
WRONG_KEY = "the API key is not one of this server's"
BAD_TOKEN = "the token is not one that this server accepts"
EXPIRED_TOKEN = "the token has expired"
REASONS = {
    NO_KEY: "no_key",
    WRONG_KEY: "wrong_key",
    BAD_TOKEN: "bad_token",
    EXPIRED_TOKEN: "expired_token",
}
FRONTS = ("http", "grpc")
_LOG_EVERY_S = 10.0  # Somebody who guesses keys must not fill the log.


class KeyRefusals:
    """This counts and logs a router's refusals. It never reports a key, right or wrong."""

    def __init__(
        self,
        count: Callable[[str, str], None] = lambda front, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._clock = clock
        self._logged_s: float | None = None  # This is the time of the last log line.
        self._unlogged = 0

    def note(self, front: str, peer: str, error: Unauthenticated) -> None:
        """Count a refusal. `peer` is the client's address, or its proxy's."""
        reason = REASONS[str(error)]
        self._count(front, reason)
        now = self._clock()
        if self._logged_s is not None and now - self._logged_s < _LOG_EVERY_S:
            self._unlogged += 1
            return
        log_lines.event(
            log,
            "unauthenticated",
            level=logging.WARNING,
            front=front,
            peer=peer,
            reason=reason,
            unlogged=self._unlogged,
        )
        self._logged_s, self._unlogged = now, 0


_TENANT = "tenant="
_OPERATOR = "operator"


def read_keys(text: str) -> Mapping[bytes, Caller]:
    """Return the callers by their keys' digests. Raises ConfigError, which names the line, not the key."""
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.split()):
            continue
        key, caller = digest(words[0]), _caller(words[1:], f"line {number}")
        if callers.setdefault(key, caller) != caller:
            raise ConfigError(f"line {number} has a key that is another's, too")
    return callers


def num_unbound(callers: Collection[Caller]) -> int:
    """Return how many keys may act as any tenant while others in the file belong to one, which is mostly an
    oversight. Operators' keys do not count, as they are meant to."""
    if all(caller.tenant is None for caller in callers):
        return 0
    return sum(caller.tenant is None and not caller.is_operator for caller in callers)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _caller(words: list[str], where: str) -> Caller:
    tenants = [word.removeprefix(_TENANT) for word in words if word.startswith(_TENANT)]
    others = [word for word in words if not word.startswith(_TENANT)]
    if len(tenants) > 1 or others not in ([], [_OPERATOR]):
        raise ConfigError(f"{where} must be KEY [{_TENANT}NAME] [{_OPERATOR}]")
    tenant = tenants[0] if tenants else None
    if tenant is not None and not (tenant and is_id(tenant)):
        raise ConfigError(f"{where}: a tenant's name has 1 to {MAX_ID_CHARS} printable characters")
    return Caller(tenant, is_operator=bool(others))


_OPEN = f"/{health.SERVICE_NAME}/"


class TokenCallers(Protocol):
    def caller(self, token: str) -> Caller:
        """Return the token's caller. Raises Unauthenticated."""


class ApiKeys:
    """The constructor raises ConfigError when the file cannot be read or parsed, or has no key. The file
    is ASCII. What is no key of it may be one of `tokens`, without which there must be a file."""

    def __init__(
        self,
        path: Path | None,
        refusals: KeyRefusals | None = None,
        tokens: TokenCallers | None = None,
    ) -> None:
        self.refusals = refusals or KeyRefusals()
        self._tokens = tokens
        self._file = (
            None
            if path is None
            else FollowedFile(
                "--api-key-file", path, _some_keys, unreadable="api_keys_revoked", encoding="ascii"
            )
        )

    def check(self, authorization: str | None) -> Caller:
        """Return the key's caller, in the same time for all wrong keys. Raises Unauthenticated."""
        callers = self._callers()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(NO_KEY)
        shown = digest(key.strip())
        fitting = [known for known in callers if hmac.compare_digest(shown, known)]  # All are compared.
        if not fitting and self._tokens is not None and key.count(".") == 2:
            return self._tokens.caller(key.strip())
        if not fitting:
            raise Unauthenticated(WRONG_KEY)
        return callers[fitting[0]]

    def is_good(self, authorization: str | None, caller: Caller) -> bool:
        try:
            return self.check(authorization) == caller
        except Unauthenticated:
            return False

    def _callers(self) -> Mapping[bytes, Caller]:
        """Return the callers by their keys' digests, none while the file cannot be read."""
        if self._file is None:
            return {}
        if self._file.is_new():
            log_lines.event(log, "api_keys_read", keys=len(self._file.content))
        return {} if self._file.problem else self._file.content


def _some_keys(text: str) -> Mapping[bytes, Caller]:
    callers = read_keys(text)
    if not callers:
        raise ConfigError("it holds no key")
    if unbound := num_unbound(callers.values()):
        log_lines.event(
            log,
            "api_keys_mixed",
            level=logging.WARNING,
            unbound=unbound,
            advice="these keys name no tenant= beside others that do: whoever has one may act as any tenant; "
            "give each a tenant=, or operator where that is meant",
        )
    return callers


class GrpcDoor(grpc.aio.ServerInterceptor):
    """This requires a key in the metadata `authorization`, except for the probes of health checks."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        shown = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        try:
            caller = self._keys.check(shown)
        except Unauthenticated as error:
            return _refusing(error, self._keys.refusals)
        enter(caller)  # The interceptors around this one read the message later, in this task.
        handler = await continuation(handler_call_details)
        return None if handler is None else _as(caller, partial(self._keys.is_good, shown, caller), handler)


def _as(caller: Caller, is_good: Callable[[], bool], handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Return a handler in whose calls `callers.current` is the caller. All behaviors are coroutines but
    reflection's, which streams both ways and needs no caller."""
    if handler.request_streaming:
        return handler
    answers = "stream" if handler.response_streaming else "unary"
    behavior = getattr(handler, f"unary_{answers}")

    async def behave(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with calling(caller, is_good):
            return await behavior(request, context)

    make_handler = getattr(grpc, f"unary_{answers}_rpc_method_handler")
    return make_handler(behave, handler.request_deserializer, handler.response_serializer)


def _refusing(error: Unauthenticated, refusals: KeyRefusals) -> grpc.RpcMethodHandler:
    """Return a handler that never reads the messages of a refused call."""

    async def refuse(messages: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        refusals.note("grpc", context.peer(), error)
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
