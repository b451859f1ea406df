"""A sending rank's transfers take tickets, requests and pages, and turn them into writes and last words.

One thread calls everything here. services/kv/handshake.py draws a transfer's states; this is the shell that
performs the table's effects. It adds to them:

    pages_ready, ---> DeltaWrite <---- turn(): poll, check the lease, post one piece per transfer
    carried_ready                         |     a write that does not end fails its transfer, which ends when
                                          |     the write ends or is given up
    ENDED, ABANDONED <--------------------+--> on_failed(RoomEnd), as soon as that is known
      (kept as tombstones, a bounded      +--> on_end(RoomEnd), once: no source page is read any more; after
       number, so that a late ticket           an unsettled write no sooner than decode reuses its pages
       or request is refused)
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.kv.handshake import RoomEffect, RoomEvent, expects_ticket, step_room
from services.kv.page_digest import ReadPages
from services.kv.ticket import StartsWithinPage, check_ticket, targets_of
from services.kv.transfer_plan import pages_covering
from services.transfer.hello import Hello
from services.transfer.sending.delta_write import DeltaDigests, DeltaWrite, Sources
from services.transfer.sending.receivers import Peers
from services.transfer.sending.room import Link, Outcome, Request, RoomEnd, Send, SendingRoom
from services.transfer.transport import PeerName, Transport
from services.values.errors import Aborted, IsthmusError, PeerFailed, ProtocolError
from services.values.kv import KvLayout, KvTicket, PageId, PullGrant
from services.values.rank import RankId, Room
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


class RoomTable:
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
        self._rooms: dict[Room, SendingRoom] = {}
        self._tombstones: OrderedDict[Room, SendingRoom] = OrderedDict()
        # These are of transfers that are over, with the time when on_end is due.
        self._unsettled: list[tuple[float, Request, RoomEnd]] = []
        self.bytes_moved_total = 0
        self.descriptors_total = 0

    def __repr__(self) -> str:
        return (
            f"RoomTable(links={len(self._links)} rooms={len(self._rooms)} in_flight={self.writes_in_flight})"
        )

    @property
    def writes_in_flight(self) -> int:
        deltas = [room.delta for room in self._rooms.values() if room.delta is not None]
        return sum(delta.writes_in_flight for delta in deltas) + self._peers.stuck_writes

    @property
    def open_rooms(self) -> int:
        return len(self._rooms)

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
        for room in list(self._rooms.values()):
            awaits_link = room.link is None and room.decode == link.decode and not linked
            if room.link is link or awaits_link:
                self._step(room, RoomEvent.LINK_LOST, "the link to the decode rank was lost")
        self._peers.link_lost(link)
        self._drop_unused(link.peer)

    def ticket(self, link_id: int, ticket: KvTicket) -> None:
        if (link := self._links.get(link_id)) is None:
            return
        room = self._find(ticket.room, link.decode)
        if room.decode != link.decode:
            _refuse(link, ticket.room, "the room is another decode rank's")
        elif expects_ticket(room.state):
            self._step(room, *self._judge(room, link, ticket), link)
        else:
            reason = "the room is over" if room.is_over else "the room's ticket came twice"
            self._step(room, RoomEvent.WRONG_TICKET, reason, link)

    def renew(self, link_id: int, room_id: Room, write_until_s: float) -> None:
        link, room = self._links.get(link_id), self._rooms.get(room_id)
        if link is not None and room is not None and room.ticket is not None and room.decode == link.decode:
            room.write_until_s = max(room.write_until_s, write_until_s)

    def abort(self, link_id: int, room_id: Room) -> None:
        if (link := self._links.get(link_id)) is None:
            return
        room = self._find(room_id, link.decode)
        if room.decode != link.decode:  # This decode rank has no transfer of that name.
            link.send(handshake_pb2.HandshakeMessage(abort_ack=handshake_pb2.AbortAck(room=room_id)))
            return
        room.link = link  # It may be a new one: the ack goes where the abort came from.
        self._step(room, RoomEvent.ABORT, "the decode rank aborted the transfer")

    def refuse(self, link_id: int, room_id: Room, reason: str) -> None:
        if (link := self._links.get(link_id)) is None:
            return
        room = self._find(room_id, link.decode)
        if room.decode == link.decode:
            self._step(room, RoomEvent.WRONG_TICKET, reason, link)
        else:
            _refuse(link, room_id, reason)

    # -- what the engine says ---------------------------------------------------------------------------

    def open_room(self, room_id: Room, request: Request) -> None:
        room = self._find(room_id, request.decode)
        if room.decode != request.decode or (room.request is not None):
            _notify(request.on_end, RoomEnd(Outcome.FAILED, f"the room {room_id:016x} is in use"))
            return
        room.request = request
        promised = room.ticket.prompt_len if room.ticket is not None else request.prompt_len
        if promised != request.prompt_len:
            reason = f"the ticket has {promised} prompt tokens, the request {request.prompt_len}"
            self._step(room, RoomEvent.FAILED, reason)
        else:
            self._step(room, RoomEvent.REQUEST)

    def pages_ready(self, room_id: Room, start_token: int, end_token: int, pages: Sequence[PageId]) -> None:
        room = self._rooms.get(room_id)
        if room is None or room.request is None:
            return  # It ended while the engine was computing.
        try:
            self._check_pages(room, room.request.prompt_len, start_token, end_token, len(pages))
        except ProtocolError as error:
            log.error("kv_pages_wrong room=%016x reason=%r", room_id, str(error))
            self._step(room, RoomEvent.FAILED, str(error))
            return
        room.sources.pages.extend(pages)

    def carried_ready(self, room_id: Room, units: Sequence[Sequence[PageId]]) -> None:
        room = self._rooms.get(room_id)
        if room is None or room.request is None:
            return  # It ended, as with pages.
        try:
            self._check_carried(room, room.request.prompt_len, units)
        except ProtocolError as error:
            log.error("kv_carried_wrong room=%016x reason=%r", room_id, str(error))
            self._step(room, RoomEvent.FAILED, str(error))
            return
        room.sources.carried = tuple(units)

    def grant(self, link_id: int, grant: PullGrant) -> None:
        """Report to the puller that all is ready for its ticket, if the transfer still waits for one."""
        room, link = self._rooms.get(grant.room), self._links.get(link_id)
        if room is None or room.request is None or room.request.prompt_len != grant.end:
            return
        if link is None:
            self._step(room, RoomEvent.LINK_LOST, "the link to the puller was lost")
        elif link.decode == room.decode:
            link.send(handshake_pb2.HandshakeMessage(pull_grant=convert.pull_grant_to_proto(grant)))

    def refuse_pull(self, link_id: int, room_id: Room, word: str, held_tokens: int) -> None:
        if (link := self._links.get(link_id)) is not None:
            _refuse(link, room_id, word, held_tokens)

    def cancel_room(self, room_id: Room) -> None:
        self._end_request(room_id, RoomEvent.CANCELLED, "the request was cancelled")

    def fail_room(self, room_id: Room, reason: str) -> None:
        self._end_request(room_id, RoomEvent.FAILED, reason)

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
        for room in list(self._rooms.values()):
            begins()
            if room.delta is not None:
                progressed |= self._advance(room, room.delta)
            elif room.deadline_s is not None and self._heard_s() >= room.deadline_s:
                self._step(room, RoomEvent.FAILED, f"no {room.missing} came for the room in time")
        self._let_go_of_settled()
        for peer in self._peers.poll_stuck():
            self._drop_unused(peer)
        self._peers.check_transport()
        return progressed

    def next_deadline_s(self) -> float | None:
        """Return when `turn` is due although no message comes and nothing is in flight; None is never."""
        deadlines = [room.deadline_s for room in self._rooms.values() if room.deadline_s is not None]
        deadlines += [room.write_until_s for room in self._rooms.values() if _could_post(room)]
        deadlines += [due_s for due_s, _, _ in self._unsettled]
        return min(deadlines, default=None)

    def fail_all(self, reason: str) -> None:
        for room in list(self._rooms.values()):
            self._step(room, RoomEvent.FAILED, reason)

    def give_up_all(self) -> None:
        """Call each on_end that is still due; the transport must be closed.

        All writes are released before the first on_end is called: a write that is left keeps a closed
        transport alive, and so the other writes could still read their pages.
        """
        rooms, now_s = list(self._rooms.values()), self._clock()
        due = [(room.request, room.end(now_s)) for room in rooms if room.request is not None]
        due += [(request, end) for _, request, end in self._unsettled]
        self._unsettled = []
        for room in rooms:
            room.request = None
            self._finish(room)
        self._peers.let_go_of_stuck()
        for request, end in due:
            _notify(request.on_end, end)

    # ---------------------------------------------------------------------------------------------------

    def _end_request(self, room_id: Room, event: RoomEvent, reason: str) -> None:
        room = self._rooms.get(room_id)
        if room is not None and room.request is not None:
            self._step(room, event, reason)

    def _find(self, room_id: Room, decode: RankId) -> SendingRoom:
        return self._rooms.get(room_id) or self._tombstones.get(room_id) or SendingRoom(room_id, decode)

    def _judge(self, room: SendingRoom, link: Link, ticket: KvTicket) -> tuple[RoomEvent, str]:
        prompt_len = room.request.prompt_len if room.request is not None else None
        try:
            self._peers.reach(link)
            check_ticket(ticket, prompt_len, link.layout, link.memories, self._own_id.generation)
        except StartsWithinPage as late:
            room.link, room.earlier_start = link, late.start
            return RoomEvent.LATE_TICKET, str(late)
        except IsthmusError as error:
            return RoomEvent.WRONG_TICKET, str(error)
        room.link, room.peer = link, link.peer
        room.ticket, room.write_until_s = ticket, ticket.write_until_s
        return RoomEvent.TICKET, ""

    def _check_pages(self, room: SendingRoom, prompt_len: int, start: int, end: int, num_pages: int) -> None:
        indices = pages_covering(start, end, self._layout.page_size)
        if indices.start != len(room.sources.pages) or len(indices) != num_pages:
            have, last = len(room.sources.pages), start + num_pages
            raise ProtocolError(f"pages [{indices.start}, {last}) do not follow the {have} pages offered")
        if end > prompt_len or (end % self._layout.page_size and end != prompt_len):
            raise ProtocolError(f"token {end} ends neither a page nor the prompt of {prompt_len}")

    def _check_carried(self, room: SendingRoom, prompt_len: int, units: Sequence[Sequence[PageId]]) -> None:
        targets_of(self._layout, prompt_len, units)
        if room.sources.carried:
            raise ProtocolError("what is carried was offered twice")

    def _advance(self, room: SendingRoom, delta: DeltaWrite) -> bool:
        moved, descriptors = delta.bytes_moved, delta.descriptors
        try:
            progressed = self._poll(room, delta) | self._post(room, delta) | self._digest(room)
            self._check_late(room, delta)
        except IsthmusError as error:
            if isinstance(error, PeerFailed):
                assert room.peer is not None
                self._peers.doubt(room.peer, room.decode, late=room.late_s is not None)
            self._step(room, RoomEvent.FAILED, str(error))
            progressed = True
        if delta.writes_in_flight and self._is_hopeless(room):
            self._give_up(room, delta)
        room.unsettled = delta.unsettled
        self.bytes_moved_total += delta.bytes_moved - moved
        self.descriptors_total += delta.descriptors - descriptors
        if room.stopped:
            self._step(room, RoomEvent.WRITES_STOPPED)
        elif room.landed:
            self._step(room, RoomEvent.LANDED)
        return progressed

    def _poll(self, room: SendingRoom, delta: DeltaWrite) -> bool:
        landed = delta.poll()
        if landed:
            assert room.peer is not None
            self._peers.note_landed(room.peer)
        return landed

    def _check_late(self, room: SendingRoom, delta: DeltaWrite) -> None:
        """Raise PeerFailed, once, if a write takes too long. Its end is still waited for."""
        posted_s, now_s = delta.oldest_post_s, self._heard_s()
        if posted_s is None or room.late_s is not None:
            return
        assert room.peer is not None
        quiet_s = now_s - max(posted_s, self._peers.last_landed_s(room.peer))
        if quiet_s >= self._max_post_s or now_s - posted_s >= _MAX_LATENESS * self._max_post_s:
            room.late_s = now_s
            log.warning("kv_write_late room=%016x decode=%s", room.id, room.decode)
            raise PeerFailed(f"a write has not ended in {now_s - posted_s:.0f} s")

    def _is_hopeless(self, room: SendingRoom) -> bool:
        late_s = room.late_s
        return late_s is not None and self._heard_s() >= late_s + _MAX_LATENESS * self._max_post_s

    def _give_up(self, room: SendingRoom, delta: DeltaWrite) -> None:
        assert room.peer is not None
        log.warning("kv_write_given_up room=%016x decode=%s", room.id, room.decode)
        room.given_up = delta.unsettled = True
        self._peers.keep_stuck(room.peer, delta)

    def _post(self, room: SendingRoom, delta: DeltaWrite) -> bool:
        if not _could_post(room):
            return False
        assert room.peer is not None
        if self._clock() >= room.write_until_s:
            if self._heard_s() < room.write_until_s:
                return False  # It may have been renewed in time.
            raise Aborted("the write lease is over")
        delta.post(self._transport, room.peer, self._max_post_bytes, self._clock())
        return True

    def _digest(self, room: SendingRoom) -> bool:
        if room.digests is None:
            return False
        return room.digests.advance(self._read_pages, _DIGEST_PIECE_BYTES)

    def _step(self, room: SendingRoom, event: RoomEvent, reason: str = "", asker: Link | None = None) -> None:
        room.state, effects = step_room(room.state, event)
        room.note_outcome(event, reason)
        for effect in effects:
            self._perform(room, effect, reason, asker)
        if room.is_over:
            self._finish(room)
        # Otherwise a ticket was sent back, and nothing is to be kept.
        elif room.ticket is not None or room.request is not None:
            self._rooms[room.id] = room

    def _perform(self, room: SendingRoom, effect: RoomEffect, reason: str, asker: Link | None) -> None:
        match effect:
            case RoomEffect.SEND_ACCEPTED:
                room.send_status(handshake_pb2.Status.STATE_ACCEPTED)
            case RoomEffect.SEND_RENEGOTIATE:
                room.send_status(handshake_pb2.Status.STATE_RENEGOTIATE)
            case RoomEffect.SEND_REFUSED:
                assert asker is not None, "only a ticket is refused"
                _refuse(asker, room.id, reason)
            case RoomEffect.SEND_LANDED:
                room.send_status(handshake_pb2.Status.STATE_LANDED)
            case RoomEffect.SEND_FAILED:
                room.send_status(handshake_pb2.Status.STATE_FAILED)
            case RoomEffect.SEND_ABORT_ACK:
                room.send_abort_ack()
            case RoomEffect.START_WRITES:
                self._start_writes(room)
            case RoomEffect.FAIL_REQUEST:
                if room.request is not None:
                    _notify(room.request.on_failed, room.end(self._clock()))
            case RoomEffect.STOP_WRITES:
                _stop_writes(room)

    def _start_writes(self, room: SendingRoom) -> None:
        assert room.ticket is not None and room.link is not None
        layout = room.link.layout
        if room.request is not None and not room.request.with_draft:
            layout = replace(layout, draft=None)
        room.delta = DeltaWrite(room.ticket, layout, room.sources)
        if room.ticket.want_digests:
            room.digests = DeltaDigests(room.ticket, layout, room.sources)
        room.began_s = self._clock()

    def _finish(self, room: SendingRoom) -> None:
        request, peer, end = room.request, room.peer, room.end(self._clock())
        room.request, room.delta, room.digests, room.peer, room.sources = None, None, None, None, Sources()
        room.ticket, room.link = None, None  # A later message brings its own link.
        self._rooms.pop(room.id, None)
        self._tombstones[room.id] = room
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self._drop_unused(peer)
        if request is not None and room.unsettled:
            due_s = max(room.write_until_s, self._clock()) + _UNSETTLED_S
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
            self._peers.drop_unused(peer, self._rooms.values())


def _could_post(room: SendingRoom) -> bool:
    return room.delta is not None and room.delta.can_post


def _stop_writes(room: SendingRoom) -> None:
    assert room.delta is not None
    room.delta.stop()
    room.digests = None  # Nobody will get them.


def _refuse(link: Link, room_id: Room, reason: str, held_tokens: int = 0) -> None:
    refused = handshake_pb2.Status.STATE_REFUSED
    status = handshake_pb2.Status(room=room_id, state=refused, reason=reason, held_tokens=held_tokens)
    link.send(handshake_pb2.HandshakeMessage(status=status))


def _notify(listener: Callable[[RoomEnd], None], end: RoomEnd) -> None:
    try:
        listener(end)
    except Exception:  # It is the engine's code; the other transfers go on.
        log.exception("kv_end_callback_failed end=%s", end)
