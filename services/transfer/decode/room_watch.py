"""What a decode rank knows of one ticket it has sent.

sent --> accepted --> landed
  |         |    +--> renegotiated: nothing was written; another ticket of the room gets another watch
  |         |    +--> failed, refused, abort acknowledged ---------------> writer stopped
  |         |    |                                                           ^
  |         |    +--> failed or acknowledged, yet unsettled: it posts        |
  |         |    |    nothing more, but what it posted may land until -------+ fence time
  |         |    |                                                           |
  |         |    +--> given up: asked to stop, and while the stream stands   |
  |         |         asked again; nothing but its word counts --------------+
  +---------+-------> lost: the stream ended without a last word             |
                        |  the writer may write still, until one of these:   |
                        +--> ack on a new stream to the same life -----------+
                        +--> the rank's next life seen at the same endpoint -+
                        +--> fence time: the last lease, and a margin -------+
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.values.errors import PeerFailed
from services.values.rank import RankAddress, Room

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Landed:
    """The whole delta is in our pages."""

    bytes_moved: int
    descriptors: int
    page_digests: tuple[int, ...] = ()  # of the delta's pages, in token order; or none at all


@dataclass(frozen=True, slots=True)
class Renegotiated:
    """Nothing was written by the ticket; one whose delta starts at `start` would be honoured."""

    start: int  # tokens, as the writer says


class WriterLink(Protocol):
    """The stream to the writer, as far as a watch uses it."""

    def send_renewal(self, room: Room, write_until_s: float) -> None: ...

    def send_abort(self, room: Room) -> None: ...

    def lease_end_s(self, write_until_s: float) -> float:
        """A time of the writer's clock on ours, at the latest."""


