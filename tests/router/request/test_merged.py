import asyncio
from contextlib import aclosing

import pytest

from services.router.request.answers import merged


class Source:
    def __init__(self, items, error=None):
        self.items, self.error = list(items), error
        self.taken, self.closed = 0, False

    async def __call__(self):
        try:
            for item in self.items:
                await asyncio.sleep(0)
                self.taken += 1
                yield item
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.closed = True


async def read(sources):
    async with aclosing(merged([source() for source in sources])) as items:
        return [item async for item in items]


async def test_everything_comes_in_its_sources_order():
    sources = [Source(range(5)), Source(()), Source("ab")]
    items = await read(sources)
    assert [item for place, item in items if place == 0] == list(range(5))
    assert [item for place, item in items if place == 2] == ["a", "b"]
    assert len(items) == 7 and all(source.closed for source in sources)


async def test_the_first_error_is_raised_and_all_are_closed():
    sources = [Source([1], KeyError("first")), Source(range(10**6))]
    with pytest.raises(KeyError, match="first"):
        await read(sources)
    assert all(source.closed for source in sources)


async def test_a_reader_that_leaves_closes_them_all():
    sources = [Source(range(10**6)) for _ in range(3)]
    async with aclosing(merged([source() for source in sources])) as items:
        await anext(items)
    assert all(source.closed for source in sources)


async def test_a_reader_that_is_cancelled_closes_them_all():
    sources = [Source([1]), Source([])]
    sources[1].items = iter(lambda: 1, 2)  # without end

    async def read_slowly():
        async with aclosing(merged([source() for source in sources])) as items:
            async for _ in items:
                await asyncio.sleep(60)

    reading = asyncio.create_task(read_slowly())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    assert all(source.closed for source in sources)


async def test_a_reader_that_is_behind_holds_them_up():
    sources = [Source(range(10**6)) for _ in range(3)]
    async with aclosing(merged([source() for source in sources])) as items:
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(source.taken for source in sources) <= 1 + 1 + 3  # read, in the queue, in hands
