"""How many may be in the batch: by number, and by how long a step of theirs takes."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from services.engine.paged.queue.limits import Limits
from services.engine.paged.queue.step_time import StepTimes
from services.engine.paged.sequence import RUNNING, Phase, Sequence


class Places:
    """`active`: those that have pages."""

    def __init__(self, limits: Limits, times: StepTimes, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._times = times
        self._clock = clock

    def one_more_runs(self, active: SequenceOf[Sequence]) -> bool:
        """Whoever receives."""
        return self._allows(sum(seq.phase in RUNNING for seq in active) + 1, receiving=0)

    def one_more_receives(self, active: SequenceOf[Sequence]) -> bool:
        """Whether there is a place for it when all have landed, but for those that are overdue."""
        now_s = self._clock()
        overdue = sum(self._is_overdue(seq, now_s) for seq in active)
        receiving = sum(seq.phase not in RUNNING for seq in active) - overdue
        return self._allows(len(active) - overdue + 1, receiving)

    def _is_overdue(self, seq: Sequence, now_s: float) -> bool:
        """Who has received for longer than those behind it would wait lands late, if ever."""
        since_s = seq.admitted_s
        waited = since_s is not None and now_s - since_s >= self._limits.patience.wait_s
        return waited and seq.phase is Phase.RECEIVING

    def _allows(self, batch: int, receiving: int) -> bool:
        target_s = self._limits.itl_target_s
        if batch > self._limits.max_running_requests:
            return False
        return target_s is None or self._times.allows(batch, target_s, receiving)
