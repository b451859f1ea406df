"""Writes that fail, come late or never end: what is told, and which connection is not used again."""

from itertools import product

from services.transfer.sending.sending_transfer import Outcome
from services.transfer.transport import Unsettled
from services.values.errors import PeerFailed
from services.values.rank import TransferId
from transfer.sending.sending_rank import DECODE, A, B, C, D, Rank


def test_an_end_that_is_not_known_is_told_as_such(subtests):
    for word, where, error in product(
        ["failed", "ack"], ["at the post", "on its way"], [PeerFailed, Unsettled]
    ):
        with subtests.test("an end that is not known is told as such", word=word, where=where, error=error):
            # Decode may lend its pages again at once or not; the source pages stay as long.
            rank = Rank()
            rank.transport.fails_posts = error if where == "at the post" else None
            rank.ticket(until_s=110.0)
            rank.request()
            rank.pages(0, 10)
            rank.turn()
            if where == "on its way":
                if word == "ack":
                    rank.transfers.abort(1, A)
                rank.transport.writes[0].failure = "cut"
                rank.transport.writes[0].unsettled = error is Unsettled
                rank.turn()
            elif word == "ack":
                rank.transfers.abort(1, A)
            assert rank.take_said()[-1] == word
            unsettled = error is Unsettled
            assert (rank.last.status if word == "failed" else rank.last.abort_ack).unsettled == unsettled
            assert [transfer_id for transfer_id, _ in rank.failed] == [A]
            assert (len(rank.ends), rank.transfers.open_transfers) == (0 if unsettled else 1, 0)
            if unsettled:
                assert rank.transfers.next_deadline_s() == 115.0
                rank.now_s = 114.9
                rank.turn()
                assert rank.ends == []
                rank.now_s = 115.0
                rank.turn()
            assert rank.outcome.error
            assert rank.transfers.next_deadline_s() is None

    with subtests.test("that an end is not known is told again to who asks again"):
        # The word before went with its stream, perhaps.
        rank = Rank()
        failing = rank.write(A)
        failing.failure, failing.unsettled = "connection reset", True
        rank.turn()
        rank.transfers.link_lost(1)
        rank.link_up(2)
        rank.transfers.abort(2, A)
        assert rank.said[-1] == (2, "ack") and rank.last.abort_ack.unsettled

    with subtests.test("giving everything up lets go of unsettled pages too"):
        rank = Rank()
        failing = rank.write(A)
        failing.failure, failing.unsettled = "connection reset", True
        rank.turn()
        assert rank.ends == []
        rank.transfers.give_up_all()
        assert rank.outcome.error == "connection reset"
        rank.now_s = 1000.0
        rank.turn()
        assert len(rank.ends) == 1


def test_peers_after_a_failed_write(subtests):
    with subtests.test("a peer is reached anew after a write to it has failed"):
        # Its connection may be broken for good though the handshake's is not.
        rank = Rank()
        rank.write(A).failure = "connection reset"
        rank.turn()
        assert (rank.take_said(), rank.transport.peers) == (["accepted", "failed"], set())
        rank.write(B).done = True
        rank.turn()
        assert rank.take_said() == ["accepted", "landed"]

    with subtests.test("a peer in doubt is kept for those that write to it still"):
        rank = Rank()
        failing, other = rank.write(A), rank.write(B)
        failing.failure = "connection reset"
        rank.turn()
        assert rank.transport.peers == {str(DECODE)}
        rank.ticket(transfer_id=C)  # or the broken connection would never rest
        assert rank.take_said() == ["accepted", "accepted", "failed", "refused"]
        other.done = True
        rank.turn()
        assert rank.take_said() == ["landed"]
        assert rank.transport.peers == set()
        rank.ticket(transfer_id=D)
        assert rank.take_said() == ["accepted"]
        assert rank.transport.peers == {str(DECODE)}

    with subtests.test("an unreachable peer is tried again at the next ticket"):
        rank = Rank(refuses="no route")
        rank.ticket()
        rank.transport.refuses = ""
        rank.ticket(transfer_id=B)
        assert rank.take_said() == ["refused", "accepted"]


