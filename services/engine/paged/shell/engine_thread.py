"""This thread owns a rank's state.

asyncio posts frozen commands on one queue. The thread applies them between steps and reports to the loop what
happened, with one `call_soon_threadsafe` a step; on a GPU mostly while the device computes the next one.
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

from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Carried, Failed, Offer, Offered, Reported, Reserved
from services.engine.paged.drafters import Drafting
from services.engine.paged.model_runner import ModelRunner, RunnerFailed, Sampled
from services.engine.paged.pulls import Granted, Refused
from services.engine.paged.sequence import Sequence
from services.engine.paged.take_overs import Declined
from services.kv.hand_over import IdlePrefix
from services.process.iteration_watch import IterationWatch, stack_of
from services.values.errors import IsthmusError, Unavailable
from services.values.kv import NO_EVENTS, CacheEvents, PageBooks, PullRequest
from services.values.rank import TransferId
from services.values.rank_reports import RankLoad

log = logging.getLogger(__name__)

T = TypeVar("T")

# A runner that fails so often in a row does not recover (a CUDA context that has faulted never does). Only a
# new incarnation of the rank helps, and it would not come while this one reports that it is well.
_MAX_FAILED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Submit:
    seq: Sequence


@dataclass(frozen=True, slots=True)
class DeltaLanded:
    seq: Sequence
    first_token: Sampled
    draft_end: int = 0  # The draft model's KV landed, too, up to here; it is in tokens.


@dataclass(frozen=True, slots=True)
class Renegotiate:
    seq: Sequence
    start: int  # It is in tokens.


@dataclass(frozen=True, slots=True)
class Cancel:
    seq: Sequence
    quarantine: bool = False


@dataclass(frozen=True, slots=True)
class EndQuarantine:
    seq: Sequence


@dataclass(frozen=True, slots=True)
class TransferEnded:
    seq: Sequence


@dataclass(frozen=True, slots=True)
class Grant:
    request: PullRequest
    answer: Callable[
        [Granted | Refused], None
    ]  # The engine's thread calls it: it must neither raise nor wait.


@dataclass(frozen=True, slots=True)
class EndGrant:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class PullUpTo:
    seq: Sequence
    end: int  # It is in tokens.


@dataclass(frozen=True, slots=True)
class PullLanded:
    seq: Sequence
    end: int  # It is in tokens.
    with_draft: bool


@dataclass(frozen=True, slots=True)
class PullFailed:
    seq: Sequence


@dataclass(frozen=True, slots=True)
class SetAside:
    seq: Sequence
    transfer_id: TransferId
    end: int  # It is in tokens.


@dataclass(frozen=True, slots=True)
class EndAside:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class BeginTakeOver:
    seq: Sequence
    idle_s: float
    protected_tokens: int
    answer: Callable[[Reserved | Declined], None]


@dataclass(frozen=True, slots=True)
class EndTakeOver:
    seq: Sequence
    # It gets the tokens held here now, and those for which there is space.
    answer: Callable[[tuple[int, int]], None]


@dataclass(frozen=True, slots=True)
class ListIdle:
    answer: Callable[[list[IdlePrefix]], None]


@dataclass(frozen=True, slots=True)
class Spell:
    prefix: IdlePrefix
    answer: Callable[[tuple[int, ...] | None], None]


@dataclass(frozen=True, slots=True)
class CheckBooks:
    answer: Callable[[PageBooks | AssertionError], None]


@dataclass(frozen=True, slots=True)
class ChangeRunner:
    change: Callable[[ModelRunner], None]  # It must not raise.
    answer: Callable[[None], None]


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """The rank serves in its other role from now on. Nothing runs."""

    limits: Limits
    drafting: Drafting | None


@dataclass(frozen=True, slots=True)
class TierNews:
    """A copy between the pool and a tier has ended, and the next step handles it."""


@dataclass(frozen=True, slots=True)
class GiveUpTiers:
    """The tier's thread hangs; with `are_back` it does so no more."""

    are_back: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    free: bool  # The pool is to be freed too, because no transfer touches it any more.


