"""Those that wait to be admitted, in order, and who of those that run goes back to them; next is who
admission.py says."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from services.engine.paged.queue.admission import Patience, Waiting, next_admission
from services.engine.paged.sequence import RUNNING, Phase, Sequence


class WaitingQueue:
    """Ordered by priority, then by arrival; a retracted sequence keeps its arrival."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, seq: Sequence) -> None:
        seq.overtaken, seq.overtaken_since_s, seq.lookup = 0, None, None
        self._sequences.append(seq)
        self._sequences.sort(key=place_in_line)

    def remove(self, seq: Sequence) -> None:
        self._sequences.remove(seq)

    def next(
        self,
        weigh: Callable[[Sequence], Waiting],
        fits: Callable[[Sequence, Waiting], bool],
        looks_small: Callable[[Sequence], bool],
        now_s: float,
    ) -> Sequence | None:
        """Who would come in now; None: nobody has room.

        Those behind the window are weighed only if they look small enough, which costs next to nothing.
        """
        window = self._sequences[: self._patience.window]
        weighed = [weigh(seq) for seq in window]
        index = next_admission(weighed, lambda index: fits(window[index], weighed[index]), self._patience)
        if index is not None:
            return window[index]
        behind = islice(filter(looks_small, self._behind_window(now_s)), self._patience.window)
        return next((seq for seq in behind if fits(seq, weigh(seq))), None)

    def _behind_window(self, now_s: float) -> Iterator[Sequence]:
        """Nobody behind one whose patience is at its end."""
        for place, seq in enumerate(self._sequences):
            if place >= self._patience.window:
                yield seq
            since_s = seq.overtaken_since_s
            if self._patience.is_over(seq.overtaken, 0.0 if since_s is None else now_s - since_s):
                return

    def take(self, seq: Sequence, now_s: float) -> int:
        """It comes in; returns how many it has overtaken."""
        index = self._sequences.index(seq)
        for passed in self._sequences[:index]:
            passed.overtaken += 1
            if passed.overtaken_since_s is None:
                passed.overtaken_since_s = now_s
        del self._sequences[index]
        return index


def place_in_line(seq: Sequence) -> tuple[int, int]:
    """Who comes in and is computed first, and keeps its pages longest: by priority, then by arrival."""
    return -seq.request.priority, seq.arrival


def retraction_victim(active: Iterable[Sequence]) -> Sequence | None:
    """The last in line whose pages can be had, unless it is the only one.

    So the first in line is never retracted and ends some time; then the next is the first.
    """
    candidates = [seq for seq in active if seq.room is None and seq.phase in (*RUNNING, Phase.LANDED)]
    return max(candidates, key=place_in_line) if len(candidates) > 1 else None
