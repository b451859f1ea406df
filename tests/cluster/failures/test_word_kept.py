"""When two ranks cannot agree, the request goes another way: another prefill rank, or plan local."""

from dataclasses import replace

from cluster.harness import FakeCluster
from services.engine.fake import continuation
from services.kv.ticket import StartsWithinPage
from services.transfer.sending import transfers
from services.wire.isthmus.v1 import common_pb2

PROMPT = list(range(30, 71))


async def test_a_ticket_refused_by_one_prefill_rank_is_honoured_by_the_other(
    etcd_endpoint, model_dir, cluster_name, refusing, first_prefill_looks_cheaper
):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(1, 1)) as cluster:
        refusing[cluster.ranks["prefill-0/0"].address.id.generation] = 0
        tokens, finish = await cluster.generate(PROMPT)
        assert tokens == continuation(PROMPT, 8)
        assert finish.placement.prefill.worker == "prefill-1"
        assert sum(refusing.values()) == 1
        await cluster.assert_nothing_held()


async def test_the_only_prefill_rank_is_asked_once_more_after_a_moment(
    etcd_endpoint, model_dir, cluster_name, refusing, monkeypatch
):
    check = transfers.check_ticket  # refuses

    def check_once(ticket, prompt_len, layout, memory, own_generation):
        if not refusing.get(own_generation):
            check(ticket, prompt_len, layout, memory, own_generation)

    monkeypatch.setattr(transfers, "check_ticket", check_once)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        generation = cluster.ranks["prefill-0/0"].address.id.generation
        refusing[generation] = 0
        tokens, finish = await cluster.generate(PROMPT)
        assert tokens == continuation(PROMPT, 8)
        assert finish.placement.prefill.worker == "prefill-0"
        assert refusing[generation] == 1
        await cluster.assert_nothing_held()


async def test_decode_computes_where_no_prefill_rank_will_or_can(
    etcd_endpoint, model_dir, cluster_name, refusing, remote_looks_cheaper, subtests
):
    with subtests.test("without another prefill rank decode computes it"):
        plans = ("remote", "local")
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), plans=plans) as cluster:
            refusing[cluster.ranks["prefill-0/0"].address.id.generation] = 0
            tokens, finish = await cluster.generate(PROMPT)
            assert tokens == continuation(PROMPT, 8)
            assert finish.placement.plan == common_pb2.PLAN_LOCAL
            assert sum(refusing.values()) == 1
            await cluster.assert_nothing_held()
    with subtests.test("a prefill rank of another layout is never asked"):
        plans = ("remote", "local")
        async with FakeCluster(
            etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,), plans=plans
        ) as cluster:
            await cluster.stop_rank("prefill-0/0")
            cluster.base = replace(cluster.base, page_size=2)
            await cluster.start_rank("prefill", "odd", 0)
            refusing.clear()
            refusing[cluster.ranks["odd/0"].address.id.generation] = 0
            for number in range(3):
                tokens, finish = await cluster.generate([number, *PROMPT])
                assert tokens == continuation([number, *PROMPT], 8)
                assert finish.placement.plan == common_pb2.PLAN_LOCAL
            assert sum(refusing.values()) == 0
            await cluster.assert_nothing_held()


async def test_a_delta_that_must_start_earlier_costs_no_attempt(
    etcd_endpoint, model_dir, cluster_name, monkeypatch
):
    check_ticket, asked = transfers.check_ticket, []

    def check(ticket, *facts):
        if ticket.decode_prefix_len > 8:
            asked.append(ticket.decode_prefix_len)
            raise StartsWithinPage(8, ticket.decode_prefix_len)
        check_ticket(ticket, *facts)

    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        await cluster.generate(PROMPT)
        monkeypatch.setattr(transfers, "check_ticket", check)
        tokens, finish = await cluster.generate([*PROMPT, 1, 2])
        assert tokens == continuation([*PROMPT, 1, 2], 8)
        assert asked == [40]
        usage = finish.usage
        assert (usage.decode_prefix_len, usage.delta_tokens) == (8, len(PROMPT) + 2 - 8)
        await cluster.assert_nothing_held()
