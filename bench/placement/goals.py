"""The goals of the project for these figures, and whether they are met."""

from collections.abc import Callable, Iterator, Sequence

from bench.report import Row, number, verdict

# Of a layout's row and a number of ranks: the share of blocks that one LRU of all their blocks would hit.
PooledHits = Callable[[Row, int], float]


def goals(rows: Sequence[Row], pooled_hits: PooledHits) -> list[Row]:
    layouts: dict[str, dict[str, Row]] = {}
    for row in rows:
        layouts.setdefault(str(row["layout"]), {})[str(row["policy"])] = row
    return [
        {"at": layout} | goal
        for layout, by_policy in layouts.items()
        if "ours" in by_policy
        for goals_of in (
            _of_pooled(by_policy, pooled_hits),
            _of_the_oracle(by_policy),
            _aggregated(by_policy),
            _speed(by_policy["ours"]),
            _times(by_policy),
        )
        for goal in goals_of
    ]


def _of_pooled(by_policy: dict[str, Row], pooled_hits: PooledHits) -> Iterator[Row]:
    """Hits of each role beside those of one cache as large as all of the role's."""
    ours = by_policy["ours"]
    prefill, decode = _ranks(ours)
    pooled = pooled_hits(ours, decode)
    yield verdict("decode hits / pooled LRU", ">=", 0.92, number(ours["decode_hit"]) / pooled)
    if not prefill:
        return
    pooled = pooled_hits(ours, prefill)
    yield verdict("prefill hits / pooled LRU", ">=", 0.92, number(ours["prefill_hit"]) / pooled)
    # Under plan local only what no decode rank holds much of comes to prefill ranks.
    if remote := by_policy.get("ours-remote"):
        value = number(remote["prefill_hit"]) / pooled
        yield verdict("prefill hits / pooled LRU, remote only", ">=", 0.92, value)
    if (prefill, decode) == (2, 6):
        saved = 1 - number(ours["computed_ratio"])
        yield verdict("compute saved, above prefill's caches", ">=", pooled, saved)


def _of_the_oracle(by_policy: dict[str, Row]) -> Iterator[Row]:
    ours, oracle = by_policy["ours"], by_policy.get("oracle")
    if oracle is None:
        return
    for role in ("decode", "prefill"):
        if (hits := number(oracle[f"{role}_hit"])) > 0:
            yield verdict(f"{role} hits / oracle's", ">=", 0.97, number(ours[f"{role}_hit"]) / hits)
    saved = (1 - number(ours["computed_ratio"])) / (1 - number(oracle["computed_ratio"]))
    yield verdict("tokens saved / oracle's", ">=", 0.97, saved)


def _aggregated(by_policy: dict[str, Row]) -> Iterator[Row]:
    ours, cache_aware = by_policy["ours"], by_policy.get("cache-aware")
    if _ranks(ours) != (0, 8):
        return
    yield verdict("hits, aggregated", ">=", 0.266, number(ours["decode_hit"]))
    if cache_aware is not None:
        value = number(ours["ttft_mean_s"]) / number(cache_aware["ttft_mean_s"])
        yield verdict("TTFT mean / cache-aware's", "<=", 0.55, value)


def _speed(ours: Row) -> Iterator[Row]:
    """The speed is by CPU time of one thread: several simulations run at once, and they share the cores."""
    ranks, cpu_s_per_s = sum(_ranks(ours)), number(ours["cpu_s"]) / number(ours["simulated_s"])
    if ranks == 8:
        yield verdict("CPU s to simulate an hour", "<=", 60.0, 3_600 * cpu_s_per_s)
    if ranks >= 1_000:
        yield verdict("CPU s to simulate a second", "<=", 1.0, cpu_s_per_s)


def _times(by_policy: dict[str, Row]) -> Iterator[Row]:
    others = [row for name, row in by_policy.items() if name not in ("ours", "ours-alone", "oracle")]
    for figure in ("ttft_p50_s", "ttft_p99_s"):
        if others:
            best = min(others, key=lambda row: number(row[figure]))
            value = number(by_policy["ours"][figure]) / number(best[figure])
            name = (
                f"{figure.removesuffix('_s').replace('ttft', 'TTFT').replace('_', ' ')} / {best['policy']}'s"
            )
            yield verdict(f"{name}, the lowest", "<=", 1.01, value)


def _ranks(row: Row) -> tuple[int, int]:
    layout = str(row["layout"])
    prefill, _, decode = layout.removesuffix(" aggregated").rpartition("+")
    return int(prefill or 0), int(decode)
