from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.handshake import (
    PULL,
    RESERVATION,
    RESERVATION_OVER,
    TRANSFER,
    TRANSFER_OVER,
    PullEffect,
    PullEvent,
    PullState,
    ReservationEffect,
    ReservationEvent,
    ReservationState,
    TransferEffect,
    TransferEvent,
    TransferState,
    may_expire,
    step_pull,
    step_reservation,
    step_transfer,
)
from services.values.errors import ProtocolError

WRITER_DONE = {
    ReservationEvent.PAGES_LANDED,
    ReservationEvent.WRITER_STOPPED,
    ReservationEvent.RENEGOTIATED,
}
HEARD_BY_DECODE = {
    TransferEffect.SEND_LANDED: ReservationEvent.PAGES_LANDED,
    TransferEffect.SEND_FAILED: ReservationEvent.WRITER_STOPPED,
    TransferEffect.SEND_ABORT_ACK: ReservationEvent.WRITER_STOPPED,
}
LAST_WORDS = set(HEARD_BY_DECODE)
HEARD_OF_A_TICKET = HEARD_BY_DECODE | {
    TransferEffect.SEND_REFUSED: ReservationEvent.WRITER_STOPPED,
    TransferEffect.SEND_RENEGOTIATE: ReservationEvent.RENEGOTIATED,
}
NONE_POSTED = {TransferEvent.LANDED, TransferEvent.WRITES_STOPPED}


@settings(max_examples=200)
@given(st.lists(st.sampled_from(ReservationEvent), max_size=12))
def test_pages_come_back_once_and_never_under_a_writer(events):
    state, effects, given_up, writing, stands, fenced = ReservationState.FILLING, [], False, True, True, False
    for event in events:
        try:
            state, new_effects = step_reservation(state, event)
        except ProtocolError:
            assert (state, event) not in RESERVATION
            continue
        given_up |= event is ReservationEvent.GIVEN_UP
        stands = (stands or event is ReservationEvent.LINKED) and event is not ReservationEvent.LINK_LOST
        fenced |= event is ReservationEvent.UNSETTLED
        # Time alone tells something only where nobody is there to say it.
        timed_out = event is ReservationEvent.FENCE_OVER and (fenced or not stands)
        writing = writing and not (event in WRITER_DONE or timed_out)
        assert not (writing and ReservationEffect.END_QUARANTINE in new_effects)
        assert (ReservationEffect.QUARANTINE in new_effects) <= writing
        effects += new_effects
        if state is not ReservationState.EXPIRED:
            assert may_expire(state) == (writing and (fenced or not stands))

    assert (state in RESERVATION_OVER) == (not writing)
    quarantined = ReservationEffect.QUARANTINE in effects
    assert effects.count(ReservationEffect.QUARANTINE) == quarantined
    assert effects.count(ReservationEffect.END_QUARANTINE) == (quarantined and not writing)
    assert quarantined == given_up or not writing


def test_who_gives_up_is_told_of_by_an_abort_wherever_a_stream_stands():
    for (state, event), (_, effects) in RESERVATION.items():
        asks = ReservationEffect.SEND_ABORT in effects
        assert asks == (
            (state, event)
            in {
                (ReservationState.FILLING, ReservationEvent.GIVEN_UP),
                (ReservationState.STOPPING, ReservationEvent.FENCE_OVER),
                (ReservationState.SOUGHT, ReservationEvent.LINKED),
                (ReservationState.EXPIRED, ReservationEvent.LINKED),
            }
        )


@pytest.mark.parametrize(
    "state, event",
    [
        (ReservationState.FILLING, ReservationEvent.FENCE_OVER),
        (ReservationState.FILLING, ReservationEvent.LINKED),
        (ReservationState.FENCED, ReservationEvent.LINK_LOST),
        (ReservationState.STOPPED, ReservationEvent.PAGES_LANDED),
    ],
)
def test_a_reservation_refuses(state, event):
    with pytest.raises(ProtocolError, match=f"{event.name} is not expected in {state.name}"):
        step_reservation(state, event)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(TransferEvent), max_size=14))
