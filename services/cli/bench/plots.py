"""This module draws a run. Nothing imports it unless --plot is set: it needs matplotlib, which only the extra
isthmus[plots] installs.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from services.cli.bench.meter import Meter, Samples

_DPI = 120
_PERCENTILES = ((50, "-"), (90, "--"), (99, ":"))


def draw(meter: Meter, path: Path, title: str) -> None:
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    spreads = {"TTFT (ms)": meter.ttft, "ITL (ms)": meter.itl, "TPOT (ms)": meter.tpot, "E2E (ms)": meter.e2e}
    names = list(spreads)
    parts = figure.subplot_mosaic([[*names[:2], "time"], [*names[2:], "time"]])
    for name, samples in spreads.items():
        _spread(parts[name], samples, name)
    _time(parts["time"], meter)
    figure.savefig(path, dpi=_DPI, format="png")


def _spread(axes: Any, samples: Samples, name: str) -> None:
    values = 1e3 * np.sort(np.asarray(samples.values()))
    axes.set(xlabel=name, ylabel="share", ylim=(0, 1.02))
    if len(values):
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
        for percent, style in _PERCENTILES:
            at = 1e3 * samples.percentile(percent)
            axes.axvline(at, color="0.5", lw=0.8, ls=style, label=f"p{percent} {at:.1f}")
        axes.legend(fontsize=7, loc="lower right")


def _time(axes: Any, meter: Meter) -> None:
    seconds = range(max(meter.tokens_by_second, default=0) + 1)
    tokens = [meter.tokens_by_second[second] for second in seconds]
    axes.bar(seconds, tokens, width=1.0, align="edge")
    axes.set(xlabel="seconds since the beginning", ylabel="output tokens in a second")
