"""A peer that the transport does not forget costs a line in the log, and nothing else."""

from services.transfer.hello import Hello
from services.transfer.sending.sending_transfer import Outcome, Request
from services.transfer.sending.transfers import TransferTable
from services.values.errors import PeerFailed
from services.values.kv import KvLayout, KvTicket, PageRun, PoolMemory
from services.values.rank import Generation, RankId, TransferId
from services.wire.isthmus.v1 import handshake_pb2

PAGE = 4
LAYOUT = KvLayout(PAGE, 256, model_fingerprint=1)
POOL = PoolMemory(0, 32)
OWN = RankId("prefill", 0, Generation(7))
GONE, OTHER = (RankId("decode", rank, Generation(8)) for rank in range(2))


class LandedWrite:
    group_bytes = (256,)

    def poll(self):
        return True

    def release(self):
        pass


class ClingingTransport:
    """Forgets no peer."""

    def __init__(self):
        self.added, self.asked_to_forget = [], []

    def add_peer(self, metadata, memories):
        self.added.append(metadata)
        return metadata.decode()

    def remove_peer(self, peer):
        self.asked_to_forget.append(peer)
        raise PeerFailed("NIXL does not forget the peer")

    def write(self, peer, moves):
        return LandedWrite()


def transfer(transfers, number, link_id, decode):
    """What becomes of a page's way to the decode rank."""
    ends = []
    transfers.open_transfer(TransferId(number), Request(PAGE, decode, ends.append, 1e9))
    transfers.pages_ready(TransferId(number), 0, PAGE, [0])
    transfers.ticket(link_id, KvTicket(TransferId(number), OWN.generation, PAGE, 0, (PageRun(1, 1),), 1e9))
    while transfers.turn():
        pass
    return [end.outcome for end in ends]


def test_others_are_written_to_and_so_is_who_comes_back(caplog):
    transport, said = ClingingTransport(), []
    transfers = TransferTable(transport, LAYOUT, OWN, lambda: 0.0, 1 << 20, lambda page: memoryview(b""))
    for link_id, decode in enumerate((GONE, OTHER)):
        transfers.link_up(link_id, Hello(decode, LAYOUT, POOL, "fake", str(decode).encode()), said.append)
    assert transfer(transfers, 1, 0, GONE) == [Outcome.LANDED]
    transfers.link_lost(0)
    assert transport.asked_to_forget == [str(GONE)] and f"kv_peer_kept peer={GONE}" in caplog.text
    assert transfer(transfers, 2, 1, OTHER) == [Outcome.LANDED]
    transfers.link_up(2, Hello(GONE, LAYOUT, POOL, "fake", str(GONE).encode()), said.append)
    assert transfer(transfers, 3, 2, GONE) == [Outcome.LANDED]
    assert transport.added == [str(GONE).encode(), str(OTHER).encode(), str(GONE).encode()]
    assert [m.status.state for m in said].count(handshake_pb2.Status.STATE_LANDED) == 3
