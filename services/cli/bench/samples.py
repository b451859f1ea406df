"""This module keeps many numbers in little memory."""

import random
from array import array
from collections.abc import Mapping

import numpy as np

_EXACT = 1_000_000


class Samples:
    """All of them are kept up to `exact`, and of more an even draw. Count,
    mean and maximum are always of all.
    """

    def __init__(self, exact: int = _EXACT, seed: int = 0) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._exact = exact
        self._kept = array("d")
        self._rng = random.Random(seed)

    def __repr__(self) -> str:
        return f"Samples(count={self.count}, mean={self.mean})"

    def add(self, value: float, times: int = 1) -> None:
        for _ in range(times):
            self.count += 1
            if len(self._kept) < self._exact:
                self._kept.append(value)
            elif (place := self._rng.randrange(self.count)) < self._exact:
                self._kept[place] = value
        self.total += times * value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        return float(np.std(self._kept)) if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Interpolate between neighbours on a straight line, as numpy does; 0 where there are none."""
        return float(np.percentile(self._kept, percent)) if self.count else 0.0

    def values(self) -> "array[float]":
        return self._kept

    def figures(self, name: str, scale: float = 1e3) -> Mapping[str, float]:
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (90, 95, 99)}
        told = {"mean": self.mean, "median": self.percentile(50), "std": self.std, **percentiles}
        return {f"{kind}_{name}_ms": scale * value for kind, value in told.items()}
