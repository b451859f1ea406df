"""How rooms end: aborts, lost links, leases, failed writes, wrong tickets."""

import pytest

from services.transfer.base import Unsettled
from services.transfer.prefill import rooms as rooms_module
from services.transfer.prefill.room import Outcome, Request
from services.values.errors import PeerFailed
from services.values.rank import Room
from transfer.prefill.room_rank import DECODE, OTHER_DECODE, A, B, C, D, Rank


@pytest.fixture
def rank():
    return Rank()


@pytest.mark.parametrize("state", ["unknown", "ticketed", "requested", "writing"])
def test_an_abort_is_acknowledged_at_once_when_no_write_is_posted(rank, state):
    if state in ("ticketed", "writing"):
        rank.ticket()
    if state in ("requested", "writing"):
        rank.request()
    rank.take_said()
    rank.rooms.abort(1, A)
    rank.turn()
    assert rank.take_said() == ["ack"]
    assert [end.outcome for _, end in rank.ends] == [Outcome.ABORTED] * (state in ("requested", "writing"))
    # A late ticket or request meets the tombstone.
    rank.ticket()
    assert rank.take_said() == ["refused"]
    rank.ends.clear()
    rank.request()
    assert rank.outcome.error
    assert rank.rooms.open_rooms == 0


@pytest.mark.parametrize("end", ["lands", "fails"])
def test_an_abort_is_acknowledged_only_when_the_posted_writes_are_over(end):
    rank = Rank(max_post_bytes=100)
    rank.ticket()
    rank.request()
    rank.pages(0, 8)
    rank.turn()
    rank.take_said()

    rank.rooms.abort(1, A)
    rank.pages(8, 10)
    rank.turn()
    assert (rank.take_said(), rank.ends, len(rank.moved)) == ([], [], 2)
    rank.transport.writes[1].done = True
    rank.turn()
    assert (rank.take_said(), rank.ends) == ([], [])
    if end == "lands":
        rank.transport.land()
    else:
        rank.transport.writes[0].failure = "cut"
    rank.turn()

    assert rank.take_said() == ["ack"]
    assert rank.outcome.outcome is Outcome.ABORTED
    rank.rooms.abort(1, A)
    assert rank.take_said() == ["ack"]


def test_a_failed_write_fails_the_room_when_the_others_are_over():
    rank = Rank(max_post_bytes=100)
    rank.ticket()
    rank.request()
    rank.pages(0, 10)
    rank.turn()
    rank.take_said()
    rank.transport.writes[0].failure = "cut"
    rank.turn()
    assert (rank.take_said(), rank.ends) == ([], [])
    rank.transport.land()
    rank.turn()
    assert rank.take_said() == ["failed"]
    assert (rank.last.status.reason, rank.outcome.error) == ("cut", "cut")


def test_who_called_is_told_of_a_failure_at_once_and_of_the_end_when_the_writes_are_over():
    rank = Rank(max_post_bytes=100)
    rank.ticket()
    rank.request()
    rank.pages(0, 10)
    rank.turn()
    rank.transport.writes[0].failure = "cut"
    rank.turn()
    assert ([(room, end.error) for room, end in rank.failed], rank.ends) == ([(A, "cut")], [])
    rank.transport.land()
    rank.turn()
    assert (len(rank.failed), rank.outcome.error) == (1, "cut")


@pytest.mark.parametrize("error", [PeerFailed, Unsettled])
@pytest.mark.parametrize("where", ["at the post", "on its way"])
@pytest.mark.parametrize("word", ["failed", "ack"])
def test_an_end_that_is_not_known_is_told_as_such(rank, error, where, word):
    """Decode may lend its pages again at once or not; the source pages stay as long."""
    rank.transport.fails_posts = error if where == "at the post" else None
    rank.ticket(until_s=110.0)
    rank.request()
    rank.pages(0, 10)
    rank.turn()
    if where == "on its way":
        if word == "ack":
            rank.rooms.abort(1, A)
        rank.transport.writes[0].failure = "cut"
        rank.transport.writes[0].unsettled = error is Unsettled
        rank.turn()
    elif word == "ack":
        rank.rooms.abort(1, A)
    assert rank.take_said()[-1] == word
    unsettled = error is Unsettled
    assert (rank.last.status if word == "failed" else rank.last.abort_ack).unsettled == unsettled
    assert [room for room, _ in rank.failed] == [A]
    assert (len(rank.ends), rank.rooms.open_rooms) == (0 if unsettled else 1, 0)
    if unsettled:
        assert rank.rooms.next_deadline_s() == 115.0
        rank.now_s = 114.9
        rank.turn()
        assert rank.ends == []
        rank.now_s = 115.0
        rank.turn()
    assert rank.outcome.error
    assert rank.rooms.next_deadline_s() is None


