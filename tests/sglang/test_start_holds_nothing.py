"""SGLang's own warm-up requests are switched off (settings.py), and nothing else leaves a page behind."""

import asyncio

import pytest

from engine.sglang.real_cluster import PAGE

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_before_the_first_request_no_page_is_held_or_cached(cluster):
    """Pages that could be evicted count as free in SGLang's report, but its tree events tell of them."""
    assert {role for role, _, _ in cluster.at_start} == {"prefill", "decode"}
    assert not [gauge for gauge in cluster.at_start if gauge[2]]


async def test_a_page_that_is_cached_would_have_been_seen(cluster):
    await cluster.generate(list(range(4 * PAGE)), 2)
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(both_publish, cluster):
            await asyncio.sleep(0.05)


def both_publish(cluster):
    gauges = [cluster.gauges("isthmus_publisher_blocks", role) for role in ("prefill", "decode")]
    return all(sum(gauge.value for gauge in of_role) for of_role in gauges)
