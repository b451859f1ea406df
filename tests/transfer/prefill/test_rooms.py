"""Rooms on a prefill rank, with a transport that lands when told to and a clock that stands still."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.page_digest import digest_of
from services.transfer.prefill import rooms as rooms_module
from services.transfer.prefill.room import Outcome
from services.values.kv import PageId
from services.wire.isthmus.v1 import handshake_pb2 as pb
from transfer.prefill.room_rank import LAYOUT, OTHER_DECODE, PAGE, A, B, Rank, page_of


@pytest.mark.parametrize("order", ["ticket request pages", "request ticket pages", "request pages ticket"])
@pytest.mark.parametrize(("prefix_len", "moved"), [(0, [(0, 500), (1, 501), (2, 502)]), (8, [(2, 500)])])
def test_the_delta_is_written_in_whatever_order_things_come(rank, order, prefix_len, moved):
    for word in order.split():
        match word:
            case "ticket":
                rank.ticket(prefix_len=prefix_len)
            case "request":
                rank.request()
            case "pages":
                rank.pages(0, 8)
                rank.pages(8, 10)
        rank.turn()
    assert (rank.moved, rank.take_said(), rank.ends) == (moved, ["accepted"], [])

    rank.transport.land()
    rank.turn()

    assert rank.take_said() == ["landed"]
    assert rank.last.status.bytes_moved == len(moved) * 100
    assert rank.last.status.hit == (pb.HIT_KIND_PARTIAL if prefix_len else pb.HIT_KIND_NONE)
    assert (rank.outcome.outcome, rank.outcome.error) == (Outcome.LANDED, None)
    assert rank.outcome.bytes_moved == rank.rooms.bytes_moved_total == len(moved) * 100
    assert rank.rooms.open_rooms == 0


def test_a_full_hit_lands_without_waiting_for_the_compute(rank):
    rank.ticket(prompt_len=8, prefix_len=8)
    rank.request(prompt_len=8)
    rank.turn()
    assert rank.take_said() == ["accepted", "landed"]
    assert rank.last.status.hit == pb.HIT_KIND_FULL
    assert rank.outcome.outcome is Outcome.LANDED
    rank.pages(0, 8)
    rank.turn()
    assert rank.transport.writes == []


def test_pages_are_written_as_they_come_neighbours_in_one_piece(rank):
    rank.ticket(prompt_len=20)
    rank.request(prompt_len=20)
    rank.pages(0, 8)
    rank.turn()
    rank.pages(8, 20)
    rank.turn()
    pieces = [[(m.source_page, m.target_page, m.num_pages) for m in w.moves] for w in rank.transport.writes]
    assert pieces == [[(0, 500, 2)], [(2, 502, 3)]]


def test_a_long_post_is_split_and_every_piece_must_land():
    rank = Rank(max_post_bytes=250)
    rank.ticket(prompt_len=20)
    rank.request(prompt_len=20)
    rank.pages(0, 20)
    rank.turn()
    for landing in (1, 0, 2):  # in any order
        assert rank.ends == []
        rank.transport.writes[landing].done = True
        rank.turn()
    assert [sum(write.group_bytes) for write in rank.transport.writes] == [200, 200, 100]
    assert rank.outcome.descriptors == 3


def test_however_long_a_delta_few_posts_are_in_flight():
    """When the lease ends, no more than those may be on their way: the fence's margin is made for them."""
    rank = Rank(max_post_bytes=100)
    rank.ticket(prompt_len=40)
    rank.request(prompt_len=40)
    rank.pages(0, 40)
    for posted in range(2, 11):
        rank.turn()
        assert (len(rank.transport.writes), rank.rooms.writes_in_flight) == (posted, 2)
        rank.transport.writes[posted - 2].done = True
    rank.now_s = 110.0  # the lease is over, and all is posted
    rank.transport.land()
    rank.turn()
    assert rank.outcome.outcome is Outcome.LANDED


def test_what_is_computed_while_posts_are_in_flight_goes_out_in_one():
    rank = Rank()
    rank.ticket(prompt_len=20)
    rank.request(prompt_len=20)
    for first in range(0, 20, 4):
        rank.pages(first, first + 4)
        rank.turn()
    rank.transport.writes[0].done = True
    rank.turn()
    assert [sum(write.group_bytes) for write in rank.transport.writes] == [100, 100, 300]