def test_that_an_end_is_not_known_is_told_again_to_who_asks_again(rank):
    """The word before went with its stream, perhaps."""
    failing = write(rank, A)
    failing.failure, failing.unsettled = "connection reset", True
    rank.turn()
    rank.rooms.link_lost(1)
    rank.link_up(2)
    rank.rooms.abort(2, A)
    assert rank.said[-1] == (2, "ack") and rank.last.abort_ack.unsettled


def test_giving_everything_up_lets_go_of_unsettled_pages_too(rank):
    failing = write(rank, A)
    failing.failure, failing.unsettled = "connection reset", True
    rank.turn()
    assert rank.ends == []
    rank.rooms.give_up_all()
    assert rank.outcome.error == "connection reset"
    rank.now_s = 1000.0
    rank.turn()
    assert len(rank.ends) == 1


def test_nothing_is_posted_at_or_past_the_end_of_the_lease(rank):
    rank.ticket(until_s=110.0)
    rank.request()
    rank.pages(0, 4)
    rank.turn()
    rank.now_s = 110.0
    rank.pages(4, 10)
    rank.turn()
    assert len(rank.moved) == 1
    assert rank.take_said() == ["accepted"]
    rank.transport.land()
    rank.turn()
    assert rank.take_said() == ["failed"]
    assert rank.outcome.error == "the write lease is over"
    assert rank.transport.peers == {str(DECODE)}  # which is in no doubt


def test_a_renewed_lease_is_longer_never_shorter(rank):
    rank.link_up(2, OTHER_DECODE)
    rank.ticket(until_s=110.0)
    rank.request()
    rank.rooms.renew(1, A, 120.0)
    rank.rooms.renew(1, A, 105.0)
    rank.rooms.renew(2, A, 999.0)  # another decode rank has no say
    rank.rooms.renew(1, B, 999.0)
    rank.now_s = 119.9
    rank.pages(0, 8)
    rank.turn()
    assert len(rank.moved) == 2
    rank.now_s = 120.0
    rank.pages(8, 10)
    rank.turn()
    assert len(rank.moved) == 2


def test_each_half_waits_for_the_other_so_long_and_no_longer(rank):
    rank.ticket(A, until_s=110.0)
    rank.request(B, timeout_s=20.0)
    rank.now_s = 109.9
    rank.turn()
    assert (rank.take_said(), rank.ends, rank.rooms.next_deadline_s()) == (["accepted"], [], 110.0)
    rank.now_s = 110.0
    rank.turn()
    assert (rank.take_said(), rank.ends, rank.rooms.next_deadline_s()) == (["failed"], [], 120.0)
    rank.now_s = 120.0
    rank.turn()
    assert rank.outcome.error == "no ticket came for the room in time"
    rank.ticket(B)  # too late
    assert rank.take_said() == ["failed"]
    assert rank.rooms.next_deadline_s() is None


def test_a_lost_link_ends_its_rooms_but_the_peer_stays_until_the_writes_are_over(rank):
    rank.link_up(2, OTHER_DECODE)
    rank.ticket(A)
    rank.request(A)
    rank.pages(0, 10)
    rank.turn()
    rank.ticket(B)
    rank.request(Room(0xC))  # its ticket can come no more
    rank.ticket(Room(0xD), link_id=2)
    rank.take_said()

    rank.rooms.link_lost(1)
    rank.turn()
    assert [room for room, _ in rank.ends] == [0xC]
    assert rank.transport.peers == {str(DECODE), str(OTHER_DECODE)}
    rank.transport.land()
    rank.turn()

    assert [room for room, _ in rank.ends] == [0xC, A]
    assert {end.outcome for _, end in rank.ends} == {Outcome.FAILED}
    assert rank.transport.peers == {str(OTHER_DECODE)}
    assert rank.rooms.open_rooms == 1
    rank.rooms.link_lost(1)  # said twice: nothing


