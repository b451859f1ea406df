"""The decode and the prefill engine share this asyncio side of the engine thread."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from prometheus_client.core import Metric

from services.engine.base import Engine
from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Event, Failed, Offer, Reported, Token
from services.engine.paged.drafters import Speculation
from services.engine.paged.model_runner import ModelRunner, scores_of
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.adapting import Adapting, ThreadLoader
from services.engine.paged.shell.engine_thread import Command, EngineThread, StepReport, steps_metric
from services.engine.paged.shell.tiers import TierSettings, open_tiers, tier_metrics
from services.engine.paged.shell.warm_up import warm_up
from services.engine.paged.tiering import Tiering
from services.grammar.grammars import Grammars
from services.grammar.matcher import Matcher
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.process.iteration_watch import IterationWatch, until_it_goes_on, until_it_hangs
from services.values.errors import Unavailable
from services.values.kv import NO_EVENTS, CacheEvents, KvLayout, PageBooks, PageId, PoolMemory
from services.values.rank_reports import ConstraintCounts, RankLoad
from services.values.request import GenerationRequest

log = logging.getLogger(__name__)

T = TypeVar("T")
EventQueue = asyncio.Queue[CacheEvents | None]  # None marks the end.

# This share of the pool (one page in so many) is evicted ahead. The bound keeps an eviction short within a
# step. On a mix of conversations, shared prompts and scans a sixteenth cost 0.4 % of the tokens in hits, and
# allocated pages in runs of 5.3 instead of 1.03.
_EVICT_AHEAD, _MAX_EVICTED_AHEAD = 16, 256

# A step's limit is at least so many times the warm-up's duration. A step of the same size takes several times
# as long with a long context before it, and a slow rank must not count as hung.
_WARM_UPS = 10


class ThreadHangs(Exception):
    event = ""  # It names the event in the log.


class EngineHangs(ThreadHangs):
    event = "engine_hangs"


class SenderHangs(ThreadHangs):
    """A call of the sender's thread, normally to the transport, does not return."""

    event = "sender_hangs"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    model: str  # It is the name that seeds the block hashes.
    index_block: int = 64  # It is the size in tokens.
    enabled: bool = True
    protected_share: float = 0.3  # This share of the pool is for prefixes requested more than once.
    tiers: TierSettings = field(default_factory=TierSettings)


class Mailbox:
    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._come = asyncio.Event()
        # It takes a token at once where no event is queued before it.
        self.tell: Callable[[int], None] | None = None

    def put(self, event: Reported) -> None:
        if isinstance(event, int):
            if self.tell is not None and not self._events:
                self.tell(event)
                return
            event = Token(event, None, None)
        self._events.append(event)
        self._come.set()

    async def get(self) -> Event:
        while not self._events:
            self._come.clear()
            await self._come.wait()
        event = self._events.popleft()
        if isinstance(event, Failed):
            raise event.error
        return event

    def take_tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while self._events and isinstance(event := self._events[0], Token):
            tokens.append(event)
            self._events.popleft()
        return tokens