def test_a_transfer_says_its_last_word_once_and_never_while_writes_are_posted(events):
    state, posted, effects, aborts_waiting, requests = TransferState.NEW, False, [], 0, 0
    for event in events:
        try:
            state, new_effects = step_transfer(state, event)
        except ProtocolError:
            assert (state, event) not in TRANSFER
            continue
        posted = (posted or TransferEffect.START_WRITES in new_effects) and event not in NONE_POSTED
        last_words = LAST_WORDS.intersection(new_effects)
        assert not (posted and (last_words or TransferEffect.SEND_REFUSED in new_effects))
        aborts_waiting += event is TransferEvent.ABORT
        if TransferEffect.SEND_ABORT_ACK in new_effects:
            assert aborts_waiting > 0
            aborts_waiting = 0
        elif last_words:
            assert LAST_WORDS.isdisjoint(effects), "a last word other than an ack was said after one"
            assert aborts_waiting == 0, "decode asked for an ack and got something else"
        # Every abort is answered at once, or waits for posted writes.
        assert aborts_waiting == 0 or state is TransferState.STOPPING_TO_ACK
        requests += event is TransferEvent.REQUEST
        effects += new_effects

    assert (
        state in (TransferState.WRITING, TransferState.STOPPING_TO_ACK, TransferState.STOPPING_TO_FAIL)
    ) == posted
    assert effects.count(TransferEffect.START_WRITES) <= 1
    assert effects.count(TransferEffect.STOP_WRITES) <= effects.count(TransferEffect.START_WRITES)
    assert effects.count(TransferEffect.FAIL_REQUEST) <= requests


@pytest.mark.parametrize("posted_state", [TransferState.STOPPING_TO_ACK, TransferState.STOPPING_TO_FAIL])
def test_a_failed_write_does_not_end_the_stop_for_others_may_be_posted(posted_state):
    assert step_transfer(posted_state, TransferEvent.FAILED) == (posted_state, ())


@pytest.mark.parametrize("first, second", [("TICKET", "REQUEST"), ("REQUEST", "TICKET")])
def test_ticket_and_request_come_in_either_order(first, second):
    state, effects = step_transfer(TransferState.NEW, TransferEvent[first])
    state, more = step_transfer(state, TransferEvent[second])
    assert state is TransferState.WRITING
    assert effects + more == (TransferEffect.SEND_ACCEPTED, TransferEffect.START_WRITES)


@pytest.mark.parametrize("state", TransferState)
def test_an_abort_is_expected_everywhere(state):
    assert (state, TransferEvent.ABORT) in TRANSFER


@pytest.mark.parametrize("before_ticket", ["FAILED", "CANCELLED", "LINK_LOST"])
def test_a_ticket_for_an_abandoned_request_is_told_so(before_ticket):
    state, _ = step_transfer(TransferState.REQUESTED, TransferEvent[before_ticket])
    assert step_transfer(state, TransferEvent.TICKET) == (TransferState.ENDED, (TransferEffect.SEND_FAILED,))


def test_a_request_after_the_abort_fails_instead_of_waiting():
    state, _ = step_transfer(TransferState.NEW, TransferEvent.ABORT)
    assert step_transfer(state, TransferEvent.REQUEST) == (
        TransferState.ENDED,
        (TransferEffect.FAIL_REQUEST,),
    )


@pytest.mark.parametrize(
    "state, event",
    [
        (TransferState.NEW, TransferEvent.LANDED),
        (TransferState.TICKETED, TransferEvent.TICKET),
        (TransferState.WRITING, TransferEvent.REQUEST),
        (TransferState.WRITING, TransferEvent.WRITES_STOPPED),
        (TransferState.ENDED, TransferEvent.TICKET),
    ],
)
def test_a_transfer_refuses(state, event):
    with pytest.raises(ProtocolError, match=f"{event.name} is not expected in {state.name}"):
        step_transfer(state, event)


