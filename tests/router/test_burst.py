"""Requests that come at the same moment, in the order in which they are placed."""

import asyncio

import pytest

from services.router.burst import GATHER_S, MOST, Burst


def ascending(together: list[int]) -> list[int]:
    return sorted(range(len(together)), key=together.__getitem__)


async def place(burst: Burst[int], price: int, placed: list[int]) -> None:
    await burst.turn(price)
    placed.append(price)


async def placed_of(burst: Burst[int], prices: list[int]) -> list[int]:
    placed: list[int] = []
    await asyncio.gather(*(place(burst, price, placed) for price in prices))
    return placed


async def test_the_cheapest_of_those_that_come_together_is_placed_first():
    assert await placed_of(Burst(ascending), [3, 1, 4, 2, 5]) == [1, 2, 3, 4, 5]


async def test_nobody_is_overtaken_by_one_that_comes_after_the_burst():
    burst: Burst[int] = Burst(ascending)
    assert await placed_of(burst, [3, 2]) == [2, 3]
    assert await placed_of(burst, [1]) == [1]


async def test_no_more_than_so_many_are_ordered_at_a_time():
    asked: list[int] = []

    def order(together: list[int]) -> list[int]:
        asked.append(len(together))
        return ascending(together)

    prices = list(range(MOST + 2, 0, -1))
    assert await placed_of(Burst(order), prices) == [*sorted(prices[:MOST]), *sorted(prices[MOST:])]
    assert asked == [MOST, 2]


async def test_a_lone_request_waits_no_longer_than_the_gathering():
    loop, called = asyncio.get_running_loop(), []
    later = loop.call_later
    loop.call_later = lambda delay_s, *call: called.append(delay_s) or later(delay_s, *call)  # type: ignore[method-assign]
    await Burst(ascending).turn(1)
    assert called == [GATHER_S]


async def test_who_is_cancelled_is_left_out():
    burst, placed = Burst(ascending), []
    tasks = [asyncio.create_task(place(burst, price, placed)) for price in (2, 1, 3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert placed == [2, 3] and tasks[1].cancelled()


async def test_what_cannot_be_ordered_is_told_and_waits_for_ever_never():
    def order(together: list[int]) -> list[int]:
        raise LookupError("a mistake")

    burst: Burst[int] = Burst(order)
    results = await asyncio.gather(burst.turn(1), burst.turn(2), return_exceptions=True)
    assert [type(result) for result in results] == [LookupError, LookupError]
    with pytest.raises(LookupError):
        await burst.turn(3)
