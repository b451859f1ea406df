"""These tests show what a sender does at its end with writes that do not end."""

import logging
import weakref

from services.transfer.hello import Hello
from services.transfer.sending import sender as sender_module
from services.transfer.sending.sender import KvSender
from services.transfer.sending.sending_transfer import Outcome
from services.values.errors import PeerFailed
from services.values.kv import KvLayout, KvTicket, PageId, PageRun, PoolMemory
from services.values.rank import Generation, RankId, TransferId
from services.wire.isthmus.v1 import handshake_pb2

PAGE = 4
LAYOUT = KvLayout(PAGE, 256, model_fingerprint=1)
POOL = PoolMemory(0, 32)
OWN = RankId("prefill", 0, Generation(7))
DECODE = RankId("decode", 0, Generation(8))


class EndlessWrite:
    group_bytes = (256,)

    def poll(self):
        return False

    def release(self):
        raise AssertionError("it has not ended")


class EndlessTransport:
    """Whoever holds one of its writes keeps it alive, as NIXL's agent is kept."""

    name = "endless"

    def __init__(self, error=None):
        self.writes, self.error, self.closed = weakref.WeakSet(), error, False

    def register(self, memories, unit_bytes):
        pass

    def metadata(self):
        return b""

    def add_peer(self, metadata, memories):
        return "decode"

    def remove_peer(self, peer):
        raise AssertionError("a write to it is under way")

    def write(self, peer, moves):
        write = EndlessWrite()
        self.writes.add(write)
        return write

    def close(self):
        self.closed = True
        if self.error is not None:
            raise self.error


def test_pages_come_back_once_nothing_reads_them_any_more(subtests, monkeypatch, caplog):
    monkeypatch.setattr(sender_module, "_STOP_TIMEOUT_S", 0.05)
    for error in (None, PeerFailed("NIXL does not forget the peer")):
        with subtests.test(error=error):
            caplog.clear()
            check_end(error, caplog)


def check_end(error, caplog):
    transport = EndlessTransport(error)
    sender = KvSender(lambda: transport, (POOL,), LAYOUT, OWN, read_pages=lambda pages, group: iter(()))
    sender.start()
    said, ends = [], []
    sender.hello(1, Hello(DECODE, LAYOUT, POOL, "endless", b""), said.append)
    for transfer_id in (TransferId(1), TransferId(2)):
        sender.open_transfer(
            transfer_id, PAGE, DECODE, lambda end: ends.append((end, transport.closed, len(transport.writes)))
        )
        sender.pages_ready(transfer_id, 0, PAGE, [PageId(0)])
        runs = (PageRun(int(transfer_id), 1),)
        sender.ticket(
            1, KvTicket(transfer_id, OWN.generation, PAGE, 0, runs, write_until_s=sender.clock() + 600)
        )
    with caplog.at_level(logging.WARNING):
        assert not sender.stop()  # They may go on while the process lives.
    assert "kv_writes_left" in caplog.text and "writes=2" in caplog.text
    assert ("kv_transport_close_failed" in caplog.text) == (error is not None)
    assert [(end.outcome, closed, writes) for end, closed, writes in ends] == [(Outcome.FAILED, True, 0)] * 2
    # Decode has heard no last word: its pages stay in quarantine until fence time.
    assert {message.status.state for message in said} == {handshake_pb2.Status.STATE_ACCEPTED}
