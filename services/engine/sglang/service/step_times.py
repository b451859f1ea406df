"""How long a decode step takes on each DP rank, from what SGLang adds up. Pure."""

from collections.abc import Sequence

from services.values.step_histogram import NO_STEPS, StepHistogram

_PACE = 0.2  # of the exponential average


class MeanStepTimes:
    """Kept while a rank rests: a router wants to know what one sequence more would cost there."""

    def __init__(self) -> None:
        self._totals: dict[int, tuple[float, float]] = {}  # steps, microseconds
        self._averages_s: dict[int, float] = {}
        self._histograms: dict[int, StepHistogram] = {}

    def note(self, dp_rank: int, moments: Sequence[float] | None) -> None:
        """`moments`: since the rank's start, over all decode steps, how many, their batch sizes, their
        microseconds and more; None before the first (sglang.srt.managers.load_snapshot)."""
        if not moments:
            return
        before = self._totals.get(dp_rank, (0.0, 0.0))
        steps, total_us = self._totals[dp_rank] = float(moments[0]), float(moments[2])
        if steps > before[0]:
            sample_s = (total_us - before[1]) / (steps - before[0]) / 1e6
            average_s = self._averages_s.get(dp_rank, sample_s)
            self._averages_s[dp_rank] = average_s + _PACE * (sample_s - average_s)
            known = self._histograms.get(dp_rank, NO_STEPS)
            self._histograms[dp_rank] = known.with_steps(sample_s, int(steps - before[0]))

    def step_s(self, dp_rank: int) -> float:
        """0 before the first step."""
        return self._averages_s.get(dp_rank, 0.0)

    def histogram(self, dp_rank: int) -> StepHistogram:
        """Since the start; of steps between two looks their mean is all that is known."""
        return self._histograms.get(dp_rank, NO_STEPS)
