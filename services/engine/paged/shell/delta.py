"""A delta is what a ticket asks a writer for; this follows it on the receiving rank, until it landed as
written.

transfer/receiving/transfer_watch.py knows whether somebody may still write the pages.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.kv.page_digest import differing_pages
from services.kv.ticket import make_ticket, targets_of
from services.kv.transfer_plan import moved_bytes
from services.transfer.receiving.sender_links import SenderLink
from services.transfer.receiving.transfer_watch import Landed, TransferWatch
from services.values.errors import KvCorrupt, PeerFailed
from services.values.kv import KvLayout, PageId
from services.values.rank import TransferId

if TYPE_CHECKING:
    from services.engine.paged.shell.transferring_engine import TransferringEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteLease:
    write_lease_s: float = 10.0  # It is renewed while the request waits.
    # It covers the longest posts in flight, and the drift between two monotonic clocks.
    fence_margin_s: float = 5.0

    @property
    def renew_every_s(self) -> float:
        return self.write_lease_s / 3


class Delta:
    def __init__(
        self,
        engine: "TransferringEngine",
        request_id: str,
        link: SenderLink,
        layout: KvLayout,
        transfer_id: TransferId,
    ) -> None:
        self.engine = engine
        self.lease = engine.lease
        self._request_id = request_id
        self._link = link
        self._layout = layout  # It has the groups that are transferred.
        self._transfer_id = transfer_id
        self._want_digests = engine.wants_digests(transfer_id)
        self._watch: TransferWatch | None = None  # It belongs to the last ticket.
        self._units: tuple[tuple[PageId, ...], ...] = ()  # The writer writes into these units, by pool.
        self.start = self._end = 0  # They are in tokens.

    @property
    def has_ticket(self) -> bool:
        return self._watch is not None

    @property
    def watch(self) -> TransferWatch:
        assert self._watch is not None, "send_ticket comes first"
        return self._watch

    def send_ticket(
        self, start: int, end: int, pages: Sequence[PageId], carried: Sequence[Sequence[PageId]]
    ) -> None:
        """Have [start, end) written into `pages`, and the state at `end` into `carried`.

        Raise PeerFailed where the connection has ended; nothing was sent then.
        """
        self.start, self._end = start, end
        shadowed = (tuple(pages),) * len(self._layout.draft_group)
        self._units = (tuple(pages), *map(tuple, carried), *shadowed)
        ticket = make_ticket(
            self._transfer_id,
            self._link.address.id.generation,
            end,
            start,
            pages,
            self._link.write_until_s(self.lease.write_lease_s),
            targets=targets_of(self.engine.layout, end, carried),
            want_digests=self._want_digests,
        )
        self._watch = self._link.send_ticket(ticket)

    def renew(self) -> None:
        self.watch.renew(self._link.write_until_s(self.lease.write_lease_s))

    async def renegotiate(self, start: int) -> None:
        """Send another ticket, whose delta starts at `start`. Raise PeerFailed where this is not allowed."""
        raise PeerFailed(f"the writer wants the delta to start at token {start}, it starts at {self.start}")

    async def landed_as_written(self) -> tuple[Landed, int]:
        """Return what has landed, and how many of its units were compared with the writer's digests.

        Raises:
            KvCorrupt: a unit differs.
            PeerFailed: nothing landed, or too little, or the number of digests is not that of all units.
        """
        while not isinstance(outcome := await self.watch.outcome(), Landed):
            await self.renegotiate(outcome.start)
        _check_bytes(outcome, moved_bytes(self.start, self._end, self._layout))
        return outcome, await self._check_digests(outcome)

    async def _check_digests(self, landed: Landed) -> int:
        digests, num_units = landed.page_digests, sum(map(len, self._units))
        if not self._want_digests or not digests:
            return 0
        if len(digests) != num_units:
            raise PeerFailed(f"the writer sent {len(digests)} digests of {num_units} pages")
        wrong = await asyncio.to_thread(differing_pages, digests, self._units, self.engine.runner.read_pages)
        if wrong:
            self._log_corrupt(wrong)
            raise KvCorrupt(f"{self._link.address.id}: {len(wrong)} of {num_units} pages came changed")
        return num_units

    def _log_corrupt(self, wrong: tuple[tuple[int, PageId], ...]) -> None:
        log.error(
            "kv_digest_mismatch request_id=%s writer=%s room=%016x group=%d page=%d differing=%d pages=%d",
            self._request_id,
            self._link.address.id,
            self._transfer_id,
            *wrong[0],
            len(wrong),
            sum(map(len, self._units)),
        )


def _check_bytes(landed: Landed, due: tuple[int, ...]) -> None:
    if landed.group_bytes != due:
        told = landed.group_bytes
        # The writer may report any number of groups.
        by_group = told if len(told) == len(due) else (sum(told),)
        moved, expected = (" + ".join(map(str, sizes)) for sizes in (by_group, due))
        raise PeerFailed(f"the writer says that {moved} bytes landed where {expected} were due")
