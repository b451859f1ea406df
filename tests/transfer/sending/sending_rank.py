"""A prefill rank's transfers with a transport that lands when told to and a clock that stands still."""

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from services.kv.tails import tail_pages, units_at
from services.kv.ticket import targets_of
from services.kv.transfer_plan import runs_of
from services.transfer.hello import Hello
from services.transfer.sending.sending_transfer import Request
from services.transfer.sending.transfers import TransferTable
from services.transfer.transport import Unsettled
from services.values.errors import PeerFailed
from services.values.kv import GroupKind, KvGroup, KvLayout, KvTicket, PageId, PoolMemory
from services.values.rank import Generation, RankId, TransferId
from services.wire.isthmus.v1 import handshake_pb2 as pb

PAGE = 4  # tokens
LAYOUT = KvLayout(PAGE, page_bytes=100, model_fingerprint=1)
HYBRID = replace(
    LAYOUT,
    groups=(
        KvGroup(GroupKind.FULL_ATTENTION, (3,), 1, 8, "float32"),
        KvGroup(GroupKind.SLIDING_WINDOW, (1,), 1, 8, "float32", window=6, unit_bytes=30),
        KvGroup(GroupKind.RECURRENT, (0, 2), 0, 0, "float32", unit_bytes=450),
    ),
)
OWN = RankId("prefill", 0, Generation(7))
DECODE = RankId("decode", 0, Generation(8))
OTHER_DECODE = RankId("decode", 1, Generation(9))
POOL = PoolMemory(0, 1000)
A, B, C, D = TransferId(0xA), TransferId(0xB), TransferId(0xC), TransferId(0xD)


@dataclass(eq=False)
class FakeWrite:
    moves: list
    peer: str
    unit_bytes: tuple
    done: bool = False
    failure: str = ""
    unsettled: bool = False
    released: bool = False

    @property
    def group_bytes(self):
        return tuple(
            sum(move.num_pages * size for move in self.moves if move.group == group)
            for group, size in enumerate(self.unit_bytes)
        )

    def poll(self):
        assert not self.released
        if self.failure:
            raise (Unsettled if self.unsettled else PeerFailed)(self.failure)
        return self.done

    def release(self):
        assert (self.done or self.failure) and not self.released
        self.released = True


@dataclass
class FakeTransport:
    name: str = "fake"
    refuses: str = ""
    unit_bytes: tuple = LAYOUT.unit_bytes
    fails_posts: type | None = None  # with which error, although pieces of it may be on their way
    writes: list = field(default_factory=list)
    peers: set = field(default_factory=set)

    def add_peer(self, metadata, memories):
        assert len(memories) == len(self.unit_bytes)
        if self.refuses:
            raise PeerFailed(self.refuses)
        self.peers.add(metadata.decode())
        return metadata.decode()

    def remove_peer(self, peer):
        assert all(write.released for write in self.writes if write.peer == peer), "a write is under way"
        self.peers.discard(peer)

    def write(self, peer, moves):
        if peer not in self.peers:
            raise PeerFailed(f"no peer {peer} is known")
        if self.fails_posts is not None:
            raise self.fails_posts("the post failed")
        self.writes.append(FakeWrite(list(moves), peer, self.unit_bytes))
        return self.writes[-1]

    def land(self):
        for write in self.writes:
            write.done = True


def page_of(page, group=0):
    """Its bytes in the rank's pool of the group."""
    return memoryview(bytes([group]) + page.to_bytes(LAYOUT.page_bytes))


