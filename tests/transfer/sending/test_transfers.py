"""Transfers on a prefill rank, with a transport that lands when told to and a clock that stands still."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.page_digest import digest_of
from services.transfer.sending import transfers as transfers_module
from services.transfer.sending.sending_transfer import Outcome
from services.values.kv import PageId
from services.wire.isthmus.v1 import handshake_pb2 as pb
from transfer.sending.sending_rank import LAYOUT, OTHER_DECODE, PAGE, A, B, Rank, page_of


def test_the_delta_is_written_in_whatever_order_things_come(subtests):
    for (prefix_len, moved), order in product(
        [(0, [(0, 500), (1, 501), (2, 502)]), (8, [(2, 500)])],
        ["ticket request pages", "request ticket pages", "request pages ticket"],
    ):
        with subtests.test(
            "the delta is written in whatever order things come",
            prefix_len=prefix_len,
            moved=moved,
            order=order,
        ):
            rank = Rank()
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
            assert rank.outcome.bytes_moved == rank.transfers.bytes_moved_total == len(moved) * 100
            assert rank.transfers.open_transfers == 0

    with subtests.test("a full hit lands without waiting for the compute"):
        rank = Rank()
        rank.ticket(prompt_len=8, prefix_len=8)
        rank.request(prompt_len=8)
        rank.turn()
        assert rank.take_said() == ["accepted", "landed"]
        assert rank.last.status.hit == pb.HIT_KIND_FULL
        assert rank.outcome.outcome is Outcome.LANDED
        rank.pages(0, 8)
        rank.turn()
        assert rank.transport.writes == []

    with subtests.test("pages are written as they come neighbours in one piece"):
        rank = Rank()
        rank.ticket(prompt_len=20)
        rank.request(prompt_len=20)
        rank.pages(0, 8)
        rank.turn()
        rank.pages(8, 20)
        rank.turn()
        pieces = [
            [(m.source_page, m.target_page, m.num_pages) for m in w.moves] for w in rank.transport.writes
        ]
        assert pieces == [[(0, 500, 2)], [(2, 502, 3)]]


def test_posts_are_bounded(subtests):
    with subtests.test("a long post is split and every piece must land"):
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

    with subtests.test("however long a delta few posts are in flight"):
        # When the lease ends, no more than those may be on their way: the fence's margin is made for them.
        rank = Rank(max_post_bytes=100)
        rank.ticket(prompt_len=40)
        rank.request(prompt_len=40)
        rank.pages(0, 40)
        for posted in range(2, 11):
            rank.turn()
            assert (len(rank.transport.writes), rank.transfers.writes_in_flight) == (posted, 2)
            rank.transport.writes[posted - 2].done = True
        rank.now_s = 110.0  # the lease is over, and all is posted
        rank.transport.land()
        rank.turn()
        assert rank.outcome.outcome is Outcome.LANDED

    with subtests.test("what is computed while posts are in flight goes out in one"):
        rank = Rank()
        rank.ticket(prompt_len=20)
        rank.request(prompt_len=20)
        for first in range(0, 20, 4):
            rank.pages(first, first + 4)
            rank.turn()
        rank.transport.writes[0].done = True
        rank.turn()
        assert [sum(write.group_bytes) for write in rank.transport.writes] == [100, 100, 300]


def test_digests(subtests):
    for prefix_len in [0, 8]:
        with subtests.test("the word that pages have landed brings their digests", prefix_len=prefix_len):
            rank = Rank()
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

    with subtests.test("who wants no digests gets none"):
        rank = Rank()
        rank.ticket()
        rank.request()
        rank.pages(0, 10)
        rank.turn()
        rank.transport.land()
        rank.turn()
        assert (rank.take_said(), rank.read) == (["accepted", "landed"], [])
        assert list(rank.last.status.page_digests) == []

    with (
        subtests.test("digests take turns with other transfers posts"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        rank = Rank()
        monkeypatch.setattr(transfers_module, "_DIGEST_PIECE_BYTES", 2 * LAYOUT.page_bytes)
        rank.ticket(A, prompt_len=20, want_digests=True)
        rank.request(A, prompt_len=20)
        rank.pages(0, 20, A)
        rank.transfers.turn()
        rank.transport.land()
        rank.ticket(B, prompt_len=4, pages=[600])
        rank.request(B, prompt_len=4)
        rank.pages(0, 4, B)
        rank.take_said()
        assert rank.transfers.turn()
        assert (len(rank.read), len(rank.transport.writes), rank.take_said()) == (4, 2, [])
        assert rank.transfers.turn()
        assert (len(rank.read), rank.take_said()) == (5, ["landed"])

    for end in ["fails", "is aborted"]:
        with (
            subtests.test("nothing is digested for a transfer that is over", end=end),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            rank = Rank()
            monkeypatch.setattr(transfers_module, "_DIGEST_PIECE_BYTES", 1)
            rank.ticket(want_digests=True)
            rank.request()
            rank.pages(0, 10)
            rank.transfers.turn()
            if end == "fails":
                rank.transport.writes[0].failure = "cut"
            else:
                rank.transfers.abort(1, A)
                rank.transport.land()
            rank.turn()
            assert rank.take_said() == ["accepted", "failed" if end == "fails" else "ack"]
            assert len(rank.read) == 1


def test_tickets_that_are_refused_or_sent_back(subtests):
    for (ticket, reason), requested in product(
        [
            ({"generation": 6}, "generation"),
            ({"pages": range(2)}, "covers 3 pages"),
            ({"pages": [1, 2, 2]}, "twice"),
            ({"pages": [1, 2, 1000]}, "outside"),
            ({"prefix_len": 11}, "not one of 10 tokens"),
        ],
        [False, True],
    ):
        with subtests.test(
            "a wrong ticket is refused with the reason", ticket=ticket, reason=reason, requested=requested
        ):
            rank = Rank()
            if requested:
                rank.request()
            rank.ticket(**ticket)
            assert rank.take_said() == ["refused"]
            assert reason in rank.last.status.reason
            assert [reason in end.error for _, end in rank.ends] == [True] * requested
            assert rank.transfers.open_transfers == 0

    for requested in [False, True]:
        with subtests.test(
            "a ticket that starts within a page is sent back and the transfer waits on", requested=requested
        ):
            rank = Rank()
            if requested:
                rank.request()
            rank.ticket(prefix_len=6, pages=range(500, 502))
            assert rank.take_said() == ["renegotiate"]
            assert rank.last.status.start == 4
            assert rank.transfers.open_transfers == requested
            rank.ticket(prefix_len=4)
            if not requested:
                rank.request()
            rank.pages(0, 10)
            rank.turn()
            rank.transport.land()
            rank.turn()
            assert rank.take_said() == ["accepted", "landed"]
            assert rank.moved == [(1, 500), (2, 501)]

    with subtests.test("a transfer that waits for a better ticket does not wait for ever"):
        rank = Rank()
        rank.request()
        rank.ticket(prefix_len=6, pages=range(500, 502))
        rank.now_s = 130.0
        rank.turn()
        assert rank.outcome.error == "no ticket came for the transfer in time"
        rank.ticket(prefix_len=6, pages=range(500, 502))
        assert rank.take_said() == ["renegotiate", "failed"]

    for first in ["ticket", "request"]:
        with subtests.test("ticket and request must mean the same prompt", first=first):
            rank = Rank()
            if first == "ticket":
                rank.ticket(prompt_len=12)
                rank.request(prompt_len=10)
                assert rank.take_said() == ["accepted", "failed"]
            else:
                rank.request(prompt_len=10)
                rank.ticket(prompt_len=12)
                assert rank.take_said() == ["refused"]
            assert "12 prompt tokens" in rank.outcome.error

    with subtests.test("an unreachable peer is told so at its ticket"):
        rank = Rank(refuses="no route")
        rank.request()
        rank.ticket()
        assert rank.take_said() == ["refused"]
        assert rank.outcome.error == rank.last.status.reason == "no route"


def test_a_transfer_has_one_ticket_and_one_decode_rank(subtests):
    for posted in [False, True]:
        with subtests.test(
            "a second ticket ends the transfer but no word is the last before the writes are over",
            posted=posted,
        ):
            rank = Rank()
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

    with subtests.test("a ticket that cannot be read is refused or ends what runs"):
        rank = Rank()
        rank.transfers.refuse(1, A, "garbled")
        assert rank.take_said() == ["refused"]
        rank.ticket(B)
        rank.transfers.refuse(1, B, "garbled")
        assert rank.take_said() == ["accepted", "failed"]

    with subtests.test("a transfer belongs to one decode rank"):
        rank = Rank()
        rank.link_up(2, OTHER_DECODE)
        rank.ticket(link_id=1)
        rank.take_said()
        rank.ticket(link_id=2)
        rank.transfers.abort(2, A)
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
            yield lambda f=first, n=last, p=pages: rank.transfers.pages_ready(
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