@pytest.mark.parametrize("prefix_len", [0, 8])
def test_the_word_that_pages_have_landed_brings_their_digests(rank, prefix_len):
    rank.ticket(prefix_len=prefix_len, want_digests=True)
    rank.request()
    rank.pages(0, 8, first=40)
    rank.turn()
    rank.pages(8, 10, first=40)
    rank.turn()
    assert list(rank.last.status.page_digests) == []
    rank.transport.land()
    rank.turn()
    assert rank.take_said() == ["accepted", "landed"]
    delta = range(40, 43)[prefix_len // PAGE :]
    assert list(rank.last.status.page_digests) == [digest_of(page_of(page)) for page in delta]
    assert rank.read == list(delta)


def test_who_wants_no_digests_gets_none(rank):
    rank.ticket()
    rank.request()
    rank.pages(0, 10)
    rank.turn()
    rank.transport.land()
    rank.turn()
    assert (rank.take_said(), rank.read) == (["accepted", "landed"], [])
    assert list(rank.last.status.page_digests) == []


def test_digests_take_turns_with_other_rooms_posts(rank, monkeypatch):
    monkeypatch.setattr(rooms_module, "_DIGEST_PIECE_BYTES", 2 * LAYOUT.page_bytes)
    rank.ticket(A, prompt_len=20, want_digests=True)
    rank.request(A, prompt_len=20)
    rank.pages(0, 20, A)
    rank.rooms.turn()
    rank.transport.land()
    rank.ticket(B, prompt_len=4, pages=[600])
    rank.request(B, prompt_len=4)
    rank.pages(0, 4, B)
    rank.take_said()
    assert rank.rooms.turn()
    assert (len(rank.read), len(rank.transport.writes), rank.take_said()) == (4, 2, [])
    assert rank.rooms.turn()
    assert (len(rank.read), rank.take_said()) == (5, ["landed"])


@pytest.mark.parametrize("end", ["fails", "is aborted"])
def test_nothing_is_digested_for_a_transfer_that_is_over(rank, end, monkeypatch):
    monkeypatch.setattr(rooms_module, "_DIGEST_PIECE_BYTES", 1)
    rank.ticket(want_digests=True)
    rank.request()
    rank.pages(0, 10)
    rank.rooms.turn()
    if end == "fails":
        rank.transport.writes[0].failure = "cut"
    else:
        rank.rooms.abort(1, A)
        rank.transport.land()
    rank.turn()
    assert rank.take_said() == ["accepted", "failed" if end == "fails" else "ack"]
    assert len(rank.read) == 1


@pytest.mark.parametrize("requested", [False, True])
@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        ({"generation": 6}, "generation"),
        ({"pages": range(2)}, "covers 3 pages"),
        ({"pages": [1, 2, 2]}, "twice"),
        ({"pages": [1, 2, 1000]}, "outside"),
        ({"prefix_len": 11}, "not one of 10 tokens"),
    ],
)
def test_a_wrong_ticket_is_refused_with_the_reason(rank, requested, ticket, reason):
    if requested:
        rank.request()
    rank.ticket(**ticket)
    assert rank.take_said() == ["refused"]
    assert reason in rank.last.status.reason
    assert [reason in end.error for _, end in rank.ends] == [True] * requested
    assert rank.rooms.open_rooms == 0


@pytest.mark.parametrize("requested", [False, True])
def test_a_ticket_that_starts_within_a_page_is_sent_back_and_the_room_waits_on(rank, requested):
    if requested:
        rank.request()
    rank.ticket(prefix_len=6, pages=range(500, 502))
    assert rank.take_said() == ["renegotiate"]
    assert rank.last.status.start == 4
    assert rank.rooms.open_rooms == requested
    rank.ticket(prefix_len=4)
    if not requested:
        rank.request()
    rank.pages(0, 10)
    rank.turn()
    rank.transport.land()
    rank.turn()
    assert rank.take_said() == ["accepted", "landed"]
    assert rank.moved == [(1, 500), (2, 501)]


