"""This thread owns a rank's state.

asyncio posts commands on one queue: functions, which the thread calls with its core between two steps. It
reports to the loop what happened, with one `call_soon_threadsafe` a step; on a GPU mostly while the device
computes the next one.
Pages that a prefill rank offers go directly from here to the sender's thread, not through the loop. No other
thread touches the core.

A step that never ends can be noticed (`watch`) and given up (`abandon`); only the end of the process ends it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, Metric

from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Carried, Failed, Offer, Offered, Reported
from services.engine.paged.model_runner import RunnerFailed
from services.engine.paged.sequence import Sequence
from services.process.iteration_watch import IterationWatch, stack_of
from services.values.errors import IsthmusError, Unavailable
from services.values.kv import NO_EVENTS, CacheEvents
from services.values.rank_reports import RankLoad

log = logging.getLogger(__name__)

T = TypeVar("T")

# A runner that fails so often in a row does not recover (a CUDA context that has faulted never does). Only a
# new incarnation of the rank helps, and it would not come while this one reports that it is well.
_MAX_FAILED_STEPS = 5


# It must neither wait nor raise: an error in it is a bug, which ends the engine.
Command = Callable[[EngineCore], object]


@dataclass(frozen=True, slots=True)
class Stop:
    free: bool  # The pool is to be freed too, because no transfer touches it any more.


@dataclass(frozen=True, slots=True)
class StepReport:
    events: list[tuple[Sequence, Reported]]
    cache_events: CacheEvents
    load: RankLoad
    below_events: CacheEvents = NO_EVENTS


class EngineThread:
    def __init__(
        self,
        build: Callable[[], EngineCore],
        deliver: Callable[[StepReport], None],
        on_crash: Callable[[BaseException], None],
        loop: asyncio.AbstractEventLoop,
        offer: Callable[[Offer], None] | None = None,
    ) -> None:
        """This thread calls `offer` with every Offered and Carried, which no report then has; it must neither
        raise nor wait. The other functions are called on `loop`."""
        self._offer = offer
        self._build = build
        self._deliver = deliver
        self._on_crash = on_crash
        self._loop = loop
        self._inbox: SimpleQueue[Command | Stop] = SimpleQueue()
        self._failures: list[tuple[Sequence, Failed]] = []
        self._held: list[tuple[Sequence, Reported]] = []  # The next step reports these when it is launched.
        self._may_hold = False
        self._busy = False  # Another step would change something without a new command.
        self._frees = False
        self.watch = IterationWatch()
        self._started: asyncio.Future[EngineCore] = loop.create_future()
        self._gone = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> EngineCore:
        self._thread.start()
        return await self._started

    def post(self, command: Command | Stop) -> None:
        self._inbox.put(command)

    def submit(self, seq: Sequence) -> None:
        self.post(partial(self._submit, seq))

    def ask(self, question: Callable[[EngineCore], T]) -> asyncio.Future[T]:
        """Return what a command returns."""
        answered: asyncio.Future[T] = self._loop.create_future()

        def tell(answer: T) -> None:
            if not answered.done():
                answered.set_result(answer)

        self.post(lambda core: self._call(tell, question(core)))
        return answered

    def report_to(
        self,
        deliver: Callable[[StepReport], None],
        on_crash: Callable[[BaseException], None],
        offer: Callable[[Offer], None] | None,
    ) -> None:
        """Call these functions from now on, when nothing runs."""
        self._deliver, self._on_crash, self._offer = deliver, on_crash, offer

    async def stop(self, free: bool = True) -> None:
        """Return when the thread has made its last iteration or was given up. With `free` the pool is
        freed."""
        self.post(Stop(free))
        await self._gone.wait()

    def abandon(self) -> str:
        """Stop waiting for the thread, and return where it hangs, as far as Python knows."""
        self._gone.set()
        return stack_of(self._thread)

    def _run(self) -> None:
        self._live()
        self.watch.rests()
        self._call(self._note_gone, None)

    def _note_gone(self, _: None) -> None:
        self._gone.set()

    def _live(self) -> None:
        try:
            core = self._build()
        except BaseException as error:
            self._call(self._start_failed, error)
            return
        self._call(self._start_succeeded, core)
        self._may_hold = core.runner.when_launched(partial(self._note_launched, core))
        try:
            while self._turn(core):
                pass
        except BaseException as error:
            # This is a bug of ours: the rank's books cannot be trusted any more.
            log.critical("engine_crashed", exc_info=True)
            self._call(self._on_crash, error)
            return
        finally:
            if core.tiers is not None:
                core.tiers.stop()
        if self._frees:
            core.runner.close()

    def _start_succeeded(self, core: EngineCore) -> None:
        if not self._started.cancelled():
            self._started.set_result(core)

    def _start_failed(self, error: BaseException) -> None:
        if not self._started.cancelled():
            self._started.set_exception(error)

    def _turn(self, core: EngineCore) -> bool:
        self.watch.begins()
        running = self._apply_commands(core)
        if running:
            self._step(core)
        self._report(core, may_hold=running and self._busy and self._may_hold and not self._held)
        return running

    def _apply_commands(self, core: EngineCore) -> bool:
        # With nothing to compute it sleeps until a command comes: only a command can help a sequence that
        # waits for pages or for its prefill.
        wait = not self._busy
        try:
            while True:
                command = self._next_command(wait, core)
                wait = False
                if isinstance(command, Stop):
                    self._frees = command.free
                    return False
                command(core)
        except Empty:
            return True

    def _next_command(self, wait: bool, core: EngineCore) -> Command | Stop:
        if not wait:
            return self._inbox.get_nowait()
        self.watch.rests()
        try:
            return self._inbox.get(timeout=core.tiers.idle_s if core.tiers is not None else None)
        finally:
            self.watch.begins()

    def _submit(self, seq: Sequence, core: EngineCore) -> None:
        try:
            core.submit(seq)
        except IsthmusError as error:
            self._failures.append((seq, Failed(error)))

    def _step(self, core: EngineCore) -> None:
        try:
            self._busy = core.step()
        except RunnerFailed as error:
            # A failed forward pass leaves the KV of its batch undefined, but the rank can continue.
            log.exception("engine_step_failed")
            if core.figures.failed >= _MAX_FAILED_STEPS:
                raise
            failure = Failed(Unavailable(f"the engine failed: {error}"))
            self._busy = True  # There may be transfer now for waiting sequences.
            self._failures += [(seq, failure) for seq in core.fail_active()]

    def _report(self, core: EngineCore, *, may_hold: bool) -> None:
        """Report the step, or with `may_hold` let the next one do so once the device computes it.

        Only tokens alone are held. The loop sends them while this thread waits for the device, instead of
        beside the Python that prepares the next step.
        """
        events = [*self._offered(core.take_outputs()), *self._failures]
        self._failures = []
        if may_hold and events and all([isinstance(event, int) for _, event in events]):
            self._held = events
            return
        self._send(core, events)

    def _note_launched(self, core: EngineCore) -> None:
        events = self._offered(core.take_outputs())
        if self._held or events:
            self._send(core, events)

    def _send(self, core: EngineCore, events: list[tuple[Sequence, Reported]]) -> None:
        events, self._held = [*self._held, *events], []
        below = core.tiers.books.take_events() if core.tiers is not None else NO_EVENTS
        report = StepReport(events, core.take_cache_events(), core.load(), below)
        self._call(self._deliver, report)

    def _offered(self, events: list[tuple[Sequence, Reported]]) -> list[tuple[Sequence, Reported]]:
        if self._offer is None:
            return events
        others: list[tuple[Sequence, Reported]] = []
        for seq, event in events:
            if isinstance(event, Offered | Carried):
                self._offer(event)
            else:
                others.append((seq, event))
        return others

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is closed, so nobody is left to report to.
            log.debug("engine_loop_closed")


def steps_metric(steps_by_way: Mapping[str, int]) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "isthmus_steps",
        "Steps of engine torch on a GPU, by way: graph (replayed from a CUDA graph), eager (launched anew).",
        labels=["way"],
    )
    for way, count in steps_by_way.items():
        steps.add_metric([way], count)
    yield steps
