"""The decode role of our own engines reserves pages, has the delta written, and generates.

transfer/receiving/room_watch.py knows whether units that somebody else writes may be reused; where it says
no, they are kept from reuse here when their request ends.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import grpc

from services.engine.base import RemotePrefill
from services.engine.paged.admitting import Limits
from services.engine.paged.core_events import Reserved, Token
from services.engine.paged.drafters import Speculation
from services.engine.paged.model_runner import ModelRunner, Sampled, check_told
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.engine_thread import Cancel, DeltaLanded, EndQuarantine, Renegotiate, Submit
from services.engine.paged.shell.paged_engine import CacheSettings, Mailbox, PagedEngine
from services.grammar.matcher import Matcher
from services.kv.page_digest import differing_pages, is_sampled
from services.kv.ticket import make_ticket, targets_of
from services.kv.transfer_plan import carried_by_kind, moved_bytes
from services.net import channels
from services.transfer.receiving.room_watch import Landed, RoomWatch
from services.transfer.receiving.sender_links import SenderConnections, SenderLink
from services.transfer.transport import Transport
from services.transfer.waits import both
from services.values.errors import KvCorrupt, PeerFailed, ProtocolError, StaleGeneration
from services.values.kv import KvLayout, PageId
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Plan, RankId, Rendezvous, Room
from services.values.request import Admitted, GenerationRequest, Output, PrefillResult

log = logging.getLogger(__name__)

E = TypeVar("E", Reserved, Token)
OpenChannel = Callable[[str], grpc.aio.Channel]

# A transfer's last word may overtake the answer to the call that it belongs to. Only the answer says which
# error it is, and with it whose: a prompt that prefill cannot hold is no failure of prefill's.
_ANSWER_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class WriteLease:
    write_lease_s: float = 10.0  # It is renewed while the request waits.
    # It covers the longest posts in flight, and the drift of two monotonic clocks.
    fence_margin_s: float = 5.0

    @property
    def renew_every_s(self) -> float:
        return self.write_lease_s / 3


@dataclass(frozen=True, slots=True)
class _Received:
    prefill: PrefillResult
    layout: KvLayout  # It has what both ranks have.
    group_bytes: tuple[int, ...]
    digested_pages: int
    link_s: float  # It lasts until the handshake with the rank stood.
    transfer_s: float


class PagedDecodeEngine(PagedEngine):
    """It implements services.engine.base.DecodeEngine."""

    plans = frozenset(Plan)
    moves_penalties = True

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        open_transport: Callable[[], Transport],
        own_id: RankId,
        *,
        limits: Limits,
        cache: CacheSettings,
        lease: WriteLease,
        digest_share: float = 0.0,
        speculation: Speculation | None = None,
        model_directory: Path | None = None,
        open_channel: OpenChannel = channels.open_channel,
    ) -> None:
        super().__init__(make_runner, limits, cache, speculation, model_directory)
        self._open_transport = open_transport
        self._own_id = own_id
        self._lease = lease
        self._digest_share = digest_share
        self._open_channel = open_channel
        self._transport: Transport | None = None
        self._links: SenderConnections | None = None
        self._quarantines: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await super().start()
        transport = self._open_transport()
        transport.register(self.memories, self.layout.unit_bytes)
        self._transport = transport
        self._links = SenderConnections(
            self._own_id,
            self.layout,
            self.memories,
            transport.name,
            transport.metadata(),
            open_channel=self._open_channel,
        )

    async def _stop_transfers(self) -> bool:
        if self._links is not None:
            await self._close_links(self._links)
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.close()
        return True

    async def _close_links(self, links: SenderConnections) -> None:
        """Give writers that were asked to stop time to say so; then the streams end and fence time begins."""
        if self._quarantines:
            patience_s = self._lease.write_lease_s + self._lease.fence_margin_s
            await asyncio.wait(self._quarantines, timeout=patience_s)
        await links.close()
        await asyncio.gather(*self._quarantines)

    async def generate(
        self,
        request: GenerationRequest,
        remote_prefill: RemotePrefill | None,
        tell: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[Output, None]:
        asked = time.monotonic()
        matcher = await self._matcher(request)
        constraint_s = time.monotonic() - asked if matcher is not None else 0.0
        seq = self._sequence(request, receives=remote_prefill is not None, matcher=matcher)
        with self._mailbox(seq) as mailbox:
            self.post(Submit(seq))
            try:
                reserved = await _next(mailbox, Reserved)
                # That event comes with a step's others: here its first part has been computed by then.
                queue_s, received = constraint_s + reserved.queue_s, None
                if remote_prefill is not None:
                    queue_s = time.monotonic() - asked
                    received = await self._receive(seq, mailbox, reserved, remote_prefill)
                token = await _next(mailbox, Token)
                admitted = self._admitted(seq, reserved, queue_s, constraint_s, received, token)
                told = token.prompt_logprobs if received is None else received.prefill.prompt_logprobs
                yield _output([token], admitted, told)
                mailbox.tell = tell
                while token.finished is None:
                    tokens = [await _next(mailbox, Token), *mailbox.take_tokens()]
                    token = tokens[-1]
                    yield _output(tokens)
            finally:
                self.post(Cancel(seq))  # It does nothing to a sequence that has ended.

    async def _receive(
        self, seq: Sequence, mailbox: Mailbox, reserved: Reserved, remote_prefill: RemotePrefill
    ) -> _Received:
        """Have the delta computed elsewhere and written into our pages.

        Raises:
            PeerFailed, NoCapacity: the prefill leg failed, or other bytes landed than prefill wrote; the
                pages are given back, or are in quarantine until the writer has stopped.
            Unavailable: the rank is stopping; likewise.
        """
        assert self._links is not None
        reserved_at = time.monotonic()
        peer = remote_prefill.peer
        try:
            link = await self._links.link(peer)
        except StaleGeneration as error:
            raise PeerFailed(str(error)) from error
        room = Room(secrets.randbits(64))
        delta = _Delta(self, seq, link, room, self._lease, is_sampled(room, self._digest_share))
        began = time.monotonic()
        delta.send_ticket(reserved)
        try:
            prefill, (landed, digested_pages) = await both(
                remote_prefill(seq.request, Rendezvous(room, self._own_id, peer.id)),
                delta.landed_as_written(),
                delta.attend(mailbox),
                patience_s=_ANSWER_PATIENCE_S,
            )
            _check_token(prefill.first_token_id, self.vocab_size, seq.matcher)
            check_told(prefill.prompt_logprobs, seq.request)
        except BaseException:
            delta.give_up()
            raise
        first_token = Sampled(prefill.first_token_id, prefill.first_token_logprobs)
        self.post(DeltaLanded(seq, first_token, with_draft=link.layout.draft is not None))
        waited_s = time.monotonic() - began
        transfer_s = max(0.0, waited_s - prefill.queue_s - prefill.compute_s)
        link_s = began - reserved_at
        return _Received(prefill, link.layout, landed.group_bytes, digested_pages, link_s, transfer_s)

    def begin_quarantine(self, seq: Sequence, watch: RoomWatch) -> None:
        self.post(Cancel(seq, quarantine=True))
        task = asyncio.create_task(self._quarantine(seq, watch), name=f"quarantine-{seq.request.request_id}")
        self._quarantines.add(task)
        task.add_done_callback(self._quarantines.discard)

    async def _quarantine(self, seq: Sequence, watch: RoomWatch) -> None:
        await watch.writer_stopped(self._lease.fence_margin_s)
        self.post(EndQuarantine(seq))

    def _admitted(
        self,
        seq: Sequence,
        reserved: Reserved,
        queue_s: float,
        constraint_s: float,
        received: _Received | None,
        first: Token,
    ) -> Admitted:
        prompt_tokens = len(seq.request.all_ids)
        prefill = received.prefill if received is not None else None
        layout = self.layout if received is None else received.layout
        if received is None and layout.draft is not None:
            layout = replace(layout, draft=None)
        moved = received.group_bytes if received is not None else (0,) * len(layout.unit_bytes)
        return Admitted(
            prompt_tokens=prompt_tokens,
            decode_prefix_len=first.reused_tokens,
            prefill_prefix_len=prefill.prefill_prefix_len if prefill is not None else 0,
            computed_tokens=prompt_tokens - first.reused_tokens
            if prefill is None
            else prefill.computed_tokens,
            kv_bytes_moved=sum(moved),
            kv_bytes_prompt=sum(moved_bytes(0, prompt_tokens, layout)),
            carried_bytes=carried_by_kind(layout, moved),
            decode_queue_s=queue_s + (received.link_s if received is not None else 0.0),
            prefill_queue_s=prefill.queue_s if prefill is not None else 0.0,
            prefill_compute_s=prefill.compute_s if prefill is not None else first.compute_s,
            transfer_s=received.transfer_s if received is not None else 0.0,
            plan=Plan.LOCAL if received is None else Plan.REMOTE,
            digested_pages=received.digested_pages if received is not None else 0,
            constraint_s=constraint_s,
        )


class _Delta:
    def __init__(
        self,
        engine: PagedDecodeEngine,
        seq: Sequence,
        link: SenderLink,
        room: Room,
        lease: WriteLease,
        want_digests: bool,
    ) -> None:
        self._engine = engine
        self._seq = seq
        self._link = link
        self._room = room
        self._lease = lease
        self._want_digests = want_digests
        self._reserved_again: asyncio.Queue[Reserved] = asyncio.Queue()
        self._watch: RoomWatch | None = None  # It belongs to the last ticket.
        self._units: tuple[tuple[PageId, ...], ...] = ()  # These units, by pool, are written into.
        self.start = 0  # It counts tokens.

    def send_ticket(self, reserved: Reserved) -> None:
        """Raises PeerFailed when the link has ended; then nothing was sent."""
        shadowed = (reserved.delta_pages,) * len(self._link.layout.draft_group)
        self.start = reserved.prefix_len
        self._units = (reserved.delta_pages, *reserved.carried, *shadowed)
        ticket = make_ticket(
            self._room,
            self._link.address.id.generation,
            len(self._seq.ids),
            reserved.prefix_len,
            reserved.delta_pages,
            self._link.write_until_s(self._lease.write_lease_s),
            targets=targets_of(self._engine.layout, len(self._seq.ids), reserved.carried),
            want_digests=self._want_digests,
        )
        self._watch = self._link.send_ticket(ticket)

    async def landed(self) -> Landed:
        while True:
            assert self._watch is not None
            outcome = await self._watch.outcome()
            if isinstance(outcome, Landed):
                return outcome
            _check_earlier(outcome.start, self.start, self._engine.layout.page_size)
            log.info("kv_renegotiated prefix=%d start=%d", self.start, outcome.start)
            self.start = outcome.start
            self._engine.post(Renegotiate(self._seq, self.start))
            self.send_ticket(await self._reserved_again.get())

    async def landed_as_written(self) -> tuple[Landed, int]:
        """Raises what `landed` and `check_digests` raise, and PeerFailed where too little has landed."""
        landed = await self.landed()
        _check_bytes(landed, moved_bytes(self.start, len(self._seq.ids), self._link.layout))
        return landed, await self.check_digests(landed)

    async def check_digests(self, landed: Landed) -> int:
        """Return how many units were compared with the digests that prefill sent, 0 where it sent none.

        Raises:
            KvCorrupt: one differs.
            PeerFailed: the number of digests is not that of all units that were to land.
        """
        digests, num_units = landed.page_digests, sum(map(len, self._units))
        if not self._want_digests or not digests:
            return 0
        if len(digests) != num_units:
            raise PeerFailed(f"prefill sent {len(digests)} digests of {num_units} pages")
        wrong = await asyncio.to_thread(differing_pages, digests, self._units, self._engine.read_pages)
        if wrong:
            self._log_corrupt(wrong)
            raise KvCorrupt(f"{self._link.address.id}: {len(wrong)} of {num_units} pages came changed")
        return num_units

    def _log_corrupt(self, wrong: tuple[tuple[int, PageId], ...]) -> None:
        log.error(
            "kv_digest_mismatch request_id=%s prefill=%s room=%016x group=%d page=%d differing=%d pages=%d",
            self._seq.request.request_id,
            self._link.address.id,
            self._room,
            *wrong[0],
            len(wrong),
            sum(map(len, self._units)),
        )

    async def attend(self, mailbox: Mailbox) -> None:
        """Renew the lease from time to time. Raises what the sequence fails with meanwhile."""
        while True:
            try:
                async with asyncio.timeout(self._lease.renew_every_s):
                    event = await mailbox.get()
            except TimeoutError:
                assert self._watch is not None
                self._watch.renew(self._link.write_until_s(self._lease.write_lease_s))
            else:
                if not isinstance(event, Reserved):
                    raise ProtocolError(f"{event!r} came before the pages had landed")
                self._reserved_again.put_nowait(event)

    def give_up(self) -> None:
        """Put pages that may be written still into quarantine; the others go with their sequence, which
        ends."""
        assert self._watch is not None
        if self._watch.abort():
            self._engine.begin_quarantine(self._seq, self._watch)


async def _next(mailbox: Mailbox, kind: type[E]) -> E:
    event = await mailbox.get()
    if not isinstance(event, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {event!r}")
    return event


def _output(
    tokens: list[Token], admitted: Admitted | None = None, told: PromptLogprobs | None = None
) -> Output:
    logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return Output(
        tuple(token.token_id for token in tokens),
        logprobs,
        admitted,
        tokens[-1].finished,
        sum(token.drafted for token in tokens),
        sum(token.accepted for token in tokens),
        told,
    )


def _check_bytes(landed: Landed, due: tuple[int, ...]) -> None:
    if landed.group_bytes != due:
        told = landed.group_bytes
        by_group = told if len(told) == len(due) else (sum(told),)  # There may be any number of them.
        moved, expected = (" + ".join(map(str, sizes)) for sizes in (by_group, due))
        raise PeerFailed(f"prefill says that {moved} bytes landed where {expected} were due")


def _check_token(token_id: int, vocab_size: int, matcher: Matcher | None) -> None:
    """Refuse a token outside the vocabulary, which in a batch would fail all the others too."""
    if not 0 <= token_id < vocab_size:
        raise PeerFailed(f"prefill chose token {token_id}, which is outside the vocabulary of {vocab_size}")
    if matcher is not None and not matcher.may_choose(token_id):
        raise PeerFailed(f"prefill chose token {token_id}, which the constraint does not allow")


def _check_earlier(start: int, prefix_len: int, page_size: int) -> None:
    if not 0 <= start < prefix_len or start % page_size:
        raise PeerFailed(f"prefill wants the delta to start at token {start}, it starts at {prefix_len}")
