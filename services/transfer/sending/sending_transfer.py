"""A sending rank keeps one record for each transfer, and reports from it how the transfer ended."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from services.kv.handshake import TRANSFER_OVER, TransferEvent, TransferState
from services.kv.ticket import hit_kind
from services.transfer.sending.delta_write import DeltaDigests, DeltaWrite, Sources
from services.transfer.transport import PeerName
from services.values.kv import HitKind, KvLayout, KvTicket, PoolMemory
from services.values.rank import RankId, TransferId
from services.wire.isthmus.v1 import handshake_pb2

Send = Callable[[handshake_pb2.HandshakeMessage], None]

_HIT = {
    HitKind.NONE: handshake_pb2.HIT_KIND_NONE,
    HitKind.PARTIAL: handshake_pb2.HIT_KIND_PARTIAL,
    HitKind.FULL: handshake_pb2.HIT_KIND_FULL,
}


class Outcome(Enum):
    LANDED = "landed"
    FAILED = "failed"
    ABORTED = "aborted"  # Decode aborted it, or the request was cancelled here.


_OUTCOMES = {
    TransferEvent.LANDED: Outcome.LANDED,
    TransferEvent.FAILED: Outcome.FAILED,
    TransferEvent.WRONG_TICKET: Outcome.FAILED,
    TransferEvent.LINK_LOST: Outcome.FAILED,
    TransferEvent.ABORT: Outcome.ABORTED,
    TransferEvent.CANCELLED: Outcome.ABORTED,
}


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """This is the outcome of a request's transfer. `error` says why it did not land."""

    outcome: Outcome
    error: str | None
    group_bytes: tuple[int, ...] = ()  # So many were moved, by pool; it is empty if nothing was begun.
    descriptors: int = 0
    seconds: float = 0.0  # This counts from when both ticket and request were there.

    @property
    def bytes_moved(self) -> int:
        return sum(self.group_bytes)


@dataclass(frozen=True, slots=True)
class Request:
    prompt_len: int
    decode: RankId
    on_end: Callable[[TransferEnd], None]  # It is called once, when no source page is read any more.
    ticket_deadline_s: float
    # It is called before `on_end` if a failure is known before.
    on_failed: Callable[[TransferEnd], None] = lambda end: None
    with_draft: bool = True  # The draft model's pages are written, too, if both sides have them.


@dataclass(slots=True, eq=False)
class Link:
    """`send` may be called from any thread and does not raise."""

    decode: RankId
    layout: KvLayout  # This is the part that both sides have.
    memories: tuple[PoolMemory, ...]  # These are the peer's pools, as in the layout.
    send: Send
    agent_metadata: bytes
    # This is None until the transport has reached it, and again once a write to it has failed.
    peer: PeerName | None = None


@dataclass(slots=True, eq=False)
class SendingTransfer:
    """This is a transfer's record. A TransferTable owns it, and only its `_step` changes the state."""

    id: TransferId
    decode: RankId
    state: TransferState = TransferState.NEW
    link: Link | None = None
    ticket: KvTicket | None = None
    write_until_s: float = 0.0
    earlier_start: int = 0  # This is in tokens; it goes with a ticket that is sent back.
    request: Request | None = None  # This is set until its on_end is called.
    sources: Sources = field(default_factory=Sources)
    peer: PeerName | None = None  # Writes go there; it is set from the ticket on.
    delta: DeltaWrite | None = None
    unsettled: bool = False  # Bytes of a failed write may still land, also when it is over.
    digests: DeltaDigests | None = None  # This is set if the ticket asks for digests.
    began_s: float = 0.0
    late_s: float | None = None  # A write was found to be late at this time.
    given_up: bool = False  # The late write has not ended in time either.
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in TRANSFER_OVER

    @property
    def landed(self) -> bool:
        written = self.delta is not None and self.delta.landed
        return written and (self.digests is None or self.digests.complete)

    @property
    def stopped(self) -> bool:
        return self.delta is not None and (self.delta.stopped or self.given_up)

    @property
    def deadline_s(self) -> float | None:
        if self.delta is not None:
            return None
        if self.ticket is not None:
            return self.write_until_s
        return self.request.ticket_deadline_s if self.request is not None else None

    @property
    def missing(self) -> str:
        return "ticket" if self.ticket is None else "request"

    def note_outcome(self, event: TransferEvent, reason: str) -> None:
        if self.outcome is None and event in _OUTCOMES:
            self.outcome, self.reason = _OUTCOMES[event], reason

    def end(self, now_s: float) -> TransferEnd:
        if self.delta is None:
            outcome = Outcome.ABORTED if self.outcome is Outcome.ABORTED else Outcome.FAILED
            return TransferEnd(
                outcome, self.reason or "the transfer is over"
            )  # The request may have come too late.
        outcome = self.outcome or Outcome.FAILED
        error = None if outcome is Outcome.LANDED else self.reason
        seconds = now_s - self.began_s
        return TransferEnd(outcome, error, self.delta.group_bytes, self.delta.descriptors, seconds)

    def send_status(self, state: handshake_pb2.Status.State) -> None:
        status = handshake_pb2.Status(room=self.id, state=state, reason=self.reason)
        if state == handshake_pb2.Status.STATE_RENEGOTIATE:
            status.start = self.earlier_start
        if state == handshake_pb2.Status.STATE_FAILED:
            status.unsettled = self.unsettled
        if self.delta is not None:
            status.bytes_moved, status.descriptors = self.delta.bytes_moved, self.delta.descriptors
            if len(self.delta.group_bytes) > 1:
                status.group_bytes.extend(self.delta.group_bytes)
        if self.digests is not None and state == handshake_pb2.Status.STATE_LANDED:
            status.page_digests.extend(self.digests.values)
        if self.ticket is not None:
            status.hit = _HIT[hit_kind(self.ticket.decode_prefix_len, self.ticket.prompt_len)]
        self._send(handshake_pb2.HandshakeMessage(status=status))

    def send_abort_ack(self) -> None:
        ack = handshake_pb2.AbortAck(room=self.id, unsettled=self.unsettled)
        self._send(handshake_pb2.HandshakeMessage(abort_ack=ack))

    def _send(self, message: handshake_pb2.HandshakeMessage) -> None:
        assert self.link is not None, "the table says a word only to who has spoken"
        self.link.send(message)
