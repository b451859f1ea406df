"""A router's view of the ranks, as the mirror changes under it."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import pytest

from net.certificates import make_certificates
from services.index.pins import Pin
from services.index.read.block_mirror import RankProgress
from services.index.read.mirror import RankState, RankView
from services.index.read.prefix_index import PrefixIndex
from services.net.tls import TlsConfig
from services.router.cluster import Cluster, ClusterSettings
from services.router.links import connections
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance, Liveness
from services.values.errors import NoCapacity, Unavailable
from services.values.kv import KvLayout
from services.values.load import RankLoad
from services.values.rank import Generation, Plan, RankAddress, RankId, RankKey, Role
from services.values.registration import NO_MOVED_PENALTIES, REMOTE_ONLY, Registration
from services.values.request import FinishReason

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


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def mirror():
    return FakeMirror()


@pytest.fixture
def balance(clock):
    return Balance(lambda: clock[0])


@pytest.fixture
async def cluster(mirror, balance):
    settings = ClusterSettings("m", frozenset(Plan), PlacerSettings(16, 512, PriceWeights()))
    opened = Cluster(settings, mirror, NoPins(), balance, None)
    await opened.start()
    yield opened
    await opened.close()
    assert mirror.subscribers == []


D0, D1, P0 = view(Role.DECODE, 0), view(Role.DECODE, 1), view(Role.PREFILL, 0)
D0_KEY, D1_KEY = D0.registration.id.key, D1.registration.id.key


async def test_a_burst_of_changes_is_looked_at_once_and_before_anyone_asks(cluster, mirror, monkeypatch):
    calls = []
    monkeypatch.setattr(Placer, "set_ranks", lambda self, *ranks: calls.append(tuple(map(len, ranks))))
    mirror.set(*(view(Role.DECODE, i) for i in range(30)), *(view(Role.PREFILL, i) for i in range(20)))
    assert calls == []
    assert len(cluster.ranks(Role.DECODE)) == 30
    assert calls == [(30, 20)]
    await asyncio.sleep(0)
    mirror.set(replace(D0, state=RankState.SUSPECT))  # it is as placeable as before
    assert cluster.ranks(Role.DECODE)[0].state is RankState.SUSPECT
    assert calls == [(30, 20)]
    mirror.remove(P0)
    await asyncio.sleep(0)  # without being asked
    assert calls[1:] == [(30, 19)]


async def test_draining_changes_the_layout_that_counts_at_once(cluster, mirror):
    """Registered first, or told by the load."""
    other = replace(LAYOUT, page_bytes=2048)
    d1 = view(Role.DECODE, 1, layout=other)
    mirror.set(D0, P0, d1, view(Role.PREFILL, 1, layout=other))
    cluster.ranks(Role.DECODE)
    assert cluster._placer._layout == LAYOUT
    mirror.set(view(Role.DECODE, 0, draining=True))
    cluster.ranks(Role.DECODE)
    assert cluster._placer._layout == other
    mirror.set(D0)
    cluster.ranks(Role.DECODE)
    assert cluster._placer._layout == LAYOUT
    for draining, layout in ((True, other), (False, LAYOUT)):
        cluster._report(D0_KEY, RankLoad(draining=draining))
        assert cluster._placer._layout == layout


async def test_a_failure_alone_forgets_no_rank_whose_lease_has_lapsed(cluster, mirror):
    mirror.set(replace(D0, registered=False), P0)
    cluster.failed(D0.registration.id)
    assert mirror.dead == []
    assert not cluster.is_up(cluster.ranks(Role.DECODE)[0])
    cluster.dead(RankId("decode", 0, Generation(99)))  # another life
    assert mirror.dead == []
    cluster.dead(D0.registration.id)
    assert mirror.dead == [D0_KEY]


async def test_a_rank_whose_stream_speaks_is_not_forgotten(two_decodes, mirror, balance):
    """It was told to stop while it had no key: it says that it does not serve, and finishes what runs."""
    mirror.set(replace(D0, registered=False))
    two_decodes.dead(D0.registration.id)
    assert mirror.dead == []
    assert balance.liveness(D0_KEY) is Liveness.FAILED
    two_decodes._connections.clients[D0_KEY].connected.clear()
    two_decodes.dead(D0.registration.id)
    assert mirror.dead == [D0_KEY]


async def test_a_rank_that_went_without_a_word_is_missed_for_a_while(cluster, mirror, clock):
    leaving = view(Role.DECODE, 1, draining=True)
    mirror.set(D0, leaving, P0)
    assert cluster.missed() == []
    for gone in (D0, leaving, P0):
        mirror.remove(gone)
    assert set(cluster.missed()) == {(Role.DECODE, D0_KEY), (Role.PREFILL, RankKey("prefill", 0))}
    mirror.set(P0)
    assert cluster.missed() == [(Role.DECODE, D0_KEY)]
    clock[0] += 1_800
    assert cluster.missed() == []


@pytest.fixture
async def two_decodes(cluster, mirror):
    """Both are reached."""
    mirror.set(D0, D1, P0)
    cluster.ranks(Role.DECODE)
    for client in cluster._connections.clients.values():
        client.connected.set()
    return cluster


def queue(balance, rank, wait_s):
    balance.report(rank, RankLoad(waiting=10, admitted_per_s=10 / wait_s))


async def test_nobody_is_let_in_who_would_wait_too_long_everywhere(two_decodes, clock, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    queue(balance, D0_KEY, 9.0)
    two_decodes.check_room(0.0)  # nobody waits at the other one
    queue(balance, D1_KEY, 7.0)
    two_decodes.check_room(7.0)
    with pytest.raises(NoCapacity, match=r"would wait 7\.0 s") as refused:
        two_decodes.check_room(5.0)
    assert refused.value.retry_after_s == pytest.approx(2.0)
    with pytest.raises(NoCapacity, match=r"would wait 7\.0 s"):
        two_decodes.place(prompt, "", frozenset(), 5.0)
    two_decodes.place(prompt, "", frozenset())  # what was begun is never refused


async def test_a_rank_whose_queue_is_too_long_is_passed_over(two_decodes, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    for rank, other in ((D0_KEY, D1_KEY), (D1_KEY, D0_KEY)):
        queue(balance, rank, 9.0)
        queue(balance, other, 1.0)
        placed = two_decodes.place(prompt, "", frozenset(), 5.0)
        assert placed.decision.chosen.decode.id.key == other
        assert [c.excluded for c in placed.decision.excluded] == ["its queue is too long"]


async def test_without_any_rank_it_is_not_the_queues_that_are_too_long(cluster):
    cluster.check_room(0.0)
    with pytest.raises(Unavailable):
        cluster.place(await cluster.hash((1, 2), ""), "", frozenset(), 0.0)


async def test_prompts_that_are_computed_first_are_waited_for_too(two_decodes, clock, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    p0 = P0.registration.id.key
    balance.report(p0, RankLoad(pending_tokens=90_000, prefill_tokens_per_s=10_000.0))
    for decode in (D0_KEY, D1_KEY):
        balance.report(decode, RankLoad(pending_tokens=80_000))
    # Nothing of theirs was measured: what they are believed to need is no ground to refuse anybody.
    assert two_decodes.place(prompt, "", frozenset(), 5.0).plan is Plan.LOCAL
    for decode in (D0_KEY, D1_KEY):
        balance.report(decode, RankLoad(pending_tokens=80_000, prefill_tokens_per_s=10_000.0))
    with pytest.raises(NoCapacity, match=r"would wait 8\.0 s"):
        two_decodes.place(prompt, "", frozenset(), 5.0)
    with pytest.raises(NoCapacity, match=r"would wait 8\.0 s"):
        two_decodes.check_room(5.0)  # before a prompt is tokenized for nothing
    two_decodes.check_room(8.5)
    two_decodes.place(prompt, "", frozenset(), 8.5)


async def test_a_home_with_too_long_a_queue_is_left_and_a_rank_in_time_taken(two_decodes, balance, mirror):
    """By slack it would be chosen: all in all it is hardly worse."""
    prompt = await two_decodes.hash(tuple(range(640)), "")
    mirror.index.apply_snapshot(D1.registration.id, prompt.hashes)
    for rank, wait_s in ((D0_KEY, 3.4), (D1_KEY, 6.4), (P0.registration.id.key, 9.0)):
        load = RankLoad(pending_tokens=int(200 * wait_s), prefill_tokens_per_s=200.0)
        balance.report(rank, load)
    pinned = two_decodes.place(prompt, "", frozenset(), 7.0).decision
    assert (pinned.chosen.decode.id.key, pinned.reason) == (D1_KEY, "longest_prefix")
    moved = two_decodes.place(prompt, "", frozenset(), 6.0).decision
    assert (moved.chosen.decode.id.key, moved.chosen.plan) == (D0_KEY, Plan.LOCAL)
    assert {str(rank.id.key): rank.excluded for rank in moved.excluded} == {
        "decode/1": "its queue is too long",
        "prefill/0": "its queue is too long",
    }
    explained = two_decodes.explain(prompt, "", 6.0).decision
    assert explained.chosen == moved.chosen and explained.excluded == moved.excluded


async def test_an_idle_rank_is_taken_where_the_one_with_the_prefix_has_too_long_a_queue(
    two_decodes, mirror, balance
):
    """Though the prompt takes longer there than one may wait: computing is no waiting."""
    p1 = view(Role.PREFILL, 1)
    mirror.set(p1)
    prompt = await two_decodes.hash(tuple(range(1_200)), "")
    mirror.index.apply_snapshot(P0.registration.id, prompt.hashes)
    mirror.index.apply_snapshot(p1.registration.id, ())
    for rank, pending_tokens in ((P0, 1_040), (p1, 0), (D0, 9_999), (D1, 9_999)):
        load = RankLoad(pending_tokens=pending_tokens, prefill_tokens_per_s=200.0)
        balance.report(rank.registration.id.key, load)
    assert two_decodes.place(prompt, "", frozenset(), 6.0).prefill == P0.registration.address
    assert two_decodes.place(prompt, "", frozenset(), 5.0).prefill == p1.registration.address


async def test_a_rank_whose_context_is_too_short_has_no_room_however_idle(two_decodes, mirror, balance):
    mirror.set(view(Role.DECODE, 0, max_context_tokens=64))
    prompt = await two_decodes.hash(tuple(range(100)), "")
    queue(balance, D1_KEY, 9.0)
    with pytest.raises(NoCapacity, match=r"would wait 9\.0 s"):
        two_decodes.place(prompt, "", frozenset(), 5.0)


@pytest.mark.parametrize(
    ("plans", "capabilities", "bound"),
    [
        ({Plan.REMOTE}, (), 101),
        ({Plan.REMOTE, Plan.LOCAL}, (), 500),
        ({Plan.LOCAL}, (), 500),
        ({Plan.REMOTE, Plan.LOCAL}, (REMOTE_ONLY,), 101),
    ],
)
async def test_a_prompt_that_only_prefill_computes_must_fit_there(
    cluster, mirror, monkeypatch, plans, capabilities, bound
):
    cluster._settings = replace(cluster._settings, plans=frozenset(plans))
    mirror.set(
        view(Role.DECODE, 0, max_context_tokens=500, capabilities=capabilities),
        view(Role.DECODE, 1, max_context_tokens=64, capabilities=capabilities),
    )
    assert cluster.max_context_tokens() == 500  # who prefills is not known yet
    mirror.set(view(Role.PREFILL, 0, max_context_tokens=80), view(Role.PREFILL, 1, max_context_tokens=100))
    assert cluster.max_context_tokens() == bound
    mirror.set(view(Role.PREFILL, 1, max_context_tokens=9_000))
    assert cluster.max_context_tokens() == 500


async def test_a_rank_that_drains_neither_forbids_a_plan_nor_lengthens_the_context(cluster, mirror):
    mirror.set(
        view(Role.DECODE, 0, max_context_tokens=500, capabilities=(REMOTE_ONLY,), draining=True),
        view(Role.DECODE, 1, max_context_tokens=64),
    )
    assert cluster.max_context_tokens() == 64
    assert cluster._plans() == frozenset(Plan)
    mirror.set(view(Role.DECODE, 1, max_context_tokens=64, draining=True))  # nobody stays
    assert cluster.max_context_tokens() == 500
    assert cluster._plans() == {Plan.REMOTE}


async def test_the_models_context_is_that_of_the_rank_that_knows_most_of_it(cluster, mirror):
    """Ranks from before they said so had no less than they hold; one that drains knows it too."""
    mirror.set(view(Role.DECODE, 0, max_context_tokens=500), view(Role.DECODE, 1, max_context_tokens=64))
    assert cluster.length_means(500, 9, None) is FinishReason.LENGTH
    assert cluster.length_means(64, 9, None) is None
    assert cluster.length_means(64, 9, 9) is FinishReason.LENGTH
    said = {"max_context_tokens": 900, "model_context_tokens": 1_000}
    mirror.set(view(Role.DECODE, 0, **said, draining=True))
    assert cluster.length_means(64, 9, None) is FinishReason.CAPACITY
    mirror.remove(D0)
    mirror.remove(D1)
    assert cluster.length_means(1_000, 9, None) is FinishReason.LENGTH  # what is known stays known
    prompt = await cluster.hash(tuple(range(100)), "", 5_000)
    mirror.set(view(Role.DECODE, 0, **said))
    assert cluster._asked(prompt, "", frozenset()).most_tokens == 1_000
    assert cluster._asked(await cluster.hash((1, 2), ""), "", frozenset()).most_tokens is None


async def test_what_is_refused_is_explained_so(two_decodes, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    for rank in (D0_KEY, D1_KEY):
        queue(balance, rank, 9.0)
    with pytest.raises(NoCapacity) as refused:
        two_decodes.place(prompt, "", frozenset(), 5.0)
    explained = two_decodes.explain(prompt, "", 5.0).decision
    assert explained.reason == str(refused.value)
    assert [rank.excluded for rank in explained.candidates] == ["its queue is too long"] * 3


async def test_a_prefill_rank_that_fell_silent_is_passed_over_and_down(two_decodes, mirror, balance):
    """Though it looks the idler one, and without a word from etcd."""
    p1 = view(Role.PREFILL, 1)
    mirror.set(p1)
    prompt = await two_decodes.hash(tuple(range(640)), "")
    for decode in (D0_KEY, D1_KEY):
        balance.report(decode, RankLoad(pending_tokens=90_000, prefill_tokens_per_s=10_000.0))
    silent, busy = (one.registration for one in (P0, p1))
    balance.report(busy.id.key, RankLoad(pending_tokens=9_000, prefill_tokens_per_s=10_000.0))
    assert two_decodes.place(prompt, "", frozenset()).prefill == silent.address
    watch = two_decodes._connections.watches[silent.id.key]
    watch._note_report(RankLoad())
    watch._note_silence()
    placed = two_decodes.place(prompt, "", frozenset())
    assert placed.prefill == busy.address
    assert [(rank.id, rank.excluded) for rank in placed.decision.excluded] == [(silent.id, "silent")]
    assert [two_decodes.is_up(rank) for rank in two_decodes.ranks(Role.PREFILL)] == [False, True]
    watch._note_report(RankLoad())
    assert two_decodes.place(prompt, "", frozenset()).prefill == silent.address


async def test_whether_an_answer_with_penalties_may_move_is_the_ranks_word(two_decodes, mirror):
    prompt = await two_decodes.hash((1, 2), "")
    for forgetful, moves in ((D0_KEY, False), (D1_KEY, True)):
        mirror.set(
            *(
                view(Role.DECODE, i, capabilities=(NO_MOVED_PENALTIES,) * (i == forgetful.rank))
                for i in (0, 1)
            )
        )
        assert two_decodes.place(prompt, "", frozenset({D1.registration.id})).moves_penalties is moves


async def test_a_rank_that_failed_a_request_may_have_it_again_once_it_has_started_anew(two_decodes):
    """Killed again and again, ranks of a small cluster would all be left out though all of them serve."""
    prompt, own = await two_decodes.hash((1, 2), ""), [D0.registration.id, D1.registration.id]
    with pytest.raises(Unavailable, match="2 it failed this request"):
        two_decodes.place(prompt, "", frozenset(own))
    earlier = replace(own[1], generation=Generation(own[1].generation + 1))
    assert two_decodes.place(prompt, "", frozenset({own[0], earlier})).decision.chosen.decode.id == own[1]
    assert two_decodes.siblings({earlier}) == {earlier, *own}


class Pins(dict[str, Pin]):
    """In place of etcd; all routers have the same."""

    def pin(self, conversation, decode, prefill):
        self[conversation] = Pin(decode, prefill)

    def recent(self, conversation):
        return self.get(conversation)


async def test_conversations_of_the_same_name_with_two_models_keep_their_pins_apart(mirror):
    mirror.set(*(view(Role.DECODE, index, model=model) for index, model in enumerate("mn")))
    pins, chosen = Pins(), []
    async with AsyncExitStack() as stack:
        routers = []
        for model in "mn":
            settings = ClusterSettings(
                model, frozenset({Plan.LOCAL}), PlacerSettings(16, 512, PriceWeights())
            )
            router = Cluster(settings, mirror, pins, Balance(lambda: 0.0), None)
            await router.start()
            stack.push_async_callback(router.close)
            for client in router._connections.clients.values():
                client.connected.set()
            routers.append(router)
        for turn in range(2):
            for router in routers:
                placed = router.place(await router.hash((1, 2), ""), "c", frozenset())
                router.sent(f"r{turn}", "c", placed)
                chosen.append((placed.pinned, placed.decision.chosen.decode.id.key))
    assert chosen == [(None, D0_KEY), (None, D1_KEY), (D0_KEY, D0_KEY), (D1_KEY, D1_KEY)]


async def test_a_certificate_that_could_not_be_read_is_read_again(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_RETRY_S", 0.01)
    settings = ClusterSettings("m", frozenset(Plan), PlacerSettings(16, 512, PriceWeights()))
    tls = TlsConfig(ca=tmp_path / "ca.pem")
    opened = Cluster(settings, mirror, NoPins(), Balance(lambda: 0.0), tls)
    mirror.set(D0, P0)
    await opened.start()
    assert len(opened.ranks(Role.DECODE)) == 1
    assert not opened._connections.clients and not opened._connections.watches
    make_certificates(tmp_path, "DNS:localhost")
    async with asyncio.timeout(10):
        while not (opened._connections.clients and opened._connections.watches):
            await asyncio.sleep(0.01)
    await opened.close()


async def test_ranks_may_leave_while_a_router_closes(mirror):
    settings = ClusterSettings("m", frozenset(Plan), PlacerSettings(16, 512, PriceWeights()))
    opened = Cluster(settings, mirror, NoPins(), Balance(lambda: 0.0), None)
    await opened.start()
    mirror.set(D0, view(Role.DECODE, 1), P0)
    await asyncio.sleep(0)
    closing = asyncio.create_task(opened.close())
    await asyncio.sleep(0)
    mirror.remove(D0)
    await closing
    async with asyncio.timeout(10):  # gRPC's own tasks end a moment later
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.01)
