"""A prefill rank's rooms with a transport that lands when told to and a clock that stands still."""

from dataclasses import dataclass, field

from services.kv.transfer_plan import runs_of
from services.transfer.base import Unsettled
from services.transfer.hello import Hello
from services.transfer.prefill.room import Request
from services.transfer.prefill.rooms import RoomTable
from services.values.errors import PeerFailed
from services.values.kv import KvLayout, KvTicket, PageId, PoolMemory
from services.values.rank import Generation, RankId, Room
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
    peer: str = ""
    done: bool = False
    failure: str = ""
    unsettled: bool = False
    released: bool = False

    @property
    def size_bytes(self):
        return sum(move.num_pages for move in self.moves) * LAYOUT.page_bytes

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
    fails_posts: type | None = None  # with which error, although pieces of it may be on their way
    writes: list = field(default_factory=list)
    peers: set = field(default_factory=set)

    def add_peer(self, metadata, memory):
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
        self.writes.append(FakeWrite(list(moves), peer))
        return self.writes[-1]

    def land(self):
        for write in self.writes:
            write.done = True


def page_of(page):
    """Its bytes in the rank's pool."""
    return memoryview(page.to_bytes(LAYOUT.page_bytes))


class Rank:
    """A prefill rank with one link to DECODE."""

    def __init__(self, max_post_bytes=1 << 20, network=None, **transport):
        self.now_s = 100.0
        self.unheard_s = 0.0  # as after a stop of the process
        self.transport = network or FakeTransport(**transport)
        self.read = []
        self.rooms = RoomTable(
            self.transport,
            LAYOUT,
            OWN,
            lambda: self.now_s,
            max_post_bytes,
            self.read_pages,
            heard_s=lambda: self.now_s - self.unheard_s,
        )
        self.said, self.ends, self.failed = [], [], []
        self.link_up(1)

    def read_pages(self, pages):
        self.read += pages
        return map(page_of, pages)

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

    def ticket(
        self,
        room=A,
        prompt_len=10,
        prefix_len=0,
        link_id=1,
        until_s=110.0,
        generation=7,
        pages=None,
        want_digests=False,
    ):
        num_pages = -(-prompt_len // PAGE) - prefix_len // PAGE
        runs = runs_of(pages if pages is not None else range(500, 500 + num_pages))
        ticket = KvTicket(
            room, Generation(generation), prompt_len, prefix_len, runs, until_s, want_digests=want_digests
        )
        self.rooms.ticket(link_id, ticket)

    def request(self, room=A, prompt_len=10, decode=DECODE, timeout_s=30.0):
        request = Request(
            prompt_len,
            decode,
            lambda end: self.ends.append((room, end)),
            self.now_s + timeout_s,
            lambda end: self.failed.append((room, end)),
        )
        self.rooms.open_room(room, request)

    def pages(self, start, end, room=A, first=0):
        count = -(-end // PAGE) - start // PAGE
        pages = [PageId(first + start // PAGE + i) for i in range(count)]
        self.rooms.pages_ready(room, start, end, pages)

    def write(self, room):
        """The room's pages are posted."""
        self.request(room=room)
        self.ticket(room=room)
        self.pages(0, 10, room=room)
        self.turn()
        return self.transport.writes[-1]

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
