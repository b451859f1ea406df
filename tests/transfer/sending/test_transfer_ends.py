"""These tests show how transfers end: aborts, lost links, failures, wrong pages, and what is remembered of
them."""

import pytest

from services.transfer.sending import transfers as transfers_module
from services.transfer.sending.delta_write import Sources
from services.transfer.sending.sending_transfer import Outcome, Request
from services.values.rank import TransferId
from transfer.sending.sending_rank import DECODE, OTHER_DECODE, A, B, Rank


def test_aborts(subtests):
    for state in ["unknown", "ticketed", "requested", "writing"]:
        with subtests.test("an abort is acknowledged at once when no write is posted", state=state):
            rank = Rank()
            if state in ("ticketed", "writing"):
                rank.ticket()
            if state in ("requested", "writing"):
                rank.request()
            rank.take_said()
            rank.transfers.abort(1, A)
            rank.turn()
            assert rank.take_said() == ["ack"]
            assert [end.outcome for _, end in rank.ends] == [Outcome.ABORTED] * (
                state in ("requested", "writing")
            )
            # A late ticket or request meets the tombstone.
            rank.ticket()
            assert rank.take_said() == ["refused"]
            rank.ends.clear()
            rank.request()
            assert rank.outcome.error
            assert rank.transfers.open_transfers == 0

    for end in ["lands", "fails"]:
        with subtests.test("an abort is acknowledged only when the posted writes are over", end=end):
            rank = Rank(max_post_bytes=100)
            rank.ticket()
            rank.request()
            rank.pages(0, 8)
            rank.turn()
            rank.take_said()

            rank.transfers.abort(1, A)
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
            rank.transfers.abort(1, A)
            assert rank.take_said() == ["ack"]

    for when in ["while writing", "afterwards"]:
        with subtests.test("an abort on a new link is acknowledged there", when=when):
            rank = Rank()
            rank.ticket()
            rank.request()
            rank.pages(0, 10)
            rank.turn()
            rank.transfers.link_lost(1)
            rank.link_up(2)
            rank.take_said()
            if when == "while writing":
                rank.transfers.abort(2, A)
                assert rank.said == []
            rank.transport.land()
            rank.turn()
            if when == "afterwards":
                rank.said.clear()
                rank.transfers.abort(2, A)
            assert rank.said == [(2, "ack")]


def test_failures_are_told_with_their_reason(subtests):
    with subtests.test("a failed write fails the transfer when the others are over"):
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

    with subtests.test("who called is told of a failure at once and of the end when the writes are over"):
        rank = Rank(max_post_bytes=100)
        rank.ticket()
        rank.request()
        rank.pages(0, 10)
        rank.turn()
        rank.transport.writes[0].failure = "cut"
        rank.turn()
        assert ([(transfer_id, end.error) for transfer_id, end in rank.failed], rank.ends) == (
            [(A, "cut")],
            [],
        )
        rank.transport.land()
        rank.turn()
        assert (len(rank.failed), rank.outcome.error) == (1, "cut")

    for when in ["ticketed", "before the ticket"]:
        with subtests.test("why a request failed is told to decode", when=when):
            rank = Rank()
            rank.request()
            if when == "ticketed":
                rank.ticket()
            rank.transfers.fail_transfer(A, "out of memory")
            rank.turn()
            if when == "before the ticket":
                rank.ticket()
            assert (rank.take_said()[-1], rank.last.status.reason) == ("failed", "out of memory")
            assert (rank.outcome.outcome, rank.outcome.error) == (Outcome.FAILED, "out of memory")

    for calls in [
        [(4, 8)],
        [(0, 4), (0, 4)],
        [(0, 4), (8, 10)],
        [(0, 6)],
        [(0, 12)],
        [(2, 8)],
        [(0, 10), (8, 10)],
    ]:
        with subtests.test("pages out of order fail the transfer and are not written", calls=calls):
            rank = Rank()
            rank.request()
            for start, end in calls:
                rank.pages(start, end)
            rank.turn()
            assert rank.outcome.outcome is Outcome.FAILED
            assert rank.transport.writes == []


