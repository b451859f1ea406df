"""One SGLang, with all its DP ranks, is shared by the engines of those ranks.

The first start creates the child process, and waits until it is healthy, the plugin is active in every
process, and the pools are as large as requested. The last stop ends the child process. If it ends by itself,
or the loop of its Handshake falls silent, `crashed` returns.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from services.engine.paged.admitting import QueueRate
from services.engine.sglang.reports import (
    Active,
    AdapterChanged,
    Beat,
    Incarnation,
    Load,
    LoadAdapter,
    Moved,
    Outputs,
    PathFound,
    Report,
    TicketSent,
    TreeEvents,
    UnloadAdapter,
    draft_of,
    group_of,
)
from services.engine.sglang.service import own_metrics, scheduler_reports
from services.engine.sglang.service.launch import Launch
from services.engine.sglang.service.leftovers import RunFolder
from services.engine.sglang.service.nodes import NodeDoor
from services.engine.sglang.service.process_connections import (
    Beats,
    Door,
    Needs,
    Process,
    Send,
    TokenCallback,
    TransferReports,
    serve_reports,
)
from services.engine.sglang.service.scheduler_reports import MeanStepTimes, TreeEventRebuilder
from services.engine.sglang.service.sglang_process import SglangHttp, SglangProcess, require_entry_point
from services.engine.sglang.service.sglang_settings import WINDOW_MEMORY_FLAG, SglangSettings
from services.host.ports import held_ports
from services.process.events import first_of
from services.values.errors import ConfigError, PeerFailed, ProtocolError, Unavailable
from services.values.kv import CacheEvents, GroupKind, KvGroup, KvLayout, KvPath, KvPathKind
from services.values.rank import RankId, TransferId
from services.values.rank_reports import RankLoad

log = logging.getLogger(__name__)

_ACTIVE_TIMEOUT_S = 15.0
_POOLS_TIMEOUT_S = 60.0  # A scheduler reports its load when it is first idle.
_HEALTH_POLL_S = 0.2
_REFUSED = 2  # This is argparse's exit code.
_ENDED = "SGLang has ended"
# Of sglang.srt.disaggregation.base.conn.StateType the first belong to each page like its KV, and the layout
# has groups for the second.
_KINDS_BY_PAGE = {"dsa", "block_scale"}
_CARRIED_KINDS = {"swa", "mamba"}


class SglangWorker:
    def __init__(self, settings: SglangSettings, own_ids: Mapping[int, RankId]) -> None:
        """The keys of `own_ids` are DP ranks. Raises ConfigError."""
        self.settings = settings
        self.dp_size = settings.engine.dp_size
        self.own_ids = own_ids
        self._launch = Launch(settings)
        self.shape = self._launch.shape
        self.max_context_tokens = settings.max_context_tokens(self._launch.context_tokens)
        self.model_context_tokens = settings.model_context_tokens(self._launch.context_tokens)
        self.stopping = False
        self._active: dict[tuple[int, int, int, int], Active] = {}
        self.transfers = TransferReports()
        self._door = Door()
        self._paths: dict[
            int, dict[KvPath, None]
        ] = {}  # It maps DP ranks to their paths, in the order in which they were found.
        self._activation = asyncio.Condition()
        self._rebuilders = [self._rebuilder() for _ in range(self.dp_size)]
        self.events: list[asyncio.Queue[CacheEvents]] = [asyncio.Queue() for _ in range(self.dp_size)]
        self._loads: dict[int, dict[str, Any]] = {}
        self._step_times = MeanStepTimes()
        self._queue_rates = [QueueRate() for _ in range(self.dp_size)]
        self._retractions = [0] * self.dp_size
        # This is set when a process of SGLang's has ended, which SGLang itself takes seconds to notice.
        self._broken = asyncio.Event()
        self._stands = (
            False  # Before this, SGLang ignores SIGTERM, and some of its processes have no parent but ours.
        )
        self._users = 0
        self._starting = asyncio.Lock()
        self._process: SglangProcess | None = None
        self._http: SglangHttp | None = None
        self._reports: asyncio.Server | None = None
        self._nodes: NodeDoor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._beats = Beats()
        self._folder: RunFolder | None = None
        self._held = ExitStack()

    def __repr__(self) -> str:
        return f"SglangWorker({self.settings.worker} dp_size={self.dp_size} users={self._users})"

    async def start(self) -> None:
        """Start with the first of its ranks; the others wait while SGLang loads.

        Raises ConfigError where SGLang refuses its flags, or runs without our plugin. Raises Unavailable
        where it ended; another start may succeed, as memory or a GPU may be in use.
        """
        async with self._starting:
            self._users += 1
            if self._users > 1:
                return
            try:
                await self._start()
            except BaseException:
                self._users -= 1
                await self._stop()
                raise

    async def stop(self) -> None:
        async with self._starting:
            self._users -= 1
            if self._users == 0:
                await self._stop()

    async def crashed(self) -> None:
        assert self._process is not None
        await first_of(self._process.ended, self._broken)

    async def _close_door_at_end(self) -> None:
        """Close the door: for a moment its schedulers outlive SGLang's first process, and answer nobody."""
        await self.crashed()
        self._door.close(_ENDED)

    async def _start(self) -> None:
        require_entry_point()
        self._folder = RunFolder.open()
        reports_path = str(self._folder.path / "reports")
        await self._open_reports(reports_path)
        (port,) = self._held.enter_context(held_ports("127.0.0.1", 1))
        self._http = SglangHttp(port)
        command = await self._launch.command(self._folder, port, self._incarnation, reports_path)
        self._process = SglangProcess(*command)
        await self._process.start()
        self._tasks.append(asyncio.create_task(self._close_door_at_end(), name="sglang-end"))
        await self._until_healthy()
        self._stands = True
        await self._until_active()
        await self._until_pools_known()
        self._check_pools()
        self._tasks.append(asyncio.create_task(self._fail_when_silent(), name="sglang-beats"))

    async def _open_reports(self, path: str) -> None:
        taking = (self._take_from, self._take_unreadable, self._broken.set)
        self._reports = await serve_reports(path, *taking)
        if self.settings.nodes is not None:
            self._nodes = NodeDoor(
                self.settings.nodes, self._incarnation, partial(Process, *taking), self._broken.set
            )
            await self._nodes.open(self.settings.engine)

    @property
    def _incarnation(self) -> Incarnation:
        return self._launch.incarnation(tuple(self.own_ids[rank].generation for rank in range(self.dp_size)))

    async def _stop(self) -> None:
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        in_order = self._stands and not self._broken.is_set()
        if self._http is not None and in_order:
            await self._http.abort_all()  # SGLang would let requests finish, however long they take.
        if self._process is not None:
            await self._process.stop(in_order)
        self._door.close(self.ending)
        if self._http is not None:
            await self._http.close()
        if self._reports is not None:
            self._reports.close()
        if self._nodes is not None:
            await self._nodes.close()
        if self._folder is not None:
            self._folder.close()
        self._held.close()

    async def _until_healthy(self) -> None:
        """Wait without a limit, as the start-up probe decides how long a model may load."""
        assert self._process is not None
        while not await self.http.healthy():
            # Its children may outlive it, and hold its output open.
            exit_code = self._process.exit_code
            if exit_code is not None or self._process.ended.is_set() or self._broken.is_set():
                refused = exit_code == _REFUSED
                error = ConfigError if refused else Unavailable
                raise error(f"SGLang ended while starting: {self._process.last_error()}")
            self._process.note_tree()
            await asyncio.sleep(_HEALTH_POLL_S)
        self._process.note_tree()

    async def _until_active(self) -> None:
        try:
            async with asyncio.timeout(_ACTIVE_TIMEOUT_S), self._activation:
                await self._activation.wait_for(lambda: not self._missing())
        except TimeoutError:
            raise ConfigError(
                f"the plugin is not active in SGLang's processes {self._missing()} (DP rank, TP rank); is "
                "isthmus installed in SGLang's environment?"
            ) from None
        if any(active.cp_rank or active.pp_rank for active in self._active.values()):
            raise ConfigError(
                "SGLang has chosen context or pipeline parallelism for this model: not supported"
            )
        kinds = {kind for active in self._active.values() for kind in active.state_kinds}
        if others := sorted(kinds - _KINDS_BY_PAGE - _CARRIED_KINDS):
            raise ConfigError(
                f"SGLang keeps state beside the KV of this model that is not known here ({', '.join(others)})"
            )

    def _missing(self) -> list[tuple[int, int]]:
        tp_size = max((active.tp_size for active in self._active.values()), default=1)
        present = {(active.dp_rank, active.tp_rank) for active in self._active.values()}
        wanted = {(dp, tp) for dp in range(self.dp_size) for tp in range(tp_size)}
        return sorted(wanted - present)

    async def _until_pools_known(self) -> None:
        try:
            async with asyncio.timeout(_POOLS_TIMEOUT_S):
                while not self.ending and len(self._num_pages()) < self.dp_size:
                    await asyncio.sleep(_HEALTH_POLL_S)
        except TimeoutError:
            raise Unavailable(f"SGLang told no load within {_POOLS_TIMEOUT_S:g} s") from None
        if self.ending:
            raise Unavailable(self.ending)

    def _num_pages(self) -> list[int]:
        reported = (
            scheduler_reports.num_pages(load, self.settings.engine.page_size) for load in self._loads.values()
        )
        return [pages for pages in reported if pages]

    def _check_pools(self) -> None:
        """Raise ConfigError where a pool is smaller than was requested.

        Where memory is short SGLang creates a smaller pool and only warns; requests admitted by the requested
        size would then wait for ever.
        """
        smallest = min(self._num_pages())
        if smallest < self.settings.engine.pool_pages:
            raise ConfigError(
                f"--kv-pages={self.settings.engine.pool_pages}: SGLang has memory for {smallest} pages; ask "
                "for no more, or give it more memory "
                f"(--engine-arg=--mem-fraction-static=...){self._way_out()}"
            )

    def _way_out(self) -> str:
        if not self.shape.is_windowed or self.settings.keeps_window_memory:
            return ""
        return f"; windows are kept whole: {WINDOW_MEMORY_FLAG} says otherwise (docs/models.md)"

    async def _fail_when_silent(self) -> None:
        silent = await self._beats.until_silent()
        log.critical("sglang_hangs processes=%s", ",".join(f"{host}/{pid}" for host, pid in silent))
        self._broken.set()

    def _take_load(self, load: dict[str, Any]) -> None:
        dp_rank = int(load["dp_rank"])
        self._loads[dp_rank] = load
        self._step_times.note(dp_rank, load.get("decode_moments"))
        if scheduler_reports.waiting(load, self.settings.role):
            self._queue_rates[dp_rank].waits(time.monotonic())
        else:
            self._queue_rates[dp_rank].empty()

    def _rebuilder(self) -> TreeEventRebuilder:
        engine = self.settings.engine
        return TreeEventRebuilder(engine.served_name, engine.page_size, engine.index_block)

    @property
    def http(self) -> SglangHttp:
        assert self._http is not None, "the worker has not been started"
        return self._http

    async def change(self, dp_rank: int, order: LoadAdapter | UnloadAdapter) -> None:
        """Change a rank's adapters. Raises as Door.change, or Unavailable when we end."""
        if self.ending:
            raise Unavailable(self.ending)
        await self._door.change(dp_rank, order)

    async def stream(
        self, body: dict[str, Any], callback: TokenCallback | None = None, needs: Needs | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of one request. Raises as Door.stream, or Unavailable when we end."""
        if self.ending:
            raise Unavailable(self.ending)
        with self.blaming_ourselves():
            async with aclosing(self._door.stream(body, callback, needs)) as chunks:
                retractions = 0
                async for chunk in chunks:
                    counted = int(chunk["meta_info"].get("num_retractions") or 0)
                    self._retractions[body["routed_dp_rank"]] += counted - retractions
                    retractions = counted
                    yield chunk

    @property
    def ending(self) -> str:
        """Return why no request can end well here any more; it is empty while all is well."""
        if self.stopping:
            return "the engine is stopping"
        gone = self._broken.is_set() or (self._process is not None and self._process.ended.is_set())
        return _ENDED if gone else ""

    @contextmanager
    def blaming_ourselves(self) -> Iterator[None]:
        """Raise Unavailable for PeerFailed where our own SGLang ends.

        Its peers then lose their streams and fail the request as well; a router must not avoid them for that.
        """
        try:
            yield
        except PeerFailed as error:
            if self.ending:
                raise Unavailable(self.ending) from error
            raise

    @property
    def actives(self) -> list[Active]:
        return list(self._active.values())

    @property
    def layout(self) -> KvLayout:
        active = next(iter(self._active.values()))
        group = KvGroup(
            GroupKind.FULL_ATTENTION,
            tuple(range(active.num_layers)),
            self.shape.num_kv_heads,
            self.shape.head_dim,
            active.dtype,
        )
        return KvLayout(
            active.page_size,
            active.page_bytes,
            self._launch.fingerprint,
            active.tp_size,
            (group, *map(group_of, active.carried)),
            draft=draft_of(active.draft),
        )

    def load(self, dp_rank: int) -> RankLoad:
        """Return the scheduler's own report, some hundred milliseconds old, and our own measurements."""
        settings = self.settings
        reported = scheduler_reports.rank_load(
            self._loads.get(dp_rank, {}), settings.role, settings.engine.page_size, settings.engine.pool_pages
        )
        return replace(
            reported,
            step_s=self._step_times.step_s(dp_rank),
            decode_steps=self._step_times.histogram(dp_rank),
            admitted_per_s=self._queue_rates[dp_rank].per_s(time.monotonic()),
            retractions=self._retractions[dp_rank],
            unreadable_events=self._rebuilders[dp_rank].unreadable.total(),
            kv_paths=tuple(self._paths.get(dp_rank, ())),
        )

    def metrics(self, dp_rank: int) -> Iterator[Metric]:
        """Return SGLang's own metrics; any thread may call this, and waits."""
        return own_metrics.read(f"{self.http.base}/metrics", dp_rank)

    def note_admitted(self, dp_rank: int) -> None:
        """Record that a request which may have waited there was admitted."""
        self._queue_rates[dp_rank].taken(time.monotonic())

    async def bytes_moved(self, transfer_id: TransferId) -> int:
        """Return the bytes that all of the rank's processes wrote for a transfer.

        Raises PeerFailed without reports.
        """
        return await self.transfers.bytes_moved(transfer_id, self.layout.tp_size)

    def _take_from(self, report: Report, send: Send) -> None:
        if isinstance(report, Active) and report.tp_rank == 0:  # It passes requests on to the others.
            self._door.connect(report.dp_rank, send)
        self._take(report)

    def _take(self, report: Report) -> None:
        match report:
            case Load(load=load):
                self._take_load(load)
            case Outputs():
                self._door.take(report)
            case AdapterChanged():
                self._door.changed(report)
            case Active():
                place = (report.dp_rank, report.cp_rank, report.tp_rank, report.pp_rank)
                self._active[place] = report
                task = asyncio.ensure_future(self._note_activation())
                task.add_done_callback(lambda ended: ended.exception())
            case TicketSent() | Moved():
                self.transfers.take(report)
            case PathFound():
                path = KvPath(KvPathKind(report.path_kind), report.reach, report.lanes)
                self._paths.setdefault(report.dp_rank, {})[path] = None
            case TreeEvents():
                self._take_events(report)
            case Beat():
                self._beats.received((report.host, report.pid))

    def _take_events(self, report: TreeEvents) -> None:
        self._follow(report.dp_rank, lambda rebuilder: rebuilder.rebuild(report.events))

    def _take_unreadable(self, error: ProtocolError) -> None:
        """Forget what is known, as events of any rank may have been in it."""
        for dp_rank in range(self.dp_size):
            self._follow(dp_rank, lambda rebuilder: rebuilder.forget(str(error)))

    def _follow(self, dp_rank: int, read: Callable[[TreeEventRebuilder], CacheEvents]) -> None:
        rebuilder = self._rebuilders[dp_rank]
        known = set(rebuilder.unreadable)
        self.events[dp_rank].put_nowait(read(rebuilder))
        for kind in rebuilder.unreadable.keys() - known:
            log.error("sglang_events_unreadable dp_rank=%d kind=%r", dp_rank, kind)

    async def _note_activation(self) -> None:
        async with self._activation:
            self._activation.notify_all()
