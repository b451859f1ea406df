"""The settings that are replayed are the base of each layout, and one thing changed at a time.

All variations of every layout, but for those of 200 + 800, where a run takes minutes, that have little to
change there: the clocks of its 25 copies of the trace tick 8 times a second anyway ("spread"), and 8 requests
a second with one prefix ("shared") are no load for a thousand ranks. Any can be had by name, and only so
those of a model with recurrent layers ("hybrid-64" has room for 64 states a rank), and of small pools with a
tier of four times their size ("tier-4") and without ("tier-0").
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from services.router.replay.ranks import Timing
from services.router.replay.setting import Setting

# Prompts share three quarters; so many a second that not all can be computed in full.
SHARED_REQUESTS_PER_S = 8.0
SHARED_DURATION_S = 300.0
_LAYOUTS = {"8": (0, 8), "4+4": (4, 4), "2+6": (2, 6), "8+64": (8, 64), "200+800": (200, 800)}
# A thousand ranks get 25 times the requests, for five minutes.
_LARGE_COPIES, _LARGE_DURATION_S = 25, 300.0
LAYOUTS = tuple(_LAYOUTS)

_VARIATIONS: dict[str, Callable[[Setting], Setting]] = {
    "base": lambda base: base,
    "slow": lambda base: replace(base, timing=Timing(tokens_per_s=5_000.0)),
    "blocks-1000": lambda base: replace(base, blocks=1_000),
    "blocks-6000": lambda base: replace(base, blocks=6_000),
    "stale-0": lambda base: replace(base, staleness_s=0.0),
    "stale-2": lambda base: replace(base, staleness_s=2.0),
    "routers-2": lambda base: replace(base, routers=2),
    "spread": lambda base: replace(base, workload="spread"),
    "spread-routers-2": lambda base: replace(base, workload="spread", routers=2),
    "shared": lambda base: replace(base, workload="shared"),
}
# Qwen3.5-35B-A3B: a state is as heavy as 3,174 tokens of its attention.
_HYBRID = Timing(kv_bytes_per_token=20_480, state_bytes=62 << 20)


def _hybrid(states: int, base: Setting) -> Setting:
    return replace(base, workload=f"hybrid-{states}", states=states, timing=_HYBRID)


_VARIATIONS |= {f"hybrid-{states}": partial(_hybrid, states) for states in (64, 256)}
_TIER_POOL = 1_250


def _with_tier(times: int, base: Setting) -> Setting:
    return replace(base, blocks=_TIER_POOL, tier_blocks=times * _TIER_POOL)


_VARIATIONS |= {f"tier-{times}": partial(_with_tier, times) for times in (0, 4)}
VARIATIONS = tuple(_VARIATIONS)
_NOT_LARGE = frozenset({"spread", "spread-routers-2", "shared"})
_BY_NAME = frozenset({"hybrid-64", "hybrid-256", "tier-0", "tier-4"})


def settings(
    layouts: Sequence[str], variations: Sequence[str], *, duration_s: float | None = None
) -> Iterator[Setting]:
    """Return the settings; with no `variations` those that a layout has by default."""
    for layout in layouts:
        base = _base(layout, duration_s)
        for name in variations or _default(base):
            yield _VARIATIONS[name](base)


def _base(layout: str, duration_s: float | None) -> Setting:
    prefill, decode = _LAYOUTS[layout]
    base = Setting(prefill, decode, duration_s=duration_s)
    if not _is_large(base):
        return base
    shorter_s = min(duration_s or _LARGE_DURATION_S, _LARGE_DURATION_S)
    return replace(base, copies=_LARGE_COPIES, duration_s=shorter_s)


def _default(base: Setting) -> Sequence[str]:
    left_out = _BY_NAME | _NOT_LARGE if _is_large(base) else _BY_NAME
    return [name for name in VARIATIONS if name not in left_out]


def _is_large(base: Setting) -> bool:
    return base.decode >= 800
