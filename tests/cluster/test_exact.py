"""Greedy five-turn conversations through the whole cluster are what transformers generates.

The only difference allowed is a near tie of the reference, which is counted and printed. Where decode ranks
speculate each is held twice: the second time others of its tenant have said the same.
"""

import asyncio
import itertools
from dataclasses import dataclass

import pytest

from cluster.harness import FakeCluster
from engine.paged.draft_ranks import every_draft_pays
from exactness.checkpoints import tiny_checkpoint
from exactness.draft_checkpoints import faint_checkpoint, grown_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation

pytestmark = pytest.mark.usefixtures(every_draft_pays.__name__)

TURNS, ANSWER = 5, 10


@dataclass(frozen=True)
class Case:
    architecture: str
    page_size: int
    chunk_size: int  # below the prompt's length, or above
    border: int  # prompt length relative to a page border
    cache: str
    plan: str
    speculation: str = "off"
    transport: str = "local"

    @property
    def models(self):
        """The target, and its draft if there is one."""
        if self.speculation == "draft":
            return grown_checkpoint(self.architecture, gain=2.0), str(tiny_checkpoint(self.architecture))
        if self.speculation == "lookup":  # one that repeats itself
            return faint_checkpoint(self.architecture, gain=2000.0), ""
        return tiny_checkpoint(self.architecture), ""

    def __str__(self):
        return "-".join(
            str(v)
            for v in (
                self.architecture,
                f"p{self.page_size}",
                f"c{self.chunk_size}",
                f"b{self.border:+d}",
                self.cache,
                self.plan,
                self.speculation,
                self.transport,
            )
        )


FACTORS = {
    "architecture": ["llama", "qwen2", "qwen3", "mistral"],
    "page_size": [1, 16, 64],
    "chunk_size": [24, 4096],
    "border": [-1, 0, 1],
    "cache": ["on", "off"],
    "plan": ["remote", "local"],
    "speculation": ["off", "lookup", "tree", "draft"],
}
ALL = [Case(*values) for values in itertools.product(*FACTORS.values())]
OF_LLAMA = [case for case in ALL if case.architecture == "llama"]
PLAIN = [case for case in ALL if case.speculation == "off"]


def covering(cases, num_factors):
    """Greedy: few cases that between them have all values together of every so many factors."""
    names = list(FACTORS)

    def met(case):
        values = [(n, getattr(case, n)) for n in names]
        return set(itertools.combinations(values, num_factors))

    all_met, chosen = {case: met(case) for case in cases}, []
    missing = set().union(*all_met.values())
    while missing:
        best = max(cases, key=lambda case: len(all_met[case] & missing))
        chosen.append(best)
        missing -= all_met[best]
    return chosen


def cluster_of(etcd, case, name, decode=(2,)):
    directory, draft = case.models
    return FakeCluster(
        etcd,
        directory,
        name,
        decode=decode,
        plans=(case.plan,),
        engine="torch",
        self_check="off",
        model=str(directory),
        page_size=case.page_size,
        index_block=64,
        kv_pages=2048 // case.page_size,
        decode_cache=case.cache,
        prefill_cache=case.cache,
        chunk_size=case.chunk_size,
        num_threads=1,
        transport=case.transport,
        speculation=case.speculation,
        draft_model=draft,
    ), directory


async def check_conversation(cluster, directory, ids, case, name):
    """Five turns; returns how many near ties there were, and how many drafts were right."""
    ties, previous, accepted = 0, 0, 0
    for turn in range(TURNS):
        tokens, finish = await cluster.generate(ids, ANSWER, conversation_id=name, tenant=name, timeout=60)
        ties += count_near_ties(reference_generation(directory, tuple(ids), ANSWER), tokens)
        usage = finish.usage
        accepted += usage.accepted_draft_tokens
        assert usage.prompt_tokens == usage.reused_tokens + usage.computed_tokens
        if case.plan == "remote":
            assert usage.prompt_tokens == usage.decode_prefix_len + usage.delta_tokens
        if turn and case.cache == "on":
            assert usage.decode_prefix_len >= previous - case.page_size
        if case.cache == "off":
            assert usage.decode_prefix_len == usage.prefill_prefix_len == 0
        ids = [*ids, *tokens]
        previous = len(ids)
        ids += random_prompt(3, seed=100 * len(name) + turn)
    return ties, accepted


