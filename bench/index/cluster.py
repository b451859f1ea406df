"""The index through a real etcd on this machine: a router's warm restart, and many publishers at once.

etcd <--publish-- processes of simulated ranks        (bench/index/publishers.py)
  +----watch----> one mirror in a process of its own  (bench/index/followed.py)
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.index.core import draw_hashes, life
from bench.report import Row
from services.etcd.connection import EtcdSettings
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import Etcd
from services.host.child_processes import dying_with_us
from services.index.keys import ClusterKeys
from services.index.write.prefix_writer import LogLimits, PrefixWriter
from services.index.write.publisher import PublisherSettings
from services.values.kv import BlockHash, CacheEvents

BLOCKS_PER_S = 600.0
WRITES_PER_S = PublisherSettings().writes_per_s
_RANKS_PER_PROCESS = 1000
_WARM_UP_S = 10.0
_SAMPLE_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READY_TIMEOUT_S = 180.0


@dataclass
class Child:
    """One of our processes; each says what it has to say in lines on stdout."""

    process: asyncio.subprocess.Process

    async def line(self, timeout_s: float = _READY_TIMEOUT_S) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        if not line:
            raise SystemExit(f"process {self.process.pid} ended with {await self.process.wait()}")
        return line.decode()

    async def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(await self.line())
        return report

    async def last_report(self) -> dict[str, Any]:
        self.process.terminate()
        return await self.report()


@asynccontextmanager
async def child(module: str, **arguments: object) -> AsyncIterator[Child]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items() if value is not True]
    flags += [f"--{name.replace('_', '-')}" for name, value in arguments.items() if value is True]
    command = dying_with_us([sys.executable, "-m", f"bench.index.{module}", *flags])
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 30)
            except TimeoutError:
                process.kill()
                await process.wait()


@asynccontextmanager
async def own_etcd(quota_bytes: int) -> AsyncIterator[tuple[EmbeddedEtcd, Etcd]]:
    with tempfile.TemporaryDirectory(prefix="bench-index-") as folder:
        quota = (f"--quota-backend-bytes={quota_bytes}",)
        async with (
            EmbeddedEtcd(Path(folder), extra_arguments=quota) as server,
            Etcd(EtcdSettings((server.endpoint,)), rng=random.Random()) as etcd,
        ):
            yield server, etcd


async def warm_restart_row(entries: int, num_ranks: int, log_deltas: int) -> Row:
    """A router starts anew beside an etcd that holds snapshots, and half-grown logs on top."""
    rng = np.random.default_rng(3)
    async with own_etcd(4 << 30) as (server, etcd):
        keys = ClusterKeys("warm")
        per_rank = entries // num_ranks
        for number in range(num_ranks):
            await _fill(etcd, keys, number, draw_hashes(rng, per_rank), log_deltas)
        revision = await etcd.current_revision()
        await etcd.compact(revision)
        started = time.monotonic()
        async with child("followed", etcd=server.endpoint, cluster="warm", until_ready=True) as router:
            ready = await router.report()
            with_python_s = time.monotonic() - started
    return {
        "entries": ready["blocks"],
        "ranks": num_ranks,
        "log records": num_ranks * log_deltas,
        "ready s": ready["ready_s"],
        "with process start s": with_python_s,
        "longest loop stall ms": ready["stall_s"] * 1000,
        "cpu s": ready["cpu_s"],
        "resident MiB": ready["resident_bytes"] / 2**20,
    }


async def _fill(etcd: Etcd, keys: ClusterKeys, number: int, held: list[int], log_deltas: int) -> None:
    """Write what a rank's publisher leaves in etcd: a snapshot, and deltas of a twentieth of a second
    each."""
    per_delta = int(BLOCKS_PER_S * 0.05)
    base = len(held) - per_delta * log_deltas
    blocks = tuple(map(BlockHash, held))
    writer = PrefixWriter(etcd, keys, life(number), LogLimits())

    async def no_pause() -> None:
        pass

    await writer.replace(CacheEvents(blocks[:base], cleared=True), lambda: 0.0, 0, no_pause)
    for start in range(base, len(held), per_delta):
        await writer.append(CacheEvents(blocks[start : start + per_delta]), 0.0, 0)


@dataclass
class Sampled:
    """etcd, once a second while the publishers write."""

    db_bytes: list[int]
    db_in_use_bytes: list[int]


async def publishers_row(num_ranks: int, minutes: float, capacity: int, writes_per_s: float) -> Row:
    """Every rank stores and evicts 600 blocks a second; one mirror follows. `blocks/s`: those that it got."""
    async with own_etcd(8 << 30) as (server, etcd):
        processes = [
            min(_RANKS_PER_PROCESS, num_ranks - start) for start in range(0, num_ranks, _RANKS_PER_PROCESS)
        ]
        common: dict[str, object] = {"etcd": server.endpoint, "cluster": "load", "capacity": capacity}
        common["writes_per_s"] = writes_per_s
        async with (
            _children(processes, common) as publishers,
            child("followed", etcd=server.endpoint, cluster="load") as router,
        ):
            ready = await router.report()
            return await _measured(server, etcd, publishers, router, ready, num_ranks, minutes)


@asynccontextmanager
async def _children(processes: list[int], common: dict[str, object]) -> AsyncIterator[list[Child]]:
    started: list[Any] = []
    try:
        publishers = []
        for number, ranks in enumerate(processes):
            opened = child("publishers", name=f"p{number}", ranks=ranks, blocks_per_s=BLOCKS_PER_S, **common)
            publishers.append(await opened.__aenter__())
            started.append(opened)
        for publisher in publishers:
            await publisher.line()
        yield publishers
    finally:
        for opened in started:
            await opened.__aexit__(None, None, None)


async def _measured(
    server: EmbeddedEtcd,
    etcd: Etcd,
    publishers: list[Child],
    router: Child,
    ready: dict[str, Any],
    num_ranks: int,
    minutes: float,
) -> Row:
    await asyncio.sleep(_WARM_UP_S)
    router.process.send_signal(10)  # SIGUSR1
    pids = [_etcd_pid(server), *(publisher.process.pid for publisher in publishers)]
    revision, cpu_s, started = await etcd.current_revision(), _cpu_s(pids), time.monotonic()
    sampled = await _sample(etcd, minutes * 60)
    took_s = time.monotonic() - started
    etcd_cpu_s, *publisher_cpu_s = (after - before for before, after in zip(cpu_s, _cpu_s(pids), strict=True))
    revisions = await etcd.current_revision() - revision
    seen = await router.last_report()
    written = [await publisher.last_report() for publisher in publishers]
    half = len(sampled.db_bytes) // 2
    return {
        "ranks": num_ranks,
        "minutes": took_s / 60,
        "writes/s": revisions / took_s,
        "blocks/s": seen["new_blocks_per_s"],
        "p50 ms": seen["staleness_p50_s"] * 1000,
        "p99 ms": seen["staleness_p99_s"] * 1000,
        "snapshots": seen["snapshots"],
        "snapshots p99 ms": _ms(seen["snapshot_p99_s"]),
        "told p50 ms": seen["estimate_p50_s"] * 1000,
        "told p99 ms": seen["estimate_p99_s"] * 1000,
        "db MiB half": sampled.db_bytes[half] / 2**20,
        "db MiB end": sampled.db_bytes[-1] / 2**20,
        "in use MiB max": max(sampled.db_in_use_bytes) / 2**20,
        "etcd CPU": etcd_cpu_s / took_s,
        "mirror CPU": seen["cpu_s"] / took_s,
        "publishers CPU": sum(publisher_cpu_s) / took_s,
        "CPU us a write": (etcd_cpu_s + seen["cpu_s"] + sum(publisher_cpu_s)) / revisions * 1e6,
        "stall ms": seen["stall_s"] * 1000,
        "entries": seen["blocks"],
        "gaps": seen["gaps"],
        "listings": seen["listings"] - 1,
        "failures": sum(one["failures"] for one in written),
        "lease losses": sum(one["lease_losses"] for one in written),
        "mirror ready s": ready["ready_s"],
    }


async def _sample(etcd: Etcd, seconds: float) -> Sampled:
    sampled, until = Sampled([], []), time.monotonic() + seconds
    while time.monotonic() < until:
        status = await etcd.status()
        sampled.db_bytes.append(status.dbSize)
        sampled.db_in_use_bytes.append(status.dbSizeInUse)
        await asyncio.sleep(_SAMPLE_S)
    return sampled


def _ms(seconds: float | None) -> float | None:
    """None where there was nothing to measure."""
    return None if seconds is None else seconds * 1000


def _etcd_pid(server: EmbeddedEtcd) -> int:
    assert server.pid is not None
    return server.pid


def _cpu_s(pids: list[int]) -> list[float]:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return [(int(one[11]) + int(one[12])) / _TICKS_PER_S for one in fields]
