"""What becomes of a draft model that fails: it costs drafts and no request."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 5  # then it does not recover


class DraftFailures:
    """Of one thing that it does."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row = 0

    @property
    def gave_up(self) -> bool:
        """It is not to be tried any more."""
        return self._in_a_row >= _MOST_IN_A_ROW

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Logs whatever fails, and goes on behind it."""
        try:
            yield
        except Exception:
            self._in_a_row += 1
            log.exception(
                "draft_failed what=%s in_a_row=%d gave_up=%s", self._what, self._in_a_row, self.gave_up
            )
        else:
            self._in_a_row = 0
