"""A prefill and a decode rank in two processes, pools on the device, NIXL between: exact, deltas move."""

import pytest

from bench.decode_cache.ranks import RankSettings, open_side
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.values.rank import Plan
from services.values.request import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PAGE_SIZE, NUM_TOKENS = 16, 24


@pytest.fixture
def settings(device):
    return RankSettings(
        model_path=str(tiny_checkpoint()),
        decode_pages=128,
        prefill_pages=256,
        page_size=PAGE_SIZE,
        chunk_size=64,
        max_running_requests=8,
        num_threads=1,
        transport="nixl",
        device=device,
        digest_share=1.0,
    )


async def answer(side, name, prompt, plan):
    request = GenerationRequest(name, prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    ids, admitted = [], None
    async for output in side.generate(request, frozenset({plan})):
        ids += output.token_ids
        admitted = admitted or output.admitted
    return tuple(ids), admitted


@pytest.mark.parametrize("decode_cache", [True, False])
async def test_a_conversation(settings, decode_cache):
    async with open_side(settings, decode_cache=decode_cache) as side:
        history, held = random_prompt(200, seed=1), 0
        for turn, plan in enumerate([Plan.REMOTE, Plan.REMOTE, Plan.LOCAL, Plan.REMOTE]):
            ids, admitted = await answer(side, f"turn-{turn}", history, plan)
            assert count_near_ties(reference_generation(tiny_checkpoint(), history, NUM_TOKENS), ids) == 0
            if plan is Plan.REMOTE:
                assert admitted.decode_prefix_len == (held if decode_cache else 0)
            held = (len(history) + NUM_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
            history += ids + random_prompt(30, seed=10 + turn)
        assert side.load().books.quarantined == 0
