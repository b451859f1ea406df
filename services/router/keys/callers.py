"""Who asks: what a key is good for, and whose call is being served."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from services.values.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant`: the one whose requests these are; None: whom they name. An operator sees everybody's."""

    tenant: str | None = None
    is_operator: bool = False

    def tenant_of(self, named: str) -> str:
        """Whose a request is that names this tenant, or none. Raises Forbidden."""
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise Forbidden(f"tenant {named!r} is not this API key's; leave it out")
        return self.tenant


ANYBODY = Caller(is_operator=True)  # where no keys are asked for
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current() -> Caller:
    """Of the call that is being served."""
    return _CALLER.get()


@contextlib.contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Within it, and in the tasks made there, `current` is the caller."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)
