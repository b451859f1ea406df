"""A decode rank, a prefill rank and the link between them."""

import pytest

from transfer.receiving.link_pair import Pair


@pytest.fixture
async def pair(make_pool):
    pair = Pair(make_pool)
    yield pair
    await pair.close()


@pytest.fixture
async def prefill(pair):
    return pair.prefill()


@pytest.fixture
async def link(pair, prefill):
    return await pair.links.link(await prefill.listen())