@pytest.mark.parametrize("when", ["while writing", "afterwards"])
def test_an_abort_on_a_new_link_is_acknowledged_there(rank, when):
    rank.ticket()
    rank.request()
    rank.pages(0, 10)
    rank.turn()
    rank.rooms.link_lost(1)
    rank.link_up(2)
    rank.take_said()
    if when == "while writing":
        rank.rooms.abort(2, A)
        assert rank.said == []
    rank.transport.land()
    rank.turn()
    if when == "afterwards":
        rank.said.clear()
        rank.rooms.abort(2, A)
    assert rank.said == [(2, "ack")]


def test_a_request_outlives_the_link_when_decode_has_another(rank):
    rank.request()
    rank.link_up(2)
    rank.rooms.link_lost(1)
    rank.ticket(link_id=2)
    assert (rank.take_said(), rank.ends) == (["accepted"], [])
    assert rank.transport.peers == {str(DECODE)}


@pytest.mark.parametrize("ticketed", [False, True])
def test_a_cancelled_request_ends_when_its_writes_have(rank, ticketed):
    rank.request()
    if ticketed:
        rank.ticket()
        rank.pages(0, 10)
        rank.turn()
        rank.rooms.cancel_room(A)
        rank.turn()
        assert rank.ends == []
        rank.transport.land()
        rank.turn()
        assert rank.take_said() == ["accepted", "failed"]
    else:
        rank.rooms.cancel_room(A)
        assert rank.ends
        rank.ticket()
        assert rank.take_said() == ["failed"]
    assert rank.outcome.outcome is Outcome.ABORTED
    rank.rooms.cancel_room(A)
    rank.pages(0, 10)


def write(rank, room):
    """The room's pages are posted."""
    rank.request(room=room)
    rank.ticket(room=room)
    rank.pages(0, 10, room=room)
    rank.turn()
    return rank.transport.writes[-1]


def test_a_peer_is_reached_anew_after_a_write_to_it_has_failed(rank):
    """Its connection may be broken for good though the handshake's is not."""
    write(rank, A).failure = "connection reset"
    rank.turn()
    assert (rank.take_said(), rank.transport.peers) == (["accepted", "failed"], set())
    write(rank, B).done = True
    rank.turn()
    assert rank.take_said() == ["accepted", "landed"]


def test_a_peer_in_doubt_is_kept_for_those_that_write_to_it_still(rank):
    failing, other = write(rank, A), write(rank, B)
    failing.failure = "connection reset"
    rank.turn()
    assert rank.transport.peers == {str(DECODE)}
    rank.ticket(room=C)  # or the broken connection would never rest
    assert rank.take_said() == ["accepted", "accepted", "failed", "refused"]
    other.done = True
    rank.turn()
    assert rank.take_said() == ["landed"]
    assert rank.transport.peers == set()
    rank.ticket(room=D)
    assert rank.take_said() == ["accepted"]
    assert rank.transport.peers == {str(DECODE)}


def test_a_write_that_does_not_end_fails_its_request_and_keeps_the_pages(rank):
    """Nothing is said to decode, for which it would be the last word."""
    stuck = write(rank, A)
    rank.now_s = 129.9
    rank.turn()
    assert (rank.failed, rank.take_said()) == ([], ["accepted"])
    rank.now_s = 130.0
    rank.turn()
    assert [(room, end.outcome, end.error) for room, end in rank.failed] == [
        (A, Outcome.FAILED, "a write has not ended in 30 s")
    ]
    rank.rooms.abort(1, A)
    rank.ticket(B)  # the connection is in doubt
    rank.turn()
    assert (rank.take_said(), rank.ends) == (["refused"], [])
    stuck.done = True
    rank.turn()
    assert (rank.take_said(), rank.last.abort_ack.unsettled) == (["ack"], False)
    assert [room for room, _ in rank.ends] == [A]
    rank.ticket(C)
    assert rank.take_said() == ["accepted"]


