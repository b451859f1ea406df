"""A router's view of its ranks as they come, drain, fail and leave."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from net.certificates import make_certificates
from router.cluster.fake_mirror import D0, D0_KEY, D1, D1_KEY, LAYOUT, P0, cluster_of, connect, started, view
from services.index.pins import Pin
from services.index.read.mirror import RankState
from services.net.channels import TlsConfig
from services.router.connections import rank_connections as connections
from services.router.placement.placer import Placer
from services.router.ranks.balance import Balance, Liveness
from services.values.errors import Unavailable
from services.values.rank import Generation, Plan, RankId, RankKey, Role
from services.values.rank_reports import NO_MOVED_PENALTIES, NO_TENANT_TURNS, RankLoad


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


def of_another_layout(cluster):
    """The prefill ranks that are excluded for that."""
    ranks = [status for status in cluster.status() if "KV layout differs" in status.excluded]
    return {rank.view.registration.id.rank for rank in ranks if rank.view.registration.role is Role.PREFILL}


async def test_draining_changes_the_layout_that_counts_at_once(cluster, mirror, balance):
    """Registered first, or told by the load."""
    other = replace(LAYOUT, page_bytes=2048)
    d1 = view(Role.DECODE, 1, layout=other)
    mirror.set(D0, P0, d1, view(Role.PREFILL, 1, layout=other))
    assert of_another_layout(cluster) == {1}
    mirror.set(view(Role.DECODE, 0, draining=True))
    assert of_another_layout(cluster) == {0}
    mirror.set(D0)
    assert of_another_layout(cluster) == {1}
    for draining, apart in ((True, 0), (False, 1)):
        balance.report(D0_KEY, RankLoad(draining=draining))
        assert of_another_layout(cluster) == {apart}


async def test_a_failure_alone_forgets_no_rank_whose_lease_has_lapsed(cluster, mirror):
    mirror.set(replace(D0, registered=False), P0)
    cluster.failed(D0.registration.id)
    assert mirror.dead == []
    assert not cluster.is_up(cluster.ranks(Role.DECODE)[0])
    cluster.dead(RankId("decode", 0, Generation(99)))  # another incarnation
    assert mirror.dead == []
    cluster.dead(D0.registration.id)
    assert mirror.dead == [D0_KEY]


async def test_a_rank_whose_stream_speaks_is_not_forgotten(two_decodes, mirror, balance):
    """It was told to stop while it had no key: it says that it does not serve, and finishes what runs."""
    prompt, others = await two_decodes.hash((1, 2), ""), frozenset({D1.registration.id})
    client = two_decodes.place(prompt, "", others).client
    mirror.set(replace(D0, registered=False))
    two_decodes.dead(D0.registration.id)
    assert mirror.dead == []
    assert balance.liveness(D0_KEY) is Liveness.FAILED
    client.connected.clear()
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


async def test_tenants_take_turns_where_every_rank_that_stays_lets_them(cluster, mirror):
    without = {"capabilities": (NO_TENANT_TURNS,)}
    for ranks, takes_turns in (
        ([D0, D1, P0], True),
        ([D0, view(Role.DECODE, 1, **without), P0], False),
        ([D0, D1, view(Role.PREFILL, 0, **without)], False),
        ([D0, view(Role.DECODE, 1, draining=True, **without), P0], True),
    ):
        mirror.set(*ranks)
        assert cluster.takes_turns is takes_turns


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
            router = cluster_of(mirror, Balance(lambda: 0.0), {Plan.LOCAL}, model, pins)
            routers.append(await stack.enter_async_context(started(router)))
            connect(router)
        for turn in range(2):
            for router in routers:
                placed = router.place(await router.hash((1, 2), ""), "c", frozenset())
                router.sent(f"r{turn}", "c", placed)
                chosen.append((placed.pinned, placed.decision.chosen.decode.id.key))
    assert chosen == [(None, D0_KEY), (None, D1_KEY), (D0_KEY, D0_KEY), (D1_KEY, D1_KEY)]


async def test_a_certificate_that_could_not_be_read_is_read_again(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_REOPEN_S", 0.01)
    opened = cluster_of(mirror, Balance(lambda: 0.0), tls=TlsConfig(ca=tmp_path / "ca.pem"))
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
    opened = cluster_of(mirror, Balance(lambda: 0.0))
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
