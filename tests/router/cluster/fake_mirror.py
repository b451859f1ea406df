"""Ranks as a router sees them, and a mirror that changes when told to."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from services.index.read.block_mirror import RankProgress
from services.index.read.mirror import RankState, RankView
from services.index.read.prefix_index import PrefixIndex
from services.router.cluster import Cluster, ClusterSettings
from services.router.placement.placer import PlacerSettings
from services.router.placement.price import PriceWeights
from services.values.kv import KvLayout
from services.values.rank import Generation, Plan, RankAddress, RankId, Role
from services.values.rank_reports import RankLoad, Registration

LAYOUT = KvLayout(page_size=16, page_bytes=1024, model_fingerprint=1)


def view(role: Role, index: int, **changes) -> RankView:
    rank = RankId(role.value, index, Generation(index + 1))
    # Nobody listens at port 1.
    registration = Registration(role, RankAddress(rank, "127.0.0.1:1"), LAYOUT, "m", 4096, 100, "fake")
    return RankView(replace(registration, **changes), RankState.LIVE, 0.0)


@dataclass
class FakeMirror:
    index: PrefixIndex = field(default_factory=PrefixIndex)
    ranks: dict = field(default_factory=dict)
    subscribers: list = field(default_factory=list)
    dead: list = field(default_factory=list)
    below: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(index=PrefixIndex()))
    degraded = None
    staleness_s = 0.0

    def subscribe(self, subscriber):
        self.subscribers.append(subscriber)
        return lambda: self.subscribers.remove(subscriber)

    def progress(self, rank):
        return RankProgress(0, 0, 0.0, True)

    def unregistered_s(self, view):
        return 0.0

    def rank_staleness_s(self, rank):
        return 0.0

    def pin(self, conversation):
        return None

    def place_among_routers(self, fleet):
        return 0, 1

    def mark_dead(self, rank):
        self.dead.append(rank)

    def mark_live(self, rank):
        assert rank in self.ranks

    def set(self, *views):
        for one in views:
            self.ranks[one.registration.id.key] = one
            self.tell(one.registration.id.key)

    def remove(self, one):
        del self.ranks[one.registration.id.key]
        self.tell(one.registration.id.key)

    def tell(self, rank):
        for subscriber in self.subscribers:
            subscriber(rank)


class NoPins:
    def recent(self, conversation):
        return None


def cluster_of(mirror, balance, plans=Plan, model="m", pins=None, tls=None) -> Cluster:
    """Not yet started."""
    settings = ClusterSettings(model, frozenset(plans), PlacerSettings(16, 512, PriceWeights()))
    return Cluster(settings, mirror, pins if pins is not None else NoPins(), balance, tls)


@asynccontextmanager
async def started(cluster: Cluster):
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


def connect(cluster: Cluster) -> None:
    """As if all its decode ranks had answered."""
    for client in cluster._connections.clients.values():
        client.connected.set()


D0, D1, P0 = view(Role.DECODE, 0), view(Role.DECODE, 1), view(Role.PREFILL, 0)
D0_KEY, D1_KEY = D0.registration.id.key, D1.registration.id.key


def queue(balance, rank, wait_s):
    balance.report(rank, RankLoad(waiting=10, admitted_per_s=10 / wait_s))
