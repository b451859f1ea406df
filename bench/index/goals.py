"""The goals say what the index was to reach; a run's tables are judged by them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.report import Row, verdict


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal is about a column of one table. Of several rows `of`, those with these values, the worst is
    judged."""

    name: str
    part: str
    column: str
    sign: str
    wanted: float
    of: Row = field(default_factory=dict)

    def judge(self, rows: Sequence[Row]) -> Row:
        got = [row[self.column] for row in rows if self.of.items() <= row.items()]
        figures = [float(figure) for figure in got if isinstance(figure, int | float)]
        worst = max if self.sign == "<=" else min
        return verdict(self.name, self.sign, self.wanted, worst(figures))


GOALS = (
    Goal("bytes per entry", "memory", "bytes per entry", "<=", 40, {"of": "blocks"}),
    Goal("bytes per resumable entry", "memory", "bytes per entry", "<=", 200, {"of": "resumable blocks"}),
    Goal("MB of 64 x 125,000 blocks below", "memory", "MB", "<=", 320, {"of": "blocks below"}),
    Goal("match p50 us, 128 blocks", "match", "p50 us", "<=", 50, {"prompt blocks": 128}),
    Goal("match p50 us, 128 blocks, cold", "match", "cold p50 us", "<=", 50, {"prompt blocks": 128}),
    Goal("match p99 us, 8192 blocks", "match", "p99 us", "<=", 300, {"prompt blocks": 8192}),
    Goal("match p99 us, 8192 blocks, cold", "match", "cold p99 us", "<=", 300, {"prompt blocks": 8192}),
    Goal("hashing M tokens/s", "hashing", "packed M tokens/s", ">=", 30),
    Goal("M blocks/s applied", "apply", "M blocks/s", ">=", 2),
    Goal("warm restart s, 2.3 M entries", "warm restart", "ready s", "<=", 5),
    Goal("staleness p99 ms, 64 ranks", "64 publishers", "p99 ms", "<=", 250),
    Goal("staleness p99 ms, 1000 ranks", "1000 publishers", "p99 ms", "<=", 1000),
    *(
        Goal(f"{what}, {part}", part, what, "<=", 0)
        for part in ("64 publishers", "1000 publishers")
        for what in ("gaps", "failures", "lease losses")
    ),
)


def verdicts(part: str, rows: Sequence[Row]) -> list[Row]:
    return [goal.judge(rows) for goal in GOALS if goal.part == part]
