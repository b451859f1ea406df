"""Overtaking decides who comes in next. It is pure: values in, a decision out.

Those that wait stand in the queue's order (priority, then arrival). Normally the first that fits comes in;
three things may put another one before it, all within bounds:

    it does not fit now and a smaller one behind it does    so that pages do not lie idle
    another one's prefix is held by those that run          so that the batch shares what it reads
    it is to receive, and those that do will fill the batch so that the batch is not left empty for them

Rule: who has been overtaken `overtakes` times, or first was `wait_s` ago, is overtaken by nobody any more. It
comes in as soon as enough of those that run have ended, so nobody starves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    overtakes: int = 16
    wait_s: float = 10.0
    window: int = 32  # The first so many are weighed and, of those behind, so many that look small.

    def is_over(self, overtaken: int, overtaken_for_s: float) -> bool:
        """Return whether one that was overtaken so often, and first so long ago, may be no more."""
        return overtaken >= self.overtakes or overtaken_for_s >= self.wait_s


@dataclass(frozen=True, slots=True)
class Newcomer:
    new_pages: int  # They are for what is not cached.
    unheld_pages: int  # Nobody holds these of its cached prefix: they are no longer evictable once it is in.
    shares: bool  # Those that run hold half of its prompt or more.
    overtaken: int
    overtaken_for_s: float  # It counts from the first time.

    @property
    def num_pages(self) -> int:
        return self.new_pages + self.unheld_pages


def next_admission(queue: Sequence[Newcomer], fits: Callable[[int], bool], patience: Patience) -> int | None:
    """Return the index of who comes in next; `fits(index)` says whether there is room."""
    reach = _reach(queue, patience)
    for index in sorted(range(reach), key=lambda index: (not queue[index].shares, index)):
        if fits(index):
            return index
    return None


def _reach(queue: Sequence[Newcomer], patience: Patience) -> int:
    """Return how many, from the first on, may be chosen from: nobody behind one whose patience is at its
    end."""
    for index, waiting in enumerate(queue):
        if patience.is_over(waiting.overtaken, waiting.overtaken_for_s):
            return index + 1
    return len(queue)
