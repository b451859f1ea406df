"""Multi-turn conversations through the whole cluster are those of one SGLang, and only deltas cross."""

import asyncio

import pytest
import pytest_asyncio

from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import PAGE, AggregatedSglang

pytestmark = pytest.mark.asyncio(loop_scope="session")

TURNS, ANSWER = 4, 11
# Around a page border, so that full pages, full hits and single tokens are among what is left to move.
FIRST_LENGTHS = (PAGE * 5 - 1, PAGE * 5, PAGE * 5 + 1, 20)


def pages(tokens):
    return -(-tokens // PAGE)


async def converse(cluster, name, length):
    """One conversation: (prompt, answer, Finish) of each turn."""
    turns, ids = [], random_ids(length, name)
    for turn in range(TURNS):
        tokens, finish = await cluster.generate(ids, ANSWER, conversation_id=name)
        turns.append((list(ids), tokens, finish))
        ids = [*ids, *tokens, *random_ids(3, f"{name}/{turn}")]
    return turns


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def conversations(cluster):
    """Turns by name, held all at once."""
    names = [f"conversation-{number}" for number in range(len(FIRST_LENGTHS))]
    held = await asyncio.gather(*map(converse, [cluster] * len(names), names, FIRST_LENGTHS))
    return dict(zip(names, held, strict=True))


async def test_only_deltas_cross_and_usage_adds_up(conversations):
    held = conversations.values()
    assert {turns[0][2].placement.decode.rank for turns in held} == {0, 1}
    page_bytes = {f.usage.kv_bytes_moved // pages(f.usage.delta_tokens) for (_, _, f), *_ in held}
    assert len(page_bytes) == 1
    (page_bytes,) = page_bytes
    for turns in held:
        homes = {finish.placement.decode.rank for _, _, finish in turns}
        assert len(homes) == 1, "a conversation left its rank"
        known = 0  # tokens whose KV the decode rank has: all but the last one generated
        for prompt, tokens, finish in turns:
            usage = finish.usage
            assert usage.prompt_tokens == len(prompt) == usage.reused_tokens + usage.computed_tokens
            assert usage.prompt_tokens == usage.decode_prefix_len + usage.delta_tokens
            assert usage.decode_prefix_len == known // PAGE * PAGE
            assert usage.kv_bytes_moved == pages(usage.delta_tokens) * page_bytes
            assert usage.kv_bytes_moved + usage.kv_bytes_saved == pages(usage.prompt_tokens) * page_bytes
            assert usage.completion_tokens == len(tokens) == ANSWER
            known = len(prompt) + len(tokens) - 1
    assert all(turn[2].usage.decode_prefix_len > 0 for turns in held for turn in turns[1:])


async def test_a_repeated_prompt_is_a_full_hit_and_moves_nothing(cluster):
    prompt = random_ids(PAGE * 4, "full hit")
    first, _ = await cluster.generate(prompt, ANSWER, conversation_id="full")
    again, finish = await cluster.generate(prompt, ANSWER, conversation_id="full")
    assert again == first
    assert finish.usage.decode_prefix_len == len(prompt)
    assert finish.usage.kv_bytes_moved == finish.usage.delta_tokens == 0


async def test_tenants_share_nothing(cluster):
    prompt = random_ids(PAGE * 4, "tenants")
    await cluster.generate(prompt, ANSWER, tenant="a")
    for tenant, hit in (("b", 0), ("a", len(prompt))):
        _, finish = await cluster.generate(prompt, ANSWER, tenant=tenant)
        assert finish.usage.decode_prefix_len == hit


async def test_the_index_knows_what_both_ranks_hold(cluster, conversations):
    for name, turns in conversations.items():
        prompt, tokens, finish = turns[-1]
        ids = prompt + tokens
        await cluster.until_indexed(finish.placement.decode, ids[: (len(ids) - 1) // PAGE * PAGE], name)


@pytest.mark.slow  # another SGLang; tests/engine/test_conformance.py compares with transformers
async def test_greedy_output_is_that_of_one_aggregated_sglang(cluster, conversations, tmp_path):
    async with AggregatedSglang(cluster.model, tmp_path) as aggregated:
        for turns in conversations.values():
            for prompt, tokens, _ in turns:
                assert await aggregated.generate(prompt, ANSWER) == tokens
