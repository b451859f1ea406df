"""A caller is the owner of a key: this module knows the current call's caller, and whether its key is
still valid."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from services.values.errors import Forbidden
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller's requests belong to `tenant`, or to the tenant that they name where it is None. An operator
    sees everybody's."""

    tenant: str | None = None
    is_operator: bool = False

    def tenant_of(self, named: str) -> str:
        """Return the tenant of a request that names this tenant, or none. Raises Forbidden."""
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise Forbidden(f"tenant {named!r} is not this API key's; leave it out")
        return self.tenant


ANYBODY = Caller(is_operator=True)  # All calls have this caller where no keys are required.
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
_IS_GOOD: ContextVar[Callable[[], bool]] = ContextVar("is_good", default=lambda: True)


def current() -> Caller:
    return _CALLER.get()


def own(request: GenerateRequest) -> GenerateRequest:
    """Set the request's tenant to the caller's, if the caller has one, and return the request. Raises
    Forbidden where it names another."""
    request.tenant = current().tenant_of(request.tenant)
    return request


def tenant_by_key() -> str | None:
    """Return the current caller's tenant, or None where its key allows others, which it then names."""
    return current().tenant


def enter(caller: Caller) -> None:
    _CALLER.set(caller)


def still_good() -> Callable[[], bool]:
    """Return a function that returns whether this call's key is still valid for the same caller, for calls
    without an end."""
    return _IS_GOOD.get()


@contextlib.contextmanager
def calling(caller: Caller, is_good: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Set the caller and the check of its key in this context and the tasks that it creates."""
    token, good_token = _CALLER.set(caller), _IS_GOOD.set(is_good)
    try:
        yield
    finally:
        _CALLER.reset(token)
        _IS_GOOD.reset(good_token)