class Rank:
    """A prefill rank with one link to DECODE.

    The targets of a HYBRID's ticket are the pages 600 and on of group 1 and slot 70 of group 2; what it has
    computed for them lies in the pages 30 and on, by position, and in slot 7.
    """

    def __init__(self, max_post_bytes=1 << 20, network=None, layout=LAYOUT, **transport):
        self.layout = layout
        self.now_s = 100.0
        self.unheard_s = 0.0  # as after a stop of the process
        self.transport = network or FakeTransport(unit_bytes=layout.unit_bytes, **transport)
        self.read = []
        self.transfers = TransferTable(
            self.transport,
            layout,
            OWN,
            lambda: self.now_s,
            max_post_bytes,
            self.read_pages,
            heard_s=lambda: self.now_s - self.unheard_s,
        )
        self.said, self.ends, self.failed = [], [], []
        self.link_up(1)

    def read_pages(self, pages, group=0):
        self.read += pages if group == 0 else [(group, page) for page in pages]
        return (page_of(page, group) for page in pages)

    def link_up(self, link_id, decode=DECODE):
        carried = (POOL,) * len(self.layout.carried)
        hello = Hello(decode, self.layout, POOL, "fake", str(decode).encode(), carried)
        self.transfers.link_up(link_id, hello, self.hear(link_id))

    def hear(self, link_id):
        def send(message):
            if message.WhichOneof("message") == "abort_ack":
                self.said.append((link_id, "ack"))
            else:
                name = pb.Status.State.Name(message.status.state).removeprefix("STATE_").lower()
                self.said.append((link_id, name))
            self.last = message

        return send

    def ticket(
        self,
        transfer_id=A,
        prompt_len=10,
        prefix_len=0,
        link_id=1,
        until_s=110.0,
        generation=7,
        pages=None,
        want_digests=False,
        targets=None,
    ):
        num_pages = -(-prompt_len // PAGE) - prefix_len // PAGE
        runs = runs_of(pages if pages is not None else range(500, 500 + num_pages))
        ticket = KvTicket(
            transfer_id,
            Generation(generation),
            prompt_len,
            prefix_len,
            runs,
            until_s,
            self.targets(prompt_len) if targets is None else targets,
            want_digests=want_digests,
        )
        self.transfers.ticket(link_id, ticket)

    def targets(self, prompt_len):
        counts = [units_at(group, prompt_len, PAGE) for group in self.layout.carried]
        firsts = (600, 70)
        units = [range(first, first + count) for first, count in zip(firsts, counts, strict=False)]
        return targets_of(self.layout, prompt_len, units)

    def request(self, transfer_id=A, prompt_len=10, decode=DECODE, timeout_s=30.0):
        request = Request(
            prompt_len,
            decode,
            lambda end: self.ends.append((transfer_id, end)),
            self.now_s + timeout_s,
            lambda end: self.failed.append((transfer_id, end)),
        )
        self.transfers.open_transfer(transfer_id, request)

    def pages(self, start, end, transfer_id=A, first=0):
        count = -(-end // PAGE) - start // PAGE
        pages = [PageId(first + start // PAGE + i) for i in range(count)]
        self.transfers.pages_ready(transfer_id, start, end, pages)

    def carried(self, prompt_len=10, transfer_id=A):
        tail = [PageId(30 + page) for page in tail_pages(self.layout.groups[1], prompt_len, PAGE)]
        self.transfers.carried_ready(transfer_id, (tail, [PageId(7)]))

    def write(self, transfer_id):
        """All that the transfer writes is posted."""
        self.request(transfer_id=transfer_id)
        self.ticket(transfer_id=transfer_id)
        self.pages(0, 10, transfer_id=transfer_id)
        if self.layout.carried:
            self.carried(transfer_id=transfer_id)
        self.turn()
        return self.transport.writes[-1]

    def turn(self):
        """Turn until nothing more happens by itself."""
        while self.transfers.turn():
            pass

    def interleave(self, events, data):
        """Between them some of what is posted lands, as hypothesis draws; then all, until its end."""
        for event in events:
            event()
            for _ in range(data.draw(st.integers(0, 3))):
                self.transfers.turn()
                unlanded = [write for write in self.transport.writes if not write.done]
                if unlanded and data.draw(st.booleans()):
                    data.draw(st.sampled_from(unlanded)).done = True
        while not self.ends:
            self.turn()
            self.transport.land()

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
        return [pair for write in self.transport.writes for pair in moved_by(write, 0)]

    @property
    def carried_by_post(self):
        """For each post: (group, source unit, target unit) beside full attention's."""
        groups = range(1, len(self.layout.groups))
        return [
            [(group, *pair) for group in groups for pair in moved_by(write, group)]
            for write in self.transport.writes
        ]


def moved_by(write, group):
    return [
        (move.source_page + i, move.target_page + i)
        for move in write.moves
        if move.group == group
        for i in range(move.num_pages)
    ]