class PagedEngine:
    reports_checkpoints = True
    takes_turns = True
    _offer: Callable[[Offer], None] | None = None  # EngineThread calls it.

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        limits: Limits,
        cache: CacheSettings,
        speculation: Speculation,
        model_directory: Path | None,
    ) -> None:
        self._make_runner = make_runner
        self._limits = limits
        self._speculation = speculation
        self._cache_settings = cache
        self._model_directory = model_directory
        self._grammars = Grammars(None, 0)
        self._thread: EngineThread | None = None
        self._core: EngineCore | None = None
        self._mailboxes: dict[Sequence, Mailbox] = {}
        self._arrivals = 0
        self._load = RankLoad()
        self._cache_events, self._below_events = EventQueue(), EventQueue()
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._crashed = asyncio.Event()
        self._hangs, self._warm_up_s = False, 0.0
        self._tiers_left_out: Collection[int] = ()
        self._tiers: Tiering | None = None
        self.adapters = Adapting(ThreadLoader(self))
        self._watches: list[IterationWatch] = []
        self._watching: list[asyncio.Task[None]] = []
        self._before: PagedEngine | None = None
        self._has_successor, self._untouched = False, True

    # -- the boundary -----------------------------------------------------------------------------

    @property
    def layout(self) -> KvLayout:
        return self._running_core.runner.layout

    @property
    def memories(self) -> tuple[PoolMemory, ...]:
        """Return the layout's pools, by group, then the draft model's."""
        runner = self._running_core.runner
        draft = (runner.draft.memory,) if runner.draft is not None else ()
        return (runner.memory, *runner.carried_memory, *draft)

    @property
    def runner(self) -> ModelRunner:
        return self._running_core.runner

    @property
    def max_context_tokens(self) -> int:
        return self._running_core.max_context_tokens

    @property
    def model_context_tokens(self) -> int:
        return self._running_core.runner.max_context_tokens

    @property
    def vocab_size(self) -> int:
        return self._running_core.runner.vocab_size

    async def start(self) -> None:
        if self._before is None:
            loop = asyncio.get_running_loop()
            thread = EngineThread(self._build_core, self._deliver, self._fail_all, loop, self._offer)
            self._core = await thread.start()
            self._grammars = Grammars(self._model_directory, self.vocab_size)
            self._load = self._core.load()
        else:
            thread, self._core = self._taken_from(self._before)
        self._thread = thread
        self.adapters.begin(self._core.runner.adapters.loaded)
        if self._limits.step_limit_s > 0:
            limit_s = max(self._limits.step_limit_s, _WARM_UPS * self._warm_up_s)
            self._watch(thread.watch, limit_s, thread.abandon, EngineHangs())
            if self._tiers is not None:
                hangs = self._give_up_while_hanging(self._tiers)
                self._watching.append(asyncio.create_task(hangs, name="tier_hangs"))

    def succeed(self, before: Engine) -> None:
        assert isinstance(before, PagedEngine), "engines of our own alone have a core to leave"
        self._before, before._has_successor = before, True

    def _taken_from(self, before: "PagedEngine") -> tuple[EngineThread, EngineCore]:
        """Return what has served in another role. Raises Unavailable where another process must."""
        thread, core = before._thread, before._core
        if thread is None or core is None or before._crashed.is_set() or not before._untouched:
            raise Unavailable("the engine, or a transfer of its, has failed in its other role")
        self._cache_events, self._below_events = before._cache_events, before._below_events
        self._crashed, self._warm_up_s = before._crashed, before._warm_up_s  # It may crash before it is told.
        self._tiers, self._tiers_left_out = before._tiers, before._tiers_left_out
        self._grammars, self._before = before._grammars, None
        self._load = before._load  # The thread may be at work, and reports once it has changed its role.
        thread.report_to(self._deliver, self._fail_all, self._offer)
        drafting = self._speculation.drafting(core.runner, self._limits.itl_target_s)
        thread.post(lambda core: core.change_role(self._limits, drafting))
        return thread, core

    async def _give_up_while_hanging(self, tiers: Tiering) -> None:
        """Do without tiers while their thread hangs: a disk that does not answer must not end the rank."""
        thread, limit_s = tiers.thread, self._limits.step_limit_s
        while True:
            await until_it_hangs(thread.watch, limit_s)
            log.critical("tier_hangs limit_s=%g\n%s", limit_s, thread.stack())
            self.post(lambda core: tiers.lose(True))
            await until_it_goes_on(thread.watch, limit_s)
            log.warning("tier_answers")
            self.post(lambda core: tiers.lose(False))

    async def stop(self) -> None:
        """End every request with Unavailable and stop the thread, without waiting for one that hangs.

        The caller must consume its iterators to their ends. The memory stays until no writer can write it any
        more.
        """
        self._stopping = True
        for mailbox in self._mailboxes.values():
            mailbox.put(Failed(Unavailable("the rank is stopping")))
        await self._idle.wait()
        self._untouched = await self._stop_transfers()
        if self._thread is not None and not self._has_successor:
            await self._thread.stop(free=self._untouched)
        for watching in self._watching:
            watching.cancel()
        if not self._has_successor:
            for queue in (self._cache_events, self._below_events):
                queue.put_nowait(None)

    async def crashed(self) -> bool:
        """Return when the engine's or the sender's thread has died of a bug, or hangs; True where one hangs.

        The process should then end and be restarted.
        """
        await self._crashed.wait()
        return self._hangs

    def load(self) -> RankLoad:
        stalled, constraints = any([watch.stalled for watch in self._watches]), self._constraints()
        if (stalled, constraints) != (self._load.stalled, self._load.constraints):
            self._load = replace(self._load, stalled=stalled, constraints=constraints)
        if self._tiers is not None:
            self._load = self._tiers.rated(self._load)
        return self._load

    def _constraints(self) -> ConstraintCounts:
        if self._core is None:
            return ConstraintCounts()
        grammars, masks = self._grammars.counts, self._core.runner.mask_counts
        return ConstraintCounts(
            grammars.asked, grammars.compiled, grammars.compile_s, masks.rows, masks.seconds
        )

    def metrics(self) -> Iterable[Metric]:
        yield from steps_metric({} if self._core is None else self._core.runner.steps_by_way)
        counts = None if self._tiers is None else self._tiers.figures()
        yield from tier_metrics(counts, len(self._tiers_left_out))

    def cache_events(self) -> AsyncIterator[CacheEvents]:
        return _taken(self._cache_events)

    @property
    def has_tiers(self) -> bool:
        return self._tiers is not None

    def below_events(self) -> AsyncIterator[CacheEvents]:
        return _taken(self._below_events)

    async def books(self) -> PageBooks:
        books = await self.ask(_checked)
        if isinstance(books, AssertionError):
            raise books
        return books

    # -- for the two roles ------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    async def _stop_transfers(self) -> bool:
        """Return once no transfer touches the pool, which the thread frees after that.

        Returns:
            False where this cannot be waited for: the pool must then stay as long as the process does.
        """
        return True

    def post(self, command: Command) -> None:
        """Hand a command to the engine thread, from any thread; after a crash nothing happens."""
        self._running_thread.post(command)

    def submit(self, seq: Sequence) -> None:
        self._running_thread.submit(seq)

    def ask(self, question: Callable[[EngineCore], T]) -> asyncio.Future[T]:
        """Return what a command returns."""
        return self._running_thread.ask(question)

    @contextlib.contextmanager
    def mailbox(self, seq: Sequence) -> Iterator[Mailbox]:
        if self._stopping:
            raise Unavailable("the rank is stopping")
        self.adapters.entered(seq.request)
        mailbox = self._mailboxes[seq] = Mailbox()
        self._idle.clear()
        try:
            yield mailbox
        finally:
            del self._mailboxes[seq]
            self.adapters.left(seq.request)
            if not self._mailboxes:
                self._idle.set()

    def _sequence(
        self, request: GenerationRequest, *, receives: bool = False, matcher: Matcher | None = None
    ) -> Sequence:
        self._arrivals += 1
        scores = scores_of(request)
        scores = None if receives else scores
        return Sequence(request, self._arrivals, receives=receives, matcher=matcher, scores=scores)

    async def _matcher(self, request: GenerationRequest) -> Matcher | None:
        constraint, output_ids = request.sampling.constraint, request.output_ids_so_far
        if constraint is None:
            return None
        matcher = self._grammars.matcher
        return await self._grammars.beside(matcher, constraint, output_ids, request.ending_ids)

    @property
    def _running_thread(self) -> EngineThread:
        assert self._thread is not None, "the engine has not been started"
        return self._thread

    @property
    def _running_core(self) -> EngineCore:
        assert self._core is not None, "the engine has not been started"
        return self._core

    def _build_core(self) -> EngineCore:
        runner = self._make_runner()
        settings = self._cache_settings
        carried = CarriedCache(
            runner.layout,
            [memory.num_pages for memory in runner.carried_memory],
            index_block=settings.index_block,
            chunk_size=self._limits.chunk_size,
            copy_slot=lambda source, target: runner.copy_slots([(source, target)]),
        )
        evict_ahead = min(runner.memory.num_pages // _EVICT_AHEAD, _MAX_EVICTED_AHEAD)
        cache = PrefixCache(
            runner.memory.num_pages,
            runner.layout.page_size,
            settings.index_block,
            settings.model,
            enabled=settings.enabled,
            protected_share=settings.protected_share,
            evict_ahead_pages=evict_ahead,
            forget=carried.points.forget,
            lent=self._note_lent(runner),
            clock=time.monotonic,
        )
        began = time.monotonic()
        warm_up(runner, cache, carried, self._limits.chunk_size)
        self._warm_up_s = time.monotonic() - began
        drafting = self._speculation.drafting(runner, self._limits.itl_target_s)
        clock, wake = time.monotonic, lambda: self.post(lambda core: None)  # The next step handles the copy.
        opened = open_tiers(settings.tiers, runner, cache, carried, evict_ahead, clock, wake)
        self._tiers, self._tiers_left_out = opened
        return EngineCore(runner, cache, self._limits, clock, carried, drafting, self._tiers)

    def _note_lent(self, runner: ModelRunner) -> Callable[[SequenceOf[PageId]], None]:
        def note(pages: SequenceOf[PageId]) -> None:
            if self._tiers is not None:
                self._tiers.storing.lent(pages)
            if runner.draft is not None:
                runner.draft.lent(pages)

        return note

    def _watch(
        self, watch: IterationWatch, limit_s: float, abandon: Callable[[], str], error: ThreadHangs
    ) -> None:
        """Handle a thread that hangs like a crash with `error`.

        `abandon` gives the thread up, so that nobody waits for it any more, and returns where it hangs.
        """

        self._watches.append(watch)

        async def fail_when_it_hangs() -> None:
            await until_it_hangs(watch, limit_s)
            log.critical("%s limit_s=%g\n%s", error.event, limit_s, abandon())
            self._hangs = True
            self._fail_all(error)

        self._watching.append(asyncio.create_task(fail_when_it_hangs(), name=error.event))

    def _fail_all(self, error: BaseException) -> None:
        self._stopping = True
        for mailbox in self._mailboxes.values():
            mailbox.put(Failed(Unavailable(f"the engine crashed: {type(error).__name__}")))
        self._crashed.set()

    def _deliver(self, report: StepReport) -> None:
        try:
            self._deliver_all(report)
        except Exception as error:
            # This is a bug of ours: the step's other events are lost, and their requests would wait for ever.
            log.critical("engine_report_lost", exc_info=True)
            self._fail_all(error)

    def _deliver_all(self, report: StepReport) -> None:
        self._load = report.load
        if report.cache_events != NO_EVENTS:
            self._cache_events.put_nowait(report.cache_events)
        if report.below_events != NO_EVENTS:
            self._below_events.put_nowait(report.below_events)
        for seq, event in report.events:
            if (mailbox := self._mailboxes.get(seq)) is not None:
                mailbox.put(event)


def _checked(core: EngineCore) -> PageBooks | AssertionError:
    try:
        return core.check()
    except AssertionError as error:
        return error


async def _taken(queue: EventQueue) -> AsyncIterator[CacheEvents]:
    while (events := await queue.get()) is not None:
        yield events