class TwoRanks:
    """Both tables joined by the ordered stream, one queue each way; the Prefill call runs beside it."""

    def __init__(self, late_tickets=0):
        self.transfer_id = TransferState.NEW
        self.to_prefill, self.to_decode = deque(), deque()
        self.calls = deque([TransferEvent.REQUEST])  # the Prefill call, once the ticket has left
        self.posted = self.stopping = self.given_up = False
        self.quarantines = self.losses = 0
        self.stream = self.answers_on = (
            0  # the newest one; and the one on which the transfer was last spoken to
        )
        self.late_tickets = late_tickets
        self.send_ticket()

    def send_ticket(self):
        """Pages are reserved, and what was reserved before is given back."""
        assert not self.posted, "pages given back under a writer"
        self.reservation = ReservationState.FILLING
        self.to_prefill.append(TransferEvent.LATE_TICKET if self.late_tickets else TransferEvent.TICKET)
        self.late_tickets = max(0, self.late_tickets - 1)

    def decode(self, event):
        self.reservation, effects = step_reservation(self.reservation, event)
        if event is ReservationEvent.GIVEN_UP and not self.given_up:
            self.given_up = True
            self.calls.append(TransferEvent.CANCELLED)  # of the Prefill call
        for effect in effects:
            if effect is ReservationEffect.SEND_ABORT:
                self.to_prefill.append(TransferEvent.ABORT)
            if effect is ReservationEffect.QUARANTINE:
                self.quarantines += 1
            if effect is ReservationEffect.END_QUARANTINE:
                assert not self.posted, "pages given back under a writer"
                assert TransferEvent.TICKET not in self.to_prefill, (
                    "a ticket is under way to pages given back"
                )
                self.quarantines -= 1
        if event is ReservationEvent.RENEGOTIATED and not self.given_up:
            self.send_ticket()

    def hear(self):
        """The first word on a ticket is the last that its link passes on."""
        event = self.to_decode.popleft()
        if self.reservation not in RESERVATION_OVER:
            self.decode(event)

    def prefill(self, event):
        if event is TransferEvent.CANCELLED and (self.transfer_id, event) not in TRANSFER:
            return  # the call has ended before
        if event in (TransferEvent.TICKET, TransferEvent.LATE_TICKET, TransferEvent.ABORT):
            self.answers_on = self.stream
        self.transfer_id, effects = step_transfer(self.transfer_id, event)
        if event in NONE_POSTED:
            self.posted = self.stopping = False
        for effect in effects:
            if effect is TransferEffect.START_WRITES:
                assert self.reservation not in RESERVATION_OVER, "writing into pages given back"
                self.posted = True
            if effect is TransferEffect.STOP_WRITES:
                self.stopping = True
            if effect in HEARD_OF_A_TICKET and self.answers_on == self.stream:
                self.to_decode.append(HEARD_OF_A_TICKET[effect])

    def lose(self):
        """The stream ends, and what was under way on it is lost. The transfers hear of it."""
        self.losses += 1
        self.stream += 1
        self.to_prefill.clear()
        self.to_decode.clear()
        self.decode(ReservationEvent.LINK_LOST)
        if (self.transfer_id, TransferEvent.LINK_LOST) in TRANSFER:
            self.prefill(TransferEvent.LINK_LOST)

    def moves(self):
        delivered = []
        if self.to_prefill:
            delivered.append(lambda: self.prefill(self.to_prefill.popleft()))
        if self.to_decode:
            delivered.append(self.hear)
        if self.calls:
            delivered.append(lambda: self.prefill(self.calls.popleft()))
        if self.posted:
            end = TransferEvent.WRITES_STOPPED if self.stopping else TransferEvent.LANDED
            delivered.append(lambda: self.prefill(end))
        if self.reservation is ReservationState.SOUGHT:
            delivered.append(lambda: self.decode(ReservationEvent.LINKED))
        if self.reservation is ReservationState.LOST:
            delivered.append(lambda: self.decode(ReservationEvent.GIVEN_UP))
        return delivered

    def faults(self):
        faults = []
        if not self.given_up:
            faults.append(lambda: self.decode(ReservationEvent.GIVEN_UP))
        if self.reservation in (ReservationState.FILLING, ReservationState.STOPPING) and self.losses < 3:
            faults.append(self.lose)
        if (
            not self.calls
            and self.transfer_id is not TransferState.NEW
            and self.transfer_id not in TRANSFER_OVER
        ):
            faults += [
                lambda event=event: self.prefill(event)
                for event in (TransferEvent.FAILED, TransferEvent.CANCELLED)
            ]
        return faults


@settings(max_examples=200)
@given(st.data())
def test_whatever_the_order_both_ranks_come_to_an_end_and_agree(data):
    ranks = TwoRanks(late_tickets=data.draw(st.integers(0, 2)))
    for _ in range(data.draw(st.integers(0, 12), label="steps before the faults end")):
        moves = ranks.moves() + ranks.faults()
        if moves:
            data.draw(st.sampled_from(moves))()
    while moves := ranks.moves():
        data.draw(st.sampled_from(moves))()
    # A request whose ticket was lost with the stream, or never sent, waits for its deadline.
    assert ranks.transfer_id in (*TRANSFER_OVER, TransferState.REQUESTED) and not ranks.posted
    assert ranks.reservation is ReservationState.STOPPED and ranks.quarantines == 0


