"""This module renames etcd's errors, and has the delays before etcd is called again.

The texts are from etcd's api/v3rpc/rpctypes/error.go: a status code alone does not distinguish a full
database from too many requests, or an expired token from a wrong password.
"""

import asyncio
import random

import grpc

from services.values.errors import ConfigError, IsthmusError, NoCapacity, NotFound, ProtocolError, Unavailable

_Code = grpc.StatusCode
_TRANSIENT = frozenset(
    {
        _Code.UNAVAILABLE,
        _Code.DEADLINE_EXCEEDED,
        _Code.CANCELLED,
        _Code.ABORTED,
        _Code.UNKNOWN,
        _Code.INTERNAL,
    }
)
_NO_USER_TEXT = "user name is empty"  # etcd sends this with INVALID_ARGUMENT if a call has no token.
_TOKEN_TEXTS = ("invalid auth token", "revision of auth store is old", _NO_USER_TEXT)


class EtcdCompacted(IsthmusError):
    """The requested revision has been compacted; list again."""


class EtcdTooLarge(IsthmusError):
    """The answer is larger than our limit; request less at a time."""


class EtcdNoSpace(NoCapacity):
    """etcd's database is full: it takes no writes until it is compacted, defragmented and disarmed."""


class LeaseNotFound(NotFound):
    """The lease has lapsed or was revoked; grant a new one and write its keys again."""


def details(error: grpc.aio.AioRpcError) -> str:
    text: str = error.details() or error.code().name
    return text


def rename(error: grpc.aio.AioRpcError) -> IsthmusError:
    """Return our error for etcd's status: Unavailable for everything that may pass."""
    text, code = details(error), error.code()
    if "database space exceeded" in text:
        return EtcdNoSpace(f"etcd is full: {text}")
    if "has been compacted" in text:
        return EtcdCompacted(text)
    if "requested lease not found" in text:
        return LeaseNotFound(text)
    if code is _Code.RESOURCE_EXHAUSTED and "larger than max" in text:  # This is gRPC's own text.
        return EtcdTooLarge(text)
    if code is _Code.NOT_FOUND:
        return NotFound(f"etcd: {text}")
    refused = code in (_Code.PERMISSION_DENIED, _Code.UNAUTHENTICATED)
    if refused or "authentication failed" in text or _NO_USER_TEXT in text:
        return ConfigError(f"etcd refuses this user: {text}")
    if code in (_Code.INVALID_ARGUMENT, _Code.FAILED_PRECONDITION, _Code.OUT_OF_RANGE, _Code.UNIMPLEMENTED):
        return ProtocolError(f"etcd refuses the call: {text}")
    return Unavailable(f"etcd: {code.name}: {text}")


def is_transient(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the same call may succeed later or elsewhere. It may also have been executed."""
    return error.code() in _TRANSIENT or "too many requests" in details(error)


def is_token_refused(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is _Code.UNAUTHENTICATED or any(text in details(error) for text in _TOKEN_TEXTS)


def is_auth_off(error: grpc.aio.AioRpcError) -> bool:
    return "authentication is not enabled" in details(error)


class Backoff:
    """Delays double from `first_s` to `max_s`; each is multiplied by a random factor between 0.5 and 1."""

    def __init__(self, rng: random.Random, *, first_s: float = 0.05, max_s: float = 2.0) -> None:
        self._rng = rng
        self._first_s = first_s
        self._max_s = max_s
        self._attempts = 0

    def reset(self) -> None:
        self._attempts = 0

    def next_s(self) -> float:
        wait_s = min(self._max_s, self._first_s * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 32)
        return wait_s * self._rng.uniform(0.5, 1.0)

    async def sleep(self) -> None:
        await asyncio.sleep(self.next_s())
