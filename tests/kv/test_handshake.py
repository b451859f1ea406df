from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.handshake import (
    RESERVATION,
    ROOM,
    ReservationEffect,
    ReservationEvent,
    ReservationState,
    RoomEffect,
    RoomEvent,
    RoomState,
    step_reservation,
    step_room,
)
from services.values.errors import ProtocolError

WRITER_DONE = {
    ReservationEvent.PAGES_LANDED,
    ReservationEvent.PREFILL_FAILED,
    ReservationEvent.WRITER_STOPPED,
    ReservationEvent.RENEGOTIATED,
}
GIVEN_BACK = (ReservationEffect.CLOSE, ReservationEffect.END_QUARANTINE)
HEARD_BY_DECODE = {
    RoomEffect.SEND_LANDED: ReservationEvent.PAGES_LANDED,
    RoomEffect.SEND_FAILED: ReservationEvent.PREFILL_FAILED,
    RoomEffect.SEND_ABORT_ACK: ReservationEvent.WRITER_STOPPED,
}
LAST_WORDS = set(HEARD_BY_DECODE)
HEARD_OF_A_TICKET = HEARD_BY_DECODE | {RoomEffect.SEND_RENEGOTIATE: ReservationEvent.RENEGOTIATED}
NONE_POSTED = {RoomEvent.LANDED, RoomEvent.WRITES_STOPPED}


@given(st.lists(st.sampled_from(ReservationEvent), max_size=12))
def test_pages_come_back_once_and_never_under_a_writer(events):
    state, effects, writing = ReservationState.RESERVED, [], False
    for event in events:
        try:
            state, new_effects = step_reservation(state, event)
        except ProtocolError:
            assert (state, event) not in RESERVATION
            continue
        writing = (writing or event is ReservationEvent.PREFILL_SENT) and event not in WRITER_DONE
        reused = {*GIVEN_BACK, ReservationEffect.PUBLISH, ReservationEffect.REOPEN}
        assert not (writing and set(new_effects) & reused)
        effects += new_effects

    released = state is ReservationState.RELEASED
    assert sum(effect in GIVEN_BACK for effect in effects) == released
    quarantined = ReservationEffect.QUARANTINE in effects
    assert effects.count(ReservationEffect.SEND_ABORT) == quarantined
    assert (ReservationEffect.END_QUARANTINE in effects) == (quarantined and released)
    assert not (quarantined and ReservationEffect.PUBLISH in effects)


@pytest.mark.parametrize(
    "state, event",
    [
        (ReservationState.RESERVED, ReservationEvent.PAGES_LANDED),
        (ReservationState.FILLING, ReservationEvent.FINISHED),
        (ReservationState.READY, ReservationEvent.PAGES_LANDED),
        (ReservationState.RELEASED, ReservationEvent.FINISHED),
    ],
)
def test_a_reservation_refuses(state, event):
    with pytest.raises(ProtocolError, match=f"{event.name} is not expected in {state.name}"):
        step_reservation(state, event)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(RoomEvent), max_size=14))
def test_a_room_says_its_last_word_once_and_never_while_writes_are_posted(events):
    state, posted, effects, aborts_waiting, requests = RoomState.NEW, False, [], 0, 0
    for event in events:
        try:
            state, new_effects = step_room(state, event)
        except ProtocolError:
            assert (state, event) not in ROOM
            continue
        posted = (posted or RoomEffect.START_WRITES in new_effects) and event not in NONE_POSTED
        last_words = LAST_WORDS.intersection(new_effects)
        assert not (posted and last_words)
        aborts_waiting += event is RoomEvent.ABORT
        if RoomEffect.SEND_ABORT_ACK in new_effects:
            assert aborts_waiting > 0
            aborts_waiting = 0
        elif last_words:
            assert LAST_WORDS.isdisjoint(effects), "a last word other than an ack was said after one"
            assert aborts_waiting == 0, "decode asked for an ack and got something else"
        # Every abort is answered at once, or waits for posted writes.
        assert aborts_waiting == 0 or state is RoomState.STOPPING_TO_ACK
        requests += event is RoomEvent.REQUEST
        effects += new_effects

    assert (state in (RoomState.WRITING, RoomState.STOPPING_TO_ACK, RoomState.STOPPING_TO_FAIL)) == posted
    assert effects.count(RoomEffect.START_WRITES) <= 1
    assert effects.count(RoomEffect.STOP_WRITES) <= effects.count(RoomEffect.START_WRITES)
    assert effects.count(RoomEffect.FAIL_REQUEST) <= requests


@pytest.mark.parametrize("posted_state", [RoomState.STOPPING_TO_ACK, RoomState.STOPPING_TO_FAIL])
def test_a_failed_write_does_not_end_the_stop_for_others_may_be_posted(posted_state):
    assert step_room(posted_state, RoomEvent.FAILED) == (posted_state, ())


@pytest.mark.parametrize("first, second", [("TICKET", "REQUEST"), ("REQUEST", "TICKET")])
def test_ticket_and_request_come_in_either_order(first, second):
    state, effects = step_room(RoomState.NEW, RoomEvent[first])
    state, more = step_room(state, RoomEvent[second])
    assert state is RoomState.WRITING
    assert effects + more == (RoomEffect.SEND_ACCEPTED, RoomEffect.START_WRITES)


