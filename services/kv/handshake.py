"""Each end of a transfer follows a table: decode's is the reservation, prefill's the transfer itself. A pull,
in which a rank asks another one for a transfer, follows a table, too.

Prefill writes KV straight into decode's pages. So decode may not reuse a page merely because the client has
left: it must first know that the writer has stopped.

A reservation, on the decode rank, covers the pages of one ticket, from the moment at which that is sent. It
tells who may still write them.

                     stream stands            stream lost           last word, but bytes may still land

    awaited          FILLING ---link_lost---> LOST
                     | | |                    |
                     | | `--------------------|----unsettled------> UNSETTLED
                     | | given_up             | given_up            | given_up
                     | v                      v                     v
    in quarantine    | STOPPING --link_lost-> SOUGHT                FENCED
                     | | | ^-----linked-------| |                   ^ |
                     | | `--------------------|-|---unsettled-------' |
                     | |                      | | fence_over          | fence_over
                     v v                      | v                     v
    over             STOPPED <-writer_stopped-' EXPIRED <-------------'

    STOPPED comes after any other word (pages_landed, renegotiated, writer_stopped), EXPIRED after time alone.
    After renegotiated, pages are reserved anew, for another ticket.

A transfer, on the prefill rank, has a ticket and a request, which come in either order:

          ticket           request
    NEW ---------> TICKETED --------> WRITING --landed--> ENDED
     |                                 ^  |  |
     | request             ticket      |  |  | abort
     +---------> REQUESTED ------------+  |  v
                  |                       | STOPPING_TO_ACK --writes_stopped--> ENDED
                  | failed, cancelled,    |      ^
                  | wrong ticket,         |      | abort
                  v link lost             v      |
                 ABANDONED               STOPPING_TO_FAIL --writes_stopped--> ENDED
                                          (after failed, cancelled, link lost, wrong ticket)

    From NEW, TICKETED, REQUESTED or ABANDONED an abort is acknowledged at once and ends the transfer.
    A ticket whose delta starts too late is sent back: NEW and REQUESTED go on waiting for a better one.
    A transfer that is over still receives tickets, requests and aborts that were sent before this was known.

A pull is on the rank that is to compute a prompt and knows a source of its prefix. Its ticket has a
reservation, too, and the source has a transfer for it, whose request the source makes itself:

    ASKED --granted--> FILLING --landed--> OVER: what landed is published, the rest is computed
      |                 |    |
      |                 |    | late, in doubt          OVER: all is computed, on other pages
      | refused, late   |    v                          ^
      v         stopped |   STOPPING --late-------------+
    OVER: all is <------+----+ stopped
    computed

    Whatever happens, the sequence is computed in the end: a bad source costs time, but no request fails.

Rule 1: every transition is in a table; the shell performs the effects in order and decides nothing.
Rule 2: there are no clocks here. The shell watches deadlines, leases and fence time, and passes them on as
        events.
Rule 3: LANDED, FAILED and the abort's ack are the last word on a transfer. None of them is sent while a write
        is posted, because decode reuses its pages when it receives one. Only LANDED and WRITES_STOPPED
        report that no write is posted. A write whose end cannot be known counts as posted no more; the shell
        then adds that to the last word. RENEGOTIATE is the last word on a ticket, by which nothing was
        written, but not on the transfer.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

from services.values.errors import ProtocolError


class ReservationState(Enum):
    FILLING = auto()  # The ticket was sent; prefill may be writing the pages.
    LOST = auto()  # The stream has ended without a last word; prefill may be writing.
    UNSETTLED = auto()  # Prefill posts nothing more, but what it has posted may still land.
    STOPPING = auto()  # It is given up, and prefill was asked to stop: only its answer counts.
    SOUGHT = auto()  # It is given up; the writer is sought on a new stream.
    FENCED = auto()  # It is given up; nobody can be asked, so only time counts.
    STOPPED = auto()  # No byte can land any more.
    EXPIRED = auto()  # It is given up, and fence time is over: no byte can land any more.


class ReservationEvent(Enum):
    PAGES_LANDED = auto()
    RENEGOTIATED = auto()  # Prefill wants a ticket that starts earlier; it has written nothing by this one.
    WRITER_STOPPED = auto()  # It refused, failed, acknowledged an abort, or its supervisor reported it dead.
    # The transfer failed, or its abort was acknowledged, and bytes of a failed write may still land.
    UNSETTLED = auto()
    LINK_LOST = auto()  # The stream ended.
    LINKED = auto()  # A new stream to the same incarnation of the writer stands.
    GIVEN_UP = auto()  # The owner gave up: the client left, a deadline passed, or the transfer failed.
    FENCE_OVER = auto()  # The last lease and the fence's margin have passed.


class ReservationEffect(Enum):
    SEND_ABORT = auto()
    BEGIN_FENCE = auto()  # Fence time begins now, or at the end of the lease if that is later.
    SEEK = auto()  # Open a new stream to the writer, or learn that it is dead.
    QUARANTINE = auto()  # Give up the prefix, keep the private pages from reuse.
    END_QUARANTINE = auto()


class TransferState(Enum):
    NEW = auto()
    TICKETED = auto()  # The ticket came first.
    REQUESTED = auto()  # The request came first.
    ABANDONED = auto()  # It was over before a ticket was accepted; decode has received no last word.
    WRITING = auto()
    STOPPING_TO_ACK = auto()  # Posted writes are not yet finished; decode awaits the ack.
    STOPPING_TO_FAIL = auto()  # Posted writes are not yet finished; decode will receive FAILED.
    ENDED = auto()  # The last word was sent.


class TransferEvent(Enum):
    TICKET = auto()  # It came and passed its check.
    LATE_TICKET = auto()  # It came, and would pass if its delta started earlier.
    WRONG_TICKET = auto()  # It came, and failed its check, cannot be read, or is not expected.
    REQUEST = auto()  # The Prefill call came.
    LANDED = auto()  # The request's last write landed: none is posted, none will be.
    FAILED = auto()  # A write or the compute failed, the request is not the ticket's, or nobody came in time.
    ABORT = auto()  # Decode asked for it.
    LINK_LOST = auto()  # Decode's stream ended.
    CANCELLED = auto()  # The Prefill call was cancelled.
    WRITES_STOPPED = auto()  # After STOP_WRITES none is posted any more, and none will be.


class TransferEffect(Enum):
    SEND_ACCEPTED = auto()
    SEND_RENEGOTIATE = auto()
    SEND_REFUSED = auto()  # It goes to the rank that the ticket came from.
    START_WRITES = auto()  # From here on writes may be posted.
    STOP_WRITES = auto()  # Post no more; WRITES_STOPPED must follow.
    SEND_LANDED = auto()
    SEND_FAILED = auto()
    SEND_ABORT_ACK = auto()
    FAIL_REQUEST = auto()  # End the Prefill call with an error, if it has no answer yet.


class PullState(Enum):
    ASKED = auto()  # Pages are reserved, and no ticket was sent: nobody writes.
    FILLING = auto()  # The ticket was sent; the source may be writing the pages.
    STOPPING = auto()  # It is given up, and waits a moment for the source to confirm that.
    OVER = auto()


class PullEvent(Enum):
    GRANTED = auto()
    REFUSED = auto()  # The source refused, or cannot be reached, or its stream ended.
    LATE = auto()  # The expected message did not come in time.
    LANDED = auto()  # All is in the pages, and has been checked.
    STOPPED = auto()  # It did not land, or its digests differ; no byte can land any more.
    DOUBTED = auto()  # The stream ended, or the end of a write is unknown: bytes may still land.
    CANCELLED = auto()  # The request is over.


class PullEffect(Enum):
    SEND_TICKET = auto()
    END_GRANT = auto()  # Report to the source, if it can be reached, that no ticket comes.
    GIVE_UP = auto()  # Give up the ticket's reservation.
    PUBLISH = auto()
    SET_ASIDE = auto()  # Quarantine the pages until the reservation is over; the sequence loses them.
    COMPUTE = auto()


_S, _E, _F = ReservationState, ReservationEvent, ReservationEffect

RESERVATION: Mapping[
    tuple[ReservationState, ReservationEvent], tuple[ReservationState, tuple[ReservationEffect, ...]]
] = {
    (_S.FILLING, _E.PAGES_LANDED): (_S.STOPPED, ()),
    (_S.FILLING, _E.RENEGOTIATED): (_S.STOPPED, ()),
    (_S.FILLING, _E.WRITER_STOPPED): (_S.STOPPED, ()),
    (_S.FILLING, _E.UNSETTLED): (_S.UNSETTLED, (_F.BEGIN_FENCE,)),
    (_S.FILLING, _E.LINK_LOST): (_S.LOST, (_F.BEGIN_FENCE,)),
    (_S.FILLING, _E.GIVEN_UP): (_S.STOPPING, (_F.SEND_ABORT, _F.QUARANTINE)),
    (_S.LOST, _E.GIVEN_UP): (_S.SOUGHT, (_F.QUARANTINE, _F.SEEK)),
    (_S.UNSETTLED, _E.GIVEN_UP): (_S.FENCED, (_F.QUARANTINE,)),
    (_S.STOPPING, _E.PAGES_LANDED): (_S.STOPPED, (_F.END_QUARANTINE,)),
    (_S.STOPPING, _E.RENEGOTIATED): (_S.STOPPED, (_F.END_QUARANTINE,)),
    (_S.STOPPING, _E.WRITER_STOPPED): (_S.STOPPED, (_F.END_QUARANTINE,)),
    (_S.STOPPING, _E.UNSETTLED): (_S.FENCED, (_F.BEGIN_FENCE,)),
    (_S.STOPPING, _E.LINK_LOST): (_S.SOUGHT, (_F.BEGIN_FENCE, _F.SEEK)),
    (_S.STOPPING, _E.GIVEN_UP): (_S.STOPPING, ()),
    # A writer that lives and does not answer may be writing.
    (_S.STOPPING, _E.FENCE_OVER): (_S.STOPPING, (_F.SEND_ABORT,)),
    # The abort may have been lost with the old stream.
    (_S.SOUGHT, _E.LINKED): (_S.STOPPING, (_F.SEND_ABORT,)),
    (_S.SOUGHT, _E.WRITER_STOPPED): (_S.STOPPED, (_F.END_QUARANTINE,)),
    (_S.SOUGHT, _E.GIVEN_UP): (_S.SOUGHT, ()),
    (_S.SOUGHT, _E.FENCE_OVER): (_S.EXPIRED, (_F.END_QUARANTINE,)),
    (_S.FENCED, _E.GIVEN_UP): (_S.FENCED, ()),
    (_S.FENCED, _E.FENCE_OVER): (_S.EXPIRED, (_F.END_QUARANTINE,)),
    # Nobody writes any more: the sequence's owner frees or keeps the pages.
    (_S.STOPPED, _E.GIVEN_UP): (_S.STOPPED, ()),
    # A writer that was sought is found late. Its end of the transfer may still be waiting, so it gets an
    # abort, and its answer is accepted.
    (_S.EXPIRED, _E.LINKED): (_S.EXPIRED, (_F.SEND_ABORT,)),
    (_S.EXPIRED, _E.WRITER_STOPPED): (_S.EXPIRED, ()),
    (_S.EXPIRED, _E.UNSETTLED): (_S.EXPIRED, ()),
    (_S.EXPIRED, _E.LINK_LOST): (_S.EXPIRED, ()),
}

RESERVATION_OVER = frozenset({_S.STOPPED, _S.EXPIRED})

_R, _V, _X = TransferState, TransferEvent, TransferEffect

TRANSFER: Mapping[tuple[TransferState, TransferEvent], tuple[TransferState, tuple[TransferEffect, ...]]] = {
    (_R.NEW, _V.TICKET): (_R.TICKETED, (_X.SEND_ACCEPTED,)),
    (_R.NEW, _V.LATE_TICKET): (_R.NEW, (_X.SEND_RENEGOTIATE,)),
    (_R.NEW, _V.WRONG_TICKET): (_R.ABANDONED, (_X.SEND_REFUSED,)),
    (_R.NEW, _V.REQUEST): (_R.REQUESTED, ()),
    (_R.NEW, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.TICKETED, _V.WRONG_TICKET): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.TICKETED, _V.REQUEST): (_R.WRITING, (_X.START_WRITES,)),
    (_R.TICKETED, _V.FAILED): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.TICKETED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.TICKETED, _V.LINK_LOST): (_R.ENDED, ()),
    (_R.REQUESTED, _V.TICKET): (_R.WRITING, (_X.SEND_ACCEPTED, _X.START_WRITES)),
    (_R.REQUESTED, _V.LATE_TICKET): (_R.REQUESTED, (_X.SEND_RENEGOTIATE,)),
    (_R.REQUESTED, _V.WRONG_TICKET): (_R.ABANDONED, (_X.SEND_REFUSED, _X.FAIL_REQUEST)),
    (_R.REQUESTED, _V.FAILED): (_R.ABANDONED, (_X.FAIL_REQUEST,)),
    (_R.REQUESTED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK, _X.FAIL_REQUEST)),
    (_R.REQUESTED, _V.LINK_LOST): (_R.ABANDONED, (_X.FAIL_REQUEST,)),
    (_R.REQUESTED, _V.CANCELLED): (_R.ABANDONED, ()),
    (_R.ABANDONED, _V.TICKET): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.ABANDONED, _V.LATE_TICKET): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.ABANDONED, _V.WRONG_TICKET): (_R.ABANDONED, (_X.SEND_REFUSED,)),
    (_R.ABANDONED, _V.REQUEST): (_R.ABANDONED, (_X.FAIL_REQUEST,)),
    (_R.ABANDONED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.WRITING, _V.WRONG_TICKET): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.LANDED): (_R.ENDED, (_X.SEND_LANDED,)),
    (_R.WRITING, _V.FAILED): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.ABORT): (_R.STOPPING_TO_ACK, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.LINK_LOST): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.CANCELLED): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES,)),
    (_R.STOPPING_TO_FAIL, _V.WRONG_TICKET): (_R.STOPPING_TO_FAIL, ()),
    # Another write may still be posted after FAILED, so it does not end the stop.
    (_R.STOPPING_TO_FAIL, _V.FAILED): (_R.STOPPING_TO_FAIL, ()),
    (_R.STOPPING_TO_FAIL, _V.ABORT): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_FAIL, _V.LINK_LOST): (_R.STOPPING_TO_FAIL, ()),
    (_R.STOPPING_TO_FAIL, _V.CANCELLED): (_R.STOPPING_TO_FAIL, ()),
    (_R.STOPPING_TO_FAIL, _V.WRITES_STOPPED): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.STOPPING_TO_ACK, _V.WRONG_TICKET): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.FAILED): (_R.STOPPING_TO_ACK, ()),
    # The abort is repeated, perhaps on a new connection; the one ack to come answers both.
    (_R.STOPPING_TO_ACK, _V.ABORT): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.LINK_LOST): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.CANCELLED): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.WRITES_STOPPED): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.ENDED, _V.WRONG_TICKET): (_R.ENDED, (_X.SEND_REFUSED,)),
    (_R.ENDED, _V.REQUEST): (_R.ENDED, (_X.FAIL_REQUEST,)),
    (_R.ENDED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
}

TRANSFER_OVER = frozenset({_R.ENDED, _R.ABANDONED})  # It has no request, and nothing is written or read.


_P, _W, _Y = PullState, PullEvent, PullEffect

PULL: Mapping[tuple[PullState, PullEvent], tuple[PullState, tuple[PullEffect, ...]]] = {
    (_P.ASKED, _W.GRANTED): (_P.FILLING, (_Y.SEND_TICKET,)),
    (_P.ASKED, _W.REFUSED): (_P.OVER, (_Y.COMPUTE,)),
    (_P.ASKED, _W.LATE): (_P.OVER, (_Y.END_GRANT, _Y.COMPUTE)),
    (_P.ASKED, _W.CANCELLED): (_P.OVER, (_Y.END_GRANT,)),
    (_P.FILLING, _W.LANDED): (_P.OVER, (_Y.PUBLISH,)),
    (_P.FILLING, _W.STOPPED): (_P.OVER, (_Y.COMPUTE,)),
    (_P.FILLING, _W.LATE): (_P.STOPPING, (_Y.GIVE_UP,)),
    (_P.FILLING, _W.DOUBTED): (_P.STOPPING, (_Y.GIVE_UP,)),
    (_P.FILLING, _W.CANCELLED): (_P.OVER, (_Y.GIVE_UP, _Y.SET_ASIDE)),
    (_P.STOPPING, _W.STOPPED): (_P.OVER, (_Y.COMPUTE,)),
    (_P.STOPPING, _W.LATE): (_P.OVER, (_Y.SET_ASIDE, _Y.COMPUTE)),
    (_P.STOPPING, _W.CANCELLED): (_P.OVER, (_Y.SET_ASIDE,)),
    # A late or repeated grant or refusal changes nothing: the source has received the end of the grant, or
    # its transfer ends with the stream.
    (_P.FILLING, _W.GRANTED): (_P.FILLING, ()),
    (_P.STOPPING, _W.GRANTED): (_P.STOPPING, ()),
    (_P.OVER, _W.GRANTED): (_P.OVER, ()),
    (_P.OVER, _W.REFUSED): (_P.OVER, ()),
    (_P.OVER, _W.CANCELLED): (_P.OVER, ()),
}


def step_reservation(
    state: ReservationState, event: ReservationEvent
) -> tuple[ReservationState, tuple[ReservationEffect, ...]]:
    """Return the next state, and the effects that the shell must perform, in order.

    Raises:
        ProtocolError: `event` is not expected in `state`.
    """
    return _look_up(RESERVATION, state, event)


def may_expire(state: ReservationState) -> bool:
    """Return whether the end of fence time ends a reservation in this state, once it is given up."""
    return state in (_S.LOST, _S.UNSETTLED, _S.SOUGHT, _S.FENCED)


def expects_ticket(state: TransferState) -> bool:
    return (state, TransferEvent.TICKET) in TRANSFER


def step_transfer(
    state: TransferState, event: TransferEvent
) -> tuple[TransferState, tuple[TransferEffect, ...]]:
    return _look_up(TRANSFER, state, event)


def step_pull(state: PullState, event: PullEvent) -> tuple[PullState, tuple[PullEffect, ...]]:
    return _look_up(PULL, state, event)


_State = TypeVar("_State", bound=Enum)
_Event = TypeVar("_Event", bound=Enum)
_Next = TypeVar("_Next")


def _look_up(table: Mapping[tuple[_State, _Event], _Next], state: _State, event: _Event) -> _Next:
    try:
        return table[state, event]
    except KeyError:
        raise ProtocolError(f"{event.name} is not expected in {state.name}") from None