def test_lost_links(subtests):
    with subtests.test("a lost link ends its transfers but the peer stays until the writes are over"):
        rank = Rank()
        rank.link_up(2, OTHER_DECODE)
        rank.ticket(A)
        rank.request(A)
        rank.pages(0, 10)
        rank.turn()
        rank.ticket(B)
        rank.request(TransferId(0xC))  # its ticket can come no more
        rank.ticket(TransferId(0xD), link_id=2)
        rank.take_said()

        rank.transfers.link_lost(1)
        rank.turn()
        assert [transfer_id for transfer_id, _ in rank.ends] == [0xC]
        assert rank.transport.peers == {str(DECODE), str(OTHER_DECODE)}
        rank.transport.land()
        rank.turn()

        assert [transfer_id for transfer_id, _ in rank.ends] == [0xC, A]
        assert {end.outcome for _, end in rank.ends} == {Outcome.FAILED}
        assert rank.transport.peers == {str(OTHER_DECODE)}
        assert rank.transfers.open_transfers == 1
        rank.transfers.link_lost(1)  # said twice: nothing

    with subtests.test("a request outlives the link when decode has another"):
        rank = Rank()
        rank.request()
        rank.link_up(2)
        rank.transfers.link_lost(1)
        rank.ticket(link_id=2)
        assert (rank.take_said(), rank.ends) == (["accepted"], [])
        assert rank.transport.peers == {str(DECODE)}


def test_cancels_and_stops(subtests):
    for ticketed in [False, True]:
        with subtests.test("a cancelled request ends when its writes have", ticketed=ticketed):
            rank = Rank()
            rank.request()
            if ticketed:
                rank.ticket()
                rank.pages(0, 10)
                rank.turn()
                rank.transfers.cancel_transfer(A)
                rank.turn()
                assert rank.ends == []
                rank.transport.land()
                rank.turn()
                assert rank.take_said() == ["accepted", "failed"]
            else:
                rank.transfers.cancel_transfer(A)
                assert rank.ends
                rank.ticket()
                assert rank.take_said() == ["failed"]
            assert rank.outcome.outcome is Outcome.ABORTED
            rank.transfers.cancel_transfer(A)
            rank.pages(0, 10)

    with subtests.test("stopping fails every transfer"):
        rank = Rank()
        rank.ticket(A)
        rank.request(A)
        rank.pages(0, 10)
        rank.turn()
        rank.ticket(B)
        rank.request(TransferId(0xC))
        rank.take_said()
        rank.transfers.fail_all("the rank is stopping")
        rank.turn()
        assert (
            rank.take_said(),
            [transfer_id for transfer_id, _ in rank.ends],
            rank.transfers.open_transfers,
        ) == (
            ["failed"],
            [0xC],
            1,
        )
        rank.transfers.give_up_all()
        assert [transfer_id for transfer_id, _ in rank.ends] == [0xC, A]


def test_tombstones(subtests):
    with subtests.test("a transfer that is over keeps nothing of what it was told"):
        # Thousands are remembered, and a ticket names every page of a prompt.
        rank = Rank()
        rank.write(A).done = True
        rank.turn()
        (over,) = rank.transfers._tombstones.values()
        assert (over.ticket, over.link, over.sources, over.delta) == (None, None, Sources(), None)
        rank.transfers.abort(1, A)
        assert rank.take_said() == ["accepted", "landed", "ack"]

    with subtests.test("tombstones are bounded"), pytest.MonkeyPatch.context() as monkeypatch:
        rank = Rank()
        monkeypatch.setattr(transfers_module, "_MAX_TOMBSTONES", 3)
        for transfer_id in range(10):
            rank.transfers.abort(1, TransferId(transfer_id))
        rank.take_said()
        rank.ticket(TransferId(9))
        rank.ticket(TransferId(0))  # forgotten: it will end with its lease
        assert rank.take_said() == ["refused", "accepted"]


def test_an_engine_that_raises_does_not_harm_the_other_transfers(rank, caplog):
    def raises(end):
        raise RuntimeError("the loop is closed")

    rank.transfers.open_transfer(A, Request(10, DECODE, raises, 101.0))
    rank.request(B, timeout_s=2.0)
    rank.now_s = 103.0
    rank.turn()
    assert rank.outcome.outcome is Outcome.FAILED
    assert "kv_end_callback_failed" in caplog.text
