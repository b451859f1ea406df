"""torch's profiler tells what a step launches, and how long device and host are busy with it."""

import gc
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.engine import seconds
from bench.gpu.captured import finish
from bench.report import Row

_TOP = 12
_NAME_LENGTH = 76
_TIMED = 9


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    start_us: float
    end_us: float


def profiled(step: Callable[[], object], device: torch.device) -> list[Launch]:
    """Return what ran on the device in one step; on a CPU, the operators that took time themselves."""
    step()
    finish(device)
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        finish(device)
    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    return [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]


def busy_us(launches: list[Launch]) -> float:
    """Return how long at least one of them ran."""
    busy, until = 0.0, float("-inf")
    for launch in sorted(launches, key=lambda each: each.start_us):
        busy += max(0.0, launch.end_us - max(until, launch.start_us))
        until = max(until, launch.end_us)
    return busy


def launch_rows(way: str, case: str, step: Callable[[], object], device: torch.device) -> list[Row]:
    """Return one row with the sums, and one for each of the kernels that took longest."""
    host_s = median(seconds(step) for _ in range(_TIMED))
    launches = profiled(step, device)
    start = min((each.start_us for each in launches), default=0.0)
    end = max((each.end_us for each in launches), default=0.0)
    counts, totals = Counter[str](), defaultdict[str, float](float)
    for each in launches:
        counts[_short(each.name)] += 1
        totals[_short(each.name)] += each.end_us - each.start_us
    sums = _row(way, case, "ALL", len(launches), busy_us(launches))
    sums |= {"span_ms": (end - start) / 1e3, "step_ms": 1e3 * host_s}
    longest = sorted(totals.items(), key=lambda item: -item[1])[:_TOP]
    return [sums, *(_row(way, case, name, counts[name], us) for name, us in longest)]


def _row(way: str, case: str, kernel: str, count: int, us: float) -> Row:
    return {
        "way": way,
        "case": case,
        "launches": count,
        "busy_ms": us / 1e3,
        "span_ms": "",
        "step_ms": "",
        "kernel": kernel,
    }


def _short(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|at::native::|void |<unnamed>::|cutlass::|std::", "", name)
    return name[:_NAME_LENGTH]


def host_rows(make_step: Callable[[], Callable[[], object]]) -> list[Row]:
    """Time steps with other numbers of threads, and without the collection of garbage."""
    before = torch.get_num_threads()
    rows = []
    try:
        for num_threads in (4, 16, 4):
            torch.set_num_threads(num_threads)
            rows.append(_host_row(make_step(), num_threads, "on"))
        gc.collect()
        gc.freeze()
        rows.append(_host_row(make_step(), 4, "frozen"))
        gc.disable()
        rows.append(_host_row(make_step(), 4, "off"))
    finally:
        gc.enable()
        gc.unfreeze()
        torch.set_num_threads(before)
    return rows


def _host_row(step: Callable[[], object], num_threads: int, gc_is: str) -> Row:
    step()
    took_s = sorted(seconds(step) for _ in range(2 * _TIMED + 1))
    return {
        "threads": num_threads,
        "gc": gc_is,
        "step_ms": 1e3 * median(took_s),
        "least_ms": 1e3 * took_s[0],
        "most_ms": 1e3 * took_s[-1],
        "objects": len(gc.get_objects()),
    }
