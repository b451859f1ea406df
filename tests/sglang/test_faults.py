"""Aborts and deaths under real SGLang: errors in time, nothing stuck, every page given back."""

import asyncio
import time

import pytest

from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import ERROR_WITHIN_S
from services.values.errors import IsthmusError
from services.values.rank import Role

pytestmark = pytest.mark.asyncio(loop_scope="session")

RESTART_S = 300.0


async def check_serves(cluster):
    await cluster.until_idle()
    tokens, _ = await cluster.generate(random_ids(40, "after an abort"), 5)
    assert len(tokens) == 5


@pytest.mark.parametrize("moment", ["during", "after"])
async def test_a_client_that_goes_away_leaves_nothing(cluster, moment):
    """During: the first chunks of the prompt are computed and written; after: tokens are streaming."""
    prompt = random_ids(3000 if moment == "during" else 40, f"abort {moment}")
    first_token, position = asyncio.Event(), cluster.log_length
    call = asyncio.create_task(cluster.generate(prompt, 400, on_token=first_token.set))
    if moment == "during":
        await cluster.until_prefilling(position)
    else:
        await first_token.wait()
    call.cancel()
    (ended,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    await check_serves(cluster)


async def test_clients_that_go_away_before_the_transfer_leave_nothing(cluster):
    """After ever longer whiles, so that each step up to the first chunk is one that some call ends in: sent,
    placed, one leg with SGLang, both legs, the transfer known to both, the ticket on its way."""
    for after_ms in (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64):
        call = asyncio.create_task(cluster.generate(random_ids(200, f"early {after_ms}"), 50))
        await asyncio.sleep(after_ms / 1000)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await check_serves(cluster)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_scheduler_fails_its_requests_and_comes_back(cluster, role):
    """Prefill comes back under the same address, to decode processes that had streams to its last life."""
    prompt = random_ids(200, f"kill {role}")
    expected, _ = await cluster.generate(prompt, 8)
    before, position = await cluster.registration(Role(role)), cluster.log_length
    call = asyncio.create_task(cluster.generate(random_ids(3000, role), 400, timeout_s=300))
    await cluster.until_prefilling(position)
    cluster.kill_schedulers(role)
    killed = time.monotonic()
    with pytest.raises(IsthmusError):
        async with asyncio.timeout(ERROR_WITHIN_S):
            await call
    print(f"killed {role}: failed after {time.monotonic() - killed:.2f} s")
    await cluster.until_placeable(RESTART_S)
    tokens, finish = await cluster.generate(prompt, 8)
    assert tokens == expected
    after = await cluster.registration(Role(role))
    assert after.id.generation != before.id.generation
    if role == "prefill":
        assert after.address.endpoint == before.address.endpoint
    else:
        assert finish.usage.decode_prefix_len == 0  # another life, an empty tree
    await cluster.until_idle(timeout_s=60.0)
    assert len(cluster.run_folders()) == 2  # one of each worker, none of the life that has ended
