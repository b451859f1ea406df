"""The ranks of bench.soak's cluster: what their logs, their metrics and the kernel say of them."""

import asyncio
import contextlib
import os
import re
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PAGE_SIZE = 16
NUM_PAGES = 240  # some eight sequences beside each other
SAMPLE_EVERY_S = 5.0
_MOVED = "isthmus_tier_tokens_total"
_TIER_MARKS = {"memory": "/memfd:isthmus-tier", "file": "/blocks"}
LET_GO_S = 60.0  # the deadline, a lease and its fence are over long before


class Ranks:
    """The processes of a LocalCluster, as their log lines tell of them."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.metrics_ports: dict[str, int] = {}
        self.tracebacks: Counter[str] = Counter()  # by their text
        self.restarts = 0
        self._open_tracebacks: dict[str, list[str]] = {}  # by service, up to the line that ends them

    def note(self, name: str, line: str) -> None:
        self._note_traceback(name, line)
        if started := re.search(r"rank_started rank=(\d+) pid=(\d+)", line):
            rank = f"{name}/{started[1]}"
            self.restarts += rank in self.pids
            self.pids[rank] = int(started[2])
        if ready := re.search(r"rank_ready rank=(\S+) .*metrics_port=(\d+)", line):
            self.metrics_ports[ready[1]] = int(ready[2])

    def _note_traceback(self, name: str, line: str) -> None:
        lines = self._open_tracebacks.get(name)
        if "Traceback (most recent call last)" in line:
            self._open_tracebacks.setdefault(name, [f"in {name}:"]).append(line)
        elif lines is not None:
            lines.append(line)
            if not line.startswith((" ", "\t")):  # the error itself
                self.tracebacks["\n".join(self._open_tracebacks.pop(name))] += 1

    async def metrics(self, rank: str) -> dict[str, float]:
        url = f"http://127.0.0.1:{self.metrics_ports[rank]}/metrics"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        samples = [s for family in text_string_to_metric_families(body) for s in family.samples]
        return {f"{s.name} {_label(s.labels)}".rstrip(): s.value for s in samples}

    async def _all_metrics(self) -> list[dict[str, float]]:
        """Raises RuntimeError while a rank has not said where its page is: nobody would be asked for it."""
        if not self.metrics_ports or len(self.metrics_ports) < len(self.pids):
            raise RuntimeError(f"of {len(self.pids)} ranks {len(self.metrics_ports)} have a page of metrics")
        return [await self.metrics(rank) for rank in self.metrics_ports]

    async def held(self) -> float:
        """Pages and requests that any rank holds."""
        held = 0.0
        for metrics in await self._all_metrics():
            held += sum(metrics[f"isthmus_kv_pages {s}"] for s in ("locked", "private", "quarantined"))
            held += metrics["isthmus_running_requests"] + metrics["isthmus_waiting_requests"]
        return held

    async def let_go(self) -> float:
        """Seconds until no rank holds anything.

        Raises:
            TimeoutError: one still does after LET_GO_S.
        """
        began = time.monotonic()
        while held := await self.held():
            if time.monotonic() - began > LET_GO_S:
                raise TimeoutError(f"ranks still hold {held:.0f} pages and requests after {LET_GO_S:.0f} s")
            await asyncio.sleep(0.01)
        return time.monotonic() - began

    async def balanced(self) -> bool:
        states = ("free", "cached", "locked", "private", "quarantined")
        books = await self._all_metrics()
        return all(sum(m[f"isthmus_kv_pages {state}"] for state in states) == NUM_PAGES for m in books)

    async def unbalanced(self) -> dict[str, str]:
        """Return by rank what it has beside pages that are free or cached."""
        books = {rank: await self.metrics(rank) for rank in self.metrics_ports}
        return {rank: text for rank, metrics in books.items() if (text := _more_than_pages(metrics))}

    async def read_from_tiers(self) -> dict[tuple[str, int], tuple[float, float]]:
        """Return by rank and pid how many tokens this life of it has read, and how many of them from others'
        files."""
        read: dict[tuple[str, int], tuple[float, float]] = {}
        for rank in self.metrics_ports:
            metrics = await self.metrics(rank)
            read[rank, self.pids[rank]] = (
                metrics.get(f"{_MOVED} up", 0.0),
                metrics.get(f"{_MOVED} shared", 0.0),
            )
        return read

    def tier_files_too_many(self) -> dict[str, str]:
        """Return by rank what it has open of tiers beside its own file, others' files once each, and memory
        that its supervisor holds and it has opened."""
        found = {rank: _tier_files(pid) for rank, pid in self.pids.items()}
        return {
            f"{rank}'s tiers": str(dict(n))
            for rank, n in found.items()
            if n["file"] > 1 or n["memory"] > 2 or any(n[kind] > 1 for kind in n if kind.startswith("/"))
        }

    async def total(self, name: str) -> float:
        return sum(metrics[name] for metrics in await self._all_metrics())


def _label(labels: dict[str, str]) -> str:
    return labels.get("state", "") or labels.get("direction", "")


def _tier_files(pid: int) -> Counter[str]:
    """Return how many of its open files are memory and how many files of tiers that it may write, and how
    often it reads each other one; none if it has ended."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name, told = os.readlink(link), Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
                writes = int(told.split("flags:")[1].split()[0], 8) & os.O_ACCMODE != os.O_RDONLY
                found.update(
                    kind if writes or kind == "memory" else f"{name} {link.stat().st_ino}"
                    for kind, mark in _TIER_MARKS.items()
                    if mark in name
                )
    return found


def _more_than_pages(metrics: dict[str, float]) -> str:
    pages = {name: value for name, value in metrics.items() if name.startswith("isthmus_kv_pages ")}
    requests = {name: metrics[f"isthmus_{name}_requests"] for name in ("running", "waiting")}
    requests["rooms"] = metrics["isthmus_open_rooms"]
    requests["granted"] = metrics["isthmus_granted_pages"]
    at_rest = pages["isthmus_kv_pages free"] + pages["isthmus_kv_pages cached"] == NUM_PAGES
    return "" if at_rest and not any(requests.values()) else f"{pages} {requests}"


class Memory:
    """Resident bytes of every process, sampled while the load lasts."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.samples: dict[str, list[int]] = {name: [] for name in pids}

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for name, pid in self._pids.items():
                with contextlib.suppress(OSError):  # it has ended, which counts as an error elsewhere
                    self.samples[name].append(resident_bytes(pid))
            await asyncio.sleep(SAMPLE_EVERY_S)

    def growth(self) -> dict[str, float]:
        """Median of the last quarter over that of the second one: the first fills caches."""
        return {name: _last_over_second_quarter(samples) for name, samples in self.samples.items()}


def _last_over_second_quarter(samples: list[int]) -> float:
    """Raises StatisticsError where there is none."""
    quarter = max(1, len(samples) // 4)
    second = samples[quarter : 2 * quarter] or samples
    return statistics.median(samples[-quarter:]) / statistics.median(second)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