PullCommand = Grant | EndGrant | PullUpTo | PullLanded | PullFailed | SetAside | EndAside
HandOverCommand = BeginTakeOver | EndTakeOver | ListIdle | Spell
TierCommand = TierNews | GiveUpTiers
RankCommand = ChangeRunner | ChangeRole | CheckBooks | Stop
OwnCommand = Submit | DeltaLanded | Renegotiate | Cancel | EndQuarantine | TransferEnded
Command = OwnCommand | PullCommand | HandOverCommand | TierCommand | RankCommand


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
        self._inbox: SimpleQueue[Command] = SimpleQueue()
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

    def post(self, command: Command) -> None:
        self._inbox.put(command)

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
                self._apply(core, command)
        except Empty:
            return True

    def _next_command(self, wait: bool, core: EngineCore) -> Command:
        if not wait:
            return self._inbox.get_nowait()
        self.watch.rests()
        try:
            return self._inbox.get(timeout=core.tiers.idle_s if core.tiers is not None else None)
        finally:
            self.watch.begins()

    def _apply(self, core: EngineCore, command: Command) -> None:
        match command:
            case Submit(seq):
                try:
                    core.submit(seq)
                except IsthmusError as error:
                    self._failures.append((seq, Failed(error)))
            case DeltaLanded(seq, first_token, draft_end):
                core.landed(seq, first_token, draft_end=draft_end)
            case Renegotiate(seq, start):
                core.renegotiate(seq, start)
            case Cancel(seq, quarantine):
                core.cancel(seq, quarantine=quarantine)
            case EndQuarantine(seq):
                core.end_quarantine(seq)
            case TransferEnded(seq):
                core.transfer_ended(seq)
            case CheckBooks(answer):
                self._call(answer, _checked(core))
            case ChangeRunner(change, changed):
                change(core.runner)
                self._call(changed, None)
            case ChangeRole(limits, drafting):
                core.change_role(limits, drafting)
            case TierNews():
                pass
            case GiveUpTiers(are_back):
                assert core.tiers is not None
                core.tiers.is_lost = not are_back
            case BeginTakeOver() | EndTakeOver() | ListIdle() | Spell():
                self._apply_to_hand_over(core, command)
            case _:
                _apply_to_pull(core, command)

    def _apply_to_hand_over(self, core: EngineCore, command: HandOverCommand) -> None:
        taking = core.pulls.taking
        match command:
            case BeginTakeOver(seq, idle_s, protected_tokens, answer):
                self._call(answer, taking.begin(seq, idle_s, protected_tokens))
            case EndTakeOver(seq, tell):
                taking.end(seq)
                self._call(tell, (taking.held_tokens(seq), taking.room_tokens(seq)))
            case ListIdle(tell_all):
                self._call(tell_all, taking.list_idle())
            case Spell(prefix, tell_ids):
                self._call(tell_ids, taking.spell(prefix))

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


def _apply_to_pull(core: EngineCore, command: Command) -> None:
    match command:
        case Grant(request, answer):
            ids, salt = request.token_ids, request.cache_salt
            if (granted := core.pulls.grant(request.transfer_id, ids, salt, request.least_end)) is not None:
                answer(granted)
        case EndGrant(transfer_id):
            core.pulls.grant_ended(transfer_id)
        case PullUpTo(seq, end):
            core.pulls.up_to(seq, end)
        case PullLanded(seq, end, with_draft):
            core.pulls.landed(seq, end, with_draft=with_draft)
        case PullFailed(seq):
            core.pulls.failed(seq)
        case SetAside(seq, transfer_id, end):
            core.pulls.set_aside(seq, transfer_id, end)
        case EndAside(transfer_id):
            core.pulls.end_aside(transfer_id)


def steps_metric(steps_by_way: Mapping[str, int]) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "isthmus_steps",
        "Steps of engine torch on a GPU, by way: graph (replayed from a CUDA graph), eager (launched anew).",
        labels=["way"],
    )
    for way, count in steps_by_way.items():
        steps.add_metric([way], count)
    yield steps


def _checked(core: EngineCore) -> PageBooks | AssertionError:
    try:
        return core.check()
    except AssertionError as error:
        return error
