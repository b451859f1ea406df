"""Failures tell whose fault it is that no write lands: the decode ranks', or our own transport's.

A failure counts while the decode rank's Handshake stream stands, and the next one to it only once it has
asked again over a connection made anew: a rank that dies with many writes under way counts once, and no more
when its stream is lost. A write that lands, to whom it may be, proves our transport and wipes all off.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.values.rank import RankId

MAX_FAILURES = 5
MIN_SPAN_S = 60.0  # A network that is away for shorter costs no rank its incarnation.


@dataclass(slots=True)
class _Row:
    first_s: float
    failures: int = 1
    asked_again: bool = False


class Failures:
    def __init__(self) -> None:
        self._rows: dict[RankId, _Row] = {}

    @property
    def decodes(self) -> tuple[RankId, ...]:
        return tuple(self._rows)

    def landed(self) -> None:
        self._rows.clear()

    def asked(self, decode: RankId) -> None:
        """Note that it wants something written, over a connection on which no write has failed."""
        if (row := self._rows.get(decode)) is not None:
            row.asked_again = True

    def failed(self, decode: RankId, now_s: float) -> None:
        row = self._rows.setdefault(decode, _Row(now_s))
        row.failures += row.asked_again
        row.asked_again = False

    def forget(self, decode: RankId) -> None:
        """Drop its failures: its stream is lost, which says enough."""
        self._rows.pop(decode, None)

    def are_ours(self, linked: Iterable[RankId], now_s: float) -> bool:
        """Return whether only a new incarnation of this rank can help; `linked` are those whose streams
        stand.

        One rank that cannot be written to proves nothing, unless there is no other to compare it with.
        """
        rows = self._rows.values()
        if sum(row.failures for row in rows) < MAX_FAILURES:
            return False
        if now_s - min(row.first_s for row in rows) < MIN_SPAN_S:
            return False
        return sum(row.failures > 1 for row in rows) > 1 or len(set(linked)) == 1
