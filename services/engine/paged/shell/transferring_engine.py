"""An engine of either role has two ends of transfers beside its thread.

    sender   writes what is here into others' pools, and serves the Handshake: deltas of a prefill rank, and
             prefixes granted to those that pull
    links    have others write into our pool: the deltas of a decode rank, and prefixes from sources

Each end has its own transport. A rank has only the ends that it needs: without pulls a decode rank has no
sender, and a prefill rank no links.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc

from services.engine.base import HandsOver
from services.engine.paged.admitting import Limits
from services.engine.paged.core_events import Reserved, Wanted
from services.engine.paged.drafters import Speculation
from services.engine.paged.model_runner import ModelRunner
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.delta import WriteLease
from services.engine.paged.shell.paged_engine import CacheSettings, Mailbox, PagedEngine, SenderHangs
from services.engine.paged.shell.pulling import Lending, Pulling, TakingOver
from services.grammar.matcher import Matcher
from services.kv.page_digest import is_sampled
from services.transfer.receiving.sender_links import SenderConnections
from services.transfer.receiving.transfer_watch import TransferWatch
from services.transfer.sending.handshake_server import HandshakeService
from services.transfer.sending.sender import KvSender
from services.transfer.transport import Transport
from services.transfer.waits import Hearing
from services.values.errors import ProtocolError
from services.values.rank import RankId, TransferId
from services.values.rank_reports import RankLoad
from services.values.request import GenerationRequest, Pulled

# The sender posts, polls or digests one piece of a transfer at a time, which takes milliseconds.
_MAX_SENDER_LIMIT_S = 30.0


class TransferringEngine(PagedEngine):
    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        own_id: RankId,
        *,
        limits: Limits,
        cache: CacheSettings,
        lease: WriteLease,
        open_writer: Callable[[], Transport] | None,
        open_listener: Callable[[], Transport] | None,
        pulls: bool,
        digest_share: float,
        speculation: Speculation,
        model_directory: Path | None,
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        """It has both ends with `pulls`: it lends what it holds, and asks sources for what it lacks."""
        super().__init__(make_runner, limits, cache, speculation, model_directory)
        self._own_id = own_id
        self.lease = lease
        self.lends = self.pulls = pulls
        self._open_writer = open_writer
        self._open_listener = open_listener
        self._digest_share = digest_share
        self._open_channel = open_channel
        self._listener: Transport | None = None  # Others write through it.
        self._links: SenderConnections | None = None
        self._quarantines: set[asyncio.Task[None]] = set()
        self._sender: KvSender | None = None
        self._sender_gone = asyncio.Event()
        self._lending: Lending | None = None
        self._pulling: Pulling | None = None

    def load(self) -> RankLoad:
        load, sender = super().load(), self._sender
        if sender is None or not (sender.open_transfers or sender.kv_paths):
            return load  # This avoids a copy at every step of a decode rank that lends nothing at present.
        return replace(load, open_transfers=sender.open_transfers, kv_paths=sender.kv_paths)

    async def start(self) -> None:
        await super().start()
        # The sender starts first, because UCX reports the paths that it chooses to the first agent.
        if self._open_writer is not None:
            await self._start_sender(self._open_writer)
        if self._open_listener is not None:
            self._start_links(self._open_listener())

    async def _start_sender(self, open_writer: Callable[[], Transport]) -> None:
        loop = asyncio.get_running_loop()
        hearing = Hearing()
        self._watching.append(asyncio.create_task(hearing.listen(), name="hearing"))
        sender = KvSender(
            open_writer,
            self.memories,
            self.layout,
            self._own_id,
            read_pages=self.runner.read_pages,
            heard_s=lambda: hearing.heard_s,
            on_crash=lambda error: loop.call_soon_threadsafe(self._sender_crashed, error),
        )
        await asyncio.to_thread(sender.start)
        self._sender = sender
        if self.lends:
            self._lending = Lending(self, sender, self._own_id)
        if self._limits.step_limit_s > 0:
            limit_s = min(self._limits.step_limit_s, _MAX_SENDER_LIMIT_S)
            self._watch(sender.watch, limit_s, self._abandon_sender, SenderHangs())

    def _start_links(self, listener: Transport) -> None:
        listener.register(self.memories, self.layout.unit_bytes)
        self._listener = listener
        self._links = SenderConnections(
            self._own_id,
            self.layout,
            self.memories,
            listener.name,
            listener.metadata(),
            open_channel=self._open_channel,
        )
        if self.pulls:
            self._pulling = Pulling(self, self._links)

    def _sender_crashed(self, error: BaseException) -> None:
        """End the rank, because a rank that only computes for others is of no use without its sender."""
        self._fail_all(error)

    def _abandon_sender(self) -> str:
        self._sender_gone.set()
        return self.sender.abandon()

    async def _stop_transfers(self) -> bool:
        untouched = self._sender is None or await asyncio.to_thread(self._sender.stop)
        if self._links is not None:
            await self._close_links(self._links)
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()
        return untouched

    async def _close_links(self, links: SenderConnections) -> None:
        """Give writers time to confirm that they have stopped; then end the streams, which begins the fence
        time."""
        if self._quarantines:
            patience_s = self.lease.write_lease_s + self.lease.fence_margin_s
            await asyncio.wait(self._quarantines, timeout=patience_s)
        await links.close()
        await asyncio.gather(*self._quarantines)

    @property
    def sender(self) -> KvSender:
        assert self._sender is not None, "the engine has not been started, or writes to nobody"
        return self._sender

    def handshake_of(self, sender: KvSender) -> HandshakeService:
        lend = self._lending.requested if self._lending is not None else None
        return HandshakeService(sender, self._sender_gone, lend)

    def wants_digests(self, transfer_id: TransferId) -> bool:
        return is_sampled(transfer_id, self._digest_share)

    def begin_quarantine(self, seq: Sequence, watch: TransferWatch) -> None:
        self.post(lambda core: core.cancel(seq, quarantine=True))
        self.when_stopped(watch, lambda: self.post(lambda core: core.end_quarantine(seq)))

    def when_stopped(self, watch: TransferWatch, ended: Callable[[], None]) -> None:
        """Call `ended` once the writer can write no more. The engine does not stop before that."""

        async def wait() -> None:
            await watch.writer_stopped(self.lease.fence_margin_s)
            ended()

        task = asyncio.create_task(wait(), name=f"quarantine-{watch.transfer_id:016x}")
        self._quarantines.add(task)
        task.add_done_callback(self._quarantines.discard)

    def check_granted_end(self, end: int, wanted: Wanted) -> None:
        unit = self._cache_settings.index_block if self.layout.carried else self.layout.page_size
        if not wanted.resumes_at < end <= wanted.end or end % unit:
            raise ProtocolError(f"the source grants {end} tokens of {wanted}")

    @property
    def pulling(self) -> Pulling:
        assert self._pulling is not None, "the engine has not been started, or does not pull"
        return self._pulling

    async def pull(self, seq: Sequence, mailbox: Mailbox, reserved: Reserved) -> Pulled | None:
        """Have the source, if there is one that holds more, write what the sequence lacks. Raise what it
        fails with."""
        source = seq.request.pull_from
        if reserved.wanted is None or source is None or self._pulling is None:
            return None
        return await self._pulling.pull(seq, mailbox, reserved, source)

    @property
    def shared_files(self) -> str:
        return "" if self._tiers is None else self._tiers.shared_files

    @property
    def hands_over(self) -> HandsOver | None:
        return TakingOver(self) if self.pulls else None

    def _sequence(
        self, request: GenerationRequest, *, receives: bool = False, matcher: Matcher | None = None
    ) -> Sequence:
        seq, source = super()._sequence(request, receives=receives, matcher=matcher), request.pull_from
        if source is not None and self._pulling is not None and source.rank.id.key != self._own_id.key:
            seq.source = source
        return seq
