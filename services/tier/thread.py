"""The tier's thread runs one copy at a time; those that requests wait for (reads) come first.

engine's thread --bounded--> [ reads | read ahead | writes ] --> tier's thread --done--> engine's thread
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import ParamSpec, TypeVar

from services.process.iteration_watch import LOOKS, IterationWatch, stack_of
from services.tier.copies import Copy, LoadCopy, Look, ReadAhead, Staging, TierSlots
from services.tier.slab import FileCalls

log = logging.getLogger(__name__)

_MOST_READS = 64
_MOST_AHEAD = 8
MOST_WRITES = 64

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class TierThread:
    def __init__(self, slabs: Sequence[TierSlots], staging: Staging, done: Callable[[Copy], None]) -> None:
        """`done` is called on this thread with each copy that has ended; it must neither raise nor wait."""
        self._slabs = list(slabs)
        self._staging = staging
        self._done = done
        self._reads: deque[Copy] = deque()
        self._ahead: deque[Copy] = deque()
        self._writes: deque[Copy] = deque()
        self._running: Copy | None = None
        self._stopping = False
        self.stopped = threading.Event()
        self._news = threading.Condition()
        self.watch = IterationWatch()
        self._thread = threading.Thread(target=self._run, name="tier", daemon=True)
        self._thread.start()

    @property
    def num_writes(self) -> int:
        return len(self._writes)

    @property
    def running(self) -> Copy | None:
        return self._running

    @property
    def may_read_ahead(self) -> bool:
        return len(self._ahead) < _MOST_AHEAD

    def submit(self, copy: Copy) -> bool:
        match copy:
            case LoadCopy() | Look():
                queue, most = self._reads, _MOST_READS
            case ReadAhead():
                queue, most = self._ahead, _MOST_AHEAD
            case _:
                queue, most = self._writes, MOST_WRITES
        with self._news:
            if self._stopping or len(queue) >= most:
                return False
            queue.append(copy)
            self._news.notify()
        return True

    def put(self, tier: int, slab: TierSlots) -> bool:
        """Take a slab in the place of one without slots; return False where the thread is being stopped."""
        with self._news:
            if not self._stopping:
                self._slabs[tier] = slab
            return not self._stopping

    def stop(self, patience_s: float) -> None:
        """Stop all copies, and close the slabs unless the thread hangs for more than `patience_s`."""
        self.stopped.set()
        with self._news:
            self._stopping = True
            running = [self._running] if self._running is not None else []
            left = [*self._reads, *self._ahead, *self._writes, *running]
            self._news.notify()
        for copy in left:
            copy.stop()
        self._thread.join(patience_s)
        if not self._thread.is_alive():
            for slab in self._slabs:
                slab.close()
            self._staging.close()

    def stack(self) -> str:
        return stack_of(self._thread)

    def _run(self) -> None:
        try:
            self._live()
        except Exception:
            # It is a defect of ours. Requests wait for a copy only for a limited time, and are then computed.
            log.critical("tier_crashed", exc_info=True)
            self._stopping = True
        self.watch.rests()

    def _live(self) -> None:
        while (copy := self._next()) is not None:
            self.watch.begins()
            copy.run(self._slabs, self._staging)
            self._done(copy)

    def _next(self) -> Copy | None:
        with self._news:
            self._running = None
            while not (self._stopping or self._reads or self._ahead or self._writes):
                self.watch.rests()
                self._news.wait()
            if self._stopping:
                return None
            self._running = (self._reads or self._ahead or self._writes).popleft()
            return self._running


class TierHangs(Exception):
    """A call of the system has not come back; this says where."""


def while_it_answers(
    work: Callable[[FileCalls], T], calls: FileCalls, limit_s: float, too_late: Callable[[T], None]
) -> T:
    """Do the work on a thread of its own, each of whose calls may take so long; return what comes of it.

    What comes of it later is for `too_late`. Raises TierHangs, and what the work raises.
    """
    watch, done = IterationWatch(), Future[T]()
    noted = replace(
        calls,
        pread=_noted(watch, calls.pread),
        pwrite=_noted(watch, calls.pwrite),
        allocate=_noted(watch, calls.allocate),
    )

    def run() -> None:
        try:
            result = work(noted)
        except BaseException as error:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        else:
            if done.set_running_or_notify_cancel():
                done.set_result(result)
            else:
                too_late(result)

    thread = threading.Thread(target=run, name="tier-opens", daemon=True)
    watch.begins()
    thread.start()
    while not done.done() and watch.looks < LOOKS:
        wait([done], limit_s / LOOKS if math.isfinite(limit_s) else None)
        watch.look()
    if done.cancel():
        raise TierHangs(stack_of(thread))
    return done.result()


def _noted(watch: IterationWatch, call: Callable[P, R]) -> Callable[P, R]:
    def noting(*args: P.args, **kwargs: P.kwargs) -> R:
        watch.begins()
        return call(*args, **kwargs)

    return noting
