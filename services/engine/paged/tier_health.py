"""It is counted here what tiers hold and lose, and known which of them are left alone after errors."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.kv.tiers.wait_or_cut import TierTrust
from services.tier.copies import Clock
from services.values.rank_reports import RankLoad

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierCounts:
    """The values count since the start, except for the last three."""

    tokens_up: int = 0
    tokens_down: int = 0
    tokens_ahead: int = 0  # Files were read for them before it was their request's turn.
    tokens_shared: int = 0  # They were among those up, and read from other ranks' files.
    bytes_up: int = 0
    bytes_down: int = 0
    file_bytes: int = 0  # These were written to files, from the pool or from a tier above.
    hits: int = 0  # It counts prompts of which a tier held more than the pool.
    misses: int = 0
    loads: dict[str, int] = field(default_factory=dict)  # They are counted by how they ended.
    overtaken: int = 0  # It counts pages that were evicted before they were copied.
    errors: int = 0
    slots: int = 0
    held: int = 0
    is_off: bool = False


class TierHealth:
    """It counts errors of tiers, and knows which tiers are left alone for a while."""

    def __init__(self, num_tiers: int, counts: TierCounts, clock: Clock) -> None:
        self.trust = [TierTrust() for _ in range(num_tiers)]
        self._counts = counts
        self._clock = clock

    def __repr__(self) -> str:
        return f"TierHealth({self.trust})"

    def is_off(self, tier: int) -> bool:
        return self.trust[tier].is_off(self._clock())

    def rated(self, load: RankLoad, in_files: Sequence[bool], is_off: bool) -> RankLoad:
        """Return the load with how fast the tiers are read, and others' files, which come last."""
        rates = {False: 0.0, True: 0.0}
        for of_files, trust in zip(in_files, self.trust, strict=False):
            known = [rate for rate in (rates[of_files], trust.bytes_per_s) if rate]
            rates[of_files] = min(known, default=0.0)  # Of several tiers in files the slowest counts.
        others = self.trust[-1].bytes_per_s if len(self.trust) > len(in_files) else 0.0
        told = memory, files, shared, is_off = rates[False], rates[True], others, is_off
        known_rates = load.memory_tier_bytes_per_s, load.file_tier_bytes_per_s, load.shared_tier_bytes_per_s
        if told == (*known_rates, load.tiers_off):
            return load
        load = replace(load, memory_tier_bytes_per_s=memory, file_tier_bytes_per_s=files, tiers_off=is_off)
        return replace(load, shared_tier_bytes_per_s=shared)

    def note_error(self, tier: int, why: str, *, reading: bool) -> None:
        self._counts.errors += 1
        log.warning("kv_tier_error tier=%d why=%s", tier, why)
        if self.trust[tier].note_error(self._clock(), reading=reading):
            self.turn_off(tier, why)

    def turn_off(self, tier: int, why: str) -> None:
        self.trust[tier].turn_off(self._clock())
        log.warning("kv_tier_off tier=%d why=%s", tier, why)
