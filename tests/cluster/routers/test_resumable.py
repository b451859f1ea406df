"""These tests show where ranks of a model with a state can go on, from their trees to a router's answer."""

import asyncio

from cluster.harness import BLOCK, FakeCluster, ids_request, prompt_of
from services.cli.look.index import format_answer
from services.engine.fake import continuation, parse_carried
from services.wire.isthmus.v1 import generation_pb2

CARRIED = "state,window:6"
PROMPT = prompt_of(1, 41)
BRANCH = [*PROMPT[:22], *prompt_of(2, 19)]


def hybrid(etcd_endpoint, model_dir, cluster_name, **shape) -> FakeCluster:
    return FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_carried=CARRIED, **shape)


async def indexed(cluster, role: str, ids) -> tuple[int, int]:
    """Tokens of the prompt that the one rank of the role holds, and after which it can go on."""
    request = generation_pb2.ExplainRequest(request=ids_request(ids))
    answer = await cluster.stubs[0].Explain(request)
    told = {
        tuple(getattr(candidate, f"{role}_indexed_{what}tokens") for what in ("", "resume_"))
        for candidate in answer.candidates
        if candidate.HasField(role)
    }
    (only,) = told
    return only


async def until_indexed(cluster, role: str, ids, expected: tuple[int, int]) -> None:
    async with asyncio.timeout(5.0):
        while await indexed(cluster, role, ids) != expected:
            await asyncio.sleep(0.01)


async def generated(cluster, ids, **fields):
    tokens, finish = await cluster.generate(ids, **fields)
    assert tokens == continuation(ids, 8, parse_carried(CARRIED))
    assert finish.placement.predicted_reused_tokens == finish.usage.reused_tokens
    return tokens, finish


async def test_where_one_can_go_on_is_believed(etcd_endpoint, model_dir, cluster_name, subtests):
    with subtests.test("who holds a branch and kept no state there is believed to compute it all"):
        async with hybrid(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
            await generated(cluster, PROMPT)
            await until_indexed(cluster, "prefill", PROMPT, (40, 40))
            await until_indexed(cluster, "prefill", BRANCH, (20, 0))
            await until_indexed(cluster, "decode", BRANCH, (20, 0))
            _, finish = await generated(cluster, BRANCH)
            assert (finish.usage.decode_prefix_len, finish.usage.prefill_prefix_len) == (20, 0)
            assert finish.placement.predicted_prefix_len == 20
            # Now it has, where the two part.
            third = [*PROMPT[:22], *prompt_of(3, 19)]
            await until_indexed(cluster, "prefill", third, (20, 20))
            _, finish = await generated(cluster, third)
            assert (finish.usage.decode_prefix_len, finish.usage.prefill_prefix_len) == (20, 20)
            ranks = await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())
            assert all(rank.resume_trust == rank.trust == 1.0 for rank in ranks.ranks)
            assert "resumable" in format_answer(ranks)
            await cluster.assert_nothing_held()
    with subtests.test("under plan local a turn is gone on from where the answer ended"):
        async with hybrid(
            etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,), prefill=(), plans=("local",)
        ) as cluster:
            tokens, _ = await generated(cluster, PROMPT, conversation_id="c")
            turn = [*PROMPT, *tokens, 7, 8, 9]
            border = (len(turn) - 4) // BLOCK * BLOCK  # of what was computed: the answer's last token was not
            await until_indexed(cluster, "decode", turn, (border, border))
            _, finish = await generated(cluster, turn, conversation_id="c")
            assert finish.usage.reused_tokens == border
            await cluster.assert_nothing_held()
