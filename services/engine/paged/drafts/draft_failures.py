"""A draft model that fails costs drafts and no request."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 5  # It does not recover after so many.


class DraftFailures:
    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row = 0

    @property
    def gave_up(self) -> bool:
        return self._in_a_row >= _MOST_IN_A_ROW

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Log whatever fails, and go on behind it."""
        try:
            yield
        except Exception:
            self._in_a_row += 1
            log.exception(
                "draft_failed what=%s in_a_row=%d gave_up=%s", self._what, self._in_a_row, self.gave_up
            )
        else:
            self._in_a_row = 0
