"""An engine's steps are counted by how long they took."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

# Each is inclusive. A decode step takes milliseconds to tenths; one with a long prompt chunk, on a CPU,
# seconds.
EDGES_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 5.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class StepHistogram:
    """`counts` are by edge, and beyond the last one."""

    counts: tuple[int, ...] = (0,) * (len(EDGES_S) + 1)
    sum_s: float = 0.0

    def with_steps(self, took_s: float, steps: int = 1) -> "StepHistogram":
        at = bisect_left(EDGES_S, took_s)
        counts = (*self.counts[:at], self.counts[at] + steps, *self.counts[at + 1 :])
        return StepHistogram(counts, self.sum_s + steps * took_s)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield (edge, steps that took no longer), as Prometheus has them."""
        total = 0
        for edge, count in zip((*map(str, EDGES_S), "+Inf"), self.counts, strict=True):
            total += count
            yield edge, total


NO_STEPS = StepHistogram()
