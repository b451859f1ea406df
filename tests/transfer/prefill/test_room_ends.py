"""How rooms end: aborts, lost links, failures, wrong pages, and what is remembered of them."""

import pytest

from services.transfer.prefill import rooms as rooms_module
from services.transfer.prefill.lanes import Sources
from services.transfer.prefill.room import Outcome, Request
from services.values.rank import Room
from transfer.prefill.room_rank import DECODE, OTHER_DECODE, A, B, Rank


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


def test_a_room_that_is_over_keeps_nothing_of_what_it_was_told(rank):
    """Thousands are remembered, and a ticket names every page of a prompt."""
    rank.write(A).done = True
    rank.turn()
    (over,) = rank.rooms._tombstones.values()
    assert (over.ticket, over.link, over.sources, over.delta) == (None, None, Sources(), None)
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
    assert "kv_end_callback_failed" in caplog.text
