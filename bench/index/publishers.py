"""A process of simulated ranks: real leases, registrations and writes to etcd; the radix tree is made up.

Each rank stores `--blocks-per-s` new blocks a second and evicts as many of its oldest. A hash carries the
time it was stored, on the machine's monotonic clock: so a mirror on the same machine can tell how old
what it applies really is.
"""

import argparse
import asyncio
import gc
import json
import logging
import random
import signal
from collections.abc import AsyncIterator

from bench.index.simulated_ledger import SimulatedLedger
from services.etcd.connection import EtcdSettings
from services.etcd.etcd_client import Etcd
from services.index.joining import Schema
from services.index.keys import ClusterKeys
from services.index.write.membership import Membership
from services.index.write.publisher import PublisherSettings
from services.values.kv import CacheEvents, KvLayout
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.rank_reports import Registration

SCHEMA = Schema(64, "xxh3-64/1")
_RANKS_PER_CLIENT = 50


def registration(worker: str) -> Registration:
    return Registration(
        role=Role.DECODE,
        address=RankAddress(RankId(worker, 0, Generation(random.getrandbits(64))), "127.0.0.1:1"),
        layout=KvLayout(page_size=64, page_bytes=1 << 20, model_fingerprint=1),
        model="bench",
        max_context_tokens=1 << 20,
        total_pages=1 << 16,
        engine="fake",
    )


async def no_events() -> AsyncIterator[CacheEvents]:
    """The ledger draws what happened."""
    await asyncio.Event().wait()
    yield CacheEvents()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--blocks-per-s", type=float, required=True)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--writes-per-s", type=float, required=True)
    return parser.parse_args()


async def run(arguments: argparse.Namespace) -> None:
    """Publish until SIGTERM, then print one line of JSON. A line "ready" comes once every rank is
    registered."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    num_clients = -(-arguments.ranks // _RANKS_PER_CLIENT)
    clients = [
        Etcd(EtcdSettings((arguments.etcd,)), rng=random.Random(number)) for number in range(num_clients)
    ]
    keys = ClusterKeys(arguments.cluster)
    members: list[Membership] = []
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(arguments.ranks):
            members.append(_member(arguments, clients[number % num_clients], keys, number))
            tasks.append(group.create_task(members[-1].run(no_events())))
            if number % 20 == 19:
                await asyncio.gather(*(one.registered.wait() for one in members[-20:]))
        await asyncio.gather(*(member.registered.wait() for member in members))
        # A rank has a process of its own; so many in one make a heap that nobody else has. To look through it
        # takes a twelfth of this process's time, stops all ranks for up to 50 ms, and finds nothing.
        gc.disable()
        print("ready", flush=True)
        await stopping.wait()
        print(json.dumps(_summary(members)), flush=True)
        for task in tasks:
            task.cancel()
    for client in clients:
        await client.close()


def _member(arguments: argparse.Namespace, etcd: Etcd, keys: ClusterKeys, number: int) -> Membership:
    its = registration(f"{arguments.name}-{number}")
    ledger = SimulatedLedger(arguments.blocks_per_s, arguments.capacity, etcd.clock, number)
    settings = PublisherSettings(writes_per_s=arguments.writes_per_s)
    return Membership(etcd, keys, SCHEMA, its, publisher_settings=settings, ledger=ledger)


def _summary(members: list[Membership]) -> dict[str, int]:
    publishers = [member.publisher for member in members]
    return {
        "deltas": sum(publisher.deltas_written for publisher in publishers),
        "snapshots": sum(publisher.snapshots_written for publisher in publishers),
        "failures": sum(publisher.failures for publisher in publishers),
        "lease_losses": sum(member.lease_losses for member in members),
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # they are counted
    asyncio.run(run(parse()))
