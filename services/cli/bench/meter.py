"""A meter measures each request while it runs. The definitions are those of sglang.bench_serving:

    TTFT   from sending the request to its first tokens
    ITL    between tokens; tokens that arrive together share the time since the ones before
    TPOT   (E2E - TTFT) / (tokens - 1), of a request with more than one token
    E2E    from sending the request to the end of its answer

Only requests that have ended count. A run is reported under the names that sglang.bench_serving uses, and as
a table of 80 columns.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from services.cli.bench.sides import Arrival, Counts
from services.cli.table import fold, format_bytes, format_table

_EXACT = 1_000_000


class Samples:
    """Up to `exact` samples are all kept, and of more a random sample. Count, mean and maximum are exact."""

    def __init__(self, exact: int = _EXACT, seed: int = 0) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._exact = exact
        self._kept = array("d")
        self._rng = random.Random(seed)

    def __repr__(self) -> str:
        return f"Samples(count={self.count}, mean={self.mean})"

    def add(self, value: float, times: int = 1) -> None:
        for _ in range(times):
            self.count += 1
            if len(self._kept) < self._exact:
                self._kept.append(value)
            elif (place := self._rng.randrange(self.count)) < self._exact:
                self._kept[place] = value
        self.total += times * value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        return float(np.std(self._kept)) if self.count else 0.0

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self._kept, percent)) if self.count else 0.0

    def values(self) -> "array[float]":
        return self._kept

    def figures(self, name: str, scale: float = 1e3) -> Mapping[str, float]:
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (90, 95, 99)}
        statistics = {"mean": self.mean, "median": self.percentile(50), "std": self.std, **percentiles}
        return {f"{kind}_{name}_ms": scale * value for kind, value in statistics.items()}


@dataclass(slots=True)
class Running:
    sent_s: float
    num_tokens: int = 0
    ttft_s: float = 0.0
    last_s: float = 0.0
    # Each item is the seconds between tokens, and the number of such gaps.
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def add(self, num_tokens: int, now_s: float) -> None:
        if self.num_tokens:
            self.gaps.append(((now_s - self.last_s) / num_tokens, num_tokens))
        else:
            self.ttft_s = now_s - self.sent_s
        self.num_tokens += num_tokens
        self.last_s = now_s


class Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.ttft, self.itl, self.tpot, self.e2e = (Samples() for _ in range(4))
        self.counts = Counts()
        self.sent = self.completed = self.cut_off = self.running = self.most_running = 0
        self.stopped = False  # Ctrl-C stopped the run before its end.
        self.errors: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}
        self.tokens_by_second: Counter[int] = Counter()
        self.began_s = self.ended_s = clock()
        self._clock = clock

    def begin(self) -> Running:
        self.sent += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return Running(self._clock())

    def note(self, request: Running, arrival: Arrival) -> None:
        if arrival.num_tokens:
            now_s = self._clock()
            request.add(arrival.num_tokens, now_s)
            self.tokens_by_second[int(now_s - self.began_s)] += arrival.num_tokens

    def end(self, request: Running, counts: Counts) -> None:
        now_s = self._clock()
        e2e_s = now_s - request.sent_s
        self._leave(now_s)
        self.completed += 1
        self.counts += counts
        self.ttft.add(request.ttft_s)
        self.e2e.add(e2e_s)
        if counts.completion_tokens > 1:
            self.tpot.add((e2e_s - request.ttft_s) / (counts.completion_tokens - 1))
        for gap_s, times in request.gaps:
            self.itl.add(gap_s, times)

    def fail(self, error: BaseException) -> None:
        name = type(error).__name__
        self._leave(self._clock())
        self.errors[name] += 1
        self.first_errors.setdefault(name, str(error))

    def cut(self) -> None:
        self._leave(self._clock())
        self.cut_off += 1

    def _leave(self, now_s: float) -> None:
        self.running -= 1
        self.ended_s = now_s

    @property
    def duration_s(self) -> float:
        return max(self.ended_s - self.began_s, 1e-9)


Figures = Mapping[str, object]
_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e_latency": "E2E"}
_COLUMNS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}


def figures_of(meter: Meter) -> dict[str, object]:
    counts, duration_s = meter.counts, meter.duration_s
    prompts = max(1, counts.prompt_tokens)
    samples = (meter.ttft, meter.itl, meter.tpot, meter.e2e)
    statistics: dict[str, object] = {
        "completed": meter.completed,
        "errors": dict(meter.errors),
        "cut": meter.cut_off,
        "duration": duration_s,
        "total_input_tokens": counts.prompt_tokens,
        "total_output_tokens": counts.completion_tokens,
        "request_throughput": meter.completed / duration_s,
        "input_throughput": counts.prompt_tokens / duration_s,
        "output_throughput": counts.completion_tokens / duration_s,
        "total_throughput": (counts.prompt_tokens + counts.completion_tokens) / duration_s,
        "concurrency": meter.e2e.total / duration_s,
        "max_concurrent_requests": meter.most_running,
        "cached_tokens": counts.reused_tokens,
        "cache_hit_rate": counts.reused_tokens / prompts,
        "decode_prefix_len": counts.decode_prefix_len,
        "decode_hit_rate": counts.decode_prefix_len / prompts,
        "delta_tokens": counts.delta_tokens,
        "kv_bytes_moved": counts.kv_bytes_moved,
        "kv_bytes_saved": counts.kv_bytes_saved,
        "pulled_tokens": counts.pulled_tokens,
        "pulled_bytes": counts.pulled_bytes,
    }
    for name, values in zip(_LATENCIES, samples, strict=True):
        statistics |= values.figures(name)
    return statistics | {"max_itl_ms": 1e3 * meter.itl.largest}


def lines_of(meter: Meter, width: int | None) -> Iterator[str]:
    counts, seconds = meter.counts, meter.duration_s
    per_s = f"{counts.prompt_tokens / seconds:.0f} input and {counts.completion_tokens / seconds:.0f} output"
    yield fold(
        f"{meter.completed} requests in {seconds:.1f} s: {meter.completed / seconds:.2f} requests/s, "
        f"{per_s} tokens/s; {meter.e2e.total / seconds:.1f} at once on average, {meter.most_running} at most",
        width,
    )
    yield ""
    yield format_table(["milliseconds", *_COLUMNS.values()], list(_rows(figures_of(meter))), width)
    yield ""
    prompts = max(1, counts.prompt_tokens)
    yield fold(
        f"{counts.prompt_tokens} prompt tokens: {counts.reused_tokens / prompts:.1%} reused by who computed "
        f"them, {counts.decode_prefix_len / prompts:.1%} held by decode; {counts.delta_tokens} crossed, KV "
        f"moved {format_bytes(counts.kv_bytes_moved)}, saved {format_bytes(counts.kv_bytes_saved)}",
        width,
    )
    if counts.pulled_tokens:
        size = format_bytes(counts.pulled_bytes)
        yield fold(f"of those reused {counts.pulled_tokens} were pulled from other ranks, {size}", width)
    for name, times in meter.errors.most_common():
        yield fold(f"failed: {times} with {name}: {meter.first_errors[name]}", width)
    if meter.stopped:
        yield f"stopped, with {meter.cut_off} still running: they are in none of the figures"


def _rows(figures: Figures) -> Iterator[list[str]]:
    cells = {
        label: [f"{figures[f'{kind}_{name}_ms']:.2f}" for kind in _COLUMNS]
        for name, label in _LATENCIES.items()
    }
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    for label, texts in cells.items():
        yield [label, *(text.rjust(width) for text, width in zip(texts, widths, strict=True))]