@pytest.mark.parametrize("state", RoomState)
def test_an_abort_is_expected_everywhere(state):
    assert (state, RoomEvent.ABORT) in ROOM


@pytest.mark.parametrize("before_ticket", ["FAILED", "CANCELLED", "LINK_LOST"])
def test_a_ticket_for_an_abandoned_request_is_told_so(before_ticket):
    state, _ = step_room(RoomState.REQUESTED, RoomEvent[before_ticket])
    assert step_room(state, RoomEvent.TICKET) == (RoomState.ENDED, (RoomEffect.SEND_FAILED,))


def test_a_request_after_the_abort_fails_instead_of_waiting():
    state, _ = step_room(RoomState.NEW, RoomEvent.ABORT)
    assert step_room(state, RoomEvent.REQUEST) == (RoomState.ENDED, (RoomEffect.FAIL_REQUEST,))


@pytest.mark.parametrize(
    "state, event",
    [
        (RoomState.NEW, RoomEvent.LANDED),
        (RoomState.TICKETED, RoomEvent.TICKET),
        (RoomState.WRITING, RoomEvent.REQUEST),
        (RoomState.WRITING, RoomEvent.WRITES_STOPPED),
        (RoomState.ENDED, RoomEvent.TICKET),
    ],
)
def test_a_room_refuses(state, event):
    with pytest.raises(ProtocolError, match=f"{event.name} is not expected in {state.name}"):
        step_room(state, event)


class TwoRanks:
    """Both tables joined by the ordered stream, one queue each way; the Prefill call runs beside it."""

    def __init__(self, late_tickets=0):
        self.reservation, self.room = ReservationState.RESERVED, RoomState.NEW
        self.to_prefill, self.to_decode = deque(), deque()
        self.calls = deque([RoomEvent.REQUEST])  # the Prefill call, once the ticket has left
        self.posted = self.stopping = False
        self.given_back = 0
        self.late_tickets = late_tickets

    def decode(self, event):
        held_nothing_there = self.reservation is ReservationState.RESERVED
        self.reservation, effects = step_reservation(self.reservation, event)
        if event is ReservationEvent.PREFILL_SENT:
            self.to_prefill.append(RoomEvent.LATE_TICKET if self.late_tickets else RoomEvent.TICKET)
            self.late_tickets = max(0, self.late_tickets - 1)
        if event is ReservationEvent.CANCELLED and held_nothing_there:
            self.calls.append(RoomEvent.CANCELLED)  # of the Prefill call
        for effect in effects:
            if effect is ReservationEffect.REOPEN:
                assert not self.posted, "pages given back under a writer"
            if effect is ReservationEffect.SEND_ABORT:
                self.to_prefill.append(RoomEvent.ABORT)
            if effect in GIVEN_BACK:
                assert not self.posted, "pages given back under a writer"
                assert RoomEvent.TICKET not in self.to_prefill, "a ticket is under way to pages given back"
                self.given_back += 1

    def prefill(self, event):
        self.room, effects = step_room(self.room, event)
        if event in NONE_POSTED:
            self.posted = self.stopping = False
        for effect in effects:
            if effect is RoomEffect.START_WRITES:
                assert self.given_back == 0, "writing into pages given back"
                self.posted = True
            if effect is RoomEffect.STOP_WRITES:
                self.stopping = True
            if effect in HEARD_OF_A_TICKET:
                self.to_decode.append(HEARD_OF_A_TICKET[effect])

    def moves(self):
        delivered = []
        if self.reservation is ReservationState.RESERVED:
            delivered.append(lambda: self.decode(ReservationEvent.PREFILL_SENT))
        if self.to_prefill:
            delivered.append(lambda: self.prefill(self.to_prefill.popleft()))
        if self.to_decode:
            delivered.append(lambda: self.decode(self.to_decode.popleft()))
        if self.calls:
            delivered.append(lambda: self.prefill(self.calls.popleft()))
        if self.posted:
            end = RoomEvent.WRITES_STOPPED if self.stopping else RoomEvent.LANDED
            delivered.append(lambda: self.prefill(end))
        return delivered

    def faults(self):
        faults = []
        if self.reservation is not ReservationState.READY:
            faults.append(lambda: self.decode(ReservationEvent.CANCELLED))
        if not self.calls and self.room is not RoomState.NEW:
            faults += [
                lambda event=event: self.prefill(event) for event in (RoomEvent.FAILED, RoomEvent.CANCELLED)
            ]
        return faults


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_order_both_ranks_come_to_an_end_and_agree(data):
    ranks = TwoRanks(late_tickets=data.draw(st.integers(0, 2)))
    for _ in range(data.draw(st.integers(0, 10), label="steps before the faults end")):
        moves = ranks.moves() + ranks.faults()
        if moves:
            data.draw(st.sampled_from(moves))()
    while moves := ranks.moves():
        data.draw(st.sampled_from(moves))()
    # A room whose decode gave up between two tickets is never told anything more.
    assert ranks.room in (RoomState.ENDED, RoomState.ABANDONED) and not ranks.posted
    if ranks.reservation is ReservationState.READY:
        assert ranks.room is RoomState.ENDED
    if ranks.reservation is ReservationState.READY:
        ranks.decode(ReservationEvent.FINISHED)
    assert ranks.reservation is ReservationState.RELEASED and ranks.given_back == 1
