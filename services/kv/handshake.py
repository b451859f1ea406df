"""The two ends of a transfer, as tables: decode's reservation and prefill's room.

Prefill writes KV straight into decode's pages, so decode may not reuse a page merely because the client
left: it must first know that the writer has stopped.

A reservation, on the decode rank:

    RESERVED --prefill_sent--> FILLING --pages_landed--> READY --finished, cancelled--> RELEASED
        |                       |   |
        | cancelled             |   | prefill_failed
        v           renegotiated|   v
     RELEASED    (to RESERVED)  |  RELEASED
                                | cancelled
                                v
                           QUARANTINED --writer_stopped, pages_landed, prefill_failed--> RELEASED

A room, on the prefill rank; ticket and request come in either order:

          ticket           request
    NEW ---------> TICKETED --------> WRITING --landed--> ENDED
     |                                 ^  |  |
     | request             ticket      |  |  | abort
     +---------> REQUESTED ------------+  |  v
                  |                       | STOPPING_TO_ACK --writes_stopped, landed--> ENDED
                  | failed, cancelled,    |      ^
                  | link_lost             |      | abort
                  v                       v      |
                 ABANDONED               STOPPING_TO_FAIL --writes_stopped, landed--> ENDED
                                          (after failed, cancelled, link_lost)

    From NEW, TICKETED, REQUESTED or ABANDONED an abort is acknowledged at once and ends the room.
    A ticket whose delta starts too late is sent back: NEW and REQUESTED go on waiting for a better one.

Rule 1: every transition is in a table; the shell performs the effects in order and decides nothing.
Rule 2: no clocks here. A deadline, a lease and a fence are the shell's, and arrive as events.
Rule 3: LANDED, FAILED and the ack are a room's last word. None is said while a write is posted, for
        decode reuses its pages on hearing it. Only LANDED and WRITES_STOPPED tell that none is posted.
        A write whose end cannot be known counts as posted no more; the shell then says so with the word.
        RENEGOTIATE is the last word on a ticket, by which nothing was written, but not on its room.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

from services.values.errors import ProtocolError


class ReservationState(Enum):
    RESERVED = auto()  # pages set aside; prefill does not know of them yet
    FILLING = auto()  # prefill may be writing the pages
    READY = auto()  # every page landed; decode reads and extends them
    QUARANTINED = auto()  # given up, but prefill may still be writing
    RELEASED = auto()  # everything given back


class ReservationEvent(Enum):
    PREFILL_SENT = auto()  # the ticket is about to leave
    PAGES_LANDED = auto()
    RENEGOTIATED = auto()  # prefill wants a ticket that starts earlier; it has written nothing by this one
    PREFILL_FAILED = auto()  # prefill says it failed or refused, hence writes no more
    WRITER_STOPPED = auto()  # abort acknowledged, process seen dead by its supervisor, or fence time over
    CANCELLED = auto()  # client gone, deadline passed, or link lost
    FINISHED = auto()


class ReservationEffect(Enum):
    SEND_ABORT = auto()
    PUBLISH = auto()  # full pages whose KV is complete go to the radix tree
    CLOSE = auto()  # give everything back
    REOPEN = auto()  # give everything back and reserve anew, with a shorter prefix
    QUARANTINE = auto()  # give up the prefix, keep the private pages from reuse
    END_QUARANTINE = auto()


class RoomState(Enum):
    NEW = auto()
    TICKETED = auto()  # the ticket came first
    REQUESTED = auto()  # the request came first
    ABANDONED = auto()  # over before a ticket was accepted; decode has had no last word
    WRITING = auto()
    STOPPING_TO_ACK = auto()  # posted writes not yet finished; decode awaits the ack
    STOPPING_TO_FAIL = auto()  # posted writes not yet finished; decode will hear FAILED
    ENDED = auto()  # the last word is said


class RoomEvent(Enum):
    TICKET = auto()  # came and passed its check
    LATE_TICKET = auto()  # came, and would pass if its delta started earlier
    REQUEST = auto()  # the Prefill call came
    LANDED = auto()  # the request's last write landed: none is posted, none will be
    FAILED = auto()  # a write or the compute failed, the ticket was refused, or nobody came in time
    ABORT = auto()  # decode said so
    LINK_LOST = auto()  # decode's stream ended
    CANCELLED = auto()  # the Prefill call was cancelled
    WRITES_STOPPED = auto()  # after STOP_WRITES: none is posted any more, none will be


class RoomEffect(Enum):
    SEND_ACCEPTED = auto()
    SEND_RENEGOTIATE = auto()
    START_WRITES = auto()  # from here on writes may be posted
    STOP_WRITES = auto()  # post no more; LANDED or WRITES_STOPPED must follow
    SEND_LANDED = auto()
    SEND_FAILED = auto()
    SEND_ABORT_ACK = auto()
    FAIL_REQUEST = auto()  # end the Prefill call with an error, if it has no answer yet


_S, _E, _F = ReservationState, ReservationEvent, ReservationEffect

RESERVATION: Mapping[
    tuple[ReservationState, ReservationEvent], tuple[ReservationState, tuple[ReservationEffect, ...]]
] = {
    (_S.RESERVED, _E.PREFILL_SENT): (_S.FILLING, ()),
    (_S.RESERVED, _E.CANCELLED): (_S.RELEASED, (_F.CLOSE,)),
    (_S.FILLING, _E.PAGES_LANDED): (_S.READY, (_F.PUBLISH,)),
    (_S.FILLING, _E.RENEGOTIATED): (_S.RESERVED, (_F.REOPEN,)),
    (_S.FILLING, _E.PREFILL_FAILED): (_S.RELEASED, (_F.CLOSE,)),
    (_S.FILLING, _E.CANCELLED): (_S.QUARANTINED, (_F.SEND_ABORT, _F.QUARANTINE)),
    (_S.QUARANTINED, _E.CANCELLED): (_S.QUARANTINED, ()),
    (_S.QUARANTINED, _E.WRITER_STOPPED): (_S.RELEASED, (_F.END_QUARANTINE,)),
    (_S.QUARANTINED, _E.RENEGOTIATED): (_S.RELEASED, (_F.END_QUARANTINE,)),
    (_S.QUARANTINED, _E.PREFILL_FAILED): (_S.RELEASED, (_F.END_QUARANTINE,)),
    (_S.QUARANTINED, _E.PAGES_LANDED): (_S.RELEASED, (_F.END_QUARANTINE,)),
    (_S.READY, _E.FINISHED): (_S.RELEASED, (_F.PUBLISH, _F.CLOSE)),
    (_S.READY, _E.CANCELLED): (_S.RELEASED, (_F.PUBLISH, _F.CLOSE)),
    (_S.RELEASED, _E.CANCELLED): (_S.RELEASED, ()),
    # An abort crossed the last word on its way, or fence time ended the quarantine before it came.
    (_S.RELEASED, _E.WRITER_STOPPED): (_S.RELEASED, ()),
    (_S.RELEASED, _E.RENEGOTIATED): (_S.RELEASED, ()),
    (_S.RELEASED, _E.PREFILL_FAILED): (_S.RELEASED, ()),
    (_S.RELEASED, _E.PAGES_LANDED): (_S.RELEASED, ()),
}

_R, _V, _X = RoomState, RoomEvent, RoomEffect

ROOM: Mapping[tuple[RoomState, RoomEvent], tuple[RoomState, tuple[RoomEffect, ...]]] = {
    (_R.NEW, _V.TICKET): (_R.TICKETED, (_X.SEND_ACCEPTED,)),
    (_R.NEW, _V.LATE_TICKET): (_R.NEW, (_X.SEND_RENEGOTIATE,)),
    (_R.NEW, _V.REQUEST): (_R.REQUESTED, ()),
    (_R.NEW, _V.FAILED): (_R.ABANDONED, ()),
    (_R.NEW, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.TICKETED, _V.REQUEST): (_R.WRITING, (_X.START_WRITES,)),
    (_R.TICKETED, _V.FAILED): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.TICKETED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.TICKETED, _V.LINK_LOST): (_R.ENDED, ()),
    (_R.REQUESTED, _V.TICKET): (_R.WRITING, (_X.SEND_ACCEPTED, _X.START_WRITES)),
    (_R.REQUESTED, _V.LATE_TICKET): (_R.REQUESTED, (_X.SEND_RENEGOTIATE,)),
    (_R.REQUESTED, _V.FAILED): (_R.ABANDONED, (_X.FAIL_REQUEST,)),
    (_R.REQUESTED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK, _X.FAIL_REQUEST)),
    (_R.REQUESTED, _V.LINK_LOST): (_R.ABANDONED, (_X.FAIL_REQUEST,)),
    (_R.REQUESTED, _V.CANCELLED): (_R.ABANDONED, ()),
    (_R.ABANDONED, _V.TICKET): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.ABANDONED, _V.LATE_TICKET): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.ABANDONED, _V.REQUEST): (_R.ABANDONED, (_X.FAIL_REQUEST,)),
    (_R.ABANDONED, _V.FAILED): (_R.ABANDONED, ()),
    (_R.ABANDONED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.ABANDONED, _V.LINK_LOST): (_R.ABANDONED, ()),
    (_R.ABANDONED, _V.CANCELLED): (_R.ABANDONED, ()),
    (_R.WRITING, _V.LANDED): (_R.ENDED, (_X.SEND_LANDED,)),
    (_R.WRITING, _V.FAILED): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.ABORT): (_R.STOPPING_TO_ACK, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.LINK_LOST): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES, _X.FAIL_REQUEST)),
    (_R.WRITING, _V.CANCELLED): (_R.STOPPING_TO_FAIL, (_X.STOP_WRITES,)),
    # Another write may still be posted after FAILED, so it does not end the stop.
    (_R.STOPPING_TO_FAIL, _V.FAILED): (_R.STOPPING_TO_FAIL, ()),
    (_R.STOPPING_TO_FAIL, _V.ABORT): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_FAIL, _V.LINK_LOST): (_R.STOPPING_TO_FAIL, ()),
    (_R.STOPPING_TO_FAIL, _V.CANCELLED): (_R.STOPPING_TO_FAIL, ()),
    (_R.STOPPING_TO_FAIL, _V.LANDED): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.STOPPING_TO_FAIL, _V.WRITES_STOPPED): (_R.ENDED, (_X.SEND_FAILED,)),
    (_R.STOPPING_TO_ACK, _V.FAILED): (_R.STOPPING_TO_ACK, ()),
    # Said again, on a new link perhaps: the one ack to come answers both.
    (_R.STOPPING_TO_ACK, _V.ABORT): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.LINK_LOST): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.CANCELLED): (_R.STOPPING_TO_ACK, ()),
    (_R.STOPPING_TO_ACK, _V.LANDED): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.STOPPING_TO_ACK, _V.WRITES_STOPPED): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.ENDED, _V.REQUEST): (_R.ENDED, (_X.FAIL_REQUEST,)),
    (_R.ENDED, _V.FAILED): (_R.ENDED, ()),
    (_R.ENDED, _V.ABORT): (_R.ENDED, (_X.SEND_ABORT_ACK,)),
    (_R.ENDED, _V.LINK_LOST): (_R.ENDED, ()),
    (_R.ENDED, _V.CANCELLED): (_R.ENDED, ()),
    (_R.ENDED, _V.WRITES_STOPPED): (_R.ENDED, ()),  # LANDED came while stopping
}


def step_reservation(
    state: ReservationState, event: ReservationEvent
) -> tuple[ReservationState, tuple[ReservationEffect, ...]]:
    """The next state, and the effects that the shell must perform, in order.

    Raises:
        ProtocolError: `event` is not expected in `state`.
    """
    return _look_up(RESERVATION, state, event)


def step_room(state: RoomState, event: RoomEvent) -> tuple[RoomState, tuple[RoomEffect, ...]]:
    """As step_reservation, for a room."""
    return _look_up(ROOM, state, event)


_State = TypeVar("_State", bound=Enum)
_Event = TypeVar("_Event", bound=Enum)
_Next = TypeVar("_Next")


def _look_up(table: Mapping[tuple[_State, _Event], _Next], state: _State, event: _Event) -> _Next:
    try:
        return table[state, event]
    except KeyError:
        raise ProtocolError(f"{event.name} is not expected in {state.name}") from None
