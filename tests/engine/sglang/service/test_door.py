"""Requests into schedulers, without SGLang."""

import asyncio
from contextlib import aclosing

import pytest

from services.engine.sglang.reports import Abort, Generate, Outputs
from services.engine.sglang.service.process_connections import Door, TokenCallback
from services.values.errors import InvalidRequest, PeerFailed, Unavailable

LENGTH = {"type": "length"}


def body(rid, dp_rank=0):
    return {"rid": rid, "routed_dp_rank": dp_rank}


def chunk(rid, ids, reason=None):
    return {"rid": rid, "output_ids": ids, "meta_info": {"finish_reason": reason}}


@pytest.fixture
def door():
    """A door with two ranks; `said` has what each was told."""
    door = Door()
    door.said = {0: [], 1: []}
    for dp_rank, said in door.said.items():
        door.connect(dp_rank, said.append)
    return door


async def ids_of(door, rid, dp_rank=0):
    return [chunk["output_ids"] async for chunk in door.stream(body(rid, dp_rank))]


async def test_outputs_of_a_step_go_to_their_requests_and_ranks_hear_of_their_own(door):
    first, second = (asyncio.create_task(ids_of(door, rid, rank)) for rid, rank in (("a", 0), ("b", 1)))
    await asyncio.sleep(0)
    door.take(Outputs([chunk("b", [7]), chunk("a", [1]), chunk("gone", [9])]))
    door.take(Outputs([chunk("a", [2, 3], LENGTH), chunk("b", [], LENGTH)]))
    assert await first == [[1], [2, 3]] and await second == [[7], []]
    assert door.said == {0: [Generate(body("a", 0))], 1: [Generate(body("b", 1))]}
    assert "open=0" in repr(door)


async def test_tokens_are_chunks_or_told_in_their_place(subtests, door):
    with subtests.test("tokens are chunks where nobody is told them"):
        answer = asyncio.create_task(ids_of(door, "a"))
        await asyncio.sleep(0)
        door.take(Outputs([], {"a": [1, 2], "gone": [9]}))
        door.take(Outputs([chunk("a", [3], LENGTH)]))
        assert await answer == [[1, 2], [3]]
    for begins_at in [1, 2, 3, 9]:
        with subtests.test(begins_at=begins_at):
            passed = []
            answer = asyncio.create_task(
                passed_on(door, passed, TokenCallback(passed.append, set()), begins_at)
            )
            await asyncio.sleep(0)
            door.take(Outputs([], {"a": [1]}))
            door.take(Outputs([], {"a": [2]}))  # while the first one waits to be read
            await asyncio.sleep(0)
            door.take(Outputs([], {"a": [3, 4]}))
            door.take(Outputs([chunk("a", [5])]))
            door.take(Outputs([], {"a": [6]}))  # behind a chunk
            await asyncio.sleep(0)
            door.take(Outputs([], {"a": [7]}))
            door.take(Outputs([chunk("a", [8], LENGTH)]))
            await answer
            ids = [token_id for each in passed for token_id in (each if isinstance(each, list) else [each])]
            assert ids == [1, 2, 3, 4, 5, 6, 7, 8]
            told = [each for each in passed if not isinstance(each, list)]
            assert told == ([3, 4, 7] if begins_at <= 2 else [7] if begins_at == 3 else [])
    with subtests.test("a stop and what comes behind it are not told"):
        passed = []
        answer = asyncio.create_task(passed_on(door, passed, TokenCallback(passed.append, {7}), 1))
        await asyncio.sleep(0)
        for ids in ([1], [2], [3, 7], [4]):
            door.take(Outputs([], {"a": ids}))
            await asyncio.sleep(0)
        door.take(Outputs([chunk("a", [5], LENGTH)]))
        await answer
        assert passed == [[1], 2, [3, 7], [4], [5]]


async def passed_on(door, passed, telling, begins_at):
    """All that comes of "a", in the order in which it is passed on: chunks as lists."""
    async for chunk in door.stream(body("a"), telling):
        passed.append(chunk["output_ids"])
        if len(passed) == begins_at:
            telling.begin()


async def test_a_name_that_is_under_way_is_refused_and_the_first_goes_on(door):
    first = asyncio.create_task(ids_of(door, "a"))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="under way"):
        await ids_of(door, "a")
    door.take(Outputs([chunk("a", [1], LENGTH)]))
    assert await first == [[1]]
    assert door.said[0] == [Generate(body("a"))]


async def test_a_request_that_is_left_is_aborted_once(subtests, door):
    for taken in [0, 1]:
        with subtests.test(taken=taken):
            door.said[0].clear()
            async with aclosing(door.stream(body("a"))) as chunks:
                waiting = asyncio.create_task(anext(chunks))
                await asyncio.sleep(0)
                if taken:
                    door.take(Outputs([chunk("a", [1])]))
                    await waiting
                else:
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)
            assert door.said[0] == [Generate(body("a")), Abort("a")]
            door.take(Outputs([chunk("a", [2])]))  # was on its way
            assert "open=0" in repr(door)


async def test_what_sglang_gives_up_is_an_error_and_not_aborted_again(subtests, door):
    for reason, error in [
        ({"status_code": 400, "message": "no such grammar"}, InvalidRequest),
        ({"status_code": 500, "message": "KVTransferError"}, PeerFailed),
        ({"message": "Abort in waiting queue"}, PeerFailed),
    ]:
        with subtests.test(reason=reason, error=error):
            answer = asyncio.create_task(ids_of(door, "a"))
            await asyncio.sleep(0)
            door.take(Outputs([chunk("a", [], {"type": "abort", **reason})]))
            with pytest.raises(error, match=reason["message"]):
                await answer
            assert Abort("a") not in door.said[0]


async def test_a_door_that_closes_ends_what_is_open_and_opens_no_more(door):
    answer = asyncio.create_task(ids_of(door, "a"))
    await asyncio.sleep(0)
    door.take(Outputs([chunk("a", [1])]))
    door.close("SGLang has ended")
    with pytest.raises(Unavailable, match="has ended"):
        await answer
    with pytest.raises(Unavailable, match="not connected"):
        await ids_of(door, "b")
