"""Ranks as a router sees them, and a mirror that changes when told to."""

from dataclasses import dataclass, field, replace

from services.index.read.block_mirror import RankProgress
from services.index.read.mirror import RankState, RankView
from services.index.read.prefix_index import PrefixIndex
from services.values.kv import KvLayout
from services.values.load import RankLoad
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.registration import Registration

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
    degraded = None

    def subscribe(self, subscriber):
        self.subscribers.append(subscriber)
        return lambda: self.subscribers.remove(subscriber)

    def progress(self, rank):
        return RankProgress(0, 0, 0.0, True)

    def pin(self, conversation):
        return None

    def place_among_routers(self):
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


D0, D1, P0 = view(Role.DECODE, 0), view(Role.DECODE, 1), view(Role.PREFILL, 0)
D0_KEY, D1_KEY = D0.registration.id.key, D1.registration.id.key


def queue(balance, rank, wait_s):
    balance.report(rank, RankLoad(waiting=10, admitted_per_s=10 / wait_s))
