"""Requests that come at the same moment, in the order in which they are placed."""

import asyncio

import pytest

from services.router.placement.burst import GATHER_S, MOST, Burst


def ascending(together: list[int]) -> list[int]:
    return sorted(range(len(together)), key=together.__getitem__)


async def place(burst: Burst[int], price: int, placed: list[int]) -> None:
    await burst.turn(price)
    placed.append(price)


async def placed_of(burst: Burst[int], prices: list[int]) -> list[int]:
    placed: list[int] = []
    await asyncio.gather(*(place(burst, price, placed) for price in prices))
    return placed


@pytest.fixture
async def delays(monkeypatch):
    """What the loop is asked to call later. Its clock stands still, so that nobody is late by chance."""
    loop, called = asyncio.get_running_loop(), []
    now_s, later = loop.time(), loop.call_later

    def call_later(delay_s, *call):
        called.append(delay_s)
        return later(0, *call)

    monkeypatch.setattr(loop, "call_later", call_later)
    monkeypatch.setattr(loop, "time", lambda: now_s)
    return called


async def test_who_comes_alone_does_not_wait(delays):
    assert await placed_of(Burst(ascending), [1]) == [1]
    assert delays == []


async def test_the_cheapest_of_those_that_come_with_another_is_placed_first(delays):
    assert await placed_of(Burst(ascending), [6, 3, 1, 4, 2, 5]) == [6, 1, 2, 3, 4, 5]
    assert delays == [GATHER_S]


async def test_nobody_is_overtaken_by_one_that_comes_after_the_burst(delays):
    burst: Burst[int] = Burst(ascending)
    assert await placed_of(burst, [6, 3, 2]) == [6, 2, 3]
    assert await placed_of(burst, [1]) == [1]


async def test_no_more_than_so_many_are_ordered_at_a_time(delays):
    asked: list[int] = []

    def order(together: list[int]) -> list[int]:
        asked.append(len(together))
        return ascending(together)

    burst, placed = Burst(order), []
    await burst.turn(0)
    tasks = [
        asyncio.create_task(place(burst, price, placed)) for price in range(MOST)
    ]  # the last one is the dearest
    await asyncio.sleep(0)
    assert len(asked) == 0
    await asyncio.gather(*tasks, place(burst, MOST + 2, placed), place(burst, MOST + 1, placed))
    assert placed == [*range(MOST), MOST + 1, MOST + 2]
    assert asked == [MOST, 2]


async def test_who_is_cancelled_is_left_out(delays):
    burst, placed = Burst(ascending), []
    tasks = [asyncio.create_task(place(burst, price, placed)) for price in (4, 2, 1, 3)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert placed == [4, 2, 3] and tasks[2].cancelled()


async def test_what_cannot_be_ordered_is_told_and_waits_for_ever_never(delays):
    def order(together: list[int]) -> list[int]:
        raise LookupError("a mistake")

    burst: Burst[int] = Burst(order)
    await burst.turn(0)
    results = await asyncio.gather(burst.turn(1), burst.turn(2), return_exceptions=True)
    assert [type(result) for result in results] == [LookupError, LookupError]
    with pytest.raises(LookupError):
        await burst.turn(3)
