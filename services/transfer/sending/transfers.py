"""A sending rank's transfers take tickets, requests and pages, and turn them into writes and last words.

One thread calls everything here. services/kv/handshake.py draws a transfer's states; this is the shell that
performs the table's effects. It adds to them:

    pages_ready, ---> DeltaWrite <---- turn(): poll, check the lease, post one piece per transfer
    carried_ready                         |     a write that does not end fails its transfer, which ends when
                                          |     the write ends or is given up
    ENDED, ABANDONED <--------------------+--> on_failed(TransferEnd), as soon as that is known
      (kept as tombstones, a bounded      +--> on_end(TransferEnd), once: no source page is read any more;
       number, so that a late ticket           after an unsettled write no sooner than decode reuses its pages
       or request is refused)
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.kv.handshake import TransferEffect, TransferEvent, expects_ticket, step_transfer
from services.kv.page_digest import ReadPages
from services.kv.ticket import StartsWithinPage, check_ticket, targets_of
from services.kv.transfer_plan import pages_covering
from services.transfer.hello import Hello
from services.transfer.sending.delta_write import DeltaDigests, DeltaWrite, Sources
from services.transfer.sending.receivers import Peers
from services.transfer.sending.sending_transfer import (
    Link,
    Outcome,
    Request,
    Send,
    SendingTransfer,
    TransferEnd,
)
from services.transfer.transport import PeerName, Transport
from services.values.errors import Aborted, IsthmusError, PeerFailed, ProtocolError
from services.values.kv import KvLayout, KvTicket, PageId, PullGrant
from services.values.rank import RankId, TransferId
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2

log = logging.getLogger(__name__)

_MAX_TOMBSTONES = 4096
_UNSETTLED_S = 5.0  # Bytes of a failed write may land so long after lease and last word.
# A write is late when it was posted `max_post_s` ago and no write to its rank has landed for as long. (Many
# transfers wait for each other on a slow path, and one that lands shows that the path works.) After this many
# times `max_post_s` a write is late in any case. The request of a late write fails, and its pages wait as
# long again for the write to end. No path over which KV is sent is slower.
_MAX_LATENESS = 10
# A piece takes about 1 ms (a large state more), and no other transfer's pages are posted meanwhile.
_DIGEST_PIECE_BYTES = 4 * 2**20


class TransferTable:
    def __init__(
        self,
        transport: Transport,
        layout: KvLayout,
        own_id: RankId,
        clock: Callable[[], float],
        max_post_bytes: int,
        read_pages: ReadPages,
        max_post_s: float = 30.0,
        heard_s: Callable[[], float] | None = None,
    ) -> None:
        """`heard_s` returns the time up to which all messages were read; lateness is judged by it."""
        self._heard_s = heard_s or clock
        self._transport = transport
        self._layout = layout
        self._own_id = own_id
        self._clock = clock
        self._max_post_bytes = max_post_bytes
        self._read_pages = read_pages
        self._max_post_s = max_post_s
        self._links: dict[int, Link] = {}
        self._peers = Peers(transport, self._links, clock)
        self._transfers: dict[TransferId, SendingTransfer] = {}
        self._tombstones: OrderedDict[TransferId, SendingTransfer] = OrderedDict()
        # These are of transfers that are over, with the time when on_end is due.
        self._unsettled: list[tuple[float, Request, TransferEnd]] = []
        self.bytes_moved_total = 0
        self.descriptors_total = 0

    def __repr__(self) -> str:
        return (
            f"TransferTable(links={len(self._links)} transfers={len(self._transfers)} "
            f"in_flight={self.writes_in_flight})"
        )

    @property
    def is_settled(self) -> bool:
        """Return whether all writes have ended, and none of them in an unknown way."""
        return not (self.writes_in_flight or self._unsettled)

    @property
    def writes_in_flight(self) -> int:
        deltas = [transfer.delta for transfer in self._transfers.values() if transfer.delta is not None]
        return sum(delta.writes_in_flight for delta in deltas) + self._peers.stuck_writes

    @property
    def open_transfers(self) -> int:
        return len(self._transfers)

    # -- what decode says -----------------------------------------------------------------------------

    def link_up(self, link_id: int, hello: Hello, send: Send) -> None:
        shared = self._layout.shared_with(hello.layout)
        memories = hello.memories_of(shared)
        link = self._links[link_id] = Link(hello.rank, shared, memories, send, hello.agent_metadata)
        try:
            self._peers.reach(link)
        except PeerFailed as error:  # Its tickets will be refused with the reason.
            log.warning("kv_peer_unreachable decode=%s reason=%r", hello.rank, str(error))

    def link_lost(self, link_id: int) -> None:
        link = self._links.pop(link_id, None)
        if link is None:
            return
        linked = any(other.decode == link.decode for other in self._links.values())
        for transfer in list(self._transfers.values()):
            awaits_link = transfer.link is None and transfer.decode == link.decode and not linked
            if transfer.link is link or awaits_link:
                self._step(transfer, TransferEvent.LINK_LOST, "the link to the decode rank was lost")
        self._peers.link_lost(link)
        self._drop_unused(link.peer)

    def ticket(self, link_id: int, ticket: KvTicket) -> None:
        if (link := self._links.get(link_id)) is None:
            return
        transfer = self._find(ticket.transfer_id, link.decode)
        if transfer.decode != link.decode:
            _refuse(link, ticket.transfer_id, "the transfer is another decode rank's")
        elif expects_ticket(transfer.state):
            self._step(transfer, *self._judge(transfer, link, ticket), link)
        else:
            reason = "the transfer is over" if transfer.is_over else "the transfer's ticket came twice"
            self._step(transfer, TransferEvent.WRONG_TICKET, reason, link)

    def renew(self, link_id: int, transfer_id: TransferId, write_until_s: float) -> None:
        link, transfer = self._links.get(link_id), self._transfers.get(transfer_id)
        if (
            link is not None
            and transfer is not None
            and transfer.ticket is not None
            and transfer.decode == link.decode
        ):
            transfer.write_until_s = max(transfer.write_until_s, write_until_s)

    def abort(self, link_id: int, transfer_id: TransferId) -> None:
        if (link := self._links.get(link_id)) is None:
            return
        transfer = self._find(transfer_id, link.decode)
        if transfer.decode != link.decode:  # This decode rank has no transfer of that name.
            link.send(handshake_pb2.HandshakeMessage(abort_ack=handshake_pb2.AbortAck(room=transfer_id)))
            return
        transfer.link = link  # It may be a new one: the ack goes where the abort came from.
        self._step(transfer, TransferEvent.ABORT, "the decode rank aborted the transfer")

    def refuse(self, link_id: int, transfer_id: TransferId, reason: str) -> None:
        if (link := self._links.get(link_id)) is None:
            return
        transfer = self._find(transfer_id, link.decode)
        if transfer.decode == link.decode:
            self._step(transfer, TransferEvent.WRONG_TICKET, reason, link)
        else:
            _refuse(link, transfer_id, reason)

    # -- what the engine says ---------------------------------------------------------------------------

    def open_transfer(self, transfer_id: TransferId, request: Request) -> None:
        transfer = self._find(transfer_id, request.decode)
        if transfer.decode != request.decode or (transfer.request is not None):
            _notify(request.on_end, TransferEnd(Outcome.FAILED, f"the transfer {transfer_id:016x} is in use"))
            return
        transfer.request = request
        promised = transfer.ticket.prompt_len if transfer.ticket is not None else request.prompt_len
        if promised != request.prompt_len:
            reason = f"the ticket has {promised} prompt tokens, the request {request.prompt_len}"
            self._step(transfer, TransferEvent.FAILED, reason)
        else:
            self._step(transfer, TransferEvent.REQUEST)

    def pages_ready(
        self, transfer_id: TransferId, start_token: int, end_token: int, pages: Sequence[PageId]
    ) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.request is None:
            return  # It ended while the engine was computing.
        try:
            self._check_pages(transfer, transfer.request.prompt_len, start_token, end_token, len(pages))
        except ProtocolError as error:
            log.error("kv_pages_wrong room=%016x reason=%r", transfer_id, str(error))
            self._step(transfer, TransferEvent.FAILED, str(error))
            return
        transfer.sources.pages.extend(pages)

    def carried_ready(self, transfer_id: TransferId, units: Sequence[Sequence[PageId]]) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.request is None:
            return  # It ended, as with pages.
        try:
            self._check_carried(transfer, transfer.request.prompt_len, units)
        except ProtocolError as error:
            log.error("kv_carried_wrong room=%016x reason=%r", transfer_id, str(error))
            self._step(transfer, TransferEvent.FAILED, str(error))
            return
        transfer.sources.carried = tuple(units)

    def grant(self, link_id: int, grant: PullGrant) -> None:
        """Report to the puller that all is ready for its ticket, if the transfer still waits for one."""
        transfer, link = self._transfers.get(grant.transfer_id), self._links.get(link_id)
        if transfer is None or transfer.request is None or transfer.request.prompt_len != grant.end:
            return
        if link is None:
            self._step(transfer, TransferEvent.LINK_LOST, "the link to the puller was lost")
        elif link.decode == transfer.decode:
            link.send(handshake_pb2.HandshakeMessage(pull_grant=convert.pull_grant_to_proto(grant)))

    def refuse_pull(self, link_id: int, transfer_id: TransferId, word: str, held_tokens: int) -> None:
        if (link := self._links.get(link_id)) is not None:
            _refuse(link, transfer_id, word, held_tokens)

    def cancel_transfer(self, transfer_id: TransferId) -> None:
        self._end_request(transfer_id, TransferEvent.CANCELLED, "the request was cancelled")

    def fail_transfer(self, transfer_id: TransferId, reason: str) -> None:
        self._end_request(transfer_id, TransferEvent.FAILED, reason)

    # -- time -------------------------------------------------------------------------------------------

    def turn(self, begins: Callable[[], None] = lambda: None) -> bool:
        """Poll what is posted, post what can be posted, and end what has waited too long.

        `begins` is called before each transfer is served.

        Returns:
            True if it should be called again at once.

        Raises:
            TransportBroken: no write lands any more; this is raised once.
        """
        progressed = False
        for transfer in list(self._transfers.values()):
            begins()
            if transfer.delta is not None:
                progressed |= self._advance(transfer, transfer.delta)
            elif transfer.deadline_s is not None and self._heard_s() >= transfer.deadline_s:
                self._step(
                    transfer, TransferEvent.FAILED, f"no {transfer.missing} came for the transfer in time"
                )
        self._let_go_of_settled()
        for peer in self._peers.poll_stuck():
            self._drop_unused(peer)
        self._peers.check_transport()
        return progressed

    def next_deadline_s(self) -> float | None:
        """Return when `turn` is due although no message comes and nothing is in flight; None is never."""
        deadlines = [each.deadline_s for each in self._transfers.values() if each.deadline_s is not None]
        deadlines += [each.write_until_s for each in self._transfers.values() if _could_post(each)]
        deadlines += [due_s for due_s, _, _ in self._unsettled]
        return min(deadlines, default=None)

    def fail_all(self, reason: str) -> None:
        for transfer in list(self._transfers.values()):
            self._step(transfer, TransferEvent.FAILED, reason)

    def give_up_all(self) -> None:
        """Call each on_end that is still due; the transport must be closed.

        All writes are released before the first on_end is called: a write that is left keeps a closed
        transport alive, and so the other writes could still read their pages.
        """
        transfers, now_s = list(self._transfers.values()), self._clock()
        due = [(each.request, each.end(now_s)) for each in transfers if each.request is not None]
        due += [(request, end) for _, request, end in self._unsettled]
        self._unsettled = []
        for transfer in transfers:
            transfer.request = None
            self._finish(transfer)
        self._peers.let_go_of_stuck()
        for request, end in due:
            _notify(request.on_end, end)

    # ---------------------------------------------------------------------------------------------------

    def _end_request(self, transfer_id: TransferId, event: TransferEvent, reason: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.request is not None:
            self._step(transfer, event, reason)

    def _find(self, transfer_id: TransferId, decode: RankId) -> SendingTransfer:
        known = self._transfers.get(transfer_id) or self._tombstones.get(transfer_id)
        return known or SendingTransfer(transfer_id, decode)

    def _judge(self, transfer: SendingTransfer, link: Link, ticket: KvTicket) -> tuple[TransferEvent, str]:
        prompt_len = transfer.request.prompt_len if transfer.request is not None else None
        try:
            self._peers.reach(link)
            check_ticket(ticket, prompt_len, link.layout, link.memories, self._own_id.generation)
        except StartsWithinPage as late:
            transfer.link, transfer.earlier_start = link, late.start
            return TransferEvent.LATE_TICKET, str(late)
        except IsthmusError as error:
            return TransferEvent.WRONG_TICKET, str(error)
        transfer.link, transfer.peer = link, link.peer
        transfer.ticket, transfer.write_until_s = ticket, ticket.write_until_s
        return TransferEvent.TICKET, ""

    def _check_pages(
        self, transfer: SendingTransfer, prompt_len: int, start: int, end: int, num_pages: int
    ) -> None:
        indices = pages_covering(start, end, self._layout.page_size)
        if indices.start != len(transfer.sources.pages) or len(indices) != num_pages:
            have, last = len(transfer.sources.pages), start + num_pages
            raise ProtocolError(f"pages [{indices.start}, {last}) do not follow the {have} pages offered")
        if end > prompt_len or (end % self._layout.page_size and end != prompt_len):
            raise ProtocolError(f"token {end} ends neither a page nor the prompt of {prompt_len}")

    def _check_carried(
        self, transfer: SendingTransfer, prompt_len: int, units: Sequence[Sequence[PageId]]
    ) -> None:
        targets_of(self._layout, prompt_len, units)
        if transfer.sources.carried:
            raise ProtocolError("what is carried was offered twice")

    def _advance(self, transfer: SendingTransfer, delta: DeltaWrite) -> bool:
        moved, descriptors = delta.bytes_moved, delta.descriptors
        try:
            progressed = self._poll(transfer, delta) | self._post(transfer, delta) | self._digest(transfer)
            self._check_late(transfer, delta)
        except IsthmusError as error:
            if isinstance(error, PeerFailed):
                assert transfer.peer is not None
                self._peers.doubt(transfer.peer, transfer.decode, late=transfer.late_s is not None)
            self._step(transfer, TransferEvent.FAILED, str(error))
            progressed = True
        if delta.writes_in_flight and self._is_hopeless(transfer):
            self._give_up(transfer, delta)
        transfer.unsettled = delta.unsettled
        self.bytes_moved_total += delta.bytes_moved - moved
        self.descriptors_total += delta.descriptors - descriptors
        if transfer.stopped:
            self._step(transfer, TransferEvent.WRITES_STOPPED)
        elif transfer.landed:
            self._step(transfer, TransferEvent.LANDED)
        return progressed

    def _poll(self, transfer: SendingTransfer, delta: DeltaWrite) -> bool:
        landed = delta.poll()
        if landed:
            assert transfer.peer is not None
            self._peers.note_landed(transfer.peer)
        return landed

    def _check_late(self, transfer: SendingTransfer, delta: DeltaWrite) -> None:
        """Raise PeerFailed, once, if a write takes too long. Its end is still waited for."""
        posted_s, now_s = delta.oldest_post_s, self._heard_s()
        if posted_s is None or transfer.late_s is not None:
            return
        assert transfer.peer is not None
        quiet_s = now_s - max(posted_s, self._peers.last_landed_s(transfer.peer))
        if quiet_s >= self._max_post_s or now_s - posted_s >= _MAX_LATENESS * self._max_post_s:
            transfer.late_s = now_s
            log.warning("kv_write_late room=%016x decode=%s", transfer.id, transfer.decode)
            raise PeerFailed(f"a write has not ended in {now_s - posted_s:.0f} s")

    def _is_hopeless(self, transfer: SendingTransfer) -> bool:
        late_s = transfer.late_s
        return late_s is not None and self._heard_s() >= late_s + _MAX_LATENESS * self._max_post_s

    def _give_up(self, transfer: SendingTransfer, delta: DeltaWrite) -> None:
        assert transfer.peer is not None
        log.warning("kv_write_given_up room=%016x decode=%s", transfer.id, transfer.decode)
        transfer.given_up = delta.unsettled = True
        self._peers.keep_stuck(transfer.peer, delta)

    def _post(self, transfer: SendingTransfer, delta: DeltaWrite) -> bool:
        if not _could_post(transfer):
            return False
        assert transfer.peer is not None
        if self._clock() >= transfer.write_until_s:
            if self._heard_s() < transfer.write_until_s:
                return False  # It may have been renewed in time.
            raise Aborted("the write lease is over")
        delta.post(self._transport, transfer.peer, self._max_post_bytes, self._clock())
        return True

    def _digest(self, transfer: SendingTransfer) -> bool:
        if transfer.digests is None:
            return False
        return transfer.digests.advance(self._read_pages, _DIGEST_PIECE_BYTES)

    def _step(
        self, transfer: SendingTransfer, event: TransferEvent, reason: str = "", asker: Link | None = None
    ) -> None:
        transfer.state, effects = step_transfer(transfer.state, event)
        transfer.note_outcome(event, reason)
        for effect in effects:
            self._perform(transfer, effect, reason, asker)
        if transfer.is_over:
            self._finish(transfer)
        # Otherwise a ticket was sent back, and nothing is to be kept.
        elif transfer.ticket is not None or transfer.request is not None:
            self._transfers[transfer.id] = transfer

    def _perform(
        self, transfer: SendingTransfer, effect: TransferEffect, reason: str, asker: Link | None
    ) -> None:
        match effect:
            case TransferEffect.SEND_ACCEPTED:
                transfer.send_status(handshake_pb2.Status.STATE_ACCEPTED)
            case TransferEffect.SEND_RENEGOTIATE:
                transfer.send_status(handshake_pb2.Status.STATE_RENEGOTIATE)
            case TransferEffect.SEND_REFUSED:
                assert asker is not None, "only a ticket is refused"
                _refuse(asker, transfer.id, reason)
            case TransferEffect.SEND_LANDED:
                transfer.send_status(handshake_pb2.Status.STATE_LANDED)
            case TransferEffect.SEND_FAILED:
                transfer.send_status(handshake_pb2.Status.STATE_FAILED)
            case TransferEffect.SEND_ABORT_ACK:
                transfer.send_abort_ack()
            case TransferEffect.START_WRITES:
                self._start_writes(transfer)
            case TransferEffect.FAIL_REQUEST:
                if transfer.request is not None:
                    _notify(transfer.request.on_failed, transfer.end(self._clock()))
            case TransferEffect.STOP_WRITES:
                _stop_writes(transfer)

    def _start_writes(self, transfer: SendingTransfer) -> None:
        assert transfer.ticket is not None and transfer.link is not None
        layout = transfer.link.layout
        if transfer.request is not None and not transfer.request.with_draft:
            layout = replace(layout, draft=None)
        transfer.delta = DeltaWrite(transfer.ticket, layout, transfer.sources)
        if transfer.ticket.want_digests:
            transfer.digests = DeltaDigests(transfer.ticket, layout, transfer.sources)
        transfer.began_s = self._clock()

    def _finish(self, transfer: SendingTransfer) -> None:
        request, peer, end = transfer.request, transfer.peer, transfer.end(self._clock())
        transfer.request = transfer.delta = transfer.digests = transfer.peer = None
        transfer.sources = Sources()
        transfer.ticket, transfer.link = None, None  # A later message brings its own link.
        self._transfers.pop(transfer.id, None)
        self._tombstones[transfer.id] = transfer
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self._drop_unused(peer)
        if request is not None and transfer.unsettled:
            due_s = max(transfer.write_until_s, self._clock()) + _UNSETTLED_S
            self._unsettled.append((due_s, request, end))
        elif request is not None:
            _notify(request.on_end, end)

    def _let_go_of_settled(self) -> None:
        if not self._unsettled:
            return
        now_s, kept = self._clock(), self._unsettled
        self._unsettled = [entry for entry in kept if entry[0] > now_s]
        for due_s, request, end in kept:
            if due_s <= now_s:
                _notify(request.on_end, end)

    def _drop_unused(self, peer: PeerName | None) -> None:
        if peer is not None:
            self._peers.drop_unused(peer, self._transfers.values())


def _could_post(transfer: SendingTransfer) -> bool:
    return transfer.delta is not None and transfer.delta.can_post


def _stop_writes(transfer: SendingTransfer) -> None:
    assert transfer.delta is not None
    transfer.delta.stop()
    transfer.digests = None  # Nobody will get them.


def _refuse(link: Link, transfer_id: TransferId, reason: str, held_tokens: int = 0) -> None:
    refused = handshake_pb2.Status.STATE_REFUSED
    status = handshake_pb2.Status(room=transfer_id, state=refused, reason=reason, held_tokens=held_tokens)
    link.send(handshake_pb2.HandshakeMessage(status=status))


def _notify(listener: Callable[[TransferEnd], None], end: TransferEnd) -> None:
    try:
        listener(end)
    except Exception:  # It is the engine's code; the other transfers go on.
        log.exception("kv_end_callback_failed end=%s", end)
