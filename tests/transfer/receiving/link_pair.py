"""Decode's links and prefill ranks in one process: real gRPC, real threads, writes that wait for a gate."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace

from services.kv.ticket import targets_of
from services.kv.transfer_plan import runs_of
from services.net import servers
from services.transfer.local import LocalTransport
from services.transfer.open_transport import open_transport
from services.transfer.receiving.sender_links import SenderConnections
from services.transfer.sending.handshake_server import HandshakeService
from services.transfer.sending.sender import KvSender
from services.transfer.transport import Unsettled
from services.values.kv import GroupKind, KvGroup, KvLayout, KvTicket, PageId
from services.values.rank import Generation, RankAddress, RankId, TransferId
from services.wire.isthmus.v1 import handshake_pb2_grpc

PAGE, PAGE_BYTES, NUM_PAGES = 4, 256, 32
LAYOUT = KvLayout(PAGE, PAGE_BYTES, model_fingerprint=1)
HYBRID = replace(
    LAYOUT,
    groups=(
        KvGroup(GroupKind.FULL_ATTENTION, (3,), 1, 8, "float32"),
        KvGroup(GroupKind.SLIDING_WINDOW, (1,), 1, 8, "float32", window=6, unit_bytes=96),
        KvGroup(GroupKind.RECURRENT, (0, 2), 0, 0, "float32", unit_bytes=5000),
    ),
)
DECODE = RankId("decode", 0, Generation(8))


async def until(holds, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


class GatedTransport(LocalTransport):
    """Local, but a write counts as landed only while the gate is open."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def write(self, peer, moves):
        if self.fails:
            raise Unsettled("the network is down")
        return GatedWrite(super().write(peer, moves), self.gate)


class GatedWrite:
    def __init__(self, write, gate):
        self.group_bytes, self.release, self._gate = write.group_bytes, write.release, gate

    def poll(self):
        return self._gate.is_set()


class FakeLink:
    """A stream on which nobody answers, to a writer whose clock is ours."""

    def __init__(self):
        self.asked = []

    def send_abort(self, transfer_id):
        self.asked.append(transfer_id)

    def send_renewal(self, transfer_id, write_until_s):
        """Heard by nobody."""

    def lease_end_s(self, write_until_s):
        return write_until_s


class Prefill:
    """A prefill rank's sender with a pool for each group, and the server that may come and go before it."""

    def __init__(self, pools, transport, layout, generation=7):
        self.pools, self.transport = pools, transport
        self.id = RankId("prefill", 0, Generation(generation))
        self.skipped_s = 0.0  # of time, on its clock
        self.sender = KvSender(
            lambda: self.transport,
            tuple(pool.memory for pool in pools),
            layout,
            self.id,
            read_pages=lambda pages, group: (memoryview(pools[group].pages[page]) for page in pages),
            clock=lambda: time.monotonic() + self.skipped_s,
        )
        self.sender.start()
        self.server = None

    @property
    def pool(self):
        return self.pools[0]

    async def listen(self, port=0, lend=None):
        service = HandshakeService(self.sender, lend=lend)
        self.server = await servers.open_server(
            f"127.0.0.1:{port}",
            lambda server: handshake_pb2_grpc.add_HandshakeServicer_to_server(service, server),
            [],
        )
        return RankAddress(self.id, f"127.0.0.1:{self.server.port}")

    def request(self, transfer_id, prompt_len, sources, carried=None, **fields):
        """The Prefill call, with everything computed; returns a future of its end."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self.sender.open_transfer(
            transfer_id,
            prompt_len,
            DECODE,
            lambda end: loop.call_soon_threadsafe(ended.set_result, end),
            **fields,
        )
        self.sender.pages_ready(transfer_id, 0, prompt_len, [PageId(page) for page in sources])
        if carried is not None:
            self.sender.carried_ready(transfer_id, carried)
        return ended

    async def stop_listening(self):
        if self.server is not None:
            await self.server.stop()
            self.server = None

    async def close(self):
        await self.stop_listening()
        if isinstance(self.transport, GatedTransport):
            self.transport.gate.set()
        await asyncio.to_thread(self.sender.stop)


class Pair:
    """One decode rank and the prefill ranks that it talks to."""

    def __init__(self, make_pool, layout=LAYOUT, transport="local"):
        self.make_pool, self.layout = make_pool, layout
        self.pools = self.make_pools(seed=1)
        self.transport = open_transport(transport)
        self.transport.register([pool.memory for pool in self.pools], layout.unit_bytes)
        self.skipped_s = 0.0  # of time, on decode's clock
        self.links = self.make_links()
        self.prefills = []
        self.transfers = map(TransferId, itertools.count(1))

    def make_pools(self, seed):
        sizes = self.layout.unit_bytes
        return [self.make_pool(NUM_PAGES, size, seed=seed + 10 * i) for i, size in enumerate(sizes)]

    @property
    def pool(self):
        return self.pools[0]

    def clock(self):
        return time.monotonic() + self.skipped_s

    def make_links(self, **changes):
        facts = {"layout": self.layout, "transport": self.transport.name, "pools": self.pools} | changes
        return SenderConnections(
            DECODE,
            facts["layout"],
            tuple(pool.memory for pool in facts["pools"]),
            facts["transport"],
            self.transport.metadata(),
            clock=self.clock,
        )

    def prefill(self, **fields):
        """`fields`: see Prefill."""
        name = self.transport.name
        facts = {"layout": self.layout} | fields
        facts.setdefault("transport", GatedTransport() if name == "local" else open_transport(name))
        self.prefills.append(Prefill(self.make_pools(seed=2), **facts))
        return self.prefills[-1]

    def send_ticket(
        self, link, pages, prompt_len=10, prefix_len=0, lease_s=10.0, transfer_id=None, carried=(), **fields
    ):
        """`pages` and the units `carried` by group are what is written into."""
        targets = targets_of(self.layout, prompt_len, carried) if carried else ()
        ticket = KvTicket(
            transfer_id if transfer_id is not None else next(self.transfers),
            link.address.id.generation,
            prompt_len,
            prefix_len,
            runs_of([PageId(page) for page in pages]),
            link.write_until_s(lease_s),
            targets,
            **fields,
        )
        return link.send_ticket(ticket)

    async def close(self):
        await self.links.close()
        for prefill in self.prefills:
            await prefill.close()
        self.transport.close()
