"""A prefix is read from below the pool only while that is faster than computing it.

    before      predicted = bytes / rate of the tier; not begun if computing takes no longer
    meanwhile   goes on only while the rest takes less time to read, at the rate so far, than to compute
    at most     4 times what was predicted, but between 1 s and 30 s: then it is cut

After three errors in a row, or at a rate below that of computing, the tier is turned off for half a minute:
nothing is read or written.
"""

from dataclasses import dataclass

_MOST_PREDICTIONS = 4.0
_LEAST_LIMIT_S, _MOST_LIMIT_S = 1.0, 30.0
_LEARNING = 0.2
_ERRORS_IN_A_ROW = 3
_OFF_S = 30.0


@dataclass(frozen=True, slots=True)
class Left:
    """This is the part of a prefix that is still to be read. A time or a rate of 0 is unknown."""

    read_s: float
    num_tokens: int
    computed_tokens_per_s: float

    @property
    def is_worth_reading(self) -> bool:
        """Return whether reading takes less time than computing. It is tried while that is unknown."""
        if not (self.read_s and self.computed_tokens_per_s):
            return True
        return self.read_s * self.computed_tokens_per_s < self.num_tokens

    @property
    def limit_s(self) -> float:
        return min(max(_LEAST_LIMIT_S, _MOST_PREDICTIONS * self.read_s), _MOST_LIMIT_S)


class TierTrust:
    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # This is a moving mean, and 0 before the first read.
        self._errors = {True: 0, False: 0}  # This counts errors in a row; True stands for reads.
        self._off_until_s = 0.0

    def __repr__(self) -> str:
        return f"TierTrust({self.bytes_per_s / 1e6:.0f} MB/s errors={self._errors})"

    def is_off(self, now_s: float) -> bool:
        return now_s < self._off_until_s

    def seconds(self, num_bytes: int) -> float:
        """Return the predicted time to read so many bytes; 0 if the rate is unknown."""
        return num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def note_read(self, num_bytes: int, took_s: float, *, is_whole: bool = True) -> None:
        """Learn the rate. Errors in a row are over only if all was read that was to be."""
        if is_whole:
            self._errors[True] = 0
        rate = num_bytes / max(took_s, 1e-6)
        mean = self.bytes_per_s
        self.bytes_per_s = rate if mean == 0.0 else (1 - _LEARNING) * mean + _LEARNING * rate

    def note_written(self) -> None:
        self._errors[False] = 0

    def note_error(self, now_s: float, *, reading: bool) -> bool:
        """Count an error, and return whether the tier is turned off now."""
        self._errors[reading] += 1
        if self._errors[reading] < _ERRORS_IN_A_ROW:
            return False
        self.turn_off(now_s)
        return True

    def turn_off(self, now_s: float) -> None:
        self._errors = {True: 0, False: 0}
        self.bytes_per_s = 0.0
        self._off_until_s = now_s + _OFF_S
