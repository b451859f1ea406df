"""`isthmus index`: what every rank holds, read from etcd as a router reads it."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

from services.cli.table import format_table
from services.cluster_config import ClusterConfig
from services.config import load, setting
from services.errors import Unavailable
from services.index.etcd import Etcd
from services.index.keys import ClusterKeys
from services.index.mirror import Mirror

_LISTING_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig(ClusterConfig):
    """Print the ranks of a cluster and how many index blocks each holds."""

    etcd: tuple[str, ...] = setting(help="etcd endpoints, HOST:PORT,...")


def run(argv: list[str]) -> int:
    config = load(IndexConfig, argv, prog="isthmus index")
    return asyncio.run(_index(config))


async def _index(config: IndexConfig) -> int:
    async with Etcd(config.etcd_settings(), rng=random.Random()) as etcd:
        mirror = Mirror(etcd, ClusterKeys(config.cluster), "cli-index")
        task = asyncio.create_task(mirror.run())
        try:
            async with asyncio.timeout(_LISTING_TIMEOUT_S):
                await mirror.ready.wait()
        except TimeoutError:
            raise Unavailable(f"the index could not be read: {mirror.degraded}") from None
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    print(format_ranks(mirror))
    return 0


def format_ranks(mirror: Mirror) -> str:
    headings = ("rank", "role", "state", "generation", "blocks", "pages", "endpoint", "model")
    rows = [
        (
            str(key),
            view.registration.role.value,
            view.state.value,
            f"{view.registration.id.generation:016x}",
            mirror.index.num_blocks(key),
            view.registration.total_pages,
            view.registration.address.endpoint,
            view.registration.model,
        )
        for key, view in sorted(mirror.ranks.items(), key=lambda item: item[0])
    ]
    return format_table(headings, rows) if rows else "no rank is registered"
