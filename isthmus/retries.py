"""Some calls that failed are tried again.

attempt --> Unavailable, Overloaded, nothing has come yet --> pause --> attempt ...
        --> anything else, the last attempt, or no time for the pause --> the error is raised
"""

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.errors import DeadlineExceeded, IsthmusError, Overloaded, Unavailable


@dataclass(frozen=True, slots=True)
class Retries:
    """There are at most `attempts` in all; 1 is no retry.

    The n-th pause is drawn from the upper half of first_s * 2**(n-1) seconds, which grows up to longest_s;
    where the router says when to come again it is that and a draw more. Raises ValueError where these cannot
    be.
    """

    attempts: int = 5
    first_s: float = 0.2
    longest_s: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_s <= self.longest_s:
            raise ValueError("retries take attempts of 1 or more, and 0 <= first_s <= longest_s")

    def pause_s(self, failed: int, error: IsthmusError, chance: float) -> float | None:
        """Return the seconds to wait after `failed` attempts, of which the last one failed with `error`;
        None says that it is not to be tried again. `chance` is in [0, 1)."""
        if failed >= self.attempts or not isinstance(error, Unavailable | Overloaded):
            return None
        if error.retry_after_s == float("inf"):
            return None
        longest_s = min(self.longest_s, self.first_s * 2.0 ** (failed - 1))
        if error.retry_after_s is not None:
            return error.retry_after_s + chance * longest_s
        return longest_s * (1 + chance) / 2


class Attempts:
    """Counts the attempts of one call, which has `timeout_s` in all; with None the router bounds it.
    `check_open` raises once the client is closed."""

    def __init__(
        self,
        retries: Retries,
        timeout_s: float | None,
        clock: Callable[[], float],
        chance: Callable[[], float],
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        self.failed = 0
        self._check_open = check_open
        self._retries = retries
        self._clock = clock
        self._chance = chance
        self._deadline = None if timeout_s is None else clock() + timeout_s

    def left_s(self) -> float | None:
        """Return the seconds for the next attempt, or None. Raises DeadlineExceeded when there is nothing
        left, and as `check_open`."""
        self._check_open()
        if self._deadline is None:
            return None
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the call's time was over before it was made")
        return left_s

    def pause_s(self, error: IsthmusError) -> float:
        """Return the seconds to wait before the next attempt. Raises `error` when that is the end."""
        self.failed += 1
        pause_s = self._retries.pause_s(self.failed, error, self._chance())
        if pause_s is None or (self._deadline is not None and self._clock() + pause_s >= self._deadline):
            raise error
        return pause_s