def test_a_room_that_waits_for_a_better_ticket_does_not_wait_for_ever(rank):
    rank.request()
    rank.ticket(prefix_len=6, pages=range(500, 502))
    rank.now_s = 130.0
    rank.turn()
    assert rank.outcome.error == "no ticket came for the room in time"
    rank.ticket(prefix_len=6, pages=range(500, 502))
    assert rank.take_said() == ["renegotiate", "failed"]


@pytest.mark.parametrize("first", ["ticket", "request"])
def test_ticket_and_request_must_mean_the_same_prompt(rank, first):
    if first == "ticket":
        rank.ticket(prompt_len=12)
        rank.request(prompt_len=10)
        assert rank.take_said() == ["accepted", "failed"]
    else:
        rank.request(prompt_len=10)
        rank.ticket(prompt_len=12)
        assert rank.take_said() == ["refused"]
    assert "12 prompt tokens" in rank.outcome.error


@pytest.mark.parametrize("posted", [False, True])
def test_a_second_ticket_ends_the_room_but_no_word_is_the_last_before_the_writes_are_over(rank, posted):
    rank.ticket()
    if posted:
        rank.request()
        rank.pages(0, 10)
        rank.turn()
    rank.take_said()
    rank.ticket()
    rank.turn()
    assert rank.take_said() == ([] if posted else ["failed"])
    rank.transport.land()
    rank.turn()
    assert rank.take_said() == (["failed"] if posted else [])


def test_a_ticket_that_cannot_be_read_is_refused_or_ends_what_runs(rank):
    rank.rooms.refuse(1, A, "garbled")
    assert rank.take_said() == ["refused"]
    rank.ticket(B)
    rank.rooms.refuse(1, B, "garbled")
    assert rank.take_said() == ["accepted", "failed"]


def test_a_room_belongs_to_one_decode_rank(rank):
    rank.link_up(2, OTHER_DECODE)
    rank.ticket(link_id=1)
    rank.take_said()
    rank.ticket(link_id=2)
    rank.rooms.abort(2, A)
    assert rank.said == [(2, "refused"), (2, "ack")]
    rank.request(decode=OTHER_DECODE)
    assert "in use" in rank.outcome.error
    rank.ends.clear()
    rank.request()
    rank.request()
    assert "in use" in rank.outcome.error
    rank.ends.clear()
    rank.pages(0, 10)
    rank.turn()
    rank.transport.land()
    rank.turn()
    assert rank.outcome.outcome is Outcome.LANDED


def test_an_unreachable_peer_is_told_so_at_its_ticket():
    rank = Rank(refuses="no route")
    rank.request()
    rank.ticket()
    assert rank.take_said() == ["refused"]
    assert rank.outcome.error == rank.last.status.reason == "no route"


@given(data=st.data())
def test_every_page_of_the_delta_is_written_once_to_where_the_ticket_says(data):
    """Random page tables, prefixes, chunks and interleavings against zip()."""
    prompt_len = data.draw(st.integers(1, 60))
    num_pages = -(-prompt_len // PAGE)
    held = data.draw(st.integers(0, prompt_len // PAGE))
    sources = data.draw(st.permutations(range(num_pages + 5)))[:num_pages]
    targets = data.draw(st.permutations(range(num_pages + 5)))[: num_pages - held]
    cuts = sorted(data.draw(st.sets(st.integers(1, num_pages - 1)))) if num_pages > 1 else []
    rank = Rank(max_post_bytes=data.draw(st.integers(1, 500)))

    def chunks():
        for first, last in zip([0, *cuts], [*cuts, num_pages], strict=True):
            pages = [PageId(page) for page in sources[first:last]]
            yield lambda f=first, n=last, p=pages: rank.rooms.pages_ready(
                A, f * PAGE, min(n * PAGE, prompt_len), p
            )

    events = [lambda: rank.request(prompt_len=prompt_len), *chunks()]
    ticket_at = data.draw(st.integers(0, len(events)))
    events.insert(
        ticket_at, lambda: rank.ticket(prompt_len=prompt_len, prefix_len=held * PAGE, pages=targets)
    )
    rank.interleave(events, data)

    assert Counter(rank.moved) == Counter(zip(sources[held:], targets, strict=True))
    assert rank.outcome.outcome is Outcome.LANDED
    assert rank.outcome.bytes_moved == (num_pages - held) * LAYOUT.page_bytes
    assert rank.take_said() == ["accepted", "landed"]