def test_an_aborted_write_that_does_not_end_puts_its_connection_in_doubt_too(rank):
    write(rank, A)
    rank.rooms.abort(1, A)
    rank.now_s = 130.0
    rank.turn()
    rank.ticket(B)
    assert rank.take_said() == ["accepted", "refused"]


def test_on_a_slow_path_no_write_is_late_while_others_land_until_it_must_be(rank):
    write(rank, A)
    rank.rooms.renew(1, A, 1000.0)
    for room in range(20, 34):
        rank.now_s += 20.0
        rank.ticket(Room(room), until_s=1000.0)
        rank.request(Room(room))
        rank.pages(0, 10, Room(room))
        rank.turn()
        rank.transport.writes[-1].done = True
        rank.turn()
    assert (rank.now_s, rank.failed) == (380.0, [])
    rank.now_s = 400.0
    rank.turn()
    assert [room for room, _ in rank.failed] == [A]


@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.parametrize("end", ["lands", "fails", "never"])
def test_a_write_that_goes_on_not_ending_is_given_up(rank, aborted, end):
    """Its connection is not, before it ends."""
    stuck = write(rank, A)
    rank.now_s = 130.0
    rank.turn()
    if aborted:
        rank.rooms.abort(1, A)
    rank.take_said()
    rank.now_s = 429.9
    rank.turn()
    assert (rank.take_said(), rank.ends) == ([], [])
    rank.now_s = 430.0
    rank.turn()
    assert rank.take_said() == ["ack" if aborted else "failed"]
    assert (rank.last.abort_ack if aborted else rank.last.status).unsettled
    assert (rank.rooms.open_rooms, rank.rooms.writes_in_flight, rank.ends) == (0, 1, [])
    rank.now_s = 435.0
    rank.turn()
    assert [room for room, _ in rank.ends] == [A]
    rank.ticket(B, until_s=500.0)
    assert rank.take_said() == ["refused"]
    if end == "never":
        rank.rooms.give_up_all()
        assert rank.rooms.writes_in_flight == 0 and len(rank.ends) == 1
        return
    stuck.done, stuck.failure = end == "lands", "cut" if end == "fails" else ""
    rank.turn()
    assert (rank.rooms.writes_in_flight, rank.transport.peers) == (0, set())
    rank.ticket(C, until_s=500.0)
    assert rank.take_said() == ["accepted"]


def test_an_unreachable_peer_is_tried_again_at_the_next_ticket():
    rank = Rank(refuses="no route")
    rank.ticket()
    rank.transport.refuses = ""
    rank.ticket(room=B)
    assert rank.take_said() == ["refused", "accepted"]


def test_a_room_that_is_over_keeps_nothing_of_what_it_was_told(rank):
    """Thousands are remembered, and a ticket names every page of a prompt."""
    write(rank, A).done = True
    rank.turn()
    (over,) = rank.rooms._tombstones.values()
    assert (over.ticket, over.link, over.pages, over.delta) == (None, None, [], None)
    rank.rooms.abort(1, A)
    assert rank.take_said() == ["accepted", "landed", "ack"]


@pytest.mark.parametrize("when", ["ticketed", "before the ticket"])
def test_why_a_request_failed_is_told_to_decode(rank, when):
    rank.request()
    if when == "ticketed":
        rank.ticket()
    rank.rooms.fail_room(A, "out of memory")
    rank.turn()
    if when == "before the ticket":
        rank.ticket()
    assert (rank.take_said()[-1], rank.last.status.reason) == ("failed", "out of memory")
    assert (rank.outcome.outcome, rank.outcome.error) == (Outcome.FAILED, "out of memory")


@pytest.mark.parametrize(
    "calls",
    [[(4, 8)], [(0, 4), (0, 4)], [(0, 4), (8, 10)], [(0, 6)], [(0, 12)], [(2, 8)], [(0, 10), (8, 10)]],
)
def test_pages_out_of_order_fail_the_room_and_are_not_written(rank, calls):
    rank.request()
    for start, end in calls:
        rank.pages(start, end)
    rank.turn()
    assert rank.outcome.outcome is Outcome.FAILED
    assert rank.transport.writes == []


