"""What the blocking and the asynchronous client have in common: all but waiting."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.channel import Router, Tls
from isthmus.errors import Cancelled
from isthmus.request import Call, Prompt, call_of
from isthmus.retries import Attempts, Retries

_TIMEOUT_S = 600.0


class BaseClient:
    """`target`: HOST:PORT of a router's gRPC API.

    `tls`: True trusts the system's authorities; a Tls names files. `api_key` goes with every call, in the
    clear where there is no TLS. `model` and `tenant` are of every request that names no other. `timeout`
    bounds a call with all its attempts, in seconds; None leaves that to the router. `clock` and `chance` are
    for tests.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:7777",
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        model: str = "",
        tenant: str = "",
        timeout: float | None = _TIMEOUT_S,
        retries: Retries = Retries(),  # noqa: B008  frozen
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        known = tls if isinstance(tls, Tls) else Tls() if tls else None
        self._router = Router(target, known, api_key)
        self._defaults = {"model": model, "tenant": tenant}
        self._timeout_s = timeout
        self._retries = retries
        self._clock = clock
        self._chance = chance
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._router.target!r})"

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("the client is closed")

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retries, timeout_s, self._clock, self._chance, self._check_open)

    def _prepared(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[Call, float | None]:
        """The call, and the seconds that it has."""
        given = {**self._defaults, **options}
        timeout_s = given.pop("timeout", self._timeout_s)
        return call_of(prompt, given), timeout_s
