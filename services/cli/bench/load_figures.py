"""A run comes to figures by the names that sglang.bench_serving gives them, and to a table of 80 columns."""

from collections.abc import Iterator, Mapping

from services.cli.bench.meter import Meter
from services.cli.table import fold, format_bytes, format_table

Figures = Mapping[str, object]
_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e_latency": "E2E"}
_COLUMNS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}


def figures_of(meter: Meter) -> dict[str, object]:
    counts, duration_s = meter.counts, meter.duration_s
    prompts = max(1, counts.prompt_tokens)
    samples = (meter.ttft, meter.itl, meter.tpot, meter.e2e)
    told: dict[str, object] = {
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
    }
    for name, values in zip(_LATENCIES, samples, strict=True):
        told |= values.figures(name)
    return told | {"max_itl_ms": 1e3 * meter.itl.largest}


def lines_of(meter: Meter, width: int | None) -> Iterator[str]:
    """Yield what a person reads; `width` is as in format_table."""
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
