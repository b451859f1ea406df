"""Rooms on a prefill rank, with a transport that lands when told to and a clock that stands still."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import PeerFailed
from services.kv.transfer_plan import runs_of
from services.kv.types import Generation, KvLayout, KvTicket, PageId, PoolMemory, RankId, Room
from services.transfer import rooms as rooms_module
from services.transfer.hello import Hello
from services.transfer.room import Outcome, Request
from services.transfer.rooms import RoomTable
from services.wire.isthmus.v1 import handshake_pb2 as pb

PAGE = 4  # tokens
LAYOUT = KvLayout(PAGE, page_bytes=100, model_fingerprint=1)
OWN = RankId("prefill", 0, Generation(7))
DECODE = RankId("decode", 0, Generation(8))
OTHER_DECODE = RankId("decode", 1, Generation(9))
POOL = PoolMemory(0, 1000)
A, B, C, D = Room(0xA), Room(0xB), Room(0xC), Room(0xD)


@dataclass(eq=False)
class FakeWrite:
    moves: list
    done: bool = False
    failure: str = ""
    released: bool = False

    @property
    def size_bytes(self):
        return sum(move.num_pages for move in self.moves) * LAYOUT.page_bytes

    def poll(self):
        assert not self.released
        if self.failure:
            raise PeerFailed(self.failure)
        return self.done

    def release(self):
        assert (self.done or self.failure) and not self.released
        self.released = True


@dataclass
class FakeTransport:
    name: str = "fake"
    refuses: str = ""
    writes: list = field(default_factory=list)
    peers: set = field(default_factory=set)

    def add_peer(self, metadata, memory):
        if self.refuses:
            raise PeerFailed(self.refuses)
        self.peers.add(metadata.decode())
        return metadata.decode()

    def remove_peer(self, peer):
        assert all(write.released for write in self.writes), "a write is under way"
        self.peers.discard(peer)

    def write(self, peer, moves):
        if peer not in self.peers:
            raise PeerFailed(f"no peer {peer} is known")
        self.writes.append(FakeWrite(list(moves)))
        return self.writes[-1]

    def land(self):
        for write in self.writes:
            write.done = True


class Rank:
    """A prefill rank with one link to DECODE."""

    def __init__(self, max_post_bytes=1 << 20, **transport):
        self.now_s = 100.0
        self.transport = FakeTransport(**transport)
        self.rooms = RoomTable(self.transport, LAYOUT, OWN, lambda: self.now_s, max_post_bytes)
        self.said, self.ends = [], []
        self.link_up(1)

    def link_up(self, link_id, decode=DECODE):
        self.rooms.link_up(
            link_id, Hello(decode, LAYOUT, POOL, "fake", str(decode).encode()), self.hear(link_id)
        )

    def hear(self, link_id):
        def send(message):
            if message.WhichOneof("message") == "abort_ack":
                self.said.append((link_id, "ack"))
            else:
                name = pb.Status.State.Name(message.status.state).removeprefix("STATE_").lower()
                self.said.append((link_id, name))
            self.last = message

        return send

    def ticket(self, room=A, prompt_len=10, prefix_len=0, link_id=1, until_s=110.0, generation=7, pages=None):
        num_pages = -(-prompt_len // PAGE) - prefix_len // PAGE
        runs = runs_of(pages if pages is not None else range(500, 500 + num_pages))
        ticket = KvTicket(room, Generation(generation), prompt_len, prefix_len, runs, until_s)
        self.rooms.ticket(link_id, ticket)

    def request(self, room=A, prompt_len=10, decode=DECODE, timeout_s=30.0):
        request = Request(
            prompt_len, decode, lambda end: self.ends.append((room, end)), self.now_s + timeout_s
        )
        self.rooms.open_room(room, request)

    def pages(self, start, end, room=A, first=0):
        count = -(-end // PAGE) - start // PAGE
        pages = [PageId(first + start // PAGE + i) for i in range(count)]
        self.rooms.pages_ready(room, start, end, pages)

    def turn(self):
        """Turn until nothing more happens by itself."""
        while self.rooms.turn():
            pass

    def take_said(self):
        said, self.said = self.said, []
        return [word for _, word in said]

    @property
    def outcome(self):
        assert len(self.ends) == 1, self.ends
        return self.ends[0][1]

    @property
    def moved(self):
        """(source page, target page) of all posted writes, in order."""
        return [
            (move.source_page + i, move.target_page + i)
            for write in self.transport.writes
            for move in write.moves
            for i in range(move.num_pages)
        ]


@pytest.fixture
def rank():
    return Rank()


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
    assert [write.size_bytes for write in rank.transport.writes] == [200, 200, 100]
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
    assert [write.size_bytes for write in rank.transport.writes] == [100, 100, 300]


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
    for event in events:
        event()
        for _ in range(data.draw(st.integers(0, 3))):
            rank.rooms.turn()
            unlanded = [write for write in rank.transport.writes if not write.done]
            if unlanded and data.draw(st.booleans()):
                data.draw(st.sampled_from(unlanded)).done = True
    while not rank.ends:
        rank.turn()
        rank.transport.land()

    assert Counter(rank.moved) == Counter(zip(sources[held:], targets, strict=True))
    assert rank.outcome.outcome is Outcome.LANDED
    assert rank.outcome.bytes_moved == (num_pages - held) * LAYOUT.page_bytes
    assert rank.take_said() == ["accepted", "landed"]
