"""The goals of the project for these figures, and whether they are met."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.placement.workload import pooled_lru_hits, read_trace
from bench.report import Row

_BLOCKS = 2_500
_OTHERS = ("round-robin", "least-loaded", "sticky", "prefix-hash", "cache-aware")


def goals(trace: Path, rows: Sequence[Row]) -> list[Row]:
    """Of those rows that are there."""
    table = {_key(row): row for row in rows}
    pooled = {ranks: pooled_lru_hits(read_trace(trace), ranks * _BLOCKS) for ranks in (2, 4, 6, 8)}
    return [
        {"goal": name, "at": at, "is": value, "wanted": f"{'<=' if most else '>='} {limit:.3f}", "met": met}
        for name, at, value, limit, most in _measured(table, pooled)
        for met in [value <= limit if most else value >= limit]
    ]


_Measured = tuple[
    str, str, float, float, bool
]  # goal, setting, value, limit, and whether the limit is a ceiling


def _measured(table: "dict[tuple[object, ...], Row]", pooled: dict[int, float]) -> Iterator[_Measured]:
    settings = dict.fromkeys(key[:-1] for key in table)
    for setting in settings:
        by_policy = {str(key[-1]): row for key, row in table.items() if key[:-1] == setting}
        at = "/".join(map(str, setting))
        workload, layout, blocks = setting[:3]
        if workload == "trace" and blocks == _BLOCKS:
            yield from _hits(by_policy, at, str(layout), pooled)
        yield from _times(by_policy, at)


def _hits(by_policy: dict[str, Row], at: str, layout: str, pooled: dict[int, float]) -> Iterator[_Measured]:
    ours, remote, oracle = (by_policy.get(name) for name in ("ours", "ours-remote", "oracle"))
    if layout == "8 aggregated" and ours and "/2500/" in at:
        yield "hits, aggregated", at, _of(ours, "decode_hit"), 0.266, False
    # All prompts pass a decode rank, but prefill ranks only without plan local.
    if ours and remote and layout in ("4+4", "2+6"):
        prefill, decode = (int(side) for side in layout.split("+"))
        yield "prefill hits / pooled LRU", at, _of(remote, "prefill_hit") / pooled[prefill], 0.92, False
        yield "decode hits / pooled LRU", at, _of(ours, "decode_hit") / pooled[decode], 0.92, False
    if ours and layout == "2+6":
        yield "compute saved, above prefill's caches", at, 1 - _of(ours, "computed_ratio"), pooled[2], False
    if ours and oracle:
        saved = (1 - _of(ours, "computed_ratio")) / (1 - _of(oracle, "computed_ratio"))
        yield "tokens saved / oracle's", at, saved, 0.97, False


def _times(by_policy: dict[str, Row], at: str) -> Iterator[_Measured]:
    ours, cache_aware = by_policy.get("ours"), by_policy.get("cache-aware")
    if ours is None:
        return
    if cache_aware and "8 aggregated/2500" in at and at.startswith("trace"):
        limit = 0.45 if "/5000/" in at else 0.55
        yield (
            "TTFT mean / cache-aware's",
            at,
            _of(ours, "ttft_mean_s") / _of(cache_aware, "ttft_mean_s"),
            limit,
            True,
        )
    for figure in ("ttft_p50_s", "ttft_p99_s"):
        others = [_of(row, figure) for name, row in by_policy.items() if name in _OTHERS]
        if others:
            yield f"{figure[:-2]} / best of the others", at, _of(ours, figure) / min(others), 1.01, True


def _of(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, float | int)
    return float(value)


def _key(row: Row) -> tuple[object, ...]:
    names = ("workload", "layout", "blocks", "tokens/s", "stale_s", "routers", "policy")
    return tuple(row[name] for name in names)
