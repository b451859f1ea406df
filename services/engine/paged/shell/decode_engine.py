"""The decode role of our own engines reserves pages, has the delta written, and generates.

transfer/receiving/transfer_watch.py knows whether units that somebody else writes may be reused. If they may
not, they are kept from reuse here when their request ends.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from services.engine.base import RemotePrefill
from services.engine.paged.core_events import Reserved, Token
from services.engine.paged.model_runner import Sampled, check_told
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.delta import Delta
from services.engine.paged.shell.paged_engine import Mailbox
from services.engine.paged.shell.transferring_engine import TransferringEngine
from services.grammar.matcher import Matcher
from services.kv.transfer_plan import carried_by_kind, moved_bytes
from services.transfer.receiving.sender_links import SenderLink
from services.transfer.receiving.transfer_watch import Landed
from services.transfer.sending.handshake_server import HandshakeService
from services.transfer.waits import both
from services.values.errors import PeerFailed, ProtocolError, StaleGeneration
from services.values.kv import KvLayout
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Plan, RankAddress, Rendezvous, TransferId
from services.values.request import Admitted, GenerationRequest, Output, PrefillResult, Pulled

log = logging.getLogger(__name__)

E = TypeVar("E", Reserved, Token)

# A transfer may end before the answer to the prefill call arrives. Only the answer has the error itself, and
# so tells whose it is: it is not prefill's fault that a prompt is too long for it.
_ANSWER_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Received:
    prefill: PrefillResult
    layout: KvLayout  # It has what both ranks have.
    group_bytes: tuple[int, ...]
    digested_pages: int
    queue_s: float  # It is the time until it had its pages, and the handshake with the rank was complete.
    transfer_s: float


class PagedDecodeEngine(TransferringEngine):
    """It implements services.engine.base.DecodeEngine."""

    plans = frozenset(Plan)
    moves_penalties = True

    def _sender_crashed(self, error: BaseException) -> None:
        """Lend nothing any more, and refuse those that ask. No request of this rank needs the sender."""
        log.critical("lending_ended rank=%s reason=%r", self._own_id, error)
        self._sender_gone.set()

    def handshake(self) -> HandshakeService | None:
        return None if self._sender is None else self.handshake_of(self._sender)

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
        with self.mailbox(seq) as mailbox:
            self.submit(seq)
            try:
                reserved = await _next(mailbox, Reserved)
                pulled, received = await self.pull(seq, mailbox, reserved), None
                if remote_prefill is not None:
                    received = await self._receive(seq, mailbox, reserved, remote_prefill, asked)
                token = await _next(mailbox, Token)
                admitted = self._admitted(seq, pulled, constraint_s, received, token)
                told = token.prompt_logprobs if received is None else received.prefill.prompt_logprobs
                yield _output([token], admitted, told)
                mailbox.tell = tell
                while token.finished is None:
                    tokens = [await _next(mailbox, Token), *mailbox.take_tokens()]
                    token = tokens[-1]
                    yield _output(tokens)
            finally:
                self.post(lambda core: core.cancel(seq))  # This has no effect on a sequence that has ended.

    async def _receive(
        self,
        seq: Sequence,
        mailbox: Mailbox,
        reserved: Reserved,
        remote_prefill: RemotePrefill,
        asked: float,
    ) -> _Received:
        """Have the delta computed elsewhere and written into our pages, but for what a tier fills meanwhile.
        The request came at `asked`.

        Raises:
            PeerFailed, NoCapacity: the prefill leg failed, or other bytes landed than prefill wrote; the
                pages are given back, or are in quarantine until the writer has stopped.
            Unavailable: the rank is stopping; the same happens to the pages.
        """
        peer = remote_prefill.peer
        link = await self._link_to(peer)
        transfer_id = TransferId(secrets.randbits(64))
        delta = _Delta(self, seq, link, transfer_id, lambda: self._link_to(peer))
        began = time.monotonic()
        if not reserved.fills:
            delta.reserve(reserved)
        try:
            prefill, (landed, digested_pages) = await both(
                remote_prefill(seq.request, Rendezvous(transfer_id, self._own_id, peer.id)),
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
        draft_end = _draft_end(seq, link.layout, prefill)
        self.post(lambda core: core.landed(seq, first_token, draft_end=draft_end))
        waited_s = time.monotonic() - began
        pull_s = prefill.pulled.seconds if prefill.pulled is not None else 0.0
        transfer_s = max(0.0, waited_s - prefill.queue_s - pull_s - prefill.compute_s)
        return _Received(prefill, link.layout, landed.group_bytes, digested_pages, began - asked, transfer_s)

    async def _link_to(self, peer: RankAddress) -> SenderLink:
        assert self._links is not None
        try:
            return await self._links.link(peer)
        except StaleGeneration as error:
            raise PeerFailed(str(error)) from error

    def _admitted(
        self,
        seq: Sequence,
        pulled: Pulled | None,
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
            decode_queue_s=constraint_s + first.time.queued_s if received is None else received.queue_s,
            prefill_queue_s=prefill.queue_s if prefill is not None else first.time.unpulled_s(pulled),
            prefill_compute_s=prefill.compute_s if prefill is not None else first.time.computed_s,
            transfer_s=received.transfer_s if received is not None else 0.0,
            plan=Plan.LOCAL if received is None else Plan.REMOTE,
            digested_pages=received.digested_pages if received is not None else 0,
            constraint_s=constraint_s,
            pulled=pulled if prefill is None else prefill.pulled,
            brought_tokens=first.brought_tokens if prefill is None else prefill.brought_tokens,
            rank_tokens=first.time.rank_tokens if prefill is None else prefill.rank_tokens,
        )


class _Delta(Delta):
    def __init__(
        self,
        engine: TransferringEngine,
        seq: Sequence,
        link: SenderLink,
        transfer_id: TransferId,
        link_again: Callable[[], Awaitable[SenderLink]],
    ) -> None:
        super().__init__(engine, seq.request.request_id, link, link.layout, transfer_id)
        self._seq = seq
        self._link_again = link_again
        self._reserved_again: asyncio.Queue[Reserved] = asyncio.Queue()

    def reserve(self, reserved: Reserved) -> None:
        self.send_ticket(reserved.prefix_len, len(self._seq.ids), reserved.delta_pages, reserved.carried)

    async def landed_as_written(self) -> tuple[Landed, int]:
        if not self.has_ticket:  # A tier fills the first pages, and prefill computes meanwhile.
            reserved = await self._reserved_again.get()
            self._link = await self._link_again()  # The stream may have been retired since.
            self.reserve(reserved)
        return await super().landed_as_written()

    async def renegotiate(self, start: int) -> None:
        _check_earlier(start, self.start, self.engine.layout.page_size)
        log.info("kv_renegotiated prefix=%d start=%d", self.start, start)
        self.engine.post(lambda core: core.renegotiate(self._seq, start))
        self.reserve(await self._reserved_again.get())

    async def attend(self, mailbox: Mailbox) -> None:
        while True:
            try:
                async with asyncio.timeout(self.lease.renew_every_s):
                    event = await mailbox.get()
            except TimeoutError:
                if self.has_ticket:
                    self.renew()
            else:
                if not isinstance(event, Reserved):
                    raise ProtocolError(f"{event!r} came before the pages had landed")
                self._reserved_again.put_nowait(event)

    def give_up(self) -> None:
        """Put pages that may still be written into quarantine; other pages go with the sequence, which
        ends."""
        if self.has_ticket and self.watch.abort():
            self.engine.begin_quarantine(self._seq, self.watch)


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


def _check_token(token_id: int, vocab_size: int, matcher: Matcher | None) -> None:
    """Refuse a token outside the vocabulary: it would fail all other sequences of its batch, too."""
    if not 0 <= token_id < vocab_size:
        raise PeerFailed(f"prefill chose token {token_id}, which is outside the vocabulary of {vocab_size}")
    if matcher is not None and not matcher.may_choose(token_id):
        raise PeerFailed(f"prefill chose token {token_id}, which the constraint does not allow")


def _draft_end(seq: Sequence, layout: KvLayout, prefill: PrefillResult) -> int:
    """Return up to which token the draft model's KV has come, where both ranks have that model."""
    if layout.draft is None:
        return 0
    num_tokens = len(seq.ids)
    return num_tokens if prefill.draft_tokens is None else min(num_tokens, prefill.draft_tokens)


def _check_earlier(start: int, prefix_len: int, page_size: int) -> None:
    if not 0 <= start < prefix_len or start % page_size:
        raise PeerFailed(f"prefill wants the delta to start at token {start}, it starts at {prefix_len}")