def test_stopping_fails_every_room(rank):
    rank.ticket(A)
    rank.request(A)
    rank.pages(0, 10)
    rank.turn()
    rank.ticket(B)
    rank.request(Room(0xC))
    rank.take_said()
    rank.rooms.fail_all("the rank is stopping")
    rank.turn()
    assert (rank.take_said(), [room for room, _ in rank.ends], rank.rooms.open_rooms) == (
        ["failed"],
        [0xC],
        1,
    )
    rank.rooms.give_up_all()
    assert [room for room, _ in rank.ends] == [0xC, A]


def test_tombstones_are_bounded(rank, monkeypatch):
    monkeypatch.setattr(rooms_module, "_MAX_TOMBSTONES", 3)
    for room in range(10):
        rank.rooms.abort(1, Room(room))
    rank.take_said()
    rank.ticket(Room(9))
    rank.ticket(Room(0))  # forgotten: it will end with its lease
    assert rank.take_said() == ["refused", "accepted"]


def test_an_engine_that_raises_does_not_harm_the_other_rooms(rank, caplog):
    def raises(end):
        raise RuntimeError("the loop is closed")

    rank.rooms.open_room(A, Request(10, DECODE, raises, 101.0))
    rank.request(B, timeout_s=2.0)
    rank.now_s = 103.0
    rank.turn()
    assert rank.outcome.outcome is Outcome.FAILED
    assert "kv_on_end_failed" in caplog.text


def test_a_lease_that_was_renewed_in_time_holds_though_the_rank_stood_still(rank):
    """Nothing is posted past what is known of the lease, and the room waits until all was heard."""
    rank.ticket(until_s=110.0)
    rank.request()
    rank.turn()
    rank.now_s, rank.unheard_s = 115.0, 15.0
    rank.pages(0, 10)
    rank.turn()
    assert not rank.transport.writes and not rank.failed
    assert rank.rooms.next_deadline_s() == 110.0  # the thread looks again
    rank.rooms.renew(1, A, 120.0)  # it was in a socket
    rank.turn()
    assert len(rank.transport.writes) == 1
    rank.transport.land()
    rank.turn()
    assert rank.outcome.outcome is Outcome.LANDED


def test_a_lease_that_was_not_renewed_is_over_once_all_was_heard(rank):
    rank.ticket(until_s=110.0)
    rank.request()
    rank.turn()
    rank.now_s, rank.unheard_s = 115.0, 15.0
    rank.pages(0, 10)
    rank.turn()
    rank.unheard_s = 0.0
    rank.turn()
    assert not rank.transport.writes and "lease is over" in rank.outcome.error


@pytest.mark.parametrize("first", ["ticket", "request"])
def test_the_other_half_that_came_in_time_is_not_too_late_after_a_stop(rank, first):
    second = {"ticket": "request", "request": "ticket"}[first]
    options = {"ticket": {"until_s": 110.0}, "request": {"timeout_s": 10.0}}
    getattr(rank, first)(**options[first])
    rank.turn()
    rank.now_s, rank.unheard_s = 150.0, 50.0
    rank.turn()
    assert not rank.ends and "failed" not in rank.take_said()
    getattr(rank, second)(**{"ticket": {"until_s": 160.0}, "request": {}}[second])
    rank.rooms.renew(1, A, 160.0)
    rank.pages(0, 10)
    rank.turn()
    rank.transport.land()
    rank.turn()
    assert rank.outcome.outcome is Outcome.LANDED


def test_a_write_that_landed_while_the_rank_stood_still_is_not_late(rank):
    rank.ticket(until_s=1000.0)
    rank.request()
    rank.pages(0, 10)
    rank.turn()
    rank.now_s, rank.unheard_s = 200.0, 100.0
    rank.turn()
    assert not rank.failed
    rank.transport.land()
    rank.turn()
    assert rank.outcome.outcome is Outcome.LANDED