def test_writes_that_do_not_end(subtests):
    with subtests.test("a write that does not end fails its request and keeps the pages"):
        # Nothing is said to decode, for which it would be the last word.
        rank = Rank()
        stuck = rank.write(A)
        rank.now_s = 129.9
        rank.turn()
        assert (rank.failed, rank.take_said()) == ([], ["accepted"])
        rank.now_s = 130.0
        rank.turn()
        assert [(transfer_id, end.outcome, end.error) for transfer_id, end in rank.failed] == [
            (A, Outcome.FAILED, "a write has not ended in 30 s")
        ]
        rank.transfers.abort(1, A)
        rank.ticket(B)  # the connection is in doubt
        rank.turn()
        assert (rank.take_said(), rank.ends) == (["refused"], [])
        stuck.done = True
        rank.turn()
        assert (rank.take_said(), rank.last.abort_ack.unsettled) == (["ack"], False)
        assert [transfer_id for transfer_id, _ in rank.ends] == [A]
        rank.ticket(C)
        assert rank.take_said() == ["accepted"]

    with subtests.test("an aborted write that does not end puts its connection in doubt too"):
        rank = Rank()
        rank.write(A)
        rank.transfers.abort(1, A)
        rank.now_s = 130.0
        rank.turn()
        rank.ticket(B)
        assert rank.take_said() == ["accepted", "refused"]

    for end, aborted in product(["lands", "fails", "never"], [True, False]):
        with subtests.test("a write that goes on not ending is given up", end=end, aborted=aborted):
            # Its connection is not, before it ends.
            rank = Rank()
            stuck = rank.write(A)
            rank.now_s = 130.0
            rank.turn()
            if aborted:
                rank.transfers.abort(1, A)
            rank.take_said()
            rank.now_s = 429.9
            rank.turn()
            assert (rank.take_said(), rank.ends) == ([], [])
            rank.now_s = 430.0
            rank.turn()
            assert rank.take_said() == ["ack" if aborted else "failed"]
            assert (rank.last.abort_ack if aborted else rank.last.status).unsettled
            assert (rank.transfers.open_transfers, rank.transfers.writes_in_flight, rank.ends) == (0, 1, [])
            rank.now_s = 435.0
            rank.turn()
            assert [transfer_id for transfer_id, _ in rank.ends] == [A]
            rank.ticket(B, until_s=500.0)
            assert rank.take_said() == ["refused"]
            if end == "never":
                rank.transfers.give_up_all()
                assert rank.transfers.writes_in_flight == 0 and len(rank.ends) == 1
                continue
            stuck.done, stuck.failure = end == "lands", "cut" if end == "fails" else ""
            rank.turn()
            assert (rank.transfers.writes_in_flight, rank.transport.peers) == (0, set())
            rank.ticket(C, until_s=500.0)
            assert rank.take_said() == ["accepted"]


def test_writes_that_are_slow_are_not_late(subtests):
    with subtests.test("on a slow path no write is late while others land until it must be"):
        rank = Rank()
        rank.write(A)
        rank.transfers.renew(1, A, 1000.0)
        for transfer_id in range(20, 34):
            rank.now_s += 20.0
            rank.ticket(TransferId(transfer_id), until_s=1000.0)
            rank.request(TransferId(transfer_id))
            rank.pages(0, 10, TransferId(transfer_id))
            rank.turn()
            rank.transport.writes[-1].done = True
            rank.turn()
        assert (rank.now_s, rank.failed) == (380.0, [])
        rank.now_s = 400.0
        rank.turn()
        assert [transfer_id for transfer_id, _ in rank.failed] == [A]

    with subtests.test("a write that landed while the rank stood still is not late"):
        rank = Rank()
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
