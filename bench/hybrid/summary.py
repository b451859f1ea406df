"""This module turns runs and replays into figures of each side, their ratios, and verdicts. It is pure."""

from collections.abc import Iterable, Sequence

from bench.decode_cache.load import Run
from bench.decode_cache.summary import figures, ratios
from bench.hybrid.measure import LEAST, PER_GROUP, Measured
from bench.report import Row, number, verdict
from services.kv.tails import carried_bytes
from services.values.kv import KvLayout
from services.values.rank import Plan
from services.values.request import Admitted

_KINDS = ("sliding_window", "recurrent")
_LIGHT_TOKENS = 500  # a state that weighs less is to gain what the goals say


def side_rows(measured: Measured) -> list[Row]:
    return [
        {
            "model": measured.case.model.name,
            "workload": runs[0].workload.name,
            "rule": rule,
            **_of_runs(runs, measured.layout),
        }
        for rule, runs in measured.runs.items()
    ]


def _of_runs(runs: Sequence[Run], layout: KvLayout) -> Row:
    of_all, admitted = figures(runs), [t.admitted for run in runs for t in run.counted if t.admitted]
    by_kind = {kind: sum(each.carried_bytes.get(kind, 0) for each in admitted) for kind in _KINDS}
    moved = sum(each.kv_bytes_moved for each in admitted)
    kept = (
        "turns",
        "rejected",
        "ttft_p50",
        "ttft_p99",
        "itl_p50",
        "throughput",
        "running_p50",
        "local_share",
    )
    return {
        **{name: of_all[name] for name in kept},
        "prompt_tokens": sum(each.prompt_tokens for each in admitted),
        "hit_tokens": sum(each.decode_prefix_len for each in admitted if each.plan is Plan.REMOTE),
        "attention_bytes": moved - sum(by_kind.values()),
        **{f"{kind}_bytes": size for kind, size in by_kind.items()},
        "wrong_bytes": sum(each.kv_bytes_moved != expected_bytes(each, layout) for each in admitted),
    }


def expected_bytes(admitted: Admitted, layout: KvLayout) -> int:
    """Delta pages, tails and one state; nothing where decode computes the tail itself."""
    if admitted.plan is Plan.LOCAL:
        return 0
    last_page = -(-admitted.prompt_tokens // layout.page_size)
    pages = last_page - admitted.decode_prefix_len // layout.page_size
    return pages * layout.page_bytes + carried_bytes(layout, admitted.prompt_tokens)


def shortage_row(measured: Measured) -> Row:
    least, per_group = (figures(measured.runs[rule]) for rule in (LEAST, PER_GROUP))
    compared = ratios(per_group, least)
    return {
        "model": measured.case.model.name,
        "carried_tokens": _carried_tokens(measured),
        "ttft_p50_least": least["ttft_p50"],
        "ttft_p50": per_group["ttft_p50"],
        "ttft_p50_ratio": compared["ttft_p50_ratio"],
        "throughput_ratio": compared["throughput_ratio"],
        "running_least": least["running_p50"],
        "running": per_group["running_p50"],
        "bytes_ratio": compared["kv_bytes_moved_ratio"],
        "itl_p50_ratio": compared["itl_p50_ratio"],
        "rejected": compared["rejected"],
    }


def _carried_tokens(measured: Measured) -> int:
    layout = measured.layout
    longest = max(c.num_tokens for c in measured.runs[PER_GROUP][0].workload.conversations)
    return round(carried_bytes(layout, longest) * layout.page_size / layout.page_bytes)


def verdicts(sides: Sequence[Row], shortage: Sequence[Row]) -> list[Row]:
    light = [row for row in shortage if number(row["carried_tokens"]) < _LIGHT_TOKENS]
    goals = (
        ("turns whose bytes are not the formula's", "<=", 0.0, _most(sides, "wrong_bytes")),
        ("rejected", "<=", 0.0, _most(sides, "rejected")),
        ("TTFT p50, light states", ">=", 4.0, _least(light, "ttft_p50_ratio")),
        ("throughput, light states", ">=", 1.3, _least(light, "throughput_ratio")),
    )
    return [verdict(name, sign, wanted, got) for name, sign, wanted, got in goals if got is not None]


def _least(rows: Iterable[Row], name: str) -> float | None:
    return min((number(row[name]) for row in rows), default=None)


def _most(rows: Iterable[Row], name: str) -> float | None:
    return max((number(row[name]) for row in rows), default=None)
