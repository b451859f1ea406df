"""The keys of those who may use a router, and gRPC's door, which asks for one; HTTP's is http/key_door.py.

    Authorization: Bearer KEY    in the file  -> let in
                                 otherwise    -> Unauthenticated, counted and logged (refusals.py)

The file is read again when it has changed. One that is gone, cannot be read or holds no key lets nobody in: a
key that was taken out of it must not go on working. So a new file is moved into the old one's place, as the
kubelet does; who writes into it refuses everybody for that moment.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from services.observe import log_lines
from services.router.keys.refusals import NO_KEY, WRONG_KEY, KeyRefusals
from services.values.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class ApiKeys:
    """Raises ConfigError when the file cannot be read or holds no key: one a line, of printable ASCII."""

    def __init__(self, path: Path, refusals: KeyRefusals | None = None) -> None:
        self.refusals = refusals or KeyRefusals()
        self._path = path
        self._stamp: _Stamp | None = _stamp(path)  # of what was read; None: read again
        self._digests = _read(path)
        self._problem = ""  # why there is no key

    def check(self, authorization: str | None) -> None:
        """Takes the same time for every key that is wrong. Raises Unauthenticated."""
        self._follow()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(NO_KEY)
        digest = _digest(key.strip())
        if not any([hmac.compare_digest(digest, known) for known in self._digests]):  # a list: all of them
            raise Unauthenticated(WRONG_KEY)

    def _follow(self) -> None:
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._stamp:
            return
        try:
            self._digests, self._stamp, self._problem = _read(self._path), stamp, ""
        except ConfigError as error:
            self._revoke(str(error))
        else:
            log_lines.event(log, "api_keys_read", keys=len(self._digests))

    def _revoke(self, problem: str) -> None:
        self._digests, self._stamp = (), None
        if problem != self._problem:
            log_lines.event(log, "api_keys_revoked", level=logging.ERROR, error=problem, keys=0)
        self._problem = problem


def _stamp(path: Path) -> _Stamp | None:
    """Tells one content of the file from another; None where there is none to be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        keys = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {error}") from error
    if not any(keys):
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return tuple(_digest(key) for key in keys if key)


def _digest(key: str) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key.encode()).digest()


class GrpcDoor(grpc.aio.ServerInterceptor):
    """Asks every call of one service for a key, in the metadata `authorization`."""

    def __init__(self, keys: ApiKeys, service: str) -> None:
        """`service`: its full name."""
        self._keys = keys
        self._methods = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method.startswith(self._methods):
            metadata = dict(handler_call_details.invocation_metadata or ())
            try:
                self._keys.check(metadata.get("authorization"))
            except Unauthenticated as error:
                return _refusing(error, self._keys.refusals)
        return await continuation(handler_call_details)


def _refusing(error: Unauthenticated, refusals: KeyRefusals) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        refusals.note("grpc", context.peer(), error)
        raise error

    return grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes)
