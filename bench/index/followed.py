"""A process with one mirror, as a router has it; says how long it took to read all, and what it sees.

python -m bench.index.followed --etcd HOST:PORT --cluster NAME [--until-ready]
"""

import argparse
import asyncio
import json
import random
import resource
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import numpy as np

from bench.index.simulated_ledger import stamped_s
from services.index import garbage
from services.index.etcd import Etcd
from services.index.etcd_settings import EtcdSettings
from services.index.keys import ClusterKeys
from services.index.mirror import Mirror
from services.index.prefix_index import PrefixIndex
from services.kv.types import RankId

_TICK_S = 0.005


class TimedIndex(PrefixIndex):
    """Notes how old the oldest block of each delta really is when it takes effect."""

    def __init__(self) -> None:
        super().__init__()
        self.ages_s: list[float] = []

    def apply_delta(self, rank: RankId, added: Collection[int], removed: Iterable[int]) -> bool:
        applied = super().apply_delta(rank, added, removed)
        if added and applied:
            stamp = next(iter(added))  # all of a delta have the same
            self.ages_s.append(time.monotonic() - stamped_s(stamp))
        return applied


async def run(arguments: argparse.Namespace) -> None:
    """SIGUSR1 begins the measurement anew, SIGTERM ends it; then one line of JSON."""
    started = time.monotonic()
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    async with Etcd(EtcdSettings((arguments.etcd,)), rng=random.Random()) as etcd:
        estimates_s: list[float] = []
        mirror = Mirror(etcd, ClusterKeys(arguments.cluster), "bench", observe_staleness=estimates_s.append)
        timed = TimedIndex()
        mirror.index = mirror.blocks.index = timed
        stalls_s: list[float] = [0.0]
        tasks = [asyncio.create_task(mirror.run()), asyncio.create_task(_note_stalls(stalls_s))]
        await garbage.freeze(mirror)
        ready = {
            "ready_s": time.monotonic() - started,
            "blocks": timed.total_blocks,
            "ranks": len(mirror.ranks),
            "stall_s": stalls_s[0],
            "cpu_s": _cpu_s(),
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(json.dumps(ready), flush=True)
        cpu_s = [_cpu_s()]

        def begin() -> None:
            timed.ages_s.clear()
            estimates_s.clear()
            stalls_s[:] = [0.0]
            cpu_s[0] = _cpu_s()

        loop.add_signal_handler(signal.SIGUSR1, begin)
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        if not arguments.until_ready:
            await stopping.wait()
            summary = {
                **_percentiles("staleness", timed.ages_s),
                **_percentiles("estimate", estimates_s),
                "deltas": len(timed.ages_s),
                "gaps": mirror.blocks.gaps,
                "torn": mirror.torn_values,
                "listings": mirror.listings,
                "blocks": timed.total_blocks,
                "stall_s": stalls_s[0],
                "cpu_s": _cpu_s() - cpu_s[0],
            }
            print(json.dumps(summary), flush=True)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _note_stalls(stalls_s: list[float]) -> None:
    """How long the loop kept a sleeper waiting beyond its time, in CPU time of its thread."""
    while True:
        busy_s = time.thread_time()
        await asyncio.sleep(_TICK_S)
        stalls_s[0] = max(stalls_s[0], time.thread_time() - busy_s - _TICK_S)


def _percentiles(name: str, samples: list[float]) -> dict[str, float]:
    if not samples:
        return {f"{name}_p50_s": 0.0, f"{name}_p99_s": 0.0}
    return {
        f"{name}_p50_s": float(np.percentile(samples, 50)),
        f"{name}_p99_s": float(np.percentile(samples, 99)),
    }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--until-ready", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(run(parse()))
