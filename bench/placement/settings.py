"""Which settings are replayed: the base of each layout, and one thing changed at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bench.placement.ranks import Timing
from services.router.price import Weights


@dataclass(frozen=True, slots=True)
class Setting:
    """`prefill` 0: an aggregated layout, in which every rank does both. `copies` of the trace at once, of
    which the first `duration_s` seconds are replayed."""

    prefill: int
    decode: int
    blocks: int = 2_500  # per rank
    staleness_s: float = 0.25  # of the index, beyond the publisher's gathering
    routers: int = 1
    workload: str = "trace"
    copies: int = 1
    duration_s: float | None = None
    timing: Timing = field(default_factory=Timing)
    weights: Weights = field(default_factory=Weights)

    @property
    def layout(self) -> str:
        return f"{self.prefill}+{self.decode}" if self.prefill else f"{self.decode} aggregated"

    def columns(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "layout": self.layout,
            "blocks": self.blocks,
            "tokens/s": int(self.timing.tokens_per_s),
            "stale_s": self.staleness_s,
            "routers": self.routers,
        }


# Prompts share three quarters; so many a second that not all can be computed in full.
SHARED_REQUESTS_PER_S = 8.0
SHARED_DURATION_S = 300.0
_LAYOUTS = {"8": (0, 8), "4+4": (4, 4), "2+6": (2, 6), "8+64": (8, 64), "200+800": (200, 800)}
# A thousand ranks get 25 times the requests, for five minutes.
_LARGE_COPIES, _LARGE_DURATION_S = 25, 300.0
LAYOUTS = tuple(_LAYOUTS)


def settings(layouts: list[str], *, base_only: bool, duration_s: float | None) -> Iterator[Setting]:
    for name in layouts:
        prefill, decode = _LAYOUTS[name]
        base = Setting(prefill, decode, duration_s=duration_s)
        if decode >= 800:
            shorter_s = min(duration_s or _LARGE_DURATION_S, _LARGE_DURATION_S)
            base = replace(base, copies=_LARGE_COPIES, duration_s=shorter_s)
        yield base
        if not base_only and decode <= 8:
            yield from _variations(base)


def _variations(base: Setting) -> Iterator[Setting]:
    yield replace(base, timing=Timing(tokens_per_s=5_000.0))
    yield replace(base, blocks=1_000)
    yield replace(base, blocks=6_000)
    yield replace(base, staleness_s=0.0)
    yield replace(base, staleness_s=2.0)
    yield replace(base, routers=2)
    yield replace(base, workload="spread")
    yield replace(base, workload="spread", routers=2)
    yield replace(base, workload="shared")