class RoomWatch:
    """Made by PrefillLink.send_ticket; every method is called on its loop."""

    def __init__(
        self,
        room: Room,
        writer: RankAddress,
        link: WriterLink,
        write_until_s: float,
        clock: Callable[[], float],
        seek: Callable[["RoomWatch"], None],
    ) -> None:
        self.room = room
        self.writer = writer
        self._link: WriterLink | None = link  # None: lost
        self._lease_end_s = link.lease_end_s(write_until_s)
        self._clock = clock
        self._seek = seek
        self._answered = asyncio.Event()  # accepted, or settled
        self._settled = asyncio.Event()
        self._stopped = asyncio.Event()
        self._news = asyncio.Event()  # for who awaits the writer's end
        self._unanswered_told = False
        # The writer has said its last word, and bytes of a failed write may land still.
        self._unsettled = False
        self._outcome: Landed | Renegotiated | None = None
        self._failure = ""
        self.stop_awaited = False

    def __repr__(self) -> str:
        marks = ("answered", self._answered), ("settled", self._settled), ("stopped", self._stopped)
        told = " ".join(name for name, event in marks if event.is_set())
        return f"RoomWatch({self.room:016x} at {self.writer.id} {told})"

    # -- what its owner asks ------------------------------------------------------------------------------

    async def accepted_or_raise(self) -> None:
        """Wait until the writer has taken the ticket. Raises PeerFailed as `landed`."""
        await self._answered.wait()
        self._raise_failure()

    async def outcome(self) -> Landed | Renegotiated:
        """Wait until the whole delta has landed, or the writer asks for another ticket.

        Raises:
            PeerFailed: refused, failed, aborted, or the stream was lost. Only `writer_stopped` tells
                when the pages may be used again.
        """
        await self._settled.wait()
        self._raise_failure()
        assert self._outcome is not None
        return self._outcome

    async def landed(self) -> Landed:
        """As `outcome`, for who has no other ticket to give. Raises PeerFailed for that too."""
        outcome = await self.outcome()
        if isinstance(outcome, Renegotiated):
            raise PeerFailed(f"{self.writer.id}: the delta would have to start at token {outcome.start}")
        return outcome

    def renew(self, write_until_s: float) -> None:
        """Let the writer write until then, on its own clock. Nothing happens once settled or lost."""
        if self._link is None or self._settled.is_set():
            return
        self._lease_end_s = max(self._lease_end_s, self._link.lease_end_s(write_until_s))
        self._link.send_renewal(self.room, write_until_s)

    def abort(self) -> None:
        """Have the writer stop; `writer_stopped` tells when it has."""
        if self._link is not None and not self._stopped.is_set() and not self._unsettled:
            self._link.send_abort(self.room)

    async def writer_stopped(self, fence_s: float) -> None:
        """Return once no byte of this room can be written any more.

        While the stream stands nothing but the writer's word tells that: a missing one can mean just that
        writes are under way still. Once it is lost, or the word was that a write failed with its end
        unknown: `fence_s` after the end of the last lease, or after the loss or the word if that came
        later. `fence_s` is the longest that the posts in flight may take, and what two monotonic clocks may
        drift apart. A lost stream is made anew in the background, to learn more.
        """
        self.stop_awaited = True
        try:
            while not self.is_over(fence_s):
                await self._learn_more(fence_s)
        finally:
            self.stop_awaited = False
        if not self._stopped.is_set():
            log.warning("kv_fence_time_over room=%016x writer=%s", self.room, self.writer.id)

    def is_over(self, fence_s: float) -> bool:
        """Whether `writer_stopped` returns."""
        fenced = self._unsettled or self._link is None
        return self._stopped.is_set() or (fenced and self._left_s(fence_s) <= 0)

    def _left_s(self, fence_s: float) -> float:
        return self._lease_end_s + fence_s - self._clock()

    async def _learn_more(self, fence_s: float) -> None:
        left_s = self._left_s(fence_s)
        if self._link is None and not self._unsettled:
            self._seek(self)
        elif left_s <= 0:
            self._ask_again()
            left_s = _ASK_AGAIN_S
        await self._hear(left_s)

    def _ask_again(self) -> None:
        """Fence time is over, and the stream stands."""
        if not self._unanswered_told:
            self._unanswered_told = True
            log.warning("kv_abort_unanswered room=%016x writer=%s", self.room, self.writer.id)
        self.abort()

    async def _hear(self, timeout_s: float) -> None:
        """Return when the writer has stopped, or its stream is another or lost."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    # -- what its link tells ------------------------------------------------------------------------------

    def on_accepted(self) -> None:
        self._answered.set()

    def on_landed(self, landed: Landed) -> None:
        self._end_well(landed)

    def on_renegotiated(self, renegotiated: Renegotiated) -> None:
        self._end_well(renegotiated)

    def on_last_word(self, reason: str) -> None:
        """Refused, failed, or the abort acknowledged."""
        self._settle(reason)
        self._stop()

    def on_unsettled(self, reason: str) -> None:
        """Failed, or the abort acknowledged, and bytes of a failed write may land still."""
        self._unsettled = True
        self._lease_end_s = max(self._lease_end_s, self._clock())
        self._settle(reason)
        self._news.set()

    def on_writer_dead(self) -> None:
        """The rank was seen in another life; its supervisor had reaped this one before."""
        self.on_last_word(f"the prefill rank {self.writer.id} has been restarted")

    def on_lost(self) -> None:
        self._link = None
        self._lease_end_s = max(self._lease_end_s, self._clock())  # what is posted has the margin's time
        self._news.set()
        self._settle(f"the handshake stream to {self.writer.id} was lost")
        if self.stop_awaited:
            self._seek(self)

    def on_linked(self, link: WriterLink) -> None:
        """A new stream to the same life stands; what it was told on the old one may be lost."""
        self._link = link
        self._news.set()
        link.send_abort(self.room)

    def _end_well(self, outcome: Landed | Renegotiated) -> None:
        if not self._settled.is_set():
            self._outcome = outcome
        self._settle("")
        self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        self._news.set()

    def _settle(self, failure: str) -> None:
        if not self._settled.is_set():
            self._failure = failure
        self._settled.set()
        self._answered.set()

    def _raise_failure(self) -> None:
        if self._failure:
            raise PeerFailed(self._failure)
