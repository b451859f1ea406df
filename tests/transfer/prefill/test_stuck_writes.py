"""Writes that fail, come late or never end: what is told, and which connection is not used again."""

import pytest

from services.transfer.base import Unsettled
from services.transfer.prefill.room import Outcome
from services.values.errors import PeerFailed
from services.values.rank import Room
from transfer.prefill.room_rank import DECODE, A, B, C, D, Rank


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
    failing = rank.write(A)
    failing.failure, failing.unsettled = "connection reset", True
    rank.turn()
    rank.rooms.link_lost(1)
    rank.link_up(2)
    rank.rooms.abort(2, A)
    assert rank.said[-1] == (2, "ack") and rank.last.abort_ack.unsettled


def test_giving_everything_up_lets_go_of_unsettled_pages_too(rank):
    failing = rank.write(A)
    failing.failure, failing.unsettled = "connection reset", True
    rank.turn()
    assert rank.ends == []
    rank.rooms.give_up_all()
    assert rank.outcome.error == "connection reset"
    rank.now_s = 1000.0
    rank.turn()
    assert len(rank.ends) == 1


def test_a_peer_is_reached_anew_after_a_write_to_it_has_failed(rank):
    """Its connection may be broken for good though the handshake's is not."""
    rank.write(A).failure = "connection reset"
    rank.turn()
    assert (rank.take_said(), rank.transport.peers) == (["accepted", "failed"], set())
    rank.write(B).done = True
    rank.turn()
    assert rank.take_said() == ["accepted", "landed"]


def test_a_peer_in_doubt_is_kept_for_those_that_write_to_it_still(rank):
    failing, other = rank.write(A), rank.write(B)
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
    stuck = rank.write(A)
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
    rank.write(A)
    rank.rooms.abort(1, A)
    rank.now_s = 130.0
    rank.turn()
    rank.ticket(B)
    assert rank.take_said() == ["accepted", "refused"]


def test_on_a_slow_path_no_write_is_late_while_others_land_until_it_must_be(rank):
    rank.write(A)
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
    stuck = rank.write(A)
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
