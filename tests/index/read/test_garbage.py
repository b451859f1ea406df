import asyncio
import gc
from types import SimpleNamespace

from etcd.real_etcd import running, until
from services.index.read import garbage


async def test_what_is_read_is_frozen_in_parts_and_then_all_of_it() -> None:
    """Frozen objects are counted; those made here are found among them, while a few of others' may end."""
    mirror = SimpleNamespace(ready=asyncio.Event(), blocks=SimpleNamespace(added_blocks=0))
    try:
        async with running(garbage.freeze(mirror)) as (task,):  # type: ignore[arg-type]
            read = [[number] for number in range(1000)]
            before = gc.get_freeze_count()
            mirror.blocks.added_blocks = 1_000_000
            await until(lambda: gc.get_freeze_count() >= before + len(read) // 2)
            assert not task.done()
            read += [[number] for number in range(100_000)]
            before = gc.get_freeze_count()
            mirror.ready.set()
            await until(task.done)
            assert gc.get_freeze_count() >= before + 50_000
    finally:
        gc.unfreeze()
