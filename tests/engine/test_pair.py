"""Decode and prefill engines together, on the fake runner: exact tokens, only the delta moves, no leaks."""

import asyncio
from dataclasses import replace

import pytest
from pair import FAKE, Pair

from services.engine.fake import continuation
from services.errors import InvalidRequest, NoCapacity, PeerFailed
from services.kv.types import Plan, RankAddress, RankId
from services.request import FinishReason

PAGE_BYTES = FAKE.page_size * 8


async def test_a_conversation_moves_only_its_delta():
    async with Pair() as pair:
        history = list(range(10, 23))
        for turn in range(5):
            answer = await pair.generate(history, 6)
            assert answer.tokens == continuation(history, 6)
            admitted = answer.admitted
            pages = -(-len(history) // 4) - admitted.decode_prefix_len // 4
            assert admitted.kv_bytes_moved == pages * PAGE_BYTES
            assert admitted.prompt_tokens == admitted.prefill_prefix_len + admitted.computed_tokens
            if turn:
                assert admitted.decode_prefix_len >= previous_len - 1 - 4  # noqa: F821
            history += answer.tokens
            previous_len = len(history)  # noqa: F841
            history += [400 + turn, 3, 5]
        await pair.assert_nothing_held()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("plan", list(Plan))
async def test_every_shape_is_exact(page_size, prompt_len, cache, plan):
    settings = replace(
        FAKE, page_size=page_size, index_block=16, num_pages=256 // page_size, cache_enabled=cache
    )
    async with Pair(settings) as pair:
        prompt = [(i * 11) % 500 for i in range(prompt_len)]
        for _ in range(2):  # the second time everything is cached
            answer = await pair.generate(prompt, 9, plan)
            assert answer.tokens == continuation(prompt, 9)
            assert answer.finished is FinishReason.LENGTH
        if cache and plan is Plan.REMOTE:
            assert answer.admitted.decode_prefix_len == prompt_len // page_size * page_size
        await pair.assert_nothing_held()


async def test_full_hit_moves_nothing():
    async with Pair() as pair:
        prompt = list(range(16))
        await pair.generate(prompt, 6)
        answer = await pair.generate(prompt, 6)
        assert answer.admitted.decode_prefix_len == 16
        assert answer.admitted.kv_bytes_moved == 0
        assert answer.tokens == continuation(prompt, 6)


async def test_a_batch_is_exact():
    async with Pair() as pair:
        prompts = [[5] * 9 + [i] * (i + 1) for i in range(8)]
        answers = await asyncio.gather(
            *(pair.generate(p, 12, list(Plan)[i % 2]) for i, p in enumerate(prompts))
        )
        assert [a.tokens for a in answers] == [continuation(p, 12) for p in prompts]
        await pair.assert_nothing_held()


async def test_eos_and_stop_tokens_end_it():
    async with Pair() as pair:
        prompt = [1, 2, 3]
        expected = continuation(prompt, 8)
        answer = await pair.generate(prompt, 8, eos_token_ids=(expected[3],))
        assert answer.tokens == expected[: expected.index(expected[3]) + 1]
        assert answer.finished is FinishReason.STOP
        first_is_eos = await pair.generate(prompt, 8, eos_token_ids=(expected[0],))
        assert first_is_eos.tokens == expected[:1]
        await pair.assert_nothing_held()


@pytest.mark.parametrize("plan", list(Plan))
async def test_bad_requests_hold_nothing(plan):
    async with Pair() as pair:
        with pytest.raises(InvalidRequest):
            await pair.generate([], plan=plan)
        with pytest.raises(InvalidRequest):
            await pair.generate([1, 512], plan=plan)
        with pytest.raises(NoCapacity):
            await pair.generate([1] * 300, plan=plan)
        await pair.assert_nothing_held()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.3, 0.6])
async def test_cancelling_in_any_phase_gives_everything_back(after_s):
    slow = replace(FAKE, fake_step_s=0.03)
    async with Pair(slow) as pair:
        task = asyncio.create_task(pair.generate(range(40), 20))
        await asyncio.wait([task], timeout=after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pair.assert_nothing_held()
        answer = await pair.generate(range(40), 5)
        assert answer.tokens == continuation(range(40), 5)


async def test_a_stale_generation_is_refused():
    async with Pair() as pair:
        good = pair.peer
        pair.peer = RankAddress(RankId("prefill", 0, 1), good.endpoint)
        with pytest.raises(PeerFailed, match="life"):
            await pair.generate([1, 2, 3])
        pair.peer = good
        assert (await pair.generate([1, 2, 3], 4)).tokens == continuation([1, 2, 3], 4)
        await pair.assert_nothing_held()


async def test_layouts_that_differ_are_refused():
    async with Pair(FAKE, replace(FAKE, page_size=2)) as pair:
        with pytest.raises(PeerFailed, match="page_size"):
            await pair.generate([1, 2, 3])
        await pair.assert_nothing_held()


async def test_prefill_lost_in_the_middle_is_a_failed_peer():
    slow = replace(FAKE, fake_step_s=0.05)
    async with Pair(slow) as pair:
        task = asyncio.create_task(pair.generate(range(60), 5))
        await asyncio.wait([task], timeout=0.15)
        await pair.server.stop()
        with pytest.raises(PeerFailed):
            await task
        # The writer may still live: the pages wait in quarantine for the fence, then come back.
        await pair.assert_nothing_held()
        local = await pair.generate(range(60), 5, Plan.LOCAL)
        assert local.tokens == continuation(range(60), 5)
