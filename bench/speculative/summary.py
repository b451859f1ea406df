"""This module compares each side with decoding without drafts in the same round. It is pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.report import Row, spread, verdict
from bench.speculative.measure import Run

# Tokens/s over those of `off`, where drafts are mostly right, and where they never are.
GAIN_AT_ONE, NO_LOSS = 2.0, 0.97
MOSTLY_RIGHT = {("repeats", "lookup"), ("repeats", "tree"), ("agrees", "draft")}
NEVER_RIGHT = {"never", "noise"}


@dataclass(frozen=True, slots=True)
class Counts:
    drafted: int = 0
    accepted: int = 0

    def since(self, before: "Counts") -> "Counts":
        return Counts(self.drafted - before.drafted, self.accepted - before.accepted)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def row(case: str, batch: int, mode: str, plain: Sequence[Run], runs: Sequence[Run], counts: Counts) -> Row:
    """`plain` are those without drafts, round by round."""
    pairs = list(zip(plain, runs, strict=True))
    speedups = [run.tokens_per_s / off.tokens_per_s for off, run in pairs]
    return {
        "case": case,
        "batch": batch,
        "mode": mode,
        "tokens_per_s_off": median(off.tokens_per_s for off in plain),
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "ratio": median(speedups),
        "spread": spread(speedups),
        "itl_ratio": median(_itl_s(run) / _itl_s(off) for off, run in pairs),
        "drafted": counts.drafted,
        "acceptance": counts.acceptance,
        "same_texts": sum(off.texts == run.texts for off, run in pairs) / len(pairs),
        "same_hits": all(_hits(off) == _hits(run) for off, run in pairs),
    }


def goals(rows: Sequence[Row]) -> list[Row]:
    return [*(goal for row in rows for goal in _speed_goals(row)), *loss_goals(rows)]


def _speed_goals(row: Row) -> list[Row]:
    case, mode, batch = row["case"], row["mode"], row["batch"]
    name = f"{case}, {mode}, batch {batch}: tokens/s"
    found = []
    if batch == 1 and (case, mode) in MOSTLY_RIGHT:
        found.append(verdict(name, ">=", GAIN_AT_ONE, row["ratio"]))
    elif batch == 16 or (batch == 1 and case in NEVER_RIGHT):
        found.append(verdict(name, ">=", NO_LOSS, row["ratio"]))
    return found


def loss_goals(rows: Sequence[Row]) -> list[Row]:
    return [
        verdict("texts as without drafts", ">=", 1.0, min(float(str(row["same_texts"])) for row in rows)),
        verdict("hits as without drafts", ">=", 1.0, float(all(row["same_hits"] for row in rows))),
    ]


def _itl_s(run: Run) -> float:
    return median(answer.itl_s for answer in run.answers)


def _hits(run: Run) -> list[int]:
    return [answer.hit_tokens for answer in run.answers]
