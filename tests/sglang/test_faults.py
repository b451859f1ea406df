"""Aborts and deaths under real SGLang: errors in time, nothing stuck, every page given back."""

import asyncio
import random
import time

import pytest

from services.errors import IsthmusError

pytestmark = pytest.mark.asyncio(loop_scope="session")

ERROR_WITHIN_S = 5.0
RESTART_S = 300.0


def random_ids(count, seed):
    return [random.Random(f"{seed}/{i}").randrange(2, 500) for i in range(count)]


@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_a_client_that_goes_away_leaves_nothing(cluster, moment):
    """During: the first chunks of the prompt are computed and written; after: tokens are streaming."""
    prompt = random_ids(3000 if moment != "after" else 40, f"abort {moment}")
    first_token, position = asyncio.Event(), cluster.log_length
    call = asyncio.create_task(cluster.generate(prompt, 400, on_token=first_token.set))
    if moment == "before":
        await asyncio.sleep(0)  # it has been sent, no more
    elif moment == "during":
        await cluster.until_prefilling(position)
    else:
        await first_token.wait()
    call.cancel()
    (ended,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    await cluster.until_idle()
    tokens, _ = await cluster.generate(random_ids(40, "after an abort"), 5)
    assert len(tokens) == 5


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_scheduler_fails_its_requests_and_comes_back(cluster, role):
    prompt = random_ids(200, f"kill {role}")
    expected, _ = await cluster.generate(prompt, 8)
    position = cluster.log_length
    call = asyncio.create_task(cluster.generate(random_ids(3000, role), 400))
    await cluster.until_prefilling(position)
    cluster.kill_schedulers(role)
    killed = time.monotonic()
    with pytest.raises(IsthmusError):
        await call
    assert time.monotonic() - killed < ERROR_WITHIN_S
    await cluster.until_placeable(RESTART_S)
    tokens, finish = await cluster.generate(prompt, 8)
    assert tokens == expected
    if role == "decode":
        assert finish.usage.decode_prefix_len == 0  # another life, an empty tree
    await cluster.until_idle(timeout_s=60.0)
