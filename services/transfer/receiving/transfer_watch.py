"""A watch follows one ticket that a receiving rank has sent. It is the shell of the reservation table.

services/kv/handshake.py draws its states. This adds to them:

    send_ticket --> TransferWatch <-- its link: Status, AbortAck, lost, linked anew, next incarnation seen
                      |   ^-- its owner: renew, abort
                      +--> outcome: the first word, or the loss of the stream, decides; no later one does
                      +--> writer_stopped: the quarantine is over, by a last word or by fence time
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.kv.handshake import (
    RESERVATION_OVER,
    ReservationEffect,
    ReservationEvent,
    ReservationState,
    may_expire,
    step_reservation,
)
from services.values.errors import PeerFailed
from services.values.rank import RankAddress, TransferId

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Landed:
    """The whole delta is in our pages, and all per-request state in our units."""

    group_bytes: tuple[int, ...]
    descriptors: int
    # These are of the delta's pages, in token order, then of each unit of the ticket's targets. It is empty
    # if the ticket asked for none.
    page_digests: tuple[int, ...] = ()

    @property
    def bytes_moved(self) -> int:
        return sum(self.group_bytes)


@dataclass(frozen=True, slots=True)
class Renegotiated:
    """Nothing was written by the ticket; one whose delta starts at `start` would be accepted."""

    start: int  # This is in tokens, and comes from the writer.


_Outcome = Landed | Renegotiated | str  # A text is the reason of a failure.


class WriterLink(Protocol):
    def send_renewal(self, transfer_id: TransferId, write_until_s: float) -> None: ...

    def send_abort(self, transfer_id: TransferId) -> None: ...

    def lease_end_s(self, write_until_s: float) -> float:
        """Return the time on our clock by which the writer's clock has reached `write_until_s`."""


class TransferWatch:
    """SenderLink.send_ticket makes it; every method is called on its loop."""

    def __init__(
        self,
        transfer_id: TransferId,
        writer: RankAddress,
        link: WriterLink,
        write_until_s: float,
        clock: Callable[[], float],
        seek: Callable[["TransferWatch"], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.writer = writer
        self.state = ReservationState.FILLING
        self._link = link  # This is the newest link.
        self._lease_end_s = link.lease_end_s(write_until_s)
        self._clock = clock
        self._seek = seek
        self._outcome: _Outcome | None = None
        self._quarantined = False
        self._settled = asyncio.Event()
        self._news = asyncio.Event()  # It wakes those that wait for the writer's end.
        self._unanswered_told = False

    def __repr__(self) -> str:
        return f"TransferWatch({self.transfer_id:016x} at {self.writer.id} {self.state.name})"

    # -- what its owner asks ------------------------------------------------------------------------------

    async def outcome(self) -> Landed | Renegotiated:
        """Wait until the whole delta has landed, or the writer asks for another ticket.

        Raises:
            PeerFailed: the transfer was refused, failed or aborted, or the stream was lost. Only
                `writer_stopped` tells when the pages may be used again.
        """
        await self._settled.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, str):
            raise PeerFailed(self._outcome)
        return self._outcome

    def renew(self, write_until_s: float) -> None:
        """Let the writer write until then, on its own clock. Nothing happens once settled or lost."""
        if not self._settled.is_set():
            self._lease_end_s = max(self._lease_end_s, self._link.lease_end_s(write_until_s))
            self._link.send_renewal(self.transfer_id, write_until_s)

    def abort(self) -> bool:
        """Give up.

        Returns:
            True, once, if the writer may still write, and the pages must wait for `writer_stopped`.
        """
        before = self._quarantined
        self._step(ReservationEvent.GIVEN_UP)
        return self._quarantined and not before

    async def writer_stopped(self, fence_s: float) -> None:
        """Give up, and return once no byte of this transfer can be written any more.

        While the stream stands only the writer's last word tells that: without one, writes may still be under
        way. Once the stream is lost, or the word was that a write failed with its end unknown, it is
        `fence_s` after the end of the last lease, or after the loss or the word if that came later. `fence_s`
        is the longest that the posts in flight may take, plus what two monotonic clocks may drift apart. A
        lost stream is opened anew in the background, to learn more.
        """
        self.abort()
        while not self.is_over(fence_s):
            await self._learn_more(fence_s)
        if self._quarantined:
            self._step(ReservationEvent.FENCE_OVER)
            log.warning("kv_fence_time_over room=%016x writer=%s", self.transfer_id, self.writer.id)

    def is_over(self, fence_s: float) -> bool:
        fenced = may_expire(self.state) and self._left_s(fence_s) <= 0
        return fenced or self.state in RESERVATION_OVER

    @property
    def is_sought(self) -> bool:
        return self.state is ReservationState.SOUGHT

    def _left_s(self, fence_s: float) -> float:
        return self._lease_end_s + fence_s - self._clock()

    async def _learn_more(self, fence_s: float) -> None:
        left_s = self._left_s(fence_s)
        if left_s <= 0:
            self._ask_again()
            left_s = _ASK_AGAIN_S
        await self._hear(left_s)

    def _ask_again(self) -> None:
        if not self._unanswered_told:
            self._unanswered_told = True
            log.warning("kv_abort_unanswered room=%016x writer=%s", self.transfer_id, self.writer.id)
        self._step(ReservationEvent.FENCE_OVER)

    async def _hear(self, timeout_s: float) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    # -- what its link tells ------------------------------------------------------------------------------

    def on_landed(self, landed: Landed) -> None:
        self._hear_outcome(ReservationEvent.PAGES_LANDED, landed)

    def on_renegotiated(self, renegotiated: Renegotiated) -> None:
        self._hear_outcome(ReservationEvent.RENEGOTIATED, renegotiated)

    def on_last_word(self, reason: str) -> None:
        self._hear_outcome(ReservationEvent.WRITER_STOPPED, reason)

    def on_unsettled(self, reason: str) -> None:
        self._hear_outcome(ReservationEvent.UNSETTLED, reason)

    def on_writer_dead(self) -> None:
        """Note that another incarnation of the rank was seen.

        Its supervisor had reaped this one before, or its writes had ended when it changed its role.
        """
        self.on_last_word(f"the prefill rank {self.writer.id} has been restarted")

    def on_lost(self) -> None:
        reason = f"the handshake stream to {self.writer.id} was lost"
        self._hear_outcome(ReservationEvent.LINK_LOST, reason)

    def on_linked(self, link: WriterLink) -> None:
        """Note a new stream to the same incarnation. Messages on the old one may be lost."""
        self._link = link
        self._step(ReservationEvent.LINKED)

    # ---------------------------------------------------------------------------------------------------

    def _hear_outcome(self, event: ReservationEvent, outcome: _Outcome) -> None:
        self._step(event)
        if self._outcome is None:
            self._outcome = outcome
        self._settled.set()

    def _step(self, event: ReservationEvent) -> None:
        self.state, effects = step_reservation(self.state, event)
        for effect in effects:
            self._perform(effect)
        self._news.set()

    def _perform(self, effect: ReservationEffect) -> None:
        match effect:
            case ReservationEffect.SEND_ABORT:
                self._link.send_abort(self.transfer_id)
            case ReservationEffect.BEGIN_FENCE:
                self._lease_end_s = max(self._lease_end_s, self._clock())
            case ReservationEffect.SEEK:
                self._seek(self)
            case ReservationEffect.QUARANTINE:
                self._quarantined = True
            case ReservationEffect.END_QUARANTINE:
                self._quarantined = False