USES = {PullEffect.PUBLISH, PullEffect.COMPUTE}


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PullEvent), max_size=8))
def test_a_pull_ends_in_one_way_and_its_pages_are_used_once(events):
    state, effects = PullState.ASKED, []
    for event in events:
        before = state
        try:
            state, new_effects = step_pull(state, event)
        except ProtocolError:
            assert (state, event) not in PULL
            continue
        assert not (before is PullState.OVER and new_effects)
        effects += new_effects
    assert len(USES.intersection(effects)) <= 1 and len(effects) == len(set(effects))
    asked_only = PullEffect.SEND_TICKET not in effects
    given_up = PullEffect.GIVE_UP in effects
    assert (PullEffect.SET_ASIDE in effects) <= given_up <= (not asked_only)
    if state is PullState.OVER and PullEvent.CANCELLED not in events:
        assert USES.intersection(effects), "the sequence waits for ever"


@pytest.mark.parametrize("state", PullState)
def test_a_pull_may_be_cancelled_and_granted_at_any_time(state):
    assert {(state, PullEvent.CANCELLED), (state, PullEvent.GRANTED)} <= set(PULL)


class PullerAndHolder:
    """All three tables: a pull and its reservation, the holder's transfer, an ordered stream between them.

    The holder's engine grants some time after it was asked. A request and a grant may come twice.
    """

    def __init__(self, refuses=False, doubled=False):
        self.pull, self.reservation, self.transfer_id = PullState.ASKED, None, TransferState.NEW
        self.to_holder = deque(["request"] * (1 + doubled))
        self.to_puller = deque()
        self.engine = deque()  # what the holder's engine is asked for
        self.refuses = refuses
        self.locked = self.granted = False
        self.posted = self.stopping = False
        self.pages = "reserved"
        self.linked, self.losses = True, 0
        self.unheard = True  # no word on the ticket was heard

    # -- the puller -----------------------------------------------------------------------------------

    def step(self, event):
        self.pull, effects = step_pull(self.pull, event)
        if event is PullEvent.CANCELLED and PullEffect.SET_ASIDE not in effects and self.pages == "reserved":
            self.use("freed")
        for effect in effects:
            match effect:
                case PullEffect.SEND_TICKET:
                    self.reservation = ReservationState.FILLING
                    self.to_holder.append("ticket")
                case PullEffect.END_GRANT if self.linked:
                    self.to_holder.append("abort")
                case PullEffect.GIVE_UP:
                    self.reserve(ReservationEvent.GIVEN_UP)
                case PullEffect.PUBLISH:
                    self.use("published")
                case PullEffect.COMPUTE if self.pages == "reserved":
                    self.use("computed")
                case PullEffect.SET_ASIDE:
                    self.pages = "aside"
                    self.look_at_what_is_aside()

    def use(self, how):
        assert not self.may_be_written, f"pages are {how} under a writer"
        self.pages = how

    @property
    def may_be_written(self):
        return self.posted or "ticket" in self.to_holder

    def reserve(self, event):
        self.reservation, effects = step_reservation(self.reservation, event)
        for effect in effects:
            if effect is ReservationEffect.SEND_ABORT and self.linked:
                self.to_holder.append("abort")
        self.look_at_what_is_aside()

    def look_at_what_is_aside(self):
        if self.pages == "aside" and self.reservation in RESERVATION_OVER:
            self.use("freed")

    def hear(self):
        word = self.to_puller.popleft()
        if word == "grant":
            self.step(PullEvent.GRANTED)
        elif self.reservation is None:  # Of a transfer that no ticket was sent for; an ack tells nothing.
            if word == "refused" and self.pull is PullState.ASKED:
                self.step(PullEvent.REFUSED)
        elif self.reservation not in RESERVATION_OVER:
            landed = word is ReservationEvent.PAGES_LANDED
            self.reserve(word)
            if self.pull in (PullState.FILLING, PullState.STOPPING):
                fits = landed and self.pull is PullState.FILLING
                self.step(PullEvent.LANDED if fits else PullEvent.STOPPED)

    def lose(self):
        self.linked, self.losses = False, self.losses + 1
        self.to_holder.clear()
        self.to_puller.clear()
        if self.pull is PullState.ASKED:
            self.step(PullEvent.REFUSED)
        elif self.reservation not in (None, *RESERVATION_OVER):
            self.reserve(ReservationEvent.LINK_LOST)
            if self.pull is PullState.FILLING:
                self.step(PullEvent.DOUBTED)
        if (self.transfer_id, TransferEvent.LINK_LOST) in TRANSFER:
            self.hold(TransferEvent.LINK_LOST)

    def link(self):
        self.linked = True
        self.reserve(ReservationEvent.LINKED)

    # -- the holder -----------------------------------------------------------------------------------

    def take(self):
        match self.to_holder.popleft():
            case "request":
                self.engine.append("request")
            case "ticket":
                self.hold(TransferEvent.TICKET)
            case "abort":
                self.hold(TransferEvent.ABORT)

    def grant(self):
        self.engine.popleft()
        if self.refuses:
            if self.linked:
                self.to_puller.append("refused")
        elif not self.granted:
            self.granted = self.locked = True
            self.hold(TransferEvent.REQUEST)
            if self.transfer_id is TransferState.REQUESTED:
                if self.linked:
                    self.to_puller += ["grant", "grant"]
                else:
                    self.hold(TransferEvent.LINK_LOST)

    def hold(self, event):
        if event is TransferEvent.TICKET and (self.transfer_id, event) not in TRANSFER:
            event = TransferEvent.WRONG_TICKET
        self.transfer_id, effects = step_transfer(self.transfer_id, event)
        if event in NONE_POSTED:
            self.posted = self.stopping = False
        for effect in effects:
            if effect is TransferEffect.START_WRITES:
                assert self.locked, "what is read is not locked"
                assert self.pages in ("reserved", "aside"), f"pages that are {self.pages} are written"
                self.posted = True
            if effect is TransferEffect.STOP_WRITES:
                self.stopping = True
            if effect in HEARD_OF_A_TICKET and self.linked:
                self.to_puller.append(HEARD_OF_A_TICKET[effect])
        if self.transfer_id in TRANSFER_OVER:
            assert not self.posted
            self.locked = False

    # -- what may happen --------------------------------------------------------------------------------

    def moves(self):
        moves = []
        if self.to_holder:
            moves.append(self.take)
        if self.engine:
            moves.append(self.grant)
        if self.to_puller:
            moves.append(self.hear)
        if self.posted:
            end = TransferEvent.WRITES_STOPPED if self.stopping else TransferEvent.LANDED
            moves.append(lambda: self.hold(end))
        quiet = not (self.to_holder or self.to_puller) and self.pull is not PullState.ASKED
        if self.transfer_id is TransferState.REQUESTED and quiet:
            moves.append(lambda: self.hold(TransferEvent.FAILED))  # No ticket came in time.
        if self.reservation is ReservationState.SOUGHT and not self.linked:
            moves.append(self.link)
        if self.pull is PullState.STOPPING and not moves:
            moves.append(lambda: self.step(PullEvent.LATE))
        return moves

    def faults(self):
        faults = []
        if self.pull is not PullState.OVER:
            faults.append(lambda: self.step(PullEvent.CANCELLED))
            faults.append(lambda: self.step(PullEvent.LATE))
        if self.linked and self.losses < 2:
            faults.append(self.lose)
        if self.transfer_id in (TransferState.REQUESTED, TransferState.WRITING):
            faults.append(lambda: self.hold(TransferEvent.FAILED))
        return faults


@settings(max_examples=300)
@given(st.data())
def test_whatever_the_order_a_pull_ends_and_nothing_is_used_under_a_writer(data):
    ranks = PullerAndHolder(data.draw(st.booleans(), "refuses"), data.draw(st.booleans(), "doubled"))
    for _ in range(data.draw(st.integers(0, 12), label="steps before the faults end")):
        goes_well = data.draw(st.integers(0, 3)) and ranks.moves()
        if moves := goes_well or ranks.faults():
            data.draw(st.sampled_from(moves))()
    while moves := ranks.moves():
        data.draw(st.sampled_from(moves))()
    if ranks.pull is PullState.ASKED:  # Whoever has said all that there is to say was not heard.
        ranks.step(PullEvent.LATE)
        while moves := ranks.moves():
            data.draw(st.sampled_from(moves))()
    assert ranks.pull is PullState.OVER and ranks.pages in ("published", "computed", "freed")
    assert not (ranks.posted or ranks.locked) and ranks.transfer_id in (TransferState.NEW, *TRANSFER_OVER)