async def check(etcd, case, name):
    speculates = case.speculation != "off"
    cluster, directory = cluster_of(etcd, case, name, decode=(1,) if speculates else (2,))
    async with cluster:
        length = 2 * max(case.page_size, 24) + case.border
        length += -(length - case.border) % case.page_size
        prompt = list(random_prompt(length, seed=1))
        for _ in range(1 + speculates):
            ties, accepted = await check_conversation(cluster, directory, prompt, case, "one")
            print(f"{case}: {ties} near ties in {TURNS * ANSWER} tokens, {accepted} of them drafted")
        # With lookup that is up to the text.
        assert case.speculation == "lookup" or speculates == (accepted > 0)
        await cluster.assert_nothing_held()


async def test_every_value(etcd_endpoint, cluster_name, subtests):
    for number, case in enumerate(covering(OF_LLAMA, 1)):
        with subtests.test(str(case)):
            await check(etcd_endpoint, case, f"{cluster_name}-{number}")


@pytest.mark.exact
@pytest.mark.parametrize("case", covering(ALL, 2), ids=str)
async def test_pairwise_of_every_architecture(etcd_endpoint, case, cluster_name):
    await check(etcd_endpoint, case, cluster_name)


@pytest.mark.exact
@pytest.mark.parametrize("case", covering(PLAIN, 3), ids=str)
async def test_every_three_values_together(etcd_endpoint, case, cluster_name):
    await check(etcd_endpoint, case, cluster_name)


@pytest.mark.nixl
@pytest.mark.parametrize(
    "page_size", [16, *(pytest.param(size, marks=pytest.mark.exact) for size in (1, 64))]
)
async def test_over_nixl(etcd_endpoint, page_size, cluster_name):
    await check(
        etcd_endpoint, Case("llama", page_size, 24, 1, "on", "remote", transport="nixl"), cluster_name
    )


@pytest.mark.exact
async def test_batches_seeds_and_shared_prompts(etcd_endpoint, cluster_name, subtests):
    with subtests.test("two conversations share a system prompt on different ranks"):
        case = Case("qwen3", 16, 24, 0, "on", "remote")
        cluster, directory = cluster_of(etcd_endpoint, case, cluster_name, decode=(1, 1))
        async with cluster:
            system = list(random_prompt(64, seed=3))
            prompts = [system + list(random_prompt(9, seed=10 + i)) for i in range(2)]
            first = await cluster.generate(prompts[0], ANSWER, conversation_id="a")
            # Make the other rank the better one for the second conversation: only it is left.
            (home,) = [n for n in cluster.ranks if n == f"{first[1].placement.decode.worker}/0"]
            other = next(n for n in cluster.ranks if n.startswith("decode") and n != home)
            await cluster.stop_rank(home)
            second = await cluster.generate(prompts[1], ANSWER, conversation_id="b")
            assert f"{second[1].placement.decode.worker}/0" == other
            assert (
                second[1].usage.prefill_prefix_len >= 64
            )  # prefill had the system prompt, this rank had not
            assert second[1].usage.decode_prefix_len == 0
            for prompt, (tokens, _) in zip(prompts, (first, second), strict=True):
                count_near_ties(reference_generation(directory, tuple(prompt), ANSWER), tokens)
            await cluster.assert_nothing_held()
    with subtests.test("a batch of eight"):
        case = Case("mistral", 16, 24, 0, "on", "remote")
        cluster, directory = cluster_of(etcd_endpoint, case, f"{cluster_name}-1", decode=(1,))
        async with cluster:
            prompts = [list(random_prompt(20 + 11 * i, seed=50 + i)) for i in range(8)]
            answers = await asyncio.gather(*(cluster.generate(p, 24, timeout=60) for p in prompts))
            for prompt, (tokens, _) in zip(prompts, answers, strict=True):
                count_near_ties(reference_generation(directory, tuple(prompt), 24), tokens)
            await cluster.assert_nothing_held()
    with subtests.test("seeded sampling does not depend on the way"):
        # The same seed gives the same tokens, on whatever ranks, plan or batch.
        from services.wire.isthmus.v1 import common_pb2, generation_pb2

        answers = []
        for plan in ("remote", "local"):
            case = Case("llama", 16, 24, 0, "on", plan)
            cluster, _ = cluster_of(etcd_endpoint, case, f"{cluster_name}-{plan}")
            async with cluster:
                sampling = common_pb2.SamplingParams(
                    temperature=1.5, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True
                )
                request = generation_pb2.GenerateRequest(
                    token_ids=generation_pb2.TokenIds(ids=random_prompt(40, seed=2)), sampling=sampling
                )
                for _ in range(2):
                    call = cluster.stubs[0].Generate(request)
                    answers.append([token async for response in call for token in response.token_ids])
        assert all(answer == answers[0] for answer in answers)
        assert len(answers[0]) == 24
