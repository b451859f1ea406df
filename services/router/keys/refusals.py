"""An operator learns of those who showed no key of the router's by a count, and now and then by a line."""

import logging
import time
from collections.abc import Callable

from services.observe import log_lines
from services.values.errors import Unauthenticated

log = logging.getLogger(__name__)

NO_KEY = "no API key was given; send it as `Authorization: Bearer KEY`"
WRONG_KEY = "the API key is not one of this server's"
REASONS = {NO_KEY: "no_key", WRONG_KEY: "wrong_key"}
FRONTS = ("http", "grpc")
_LOG_EVERY_S = 10.0  # Who guesses keys must not fill the log.


class KeyRefusals:
    """Counts and logs one router's refusals. No key is reported, neither a right nor a wrong one."""

    def __init__(
        self,
        count: Callable[[str, str], None] = lambda front, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._clock = clock
        self._logged_s: float | None = None  # It is when one was logged last.
        self._unlogged = 0

    def note(self, front: str, peer: str, error: Unauthenticated) -> None:
        """Count a refusal. `peer` is the address that asked; behind a proxy it is the proxy's."""
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
