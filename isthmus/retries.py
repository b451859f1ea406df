"""This module decides which failed calls are retried.

attempt --> Unavailable, Overloaded, before any piece --> pause --> attempt ...
        --> anything else, the last attempt, or no time for the pause --> the error is raised
"""

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.errors import DeadlineExceeded, IsthmusError, Overloaded, Unavailable


@dataclass(frozen=True, slots=True)
class Retries:
    """A call has at most `attempts`; 1 means no retry.

    The n-th pause is random, from the upper half of first_s * 2**(n-1) seconds, with longest_s as the limit;
    if the router requests a delay, that and a random pause. Raises ValueError if the values make no sense.
    """

    attempts: int = 5
    first_s: float = 0.2
    longest_s: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_s <= self.longest_s:
            raise ValueError("retries take attempts of 1 or more, and 0 <= first_s <= longest_s")

    def pause_s(self, failed: int, error: IsthmusError, chance: float) -> float | None:
        """Return the seconds to wait after `failed` attempts, of which the last raised `error`, or None for
        no retry. `chance` is in [0, 1).
        """
        if failed >= self.attempts or not isinstance(error, Unavailable | Overloaded):
            return None
        if error.retry_after_s == float("inf"):
            return None
        longest_s = min(self.longest_s, self.first_s * 2.0 ** (failed - 1))
        if error.retry_after_s is not None:
            return error.retry_after_s + chance * longest_s
        return longest_s * (1 + chance) / 2


class Attempts:
    """This counts the attempts of one call, which may take `timeout_s` in all; None leaves the limit to the
    router. `check_open` raises once the client is closed.
    """

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
        """Return the seconds for the next attempt, or None without a limit. Raises DeadlineExceeded if none
        are left, and the error of `check_open`.
        """
        self._check_open()
        if self._deadline is None:
            return None
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the call's time was over before it was made")
        return left_s

    def pause_s(self, error: IsthmusError) -> float:
        """Return the seconds to wait before the next attempt. Raises `error` if there is none."""
        self.failed += 1
        pause_s = self._retries.pause_s(self.failed, error, self._chance())
        if pause_s is None or (self._deadline is not None and self._clock() + pause_s >= self._deadline):
            raise error
        return pause_s
