"""What was promised between two ranks is kept or renegotiated, and the tokens are those of transformers.

The cases of test_word_kept.py, here and in tests/engine/paged, through every service, on a real model.
"""

import asyncio
from dataclasses import replace

import pytest

from cluster.harness import FakeCluster
from cluster.metrics_page import moves
from engine.pair import core_of
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.decode.prefill_leg import PrefillLeg
from services.kv.ticket import StartsWithinPage
from services.rank import main as rank
from services.transfer.sending import transfers
from services.wire.isthmus.v1 import common_pb2

pytestmark = pytest.mark.long  # test_word_kept.py has the cases on the fake engine

PAGE, ANSWER = 16, 10
PREFIX = list(random_prompt(4 * PAGE, seed=1))
PROMPT = [*PREFIX, *random_prompt(9, seed=2)]


class TorchCluster(FakeCluster):
    def __init__(self, etcd, name, **settings):
        self.directory = tiny_checkpoint()
        ranks = dict(
            engine="torch", model=str(self.directory), page_size=PAGE, index_block=PAGE, num_threads=1
        )
        super().__init__(etcd, self.directory, name, **({"decode": (1,), "kv_pages": 64} | ranks | settings))

    async def exact(self, ids):
        """The Finish of a request whose tokens are right."""
        tokens, finish = await self.generate(ids, ANSWER, timeout=60)
        count_near_ties(reference_generation(self.directory, tuple(ids), ANSWER), tokens)
        return finish

    @property
    def decode(self):
        return self.ranks["decode-0/0"].engine

    async def has_prefix(self):
        """The rank has the prefix, and the router knows."""
        finish = await self.exact(PROMPT)
        await self.until_indexed(finish.placement.decode, PREFIX)


@pytest.mark.parametrize("plan", ["remote", "local"])
async def test_a_full_hit(etcd_endpoint, cluster_name, plan):
    async with TorchCluster(etcd_endpoint, cluster_name, plans=(plan,)) as cluster:
        await cluster.exact(PREFIX)
        usage = (await cluster.exact(PREFIX)).usage
        # Where the next token is computed, the last one of the prompt is too.
        assert usage.decode_prefix_len == (len(PREFIX) if plan == "remote" else len(PREFIX) - PAGE)
        assert usage.kv_bytes_moved == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("when", ["before it is weighed", "before it is locked"])
@pytest.mark.parametrize("plan", ["remote", "local"])
async def test_a_prefix_evicted_since_the_router_matched_it(
    etcd_endpoint, cluster_name, monkeypatch, plan, when
):
    async with TorchCluster(etcd_endpoint, cluster_name, plans=(plan,)) as cluster:
        await cluster.has_prefix()
        core = core_of(cluster.decode)
        owner, name = (core, "submit") if when == "before it is weighed" else (core._gate, "reserve")
        then = getattr(owner, name)

        def evicted(*asked):
            core.cache.clear()
            return then(*asked)

        monkeypatch.setattr(owner, name, evicted)
        finish = await cluster.exact([*PROMPT, 5])
        assert finish.placement.predicted_prefix_len == len(PREFIX)
        assert finish.usage.decode_prefix_len == 0
        await cluster.assert_nothing_held()


async def test_a_layout_that_turns_out_to_be_another(
    etcd_endpoint, cluster_name, monkeypatch, remote_looks_cheaper
):
    """It registered with the layout that decode has, so only the handshake finds out."""
    plans, registration = ("remote", "local"), rank._registration
    async with TorchCluster(etcd_endpoint, cluster_name, plans=plans) as cluster:
        await cluster.stop_rank("prefill-0/0")
        cluster.base = replace(cluster.base, page_size=PAGE // 2)
        layout = cluster.decode.layout
        monkeypatch.setattr(rank, "_registration", lambda *args: replace(registration(*args), layout=layout))
        await cluster.start_rank("prefill", "prefill-0", 0)
        await cluster.until_placeable()
        finish = await cluster.exact(PROMPT)
        assert finish.placement.plan == common_pb2.PLAN_LOCAL
        assert await moves(cluster, "retry") == 1
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("left", ["another prefill rank", "plan local"])
async def test_a_prefill_rank_that_refuses(etcd_endpoint, cluster_name, refusing, remote_looks_cheaper, left):
    shape = {"prefill": (1, 1)} if left == "another prefill rank" else {"plans": ("remote", "local")}
    async with TorchCluster(etcd_endpoint, cluster_name, **shape) as cluster:
        refusing[cluster.ranks["prefill-0/0"].address.id.generation] = 0
        number = 0
        while not sum(refusing.values()):  # until one was sent there first
            number += 1
            finish = await cluster.exact([*random_prompt(1, seed=number), *PROMPT])
        if left == "another prefill rank":
            assert finish.placement.prefill.worker == "prefill-1"
        else:
            assert finish.placement.plan == common_pb2.PLAN_LOCAL
        await cluster.assert_nothing_held()


async def test_a_delta_that_must_start_earlier(etcd_endpoint, cluster_name, monkeypatch):
    check_ticket, asked = transfers.check_ticket, []

    def check(ticket, *facts):
        if ticket.decode_prefix_len > PAGE:
            asked.append(ticket.decode_prefix_len)
            raise StartsWithinPage(PAGE, ticket.decode_prefix_len)
        check_ticket(ticket, *facts)

    async with TorchCluster(etcd_endpoint, cluster_name) as cluster:
        await cluster.has_prefix()
        monkeypatch.setattr(transfers, "check_ticket", check)
        finish = await cluster.exact([*PROMPT, 5])
        assert (asked, finish.usage.decode_prefix_len) == ([len(PREFIX)], PAGE)
        await cluster.assert_nothing_held()


async def test_a_prefill_rank_restarted_between_handshake_and_call(etcd_endpoint, cluster_name, monkeypatch):
    """The lease has minutes to go: that a next life answers is what ends the quarantine."""
    held, go_on, call = asyncio.Event(), asyncio.Event(), PrefillLeg.__call__

    async def late(leg, request, rendezvous):
        if not held.is_set():
            held.set()
            await go_on.wait()
        return await call(leg, request, rendezvous)

    async with TorchCluster(etcd_endpoint, cluster_name, write_lease_s=600.0) as cluster:
        monkeypatch.setattr(PrefillLeg, "__call__", late)
        request = asyncio.create_task(cluster.exact(PROMPT))
        await asyncio.wait_for(held.wait(), 30)
        old = await cluster.stop_rank("prefill-0/0")
        port = int(old.address.endpoint.rpartition(":")[2])
        await cluster.start_rank("prefill", "prefill-0", 0, port)
        go_on.set()
        finish = await request
        assert finish.placement.prefill.generation != old.address.id.generation
        await cluster.assert_nothing_held()
