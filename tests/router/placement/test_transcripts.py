"""Placements as stories: what ranks and the index say, where each request goes and what it would cost.

A block has 64 tokens; a rank computes 10,000 tokens a second and its pool has room, unless its load says
otherwise. Of ranks that are equal in all the first one is taken.

    cluster decode= [prefill=] [routers=] ...   idle ranks d0, d1, ... and p0, p1, ... and new routers
    index RANK blocks= [states=]                it holds so many blocks of the one text that all ask about;
                                                with layout=hybrid, and the states after so many: 5,20
    load RANK [pending=] [waiting=] ...         its report; what is not said is as of an idle rank
    rank RANK [draining=] [holds=] [layout=]    it registers anew; it holds so many tokens of one request
    fails RANK, silent RANK, lost RANK          what the routers find out themselves; lost: the stream to it
    ask NAME [blocks=] [own=] [router=] ...     where a prompt of so many blocks and more tokens would go
    place NAME ...                              as `ask`, and it goes there
    wait SECONDS
"""

from collections import Counter
from dataclasses import replace

import pytest

from plugins.transcripts import stem, transcripts_beside
from router.placement.known_cluster import HYBRID
from services.index.read.prefix_index import PrefixIndex
from services.router.placement.candidates import Asked
from services.router.placement.decision import Nowhere
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.router.ranks.rank_order import Share
from services.values.kv import BlockHash, KvLayout, PageBooks
from services.values.rank import Generation, Plan, RankAddress, RankId, Role
from services.values.rank_reports import RankLoad, Registration

BLOCK = 64
HASHES = [BlockHash(number) for number in range(1, 101)]
LAYOUTS = {"old": KvLayout(BLOCK, 1 << 20, 1), "new": KvLayout(BLOCK, 1 << 19, 1), "hybrid": HYBRID}
ROLES = {"d": Role.DECODE, "p": Role.PREFILL}
_LOADS = {"pending": "pending_tokens", "receiving": "waiting_tokens"}
PLANS = {"local": {Plan.LOCAL}, "remote": {Plan.REMOTE}, "both": set(Plan)}


class Router:
    def __init__(self, clock, share, is_connected):
        self.index = PrefixIndex()
        self.balance = Balance(clock)
        self.share = share
        settings = PlacerSettings(BLOCK, 2_048, PriceWeights())
        self.placer = Placer(settings, self.index, self.balance, Counter().__getitem__, is_connected)

    def knows(self, ranks):
        of_role = ([rank for rank in ranks if rank.role is role] for role in ROLES.values())
        self.placer.set_ranks(*of_role)
        self.placer.set_share(self.share)


class Story:
    def __init__(self):
        self.now = 100.0
        self.ranks = {}
        self.routers = []
        self.lost = set()

    def perform(self, command):
        words, options = command.words, command.options
        return getattr(self, f"do_{command.name}")(*words, **options) or ()

    def do_cluster(self, decode, prefill="0", routers="1", layout="old"):
        self.lost = set()
        self.routers = [
            Router(lambda: self.now, Share(i, int(routers)), lambda rank: rank not in self.lost)
            for i in range(int(routers))
        ]
        names = [
            f"{role}{number}" for role, many in (("d", decode), ("p", prefill)) for number in range(int(many))
        ]
        self.ranks = {name: registration(name, layout) for name in names}
        self.register()
        for name in names:
            self.do_index(name, "0")
            self.do_load(name)
        self.now += 1

    def register(self):
        for router in self.routers:
            router.knows(self.ranks.values())

    def do_index(self, name, blocks, states=""):
        resumable = [HASHES[int(depth) - 1] for depth in filter(None, states.split(","))]
        for router in self.routers:
            router.index.apply_snapshot(self.ranks[name].id, HASHES[: int(blocks)], resumable)

    def do_load(self, name, **fields):
        load = load_of(**fields)
        for router in self.routers:
            router.balance.report(self.ranks[name].id.key, load)

    def do_rank(self, name, draining="no", holds="100000", layout="old"):
        self.ranks[name] = replace(
            self.ranks[name],
            draining=draining == "yes",
            max_context_tokens=int(holds),
            layout=LAYOUTS[layout],
        )
        self.register()

    def do_fails(self, name):
        for router in self.routers:
            router.balance.failed(self.ranks[name].id.key)

    def do_silent(self, name):
        for router in self.routers:
            router.balance.fell_silent(self.ranks[name].id.key)

    def do_lost(self, name):
        self.lost.add(self.ranks[name].id.key)

    def do_wait(self, seconds):
        self.now += float(seconds)

    def do_ask(self, name, router="0", **fields):
        own = self.routers[int(router)]
        return explained(own.placer.explain(self.asked(own, **fields), 0.0))

    def do_place(self, name, router="0", **fields):
        own = self.routers[int(router)]
        asked = self.asked(own, **fields)
        told = list(self.do_ask(name, router, **fields))
        own.placer.sent(name, asked.hashes, asked.prompt_tokens, own.placer.place(asked, 0.0))
        return told

    def asked(
        self, router, blocks="0", own="100", plans="both", pinned="", most="", tried="", max_wait="inf"
    ):
        hashes = HASHES[: int(blocks)]
        return Asked(
            hashes,
            len(hashes) * BLOCK + int(own),
            frozenset(PLANS[plans]),
            self.ranks[pinned].id.key if pinned else None,
            frozenset(self.ranks[name].id for name in filter(None, tried.split(","))),
            float(max_wait),
            int(most) if most else None,
        )


def registration(name, layout):
    rank = RankId(name[0], int(name[1:]), Generation(1))
    role = ROLES[name[0]]
    return Registration(role, RankAddress(rank, "host:1"), LAYOUTS[layout], "m", 100_000, 10_000, "fake")


def load_of(free="500000", cached="500000", rate="10000", step="0.01", room="0", stalled="no", **numbers):
    """`free` and `cached` in tokens; `room`: how many get pages in a second; `receiving`: tokens of those
    that wait for them."""
    pages, held = int(free) // BLOCK, int(cached) // BLOCK
    return RankLoad(
        books=PageBooks(pages + held, pages, held, 0, 0, 0),
        step_s=float(step),
        prefill_tokens_per_s=float(rate),
        admitted_per_s=float(room),
        stalled=stalled == "yes",
        **{_LOADS.get(name, name): int(value) for name, value in numbers.items()},
    )


def explained(decision):
    if isinstance(decision, Nowhere):
        yield f"goes nowhere: {decision.reason}"
        yield from excluded(decision.candidates)
        return
    yield f"goes to {way(decision.chosen)}: {decision.reason}"
    for priced in decision.ranked:
        terms = " + ".join(f"{name} {seconds:.3f}" for name, seconds in priced.terms if seconds >= 0.0005)
        yield f"  {way(priced)}: {priced.total_s:.3f} s = {terms}"
    yield from excluded(decision.excluded)


def excluded(candidates):
    for candidate in candidates:
        if candidate.excluded:
            yield f"  not {short(candidate)}: {candidate.excluded}"


def way(priced):
    return f"{short(priced.decode)} from {short(priced.prefill)}" if priced.prefill else short(priced.decode)


def short(candidate):
    return f"{candidate.id.worker}{candidate.id.rank}"


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_placement(path, play):
    play(path, Story().perform)
