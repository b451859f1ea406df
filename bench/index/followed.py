"""A process with one mirror, as a router has it; says how long it took to read all, and what it sees.

python -m bench.index.followed --etcd HOST:PORT --cluster NAME [--until-ready]
"""

import argparse
import asyncio
import json
import random
import resource
import selectors
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from selectors import SelectorKey

import numpy as np

from bench.index.simulated_ledger import newest_of, stamped_s
from services.etcd.connection import EtcdSettings
from services.etcd.etcd_client import Etcd
from services.index.keys import ClusterKeys
from services.index.read.mirror import Mirror, keep_from_garbage_collector
from services.index.read.prefix_index import IndexDraft, PrefixIndex
from services.values.rank import RankId


class TimedSelector(selectors.DefaultSelector):
    """The selector of an event loop. Whoever comes while a turn lasts waits for its end.

    In CPU time of the loop's thread, so that other work on the machine counts only through the caches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn_began_s: float | None = None
        self.longest_turn_s = 0.0

    def begin(self) -> None:
        """Turns before this one do not count, nor what has been of it."""
        self.longest_turn_s, self._turn_began_s = 0.0, time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if self._turn_began_s is not None:
            self.longest_turn_s = max(self.longest_turn_s, time.thread_time() - self._turn_began_s)
        ready = super().select(timeout)
        self._turn_began_s = time.thread_time()
        return ready


class TimedIndex(PrefixIndex):
    """Seconds since the oldest block was stored that a delta or a snapshot is the first to tell.

    All blocks that one record is the first to tell bear the same stamp; in a snapshot that is the newest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timing = False
        self._began_s = 0.0
        self.delta_ages_s: list[float] = []
        self.snapshot_ages_s: list[float] = []
        self._num_new = 0
        self._drafted: list[int] = []

    def begin(self) -> None:
        self._timing, self._began_s, self._num_new = True, time.monotonic(), 0
        self.delta_ages_s.clear()
        self.snapshot_ages_s.clear()

    def new_blocks_per_s(self) -> float:
        """Blocks that were told for the first time, since `begin`."""
        return self._num_new / (time.monotonic() - self._began_s)

    def apply_delta(
        self,
        rank: RankId,
        added: Collection[int],
        removed: Collection[int],
        resumable_added: Iterable[int] = (),
        resumable_removed: Iterable[int] = (),
        files_added: Collection[int] = (),
        files_removed: Collection[int] = (),
    ) -> bool:
        marks = resumable_added, resumable_removed, files_added, files_removed
        applied = super().apply_delta(rank, added, removed, *marks)
        if self._timing and added and applied:
            self.delta_ages_s.append(time.monotonic() - stamped_s(next(iter(added))))
            self._num_new += len(added)
        return applied

    def add_to_draft(self, draft: IndexDraft, hashes: Iterable[int]) -> None:
        super().add_to_draft(draft, hashes)
        self._drafted += list(hashes)

    def show_draft(self, draft: IndexDraft, rank: RankId) -> None:
        super().show_draft(draft, rank)
        drafted, self._drafted = self._drafted, []
        if self._timing and drafted:
            stamp_s, num_new = newest_of(np.array(drafted, np.uint64))
            self.snapshot_ages_s.append(time.monotonic() - stamp_s)
            self._num_new += num_new


async def run(arguments: argparse.Namespace, turns: TimedSelector) -> None:
    """SIGUSR1 begins the measurement anew, SIGTERM ends it; then one line of JSON."""
    started = time.monotonic()
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    async with Etcd(EtcdSettings((arguments.etcd,)), rng=random.Random()) as etcd:
        watched = Watched(etcd, arguments.cluster, turns)
        following = asyncio.create_task(watched.mirror.run())
        await keep_from_garbage_collector(watched.mirror)
        print(json.dumps({"ready_s": time.monotonic() - started} | watched.size()), flush=True)
        loop.add_signal_handler(signal.SIGUSR1, watched.begin)
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        if not arguments.until_ready:
            await stopping.wait()
            print(json.dumps(watched.seen()), flush=True)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


class Watched:
    """The mirror, and what is measured of it."""

    def __init__(self, etcd: Etcd, cluster: str, turns: TimedSelector) -> None:
        self._estimates_s: list[float] = []
        self._index, self._turns, self._began_cpu_s = TimedIndex(), turns, 0.0
        self.mirror = Mirror(etcd, ClusterKeys(cluster), "bench", observe_staleness=self._estimates_s.append)
        self.mirror.index = self.mirror.blocks.index = self._index

    def begin(self) -> None:
        self._index.begin()
        self._turns.begin()
        self._estimates_s.clear()
        self._began_cpu_s = _cpu_s()

    def size(self) -> dict[str, float]:
        return {
            "blocks": self._index.total_blocks,
            "stall_s": self._turns.longest_turn_s,
            "cpu_s": _cpu_s(),
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def seen(self) -> dict[str, float | None]:
        """Return the staleness since `begin`. Raises RuntimeError where nothing was told: that is no
        staleness of 0 ms."""
        index = self._index
        counted = {
            "cpu_s": _cpu_s() - self._began_cpu_s,
            "stall_s": self._turns.longest_turn_s,
            "new_blocks_per_s": index.new_blocks_per_s(),
            "blocks": index.total_blocks,
            "gaps": self.mirror.blocks.gaps,
            "listings": self.mirror.listings,
            "snapshots": len(index.snapshot_ages_s),
        }
        return {
            **counted,
            **_percentiles("staleness", index.delta_ages_s + index.snapshot_ages_s),
            **_percentiles("estimate", self._estimates_s),
            "snapshot_p99_s": _percentile(index.snapshot_ages_s, 99),
        }


def _percentiles(name: str, samples: list[float]) -> dict[str, float | None]:
    if not samples:
        raise RuntimeError(f"no {name} was measured")
    return {f"{name}_p{percent}_s": _percentile(samples, percent) for percent in (50, 99)}


def _percentile(samples: list[float], percent: float) -> float | None:
    return float(np.percentile(samples, percent)) if samples else None


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
    turns = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        runner.run(run(parse(), turns))
