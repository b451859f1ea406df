"""What services/engine/base.py promises, over every engine: fake and torch, memcpy and NIXL.

Each engine comes with its oracle: the fake's own function, or what transformers generates.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from checkpoints import tiny_checkpoint
from pair import FAKE, Pair
from reference import count_near_ties, random_prompt, reference_generation
from services.engine.choose import EngineSettings
from services.engine.fake import continuation
from services.errors import InvalidRequest, NoCapacity, Unavailable
from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.types import Plan
from services.request import FinishReason, SamplingParams


@dataclass(frozen=True)
class Fake:
    settings: EngineSettings = FAKE

    def check(self, prompt, tokens):
        assert list(tokens) == continuation(prompt, len(tokens))

    def expected(self, prompt, count):
        return continuation(prompt, count)


@dataclass(frozen=True)
class Torch:
    settings: EngineSettings
    directory: Path

    def check(self, prompt, tokens):
        count_near_ties(reference_generation(self.directory, tuple(prompt), len(tokens)), tokens)

    def expected(self, prompt, count):
        return list(reference_generation(self.directory, tuple(prompt), count).token_ids)


def torch_engine(transport="local", **changes):
    directory = tiny_checkpoint("qwen3")
    settings = replace(
        FAKE,
        engine="torch",
        model_path=str(directory),
        page_size=16,
        index_block=16,
        num_pages=64,
        transport=transport,
        limits=replace(FAKE.limits, chunk_size=24),
        **changes,
    )
    return Torch(settings, directory)


@pytest.fixture(params=["fake", "torch", pytest.param("torch-nixl", marks=pytest.mark.nixl)])
def engine(request):
    if request.param == "fake":
        return Fake()
    return torch_engine("nixl" if request.param == "torch-nixl" else "local")


@pytest.fixture(params=list(Plan), ids=lambda plan: plan.value)
def plan(request):
    return request.param


def prompt_of(length, seed=0):
    return list(random_prompt(length, seed))


async def test_tokens_are_the_oracles(engine, plan):
    async with Pair(engine.settings) as pair:
        for length in (1, 15, 16, 17, 50):
            answer = await pair.generate(prompt_of(length, length), 8, plan)
            engine.check(prompt_of(length, length), answer.tokens)
            assert answer.finished is FinishReason.LENGTH
            admitted = answer.admitted
            assert (admitted.prompt_tokens, admitted.plan) == (length, plan)
            reused = admitted.prefill_prefix_len if plan is Plan.REMOTE else admitted.decode_prefix_len
            assert admitted.prompt_tokens == reused + admitted.computed_tokens
        await pair.assert_nothing_held()


async def test_the_next_turn_reuses_the_last_one_with_its_answer(engine, plan):
    async with Pair(engine.settings) as pair:
        page = engine.settings.page_size
        first = await pair.generate(prompt_of(40), 9, plan)
        turn = [*prompt_of(40), *first.tokens, *prompt_of(5, 9)]
        second = await pair.generate(turn, 9, plan)
        engine.check(turn, second.tokens)
        assert second.admitted.decode_prefix_len == 48 // page * page
        pages = -(-len(turn) // page) - 48 // page
        moved = pages * pair.decode.layout.page_bytes if plan is Plan.REMOTE else 0
        assert second.admitted.kv_bytes_moved == moved
        await pair.assert_nothing_held()


async def test_a_full_hit_moves_nothing(engine):
    async with Pair(engine.settings) as pair:
        await pair.generate(prompt_of(48), 4)
        answer = await pair.generate(prompt_of(48), 4)
        assert (answer.admitted.decode_prefix_len, answer.admitted.kv_bytes_moved) == (48, 0)
        engine.check(prompt_of(48), answer.tokens)


async def test_without_a_cache_nothing_is_reused(engine, plan):
    async with Pair(replace(engine.settings, cache_enabled=False)) as pair:
        for _ in range(2):
            answer = await pair.generate(prompt_of(40), 5, plan)
            engine.check(prompt_of(40), answer.tokens)
            assert answer.admitted.decode_prefix_len == answer.admitted.prefill_prefix_len == 0
        await pair.assert_nothing_held()
        books = await pair.decode.books()
        assert books.free == books.total


async def test_a_mixed_batch_is_exact(engine):
    async with Pair(engine.settings) as pair:
        prompts = [prompt_of(32, 1) + prompt_of(1 + 5 * i, 50 + i) for i in range(8)]
        plans = [list(Plan)[i % 2] for i in range(8)]
        answers = await asyncio.gather(
            *(pair.generate(p, 12, plan) for p, plan in zip(prompts, plans, strict=True))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            engine.check(prompt, answer.tokens)
        await pair.assert_nothing_held()


async def test_retraction_changes_no_token(engine, plan):
    """Six sequences that together need more pages than there are."""
    pages = 240 // engine.settings.page_size
    async with Pair(replace(engine.settings, num_pages=pages)) as pair:
        prompts = [prompt_of(20, i) for i in range(6)]
        sampled = SamplingParams(temperature=1.3, seed=5)
        answers = await asyncio.gather(*(pair.generate(p, 40, plan) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            engine.check(prompt, answer.tokens)
        together = await asyncio.gather(*(pair.generate(p, 40, plan, sampling=sampled) for p in prompts))
        alone = [await pair.generate(p, 40, plan, sampling=sampled) for p in prompts]
        assert [a.tokens for a in together] == [a.tokens for a in alone]
        await pair.assert_nothing_held()


async def test_generation_goes_on_after_output_so_far(engine, plan):
    async with Pair(engine.settings) as pair:
        whole = engine.expected(prompt_of(30), 12)
        answer = await pair.generate(prompt_of(30), 12, plan, output_ids_so_far=tuple(whole[:5]))
        assert whole[:5] + answer.tokens == whole
        assert answer.admitted.prompt_tokens == 35


async def test_end_of_sequence_and_stop_tokens(engine, plan):
    async with Pair(engine.settings) as pair:
        expected = engine.expected(prompt_of(30), 12)
        end = expected[4]
        until = expected[: expected.index(end) + 1]
        stopped = await pair.generate(prompt_of(30), 12, plan, eos_token_ids=(end,))
        assert (stopped.tokens, stopped.finished) == (until, FinishReason.STOP)
        sampling = SamplingParams(temperature=0, stop_token_ids=(end,))
        stopped = await pair.generate(prompt_of(30), 12, plan, sampling=sampling)
        assert (stopped.tokens, stopped.finished) == (until, FinishReason.STOP)
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        ignored = await pair.generate(prompt_of(30), 12, plan, sampling=sampling, eos_token_ids=(end,))
        assert (ignored.tokens, ignored.finished) == (expected, FinishReason.LENGTH)
        await pair.assert_nothing_held()


async def test_closing_the_iterator_gives_every_page_back(engine, plan):
    async with Pair(engine.settings) as pair:
        for taken in range(4):
            async with pair.outputs(pair.request(prompt_of(40, taken), 30, plan)) as outputs:
                for _ in range(taken):
                    await anext(outputs)
        await pair.assert_nothing_held()
        engine.check(prompt_of(40), (await pair.generate(prompt_of(40), 5, plan)).tokens)


async def test_what_can_never_work_is_refused(engine, plan):
    async with Pair(engine.settings) as pair:
        limit = pair.decode.max_context_tokens
        for prompt, error in (([], InvalidRequest), ([1, 10**6], InvalidRequest), ([5] * limit, NoCapacity)):
            with pytest.raises(error):
                await pair.generate(prompt, plan=plan)
        answer = await pair.generate(prompt_of(limit - 2), 50, plan)
        assert (len(answer.tokens), answer.finished) == (2, FinishReason.LENGTH)
        await pair.assert_nothing_held()


async def test_cache_events_tell_what_the_tree_holds(engine, plan):
    async with Pair(engine.settings) as pair:
        held = set()
        async with aclosing(pair.decode.cache_events()) as events:
            follow = asyncio.create_task(_follow(events, held))
            answer = await pair.generate(prompt_of(40), 9, plan)
            ids = [*prompt_of(40), *answer.tokens]
            block, seed = engine.settings.index_block, scope_seed(engine.settings.model_name)
            expected = set(sequence_hashes(ids[:-1], block, seed))
            async with asyncio.timeout(5):
                while held != expected:
                    await asyncio.sleep(0.01)
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)


async def _follow(events, held):
    async for change in events:
        held -= set(change.removed)
        held |= set(change.stored)


async def test_stopping_ends_requests_as_unavailable(engine, plan):
    async with Pair(replace(engine.settings, fake_step_s=0.005)) as pair:
        async with pair.outputs(pair.request(prompt_of(20), 200, plan)) as outputs:
            await anext(outputs)
            stop = asyncio.create_task(pair.decode.stop())
            with pytest.raises(Unavailable):
                async for _ in outputs:
                    pass
        await stop
