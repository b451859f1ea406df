"""The goals of the project for these figures, and whether they are met."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.report import Row

_BLOCKS = 2_500  # a rank, where hits and mean TTFT are judged
_SETTING = ("workload", "layout", "blocks", "tokens/s", "stale_s", "routers")

# Of a setting and a number of ranks: the share of blocks that one LRU as large as these ranks' would hit.
PooledHits = Callable[[Row, int], float]


@dataclass(frozen=True, slots=True)
class _Measured:
    goal: str
    value: float
    limit: float
    ceiling: bool = False  # the limit is one

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.ceiling else self.value >= self.limit


def goals(rows: Sequence[Row], pooled_hits: PooledHits) -> list[Row]:
    settings: dict[str, dict[str, Row]] = {}
    for row in rows:
        settings.setdefault("/".join(str(row[name]) for name in _SETTING), {})[str(row["policy"])] = row
    return [
        {
            "goal": measured.goal,
            "at": at,
            "is": measured.value,
            "wanted": f"{'<=' if measured.ceiling else '>='} {measured.limit:.3f}",
            "met": measured.met,
        }
        for at, by_policy in settings.items()
        for measured in _measured(by_policy, pooled_hits)
    ]


def _measured(by_policy: dict[str, Row], pooled_hits: PooledHits) -> Iterator[_Measured]:
    ours = by_policy.get("ours")
    if ours is None:
        return
    if ours["workload"] == "trace" and ours["blocks"] == _BLOCKS:
        yield from _of_pooled(by_policy, pooled_hits)
        yield from _of_the_oracle(by_policy)
        yield from _aggregated(by_policy)
        yield from _speed(ours)
    yield from _times(by_policy)


def _of_pooled(by_policy: dict[str, Row], pooled_hits: PooledHits) -> Iterator[_Measured]:
    """Hits of each role beside those of one cache as large as all of the role's."""
    ours = by_policy["ours"]
    prefill, decode = _ranks(ours)
    pooled = pooled_hits(ours, decode)
    yield _Measured("decode hits / pooled LRU", _number(ours, "decode_hit") / pooled, 0.92)
    if not prefill:
        return
    pooled = pooled_hits(ours, prefill)
    yield _Measured("prefill hits / pooled LRU", _number(ours, "prefill_hit") / pooled, 0.92)
    # Under plan local only what no decode rank holds much of comes to prefill ranks.
    if remote := by_policy.get("ours-remote"):
        value = _number(remote, "prefill_hit") / pooled
        yield _Measured("prefill hits / pooled LRU, remote only", value, 0.92)
    if (prefill, decode) == (2, 6):
        saved = 1 - _number(ours, "computed_ratio")
        yield _Measured("compute saved, above prefill's caches", saved, pooled)


def _of_the_oracle(by_policy: dict[str, Row]) -> Iterator[_Measured]:
    ours, oracle = by_policy["ours"], by_policy.get("oracle")
    if oracle is None:
        return
    for role in ("decode", "prefill"):
        if (hits := _number(oracle, f"{role}_hit")) > 0:
            yield _Measured(f"{role} hits / oracle's", _number(ours, f"{role}_hit") / hits, 0.97)
    saved = (1 - _number(ours, "computed_ratio")) / (1 - _number(oracle, "computed_ratio"))
    yield _Measured("tokens saved / oracle's", saved, 0.97)


def _aggregated(by_policy: dict[str, Row]) -> Iterator[_Measured]:
    ours, cache_aware = by_policy["ours"], by_policy.get("cache-aware")
    if _ranks(ours) != (0, 8):
        return
    yield _Measured("hits, aggregated", _number(ours, "decode_hit"), 0.266)
    if cache_aware is not None:
        limit = 0.45 if ours["tokens/s"] == 5_000 else 0.55
        value = _number(ours, "ttft_mean_s") / _number(cache_aware, "ttft_mean_s")
        yield _Measured("TTFT mean / cache-aware's", value, limit, ceiling=True)


def _speed(ours: Row) -> Iterator[_Measured]:
    """The speed is by CPU time of one thread: several simulations run at once, and they share the cores."""
    ranks, cpu_s_per_s = sum(_ranks(ours)), _number(ours, "cpu_s") / _number(ours, "simulated_s")
    if ranks == 8:
        yield _Measured("CPU s to simulate an hour", 3_600 * cpu_s_per_s, 60.0, ceiling=True)
    if ranks >= 1_000:
        yield _Measured("CPU s to simulate a second", cpu_s_per_s, 1.0, ceiling=True)


def _times(by_policy: dict[str, Row]) -> Iterator[_Measured]:
    others = [
        row for name, row in by_policy.items() if name not in ("ours", "ours-held", "ours-alone", "oracle")
    ]
    for figure in ("ttft_p50_s", "ttft_p99_s"):
        if others:
            best = min(others, key=lambda row: _number(row, figure))
            value = _number(by_policy["ours"], figure) / _number(best, figure)
            name = (
                f"{figure.removesuffix('_s').replace('ttft', 'TTFT').replace('_', ' ')} / {best['policy']}'s"
            )
            yield _Measured(f"{name}, the lowest", value, 1.01, ceiling=True)


def _ranks(row: Row) -> tuple[int, int]:
    layout = str(row["layout"])
    prefill, _, decode = layout.removesuffix(" aggregated").rpartition("+")
    return int(prefill or 0), int(decode)


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, float | int)
    return float(value)
