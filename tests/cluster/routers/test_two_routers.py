"""Two routers of one cluster know the same: index, pins, and each other's load."""

import asyncio

from cluster.harness import BLOCK, FakeCluster, ids_request
from services.wire.isthmus.v1 import generation_pb2

PROMPT = [number % 400 for number in range(81)]


async def ranks_of(cluster, router):
    answer = await cluster.stubs[router].ListRanks(generation_pb2.ListRanksRequest())
    return {f"{rank.rank.worker}/{rank.rank.rank}": rank for rank in answer.ranks}


async def explained(cluster, router, ids, **fields):
    return await cluster.stubs[router].Explain(
        generation_pb2.ExplainRequest(request=ids_request(ids, **fields))
    )


def held(answer):
    """What the index says of each rank."""
    tokens = {}
    for candidate in answer.candidates:
        tokens[candidate.decode.worker, candidate.decode.rank] = candidate.decode_indexed_tokens
        tokens[candidate.prefill.worker, candidate.prefill.rank] = candidate.prefill_indexed_tokens
    return tokens


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_they_know_the_same(etcd_endpoint, model_dir, cluster_name, subtests):
    with subtests.test("they agree on the index and the pins"):
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, routers=2, prefill=(2,)) as cluster:
            _, finish = await cluster.generate(PROMPT, conversation_id="c", router=0)
            home = finish.placement.decode

            async def both_know():
                answers = [await explained(cluster, r, [*PROMPT, 1, 2], conversation_id="c") for r in (0, 1)]
                indexed = [held(answer) for answer in answers]
                pinned = [answer.pinned for answer in answers]
                full = len(PROMPT) // BLOCK * BLOCK
                return (
                    pinned == [home, home]
                    and indexed[0] == indexed[1]
                    and list(indexed[0].values()).count(full) == 2
                )

            await until(both_know)
            _, finish = await cluster.generate([*PROMPT, 1, 2], conversation_id="c", router=1)
            assert (finish.placement.decode, finish.placement.reason) == (home, "pinned")
            listed = [await ranks_of(cluster, router) for router in (0, 1)]
            assert listed[0].keys() == listed[1].keys() == {*cluster.ranks}
            for name, rank in listed[0].items():
                assert (rank.trust, rank.excluded) == (1.0, "")
                assert (
                    rank.rank.generation
                    == listed[1][name].rank.generation
                    == cluster.ranks[name].address.id.generation
                )
    with subtests.test("each knows what the other has sent"):
        # A prefill rank tells both what is queued there, whoever sent it.
        slow = FakeCluster(
            etcd_endpoint,
            model_dir,
            f"{cluster_name}-1",
            routers=2,
            prefill=(2,),
            decode=(1,),
            fake_prompt_token_s=0.01,
        )
        async with slow as cluster:
            sent = asyncio.create_task(cluster.generate(list(range(400)), 1, router=0))
            busy = {}

            async def seen():
                busy.update(await ranks_of(cluster, 1))
                return any(rank.pending_tokens > 100 for name, rank in busy.items() if "prefill" in name)

            await until(seen)
            loaded = max(
                (name for name in busy if "prefill" in name), key=lambda name: busy[name].pending_tokens
            )
            answer = await explained(cluster, 1, list(range(90, 200)))
            chosen = next(candidate for candidate in answer.candidates if candidate.chosen)
            assert f"{chosen.prefill.worker}/{chosen.prefill.rank}" != loaded
            waits = {
                f"{c.prefill.worker}/{c.prefill.rank}": term.seconds
                for c in answer.candidates
                for term in c.terms
                if term.name == "wait_prefill"
            }
            assert waits.get(loaded, 1.0) > 0
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
            await cluster.assert_nothing_held()
    with subtests.test("each expects what the other has sent"):
        slow = FakeCluster(
            etcd_endpoint,
            model_dir,
            f"{cluster_name}-2",
            routers=2,
            decode=(3,),
            plans=("local",),
            fake_prompt_token_s=0.01,
        )
        async with slow as cluster:
            ranks = {name for name in cluster.ranks if "decode" in name}
            first = list(range(100, 180))
            await asyncio.gather(*(cluster.generate(first[n:], 1, router=0) for n in range(9)))
            prompt = list(range(400))
            sent = asyncio.create_task(cluster.generate(prompt, 1, router=0))
            counted = {}

            async def expected():
                answer = await explained(cluster, 1, [*prompt[:390], 7])
                counted.update({f"{c.decode.worker}/{c.decode.rank}": c for c in answer.candidates})
                return any(c.decode_hit_tokens > c.decode_indexed_tokens for c in counted.values())

            await until(expected)
            assert counted.keys() == ranks
            (told,) = (c for c in counted.values() if c.decode_hit_tokens > c.decode_indexed_tokens)
            assert told.decode_hit_tokens == 390 // BLOCK * BLOCK and told.chosen
            assert not sent.done()
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
            await cluster.assert_nothing_held()
