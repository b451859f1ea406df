"""A receiving rank (a decode rank) is known to the transport, in doubt, or forgotten.

    reach(link) --> known --a write fails or takes too long--> in doubt: gets no more tickets
                      |                                           |
                      +---no link, transfer or stuck write -------+---> forgotten, reached anew at a ticket

A transport's connection may be broken for good while the handshake stream stands, so one in doubt is not
used again. A write that was given up is stuck: the transport holds it, and its connection, until it ends.

Failures show why no write lands: because of the decode ranks, or because of our own transport. A failure
counts only while the decode rank's Handshake stream stands. The next failure to the same rank counts only
after it has asked again over a new connection. So a rank that dies with many writes under way counts once,
and no more once its stream is lost. A write that lands at any rank proves that our transport works, and
clears all failures.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.transfer.sending.delta_write import DeltaWrite
from services.transfer.sending.sending_transfer import Link, SendingTransfer
from services.transfer.transport import PeerName, Transport
from services.values.errors import PeerFailed
from services.values.rank import RankId

MAX_FAILURES = 5
MIN_SPAN_S = 60.0  # A shorter outage of the network restarts no rank.


@dataclass(slots=True)
class _Row:
    first_s: float
    failures: int = 1
    asked_again: bool = False


class Failures:
    def __init__(self) -> None:
        self._rows: dict[RankId, _Row] = {}

    @property
    def decodes(self) -> tuple[RankId, ...]:
        return tuple(self._rows)

    def landed(self) -> None:
        self._rows.clear()

    def asked(self, decode: RankId) -> None:
        """Note that the rank wants something written, over a connection on which no write has failed."""
        if (row := self._rows.get(decode)) is not None:
            row.asked_again = True

    def failed(self, decode: RankId, now_s: float) -> None:
        row = self._rows.setdefault(decode, _Row(now_s))
        row.failures += row.asked_again
        row.asked_again = False

    def forget(self, decode: RankId) -> None:
        """Drop the rank's failures: its lost stream shows that the fault is on its side."""
        self._rows.pop(decode, None)

    def are_ours(self, linked: Iterable[RankId], now_s: float) -> bool:
        """Return whether only a restart of this rank can help; `linked` are the ranks whose streams stand.

        One rank that cannot be written to proves nothing, unless there is no other to compare it with.
        """
        rows = self._rows.values()
        if sum(row.failures for row in rows) < MAX_FAILURES:
            return False
        if now_s - min(row.first_s for row in rows) < MIN_SPAN_S:
            return False
        return sum(row.failures > 1 for row in rows) > 1 or len(set(linked)) == 1


log = logging.getLogger(__name__)


class TransportBroken(Exception):
    """No write lands at any rank any more."""


class Peers:
    """These are the peers of one TransferTable, which owns `links`. All calls come from its thread."""

    def __init__(self, transport: Transport, links: Mapping[int, Link], clock: Callable[[], float]) -> None:
        self._transport = transport
        self._links = links
        self._clock = clock
        self._failures = Failures()
        self._doubted: set[PeerName] = set()
        self._late: set[PeerName] = set()  # These are the doubted ones with a write that does not end.
        self._stuck: list[tuple[PeerName, DeltaWrite]] = []
        self._landed_s: dict[PeerName, float] = {}

    @property
    def stuck_writes(self) -> int:
        return sum(delta.writes_in_flight for _, delta in self._stuck)

    def reach(self, link: Link) -> None:
        if link.peer is None:
            peer = self._transport.add_peer(link.agent_metadata, link.memories)
            if peer in self._late:
                self._failures.asked(link.decode)
                self._failures.failed(link.decode, self._clock())
            if peer in self._doubted:
                raise PeerFailed("a write to this rank has failed, and others have not ended yet")
            link.peer = peer
        self._failures.asked(link.decode)

    def doubt(self, peer: PeerName, decode: RankId, *, late: bool) -> None:
        """Give the peer no more tickets until no transfer uses its connection and it is reached anew."""
        self._doubted.add(peer)
        if late:
            self._late.add(peer)
        if self._is_linked(decode):
            self._failures.failed(decode, self._clock())
        for link in self._links.values():
            if link.peer == peer:
                link.peer = None

    def link_lost(self, link: Link) -> None:
        if not self._is_linked(link.decode):
            self._failures.forget(link.decode)

    def check_transport(self) -> None:
        """Raise TransportBroken, once, when this rank has to be restarted."""
        if self._failures.are_ours((link.decode for link in self._links.values()), self._clock()):
            tried = self._failures.decodes
            self._failures = Failures()
            raise TransportBroken(f"no write lands any more: tried {', '.join(map(str, tried))}")

    def note_landed(self, peer: PeerName) -> None:
        self._failures.landed()
        self._landed_s[peer] = self._clock()

    def last_landed_s(self, peer: PeerName) -> float:
        return self._landed_s.get(peer, float("-inf"))  # This is before all time if none has landed.

    def keep_stuck(self, peer: PeerName, delta: DeltaWrite) -> None:
        self._stuck.append((peer, delta))

    def poll_stuck(self) -> list[PeerName]:
        for peer, delta in self._stuck:
            try:
                delta.poll()
            except PeerFailed as error:
                log.info("kv_stuck_write_failed peer=%s reason=%r", peer, str(error))
        ended = [peer for peer, delta in self._stuck if delta.writes_in_flight == 0]
        self._stuck = [entry for entry in self._stuck if entry[1].writes_in_flight]
        return ended

    def let_go_of_stuck(self) -> None:
        self._stuck = []

    def drop_unused(self, peer: PeerName, transfers: Iterable[SendingTransfer]) -> None:
        in_use = any(link.peer == peer for link in self._links.values())
        if (
            in_use
            or any(transfer.peer == peer for transfer in transfers)
            or any(peer == name for name, _ in self._stuck)
        ):
            return
        self._doubted.discard(peer)
        self._late.discard(peer)
        self._landed_s.pop(peer, None)
        try:
            self._transport.remove_peer(peer)
        except PeerFailed as error:
            log.warning("kv_peer_kept peer=%s reason=%r", peer, str(error))

    def _is_linked(self, decode: RankId) -> bool:
        return any(link.decode == decode for link in self._links.values())
