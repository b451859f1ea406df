"""This module turns the runs of bench.decode_cache into figures of each side and their ratios. It is pure."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from bench.decode_cache.load import Run
from bench.report import Row, number, percentile, verdict

# Of each ratio: above 1 (off/on) or below 1 (on/off) is better for the cache.
_OFF_OVER_ON = ("ttft_p50", "ttft_p99", "kv_bytes_moved")
_ON_OVER_OFF = ("throughput", "itl_p50", "itl_p99", "computed_tokens")

# Those of either side that say what the ratios rest on.
_OF_A_SIDE = ("running_p50", "running_share", "pool_used_p50", "retractions")

# (key, sign, value) by workload. On the off side the pool is full, and holds as many as it was made for.
GOALS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "shared": (
        ("ttft_p50_ratio", ">=", 8.1),
        ("throughput_ratio", ">=", 2.0),
        ("itl_p50_ratio", "<=", 1.0),
        ("pool_used_p50_off", ">=", 0.95),
        ("running_share_off", "~", 0.29),
    ),
    "groups": (
        ("ttft_p50_ratio", ">=", 6.5),
        ("throughput_ratio", ">=", 1.5),
        ("itl_p50_ratio", "<=", 1.1),
        ("pool_used_p50_off", ">=", 0.95),
        ("running_share_off", "~", 0.6),
    ),
    "turns": (("ttft_p50_ratio", ">=", 2.0), ("throughput_ratio", ">=", 1.1), ("itl_p50_ratio", "<=", 1.15)),
    "idle": (("ttft_p50_ratio", ">=", 1 / 1.02), ("itl_p50_ratio", "<=", 1.02)),
}


def figures(runs: Sequence[Run]) -> Row:
    """Return the figures of one side over all its runs of one workload, in seconds, tokens a second, bytes,
    tokens."""
    turns = [turn for run in runs for turn in run.counted]
    ttfts = [turn.ttft_s for turn in turns]
    gaps = [gap for run in runs for gap in _gaps_s(run)]
    admitted = [turn.admitted for turn in turns if turn.admitted is not None]
    in_window = [sample for run in runs for sample in run.samples if _within(run, sample.at_s)]
    running = median(sample.running for sample in in_window)
    return {
        "turns": len(turns),
        "rejected": sum(turn.rejected for run in runs for turn in run.turns),
        "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p99": percentile(ttfts, 0.99),
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
        "throughput": sum(map(_window_tokens, runs)) / sum(end - begin for begin, end in map(_window, runs)),
        "kv_bytes_moved": sum(each.kv_bytes_moved for each in admitted),
        "computed_tokens": sum(each.computed_tokens for each in admitted),
        "local_share": sum(each.plan.value == "local" for each in admitted) / len(admitted),
        "running_p50": running,
        "running_share": running / runs[0].workload.concurrency,
        "pool_used_p50": median(sample.used_share for sample in in_window),
        "pool_used_max": max(sample.used_share for sample in in_window),
        "retractions": sum(run.retractions for run in runs),
    }


def ratios(on: Row, off: Row) -> Row:
    """Return the ratios: off/on for TTFT and bytes, on/off for the others."""
    row: Row = {f"{name}_ratio": _over(off[name], on[name]) for name in _OFF_OVER_ON}
    row |= {f"{name}_ratio": _over(on[name], off[name]) for name in _ON_OVER_OFF}
    row["rejected"] = number(on["rejected"]) + number(off["rejected"])
    for name in _OF_A_SIDE:
        row |= {f"{name}_on": on[name], f"{name}_off": off[name]}
    return row


def worst(rows: Sequence[Row]) -> Row:
    """Return of each ratio over several cells (idle) the one that is worst for the cache; rejections
    together."""
    row: Row = {f"{name}_ratio": min(number(r[f"{name}_ratio"]) for r in rows) for name in _OFF_OVER_ON}
    row["throughput_ratio"] = min(number(r["throughput_ratio"]) for r in rows)
    row |= {
        f"{name}_ratio": max(number(r[f"{name}_ratio"]) for r in rows)
        for name in _ON_OVER_OFF
        if name != "throughput"
    }
    row["rejected"] = sum(number(r["rejected"]) for r in rows)
    for name in _OF_A_SIDE:
        row |= {key: max(number(r[key]) for r in rows) for key in (f"{name}_on", f"{name}_off")}
    return row


def verdicts(workload: str, got: Row) -> list[Row]:
    """Each goal of the workload, and whether it was met."""
    goals = (*GOALS[workload], ("rejected", "<=", 0.0))
    return [verdict(name, sign, wanted, got[name]) for name, sign, wanted in goals]


def _window(run: Run) -> tuple[float, float]:
    """The whole run where nothing was ramped up, or too little came after."""
    begin, end = run.window_s
    last = max(turn.token_times_s[-1] for turn in run.turns if turn.ended)
    return (begin, end) if len(run.turns) > 2 * run.workload.concurrency else (begin, last)


def _within(run: Run, at_s: float) -> bool:
    begin, end = _window(run)
    return begin <= at_s <= end


def _window_tokens(run: Run) -> int:
    return sum(_within(run, at_s) for turn in run.turns for at_s in turn.token_times_s)


def _gaps_s(run: Run) -> list[float]:
    return [
        later - earlier
        for turn in run.turns
        for earlier, later in pairwise(turn.token_times_s)
        if _within(run, later)
    ]


def _over(numerator: object, denominator: object) -> float:
    """It is 1 where both are 0."""
    top, bottom = number(numerator), number(denominator)
    if bottom == 0:
        return 1.0 if top == 0 else math.inf
    return top / bottom
