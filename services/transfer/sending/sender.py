"""The sending side of all transfers is one thread, which owns the transport and the table of transfers.

    start() --> thread: open the transport, register the pools
        handshake server --hello, ticket, renew, abort, link_lost--+
        engine's loop --open, cancel, fail-------------------------+--> queue --> TransferTable --> Transport
        engine's thread --pages, carried ready---------------------+                  |
                                                                                      |
        on_failed, on_end, link.send(Status | AbortAck) <--- from the sender's thread +
    stop() --> nothing is posted any more; posted writes get a short time to end; the transport closes

Each call puts one command into the queue and returns at once. A transport's agent is not thread-safe, so
nothing else touches it. While writes are in flight the thread polls: at first without a pause, then with
pauses of up to 1 ms.

A transport call that never returns can be noticed (`watch`) and given up (`abandon`), but only the end of the
process ends it. The thread may then still read the pool, which therefore has to stay.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from services.kv.page_digest import ReadPages
from services.process.iteration_watch import IterationWatch, stack_of
from services.transfer.hello import Hello
from services.transfer.sending.sending_transfer import Outcome, Request, Send, TransferEnd
from services.transfer.sending.transfers import TransferTable
from services.transfer.transport import Transport
from services.values.kv import KvLayout, KvPath, KvTicket, PageId, PoolMemory, PullGrant
from services.values.rank import RankId, TransferId

log = logging.getLogger(__name__)

Command = Callable[[TransferTable], None]

_MAX_POST_BYTES = 64 * 2**20
_SPINS = 50  # So many idle polls follow each other without a pause: about the time of a small write.
_MIN_PAUSE_S = 50e-6
_MAX_PAUSE_S = 1e-3
_LATE_PAUSE_S = 0.05
_STOP_TIMEOUT_S = 2.0
# The thread may take so long to end, including the closing of the transport.
_END_LIMIT_S = 10.0


class KvSender:
    def __init__(
        self,
        open_transport: Callable[[], Transport],
        memories: tuple[PoolMemory, ...],
        layout: KvLayout,
        own_id: RankId,
        *,
        read_pages: ReadPages,
        clock: Callable[[], float] = time.monotonic,
        heard_s: Callable[[], float] | None = None,
        on_crash: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """`memories` are as in `Hello.of`, and `heard_s` is as for TransferTable; any thread may call it.

        `on_crash` is called from the thread if a bug ends it, or on TransportBroken: nothing can be sent any
        more.
        """
        self._open_transport = open_transport
        self._memories = memories
        self._layout = layout
        self._own_id = own_id
        self.clock = clock
        self._heard_s = heard_s
        self._read_pages = read_pages
        self._on_crash = on_crash
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self.watch = IterationWatch()
        self._gone = threading.Event()  # The thread has ended, or was given up.
        self._abandoned, self._untouched = False, True
        self._accepting = threading.Lock()  # It guards `_stopped` and the queue's last command.
        self._stopped = True
        self._stopping = False
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._hello: Hello | None = None
        self._transport: Transport | None = None
        self._transfers: TransferTable | None = None
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)

    def __repr__(self) -> str:
        return f"KvSender({self._own_id} {self._transfers!r})"

    def start(self) -> None:
        """Start the thread, and return once the pools are registered.

        Raises:
            ConfigError: they cannot be registered.
        """
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def stop(self) -> bool:
        """End every transfer and the thread, close the transport, and return when that is done.

        Returns:
            False if the thread hangs: it is given up, and may read the pool while the process lives. So may
            writes that have not ended, or a transport that did not close.
        """
        self._post(self._stop)
        if not self._gone.wait(_END_LIMIT_S):
            log.critical("sender_hangs limit_s=%g\n%s", _END_LIMIT_S, self.abandon())
        return self._untouched and not (self._thread.is_alive() and self._abandoned)

    def abandon(self) -> str:
        """Accept no more commands and wait no more for the thread; return the stack at which it hangs."""
        self._abandoned = self._stopping = True
        with self._accepting:
            self._stopped = True
        self._gone.set()
        return stack_of(self._thread)

    @property
    def own_hello(self) -> Hello:
        assert self._hello is not None, "the sender has not been started"
        return self._hello

    @property
    def kv_paths(self) -> tuple[KvPath, ...]:
        return tuple(self._transport.paths) if self._transport is not None else ()

    @property
    def bytes_moved_total(self) -> int:
        return self._table.bytes_moved_total

    @property
    def descriptors_total(self) -> int:
        return self._table.descriptors_total

    @property
    def open_transfers(self) -> int:
        return self._table.open_transfers

    @property
    def writes_in_flight(self) -> int:
        return self._table.writes_in_flight

    # -- from the handshake server ----------------------------------------------------------------------

    def hello(self, link_id: int, peer: Hello, send: Send) -> None:
        """Note that a link stands. The sender's thread calls `send`, which must not raise."""
        self._post(lambda transfers: transfers.link_up(link_id, peer, send))

    def ticket(self, link_id: int, ticket: KvTicket) -> None:
        self._post(lambda transfers: transfers.ticket(link_id, ticket))

    def refuse(self, link_id: int, transfer_id: TransferId, reason: str) -> None:
        self._post(lambda transfers: transfers.refuse(link_id, transfer_id, reason))

    def renew(self, link_id: int, transfer_id: TransferId, write_until_s: float) -> None:
        self._post(lambda transfers: transfers.renew(link_id, transfer_id, write_until_s))

    def abort(self, link_id: int, transfer_id: TransferId) -> None:
        self._post(lambda transfers: transfers.abort(link_id, transfer_id))

    def link_lost(self, link_id: int) -> None:
        self._post(lambda transfers: transfers.link_lost(link_id))

    def refuse_pull(self, link_id: int, transfer_id: TransferId, word: str, held_tokens: int = 0) -> None:
        self._post(lambda transfers: transfers.refuse_pull(link_id, transfer_id, word, held_tokens))

    # -- from the engine --------------------------------------------------------------------------------

    def open_transfer(
        self,
        transfer_id: TransferId,
        prompt_len: int,
        decode: RankId,
        on_end: Callable[[TransferEnd], None],
        ticket_timeout_s: float = 30.0,
        on_failed: Callable[[TransferEnd], None] = lambda end: None,
        *,
        with_draft: bool = True,
    ) -> None:
        """Open the transfer of a Prefill call, or of a grant.

        `on_end` is called once, from the sender's thread. Until then the transfer's source pages must not be
        reused; after it none is read any more. `on_failed` is called before it if a failure is known earlier.
        """
        deadline_s = self.clock() + ticket_timeout_s
        request = Request(prompt_len, decode, on_end, deadline_s, on_failed, with_draft)
        if not self._post(lambda transfers: transfers.open_transfer(transfer_id, request)):
            on_end(TransferEnd(Outcome.FAILED, "the rank's sender has stopped"))

    def pages_ready(
        self, transfer_id: TransferId, start_token: int, end_token: int, pages: Sequence[PageId]
    ) -> None:
        """Note that the KV of [start_token, end_token) is final and in `pages`, in token order.

        A transfer's first call starts at 0, and each next one where the last ended. Only the prompt's last
        page may be partly filled.
        """
        self._post(lambda transfers: transfers.pages_ready(transfer_id, start_token, end_token, pages))

    def carried_ready(self, transfer_id: TransferId, units: Sequence[Sequence[PageId]]) -> None:
        """Note that the per-request state at the prompt's end is final and in `units`.

        These are by group beside full attention, in the layout's order, each group's in token order. This is
        called once, after the last `pages_ready`, if the layout has per-request state.
        """
        self._post(lambda transfers: transfers.carried_ready(transfer_id, units))

    def grant(self, link_id: int, grant: PullGrant) -> None:
        """Send the grant to the puller, once all pages of the transfer are ready."""
        self._post(lambda transfers: transfers.grant(link_id, grant))

    def cancel_transfer(self, transfer_id: TransferId) -> None:
        """Note that the Prefill call was cancelled. on_end is still called, after the posted writes' end."""
        self._post(lambda transfers: transfers.cancel_transfer(transfer_id))

    def fail_transfer(self, transfer_id: TransferId, reason: str) -> None:
        """Note that the Prefill call failed; decode gets `reason`. on_end is called as after a cancel."""
        self._post(lambda transfers: transfers.fail_transfer(transfer_id, reason))

    # -- the thread -------------------------------------------------------------------------------------

    @property
    def _table(self) -> TransferTable:
        assert self._transfers is not None, "the sender has not been started"
        return self._transfers

    def _post(self, command: Command) -> bool:
        """Return False, with the command dropped, if the thread has ended or not begun."""
        with self._accepting:
            if not self._stopped:
                self._inbox.put(command)
            return not self._stopped

    def _stop(self, transfers: TransferTable) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            transport = self._open_transport()
            transport.register(self._memories, self._layout.unit_bytes)
            self._hello = self._make_hello(transport)
            self._transport = transport
            self._transfers = TransferTable(
                transport,
                self._layout,
                self._own_id,
                self.clock,
                _MAX_POST_BYTES,
                self._read_pages,
                heard_s=self._heard_s,
            )
            self._stopped = self._untouched = False
        except BaseException as error:
            self._start_error = error
            self._gone.set()
            return
        finally:
            self._started.set()
        self._live(self._transfers, transport)
        self.watch.rests()
        self._gone.set()

    def _live(self, transfers: TransferTable, transport: Transport) -> None:
        try:
            self._serve(transfers)
        except Exception as error:
            log.exception("kv_sender_died rank=%s", self._own_id)
            self._on_crash(error)
        finally:
            self.watch.begins()
            self._end(transfers, transport)

    def _make_hello(self, transport: Transport) -> Hello:
        return Hello.of(self._own_id, self._layout, self._memories, transport.name, transport.metadata())

    def _serve(self, transfers: TransferTable) -> None:
        idle_turns = 0
        while not self._stopping:
            self._apply(transfers, self._pause_s(transfers, idle_turns))
            self.watch.begins()
            idle_turns = 0 if transfers.turn(self.watch.begins) else idle_turns + 1

    def _pause_s(self, transfers: TransferTable, idle_turns: int) -> float | None:
        if idle_turns == 0:
            return 0.0
        if transfers.writes_in_flight:
            late = idle_turns - _SPINS
            return 0.0 if late < 0 else min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2.0 ** min(late, 16))
        deadline_s = transfers.next_deadline_s()
        # A deadline that has passed waits until all messages that came in time were read.
        return None if deadline_s is None else max(_LATE_PAUSE_S, deadline_s - self.clock())

    def _apply(self, transfers: TransferTable, wait_s: float | None) -> None:
        try:
            command = self._next(wait_s)
            while True:
                self.watch.begins()
                command(transfers)
                if self._stopping:  # `_drain` applies the others.
                    return
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _next(self, wait_s: float | None) -> Command:
        self.watch.rests()
        return self._inbox.get(timeout=wait_s)

    def _end(self, transfers: TransferTable, transport: Transport) -> None:
        """Call every on_end, even if the error that ended the thread happens again here."""
        try:
            self._drain(transfers)
            transfers.fail_all("the rank is stopping")
            self._await_writes(transfers)
        except Exception:
            log.exception("kv_sender_end_failed rank=%s", self._own_id)
        finally:
            is_settled = transfers.is_settled
            self._untouched = self._close(transport) and is_settled
            transfers.give_up_all()

    def _close(self, transport: Transport) -> bool:
        try:
            transport.close()
        except Exception:  # Closing may fail with writes in flight.
            log.exception("kv_transport_close_failed rank=%s", self._own_id)
            return False
        return True

    def _await_writes(self, transfers: TransferTable) -> None:
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while transfers.open_transfers and time.monotonic() < deadline_s:
            transfers.turn()
            time.sleep(_MAX_PAUSE_S)
        if transfers.writes_in_flight:
            log.warning("kv_writes_left rank=%s writes=%d", self._own_id, transfers.writes_in_flight)

    def _drain(self, transfers: TransferTable) -> None:
        with self._accepting:
            self._stopped = True
        # The commands that were accepted are applied, so that no on_end is forgotten.
        while not self._inbox.empty():
            self._inbox.get()(transfers)
