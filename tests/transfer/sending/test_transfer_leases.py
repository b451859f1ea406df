"""These tests show how long a transfer may wait and write: its lease, its other half, and a rank that stood
still."""

from services.transfer.sending.sending_transfer import Outcome
from transfer.sending.sending_rank import DECODE, OTHER_DECODE, A, B, Rank


def test_the_end_of_a_lease(subtests):
    with subtests.test("nothing is posted at or past the end of the lease"):
        rank = Rank()
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

    with subtests.test("a renewed lease is longer never shorter"):
        rank = Rank()
        rank.link_up(2, OTHER_DECODE)
        rank.ticket(until_s=110.0)
        rank.request()
        rank.transfers.renew(1, A, 120.0)
        rank.transfers.renew(1, A, 105.0)
        rank.transfers.renew(2, A, 999.0)  # another decode rank has no say
        rank.transfers.renew(1, B, 999.0)
        rank.now_s = 119.9
        rank.pages(0, 8)
        rank.turn()
        assert len(rank.moved) == 2
        rank.now_s = 120.0
        rank.pages(8, 10)
        rank.turn()
        assert len(rank.moved) == 2


def test_each_half_waits_for_the_other(subtests):
    with subtests.test("each half waits for the other so long and no longer"):
        rank = Rank()
        rank.ticket(A, until_s=110.0)
        rank.request(B, timeout_s=20.0)
        rank.now_s = 109.9
        rank.turn()
        assert (rank.take_said(), rank.ends, rank.transfers.next_deadline_s()) == (["accepted"], [], 110.0)
        rank.now_s = 110.0
        rank.turn()
        assert (rank.take_said(), rank.ends, rank.transfers.next_deadline_s()) == (["failed"], [], 120.0)
        rank.now_s = 120.0
        rank.turn()
        assert rank.outcome.error == "no ticket came for the transfer in time"
        rank.ticket(B)  # too late
        assert rank.take_said() == ["failed"]
        assert rank.transfers.next_deadline_s() is None

    for first in ["ticket", "request"]:
        with subtests.test("the other half that came in time is not too late after a stop", first=first):
            rank = Rank()
            second = {"ticket": "request", "request": "ticket"}[first]
            options = {"ticket": {"until_s": 110.0}, "request": {"timeout_s": 10.0}}
            getattr(rank, first)(**options[first])
            rank.turn()
            rank.now_s, rank.unheard_s = 150.0, 50.0
            rank.turn()
            assert not rank.ends and "failed" not in rank.take_said()
            getattr(rank, second)(**{"ticket": {"until_s": 160.0}, "request": {}}[second])
            rank.transfers.renew(1, A, 160.0)
            rank.pages(0, 10)
            rank.turn()
            rank.transport.land()
            rank.turn()
            assert rank.outcome.outcome is Outcome.LANDED


def test_a_lease_of_a_rank_that_stood_still(subtests):
    with subtests.test("a lease that was renewed in time holds though the rank stood still"):
        # Nothing is posted past what is known of the lease, and the transfer waits until all was heard.
        rank = Rank()
        rank.ticket(until_s=110.0)
        rank.request()
        rank.turn()
        rank.now_s, rank.unheard_s = 115.0, 15.0
        rank.pages(0, 10)
        rank.turn()
        assert not rank.transport.writes and not rank.failed
        assert rank.transfers.next_deadline_s() == 110.0  # the thread looks again
        rank.transfers.renew(1, A, 120.0)  # it was in a socket
        rank.turn()
        assert len(rank.transport.writes) == 1
        rank.transport.land()
        rank.turn()
        assert rank.outcome.outcome is Outcome.LANDED

    with subtests.test("a lease that was not renewed is over once all was heard"):
        rank = Rank()
        rank.ticket(until_s=110.0)
        rank.request()
        rank.turn()
        rank.now_s, rank.unheard_s = 115.0, 15.0
        rank.pages(0, 10)
        rank.turn()
        rank.unheard_s = 0.0
        rank.turn()
        assert not rank.transport.writes and "lease is over" in rank.outcome.error
