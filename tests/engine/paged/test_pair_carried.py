"""Decode and prefill engines of a model of several groups: hits are attention's, the rest is carried."""

import asyncio
from dataclasses import replace
from itertools import product

import pytest

from engine.pair import FAKE, Pair, core_of
from services.engine.fake import continuation, parse_carried
from services.kv.tails import carried_bytes
from services.values.errors import ConfigError
from services.values.rank import Plan

CARRIED = ["state:3", "window:6", "chunk:8,state", "state,window:5,window:9"]
PAGE_BYTES = FAKE.page_size * 8


def hybrid(carried, **changes):
    return replace(FAKE, fake_carried=carried, **changes)


def expected(carried, prompt, count):
    return continuation(prompt, count, parse_carried(carried))


async def test_a_conversation_moves_its_delta_and_what_is_carried(subtests):
    for carried in CARRIED:
        with subtests.test("a conversation moves its delta and what is carried", carried=carried):
            async with Pair(hybrid(carried)) as pair:
                history = list(range(10, 23))
                previous_prompt = previous_len = 0
                for turn in range(5):
                    answer = await pair.generate(history, 6)
                    assert answer.tokens == expected(carried, history, 6)
                    admitted, layout = answer.admitted, pair.decode.layout
                    pages = -(-len(history) // 4) - admitted.decode_prefix_len // 4
                    due = carried_bytes(layout, len(history))
                    assert admitted.kv_bytes_moved == pages * PAGE_BYTES + due
                    assert sum(admitted.carried_bytes.values()) == due > 0
                    if turn:
                        assert admitted.decode_prefix_len >= previous_len - 1 - 4
                        assert admitted.prefill_prefix_len == previous_prompt // 4 * 4
                    previous_prompt = len(history)
                    history += answer.tokens
                    previous_len = len(history)
                    history += [400 + turn, 3, 5]
                await pair.assert_nothing_held()

    with subtests.test("a full hit still moves what is carried"):
        async with Pair(hybrid("window:6,state")) as pair:
            prompt = list(range(16))
            await pair.generate(prompt, 6)
            admitted = (answer := await pair.generate(prompt, 6)).admitted
            assert admitted.decode_prefix_len == 16
            assert admitted.kv_bytes_moved == carried_bytes(pair.decode.layout, 16) == 2 * PAGE_BYTES + 8
            assert answer.tokens == expected("window:6,state", prompt, 6)


POOLS = [(1, 16, 1), (4, 16, 16), (16, 16, 17), (16, 32, 40), (4, 8, 33)]  # page, index block, prompt
CACHES, PLANS = ["on", "off"], list(Plan)
# Every two values of every two factors meet in one of these.
SHAPES = [
    (carried, PLANS[i // 2 % 2], CACHES[i % 2], pool)
    for i, (carried, pool) in enumerate(product(CARRIED, POOLS))
]


async def check_shape(carried, plan, cache, pool):
    page_size, index_block, prompt_len = pool
    settings = hybrid(
        carried,
        page_size=page_size,
        index_block=index_block,
        kv_pages=256 // page_size,
        decode_cache=cache,
        prefill_cache=cache,
    )
    async with Pair(settings) as pair:
        prompt = [(i * 11) % 500 for i in range(prompt_len)]
        for _ in range(2):  # the second time everything is cached
            answer = await pair.generate(prompt, 9, plan)
            assert answer.tokens == expected(carried, prompt, 9)
        if cache == "on" and plan is Plan.REMOTE:
            assert answer.admitted.decode_prefix_len == prompt_len // page_size * page_size
        await pair.assert_nothing_held()


async def test_shapes_are_exact(subtests):
    for shape in SHAPES:
        with subtests.test(shape=shape):
            await check_shape(*shape)


@pytest.mark.exact
@pytest.mark.parametrize("shape", list(product(CARRIED, PLANS, CACHES, POOLS)), ids=str)
async def test_every_shape_is_exact(shape):
    await check_shape(*shape)


async def test_turns_under_either_plan_go_on_from_each_other(subtests):
    """Under local decode goes on where its own answer ended."""
    for carried in CARRIED:
        with subtests.test(carried=carried):
            async with Pair(hybrid(carried)) as pair:
                history = list(range(10, 23))
                previous_len = 0
                for turn, plan in enumerate([Plan.REMOTE, Plan.LOCAL, Plan.LOCAL, Plan.REMOTE, Plan.LOCAL]):
                    answer = await pair.generate(history, 7, plan)
                    assert answer.tokens == expected(carried, history, 7)
                    if plan is Plan.LOCAL:
                        assert answer.admitted.decode_prefix_len >= previous_len - 1 - 4
                    history += answer.tokens
                    previous_len = len(history)
                    history += [400 + turn, 3, 5]
                await pair.assert_nothing_held()


async def test_checkpoints_and_states_that_go(subtests):
    for carried in CARRIED:
        with subtests.test(carried=carried):
            async with Pair(hybrid(carried)) as pair:
                prompt = list(range(40))
                await pair.generate(prompt, 4)
                for engine in (pair.decode, pair.prefill):
                    while core_of(engine).carried.points.evict():
                        pass
                for plan in (Plan.REMOTE, Plan.LOCAL):
                    answer = await pair.generate([*prompt, 77], 4, plan)
                    assert answer.tokens == expected(carried, [*prompt, 77], 4)
                await pair.assert_nothing_held()

    with subtests.test("an aborted transfer leaks no state"):
        settings = hybrid("window:6,state", fake_prompt_token_s=0.002)
        async with Pair(settings) as pair:
            for _ in range(3):
                async with pair.outputs(pair.request(range(60), 8)) as outputs:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.03):
                            await anext(outputs)
            answer = await pair.generate(range(60), 8)
            assert answer.tokens == expected("window:6,state", list(range(60)), 8)
            await pair.assert_nothing_held()


async def test_a_batch_on_a_small_pool_is_exact(subtests):
    """With retractions, and with fewer states and windows than sequences."""
    for carried in CARRIED:
        with subtests.test(carried=carried):
            settings = hybrid(carried, kv_pages=24, max_running_requests=3)
            async with Pair(settings) as pair:
                prompts = [[5] * 9 + [i] * (i + 1) for i in range(8)]
                answers = await asyncio.gather(
                    *(pair.generate(p, 24, list(Plan)[i % 2]) for i, p in enumerate(prompts))
                )
                assert [a.tokens for a in answers] == [expected(carried, p, 24) for p in prompts]
                await pair.assert_nothing_held()


async def test_groups_as_they_are_set(subtests):
    with subtests.test("ranks of other groups do not pair"):
        async with Pair(hybrid("state"), prefill_settings=hybrid("window:6")) as pair:
            with pytest.raises(Exception, match="the KV layouts differ in groups"):
                await pair.generate(range(9), 2)

    with subtests.test("pools are as large as they are set"):
        async with Pair(hybrid("state:3,window:6", state_slots=21, window_pages=40)) as pair:
            assert [memory.num_pages for memory in pair.decode.memories] == [FAKE.kv_pages, 21, 40]
            assert pair.decode.layout.unit_bytes == (PAGE_BYTES, 24, PAGE_BYTES)

    for text in ["state:0", "state:x", "window", "window:0", "latent:4"]:
        with (
            subtests.test("groups that are none are refused", text=text),
            pytest.raises(ConfigError, match="--fake-carried takes"),
        ):
            parse_carried(text)
