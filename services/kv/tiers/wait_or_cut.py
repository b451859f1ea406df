"""Reading a prefix from below the pool is worth it while it is faster than computing it.

    before      predicted = bytes / rate of the tier; not begun where computing takes no longer
    meanwhile   read on only while what is left takes less time than to compute it, at the rate so far
    at most     4 times what was predicted, and a second where that is more: then it is cut

Three errors in a row, or a rate below that of computing, and nothing is read or written for half a minute.
"""

from dataclasses import dataclass

_MOST_PREDICTIONS = 4.0
_LEAST_LIMIT_S, _MOST_LIMIT_S = 1.0, 30.0
_LEARNING = 0.2
_ERRORS_IN_A_ROW = 3
_OFF_S = 30.0


@dataclass(frozen=True, slots=True)
class Left:
    """So much of a prefix is still to be read; seconds and a rate of 0 are not known."""

    read_s: float
    num_tokens: int
    computed_tokens_per_s: float

    @property
    def is_worth_reading(self) -> bool:
        """Return whether reading it takes less time than computing it; what is not known is tried."""
        if not (self.read_s and self.computed_tokens_per_s):
            return True
        return self.read_s * self.computed_tokens_per_s < self.num_tokens

    @property
    def limit_s(self) -> float:
        """Return how long to wait for it at most."""
        return min(max(_LEAST_LIMIT_S, _MOST_PREDICTIONS * self.read_s), _MOST_LIMIT_S)


class TierTrust:
    """It knows how fast a tier reads, and turns the tier off for a while where it fails."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # It is a mean, and 0 before the first read.
        self._errors = {True: 0, False: 0}  # They count those in a row, of reads and of writes.
        self._off_until_s = 0.0

    def __repr__(self) -> str:
        return f"TierTrust({self.bytes_per_s / 1e6:.0f} MB/s errors={self._errors})"

    def is_off(self, now_s: float) -> bool:
        return now_s < self._off_until_s

    def seconds(self, num_bytes: int) -> float:
        """Return how long it takes to read so many; 0 where that is not known."""
        return num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def note_read(self, num_bytes: int, took_s: float) -> None:
        self._errors[True] = 0
        rate = num_bytes / max(took_s, 1e-6)
        mean = self.bytes_per_s
        self.bytes_per_s = rate if mean == 0.0 else (1 - _LEARNING) * mean + _LEARNING * rate

    def note_written(self) -> None:
        self._errors[False] = 0

    def note_error(self, now_s: float, *, reading: bool) -> bool:
        """Return whether the tier is off from now on."""
        self._errors[reading] += 1
        if self._errors[reading] < _ERRORS_IN_A_ROW:
            return False
        self.turn_off(now_s)
        return True

    def turn_off(self, now_s: float) -> None:
        """Turn it off for a while, after which it is tried as if nothing were known of it."""
        self._errors = {True: 0, False: 0}
        self.bytes_per_s = 0.0
        self._off_until_s = now_s + _OFF_S
