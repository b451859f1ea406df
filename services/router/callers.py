"""A caller is who asks: what a key is good for, whose call is being served, and whether that key is still
good."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from services.values.errors import Forbidden
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """These requests are of `tenant`, or of whom they name where it is None. An operator sees everybody's."""

    tenant: str | None = None
    is_operator: bool = False

    def tenant_of(self, named: str) -> str:
        """Return whose a request is that names this tenant, or none. Raises Forbidden."""
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise Forbidden(f"tenant {named!r} is not this API key's; leave it out")
        return self.tenant


ANYBODY = Caller(is_operator=True)  # Everybody is this caller where no keys are requested.
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
_IS_GOOD: ContextVar[Callable[[], bool]] = ContextVar("is_good", default=lambda: True)


def current() -> Caller:
    return _CALLER.get()


def own(request: GenerateRequest) -> GenerateRequest:
    """Give the request the tenant of the key that was shown, if the key has one, and return it.

    Raises Forbidden where it names another.
    """
    request.tenant = current().tenant_of(request.tenant)
    return request


def tenant_by_key() -> str | None:
    """Return the tenant of the call that is being served; None where its key names none, and others may
    share the name that it gives."""
    return current().tenant


def enter(caller: Caller) -> None:
    """Make `current` the caller in what is left of this task."""
    _CALLER.set(caller)


def still_good() -> Callable[[], bool]:
    """Return what tells, whenever it is called, whether the key that was shown for this call is still good
    for the same: a call without an end has to ask."""
    return _IS_GOOD.get()


@contextlib.contextmanager
def calling(caller: Caller, is_good: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Make `current` the caller, and `still_good` `is_good`, within it and in the tasks made there."""
    token, good_token = _CALLER.set(caller), _IS_GOOD.set(is_good)
    try:
        yield
    finally:
        _CALLER.reset(token)
        _IS_GOOD.reset(good_token)
