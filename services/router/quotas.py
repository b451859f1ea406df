"""A Quota decides whether a tenant may begin one more request; it is pure.

Each rate fills a bucket, which holds one minute of it at most:

    level  60 |\\            a request is refused while the level is below 1
              | \\    /      tokens are taken when their number is known, so that the level may fall below 0
            1 |..\\../....   the debt is refilled first, so the mean over time is the rate
            0 |   \\/

A router enforces its share of every limit, which the caller gives with each call.
"""

import math
from dataclasses import dataclass

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = RATES = (
    "requests_per_minute",
    "prompt_tokens_per_minute",
    "output_tokens_per_minute",
)
CONCURRENT = "concurrent_requests"
LIMITS = (*RATES, CONCURRENT)
_ROUNDING_S = 1e-6  # Who comes again when it was told to must not be refused for a rounding.
_SOON_S = 1.0  # Nobody knows when a running request will end.


@dataclass(frozen=True, slots=True)
class TenantLimits:
    requests_per_minute: float = math.inf
    prompt_tokens_per_minute: float = math.inf
    output_tokens_per_minute: float = math.inf
    concurrent_requests: float = math.inf


@dataclass(frozen=True, slots=True)
class Refusal:
    limit: str  # This is the name of a field of TenantLimits.
    allowed: float  # This is the router's share of it.
    retry_after_s: float


class _Bucket:
    def __init__(self) -> None:
        self._missing = 0.0  # This much has been taken and is not refilled yet.
        self._at_s = -math.inf

    def take(self, amount: float, per_minute: float, now_s: float) -> None:
        self._refill(per_minute, now_s)
        self._missing = max(0.0, self._missing + amount)

    def wait_s(self, per_minute: float, now_s: float) -> float:
        """Return the seconds until the bucket's level is 1, or 0 where it is."""
        self._refill(per_minute, now_s)
        lacking = 1.0 + self._missing - max(1.0, per_minute)
        return max(0.0, lacking * 60 / per_minute)

    def _refill(self, per_minute: float, now_s: float) -> None:
        if self._missing:
            self._missing = max(0.0, self._missing - per_minute / 60 * (now_s - self._at_s))
        self._at_s = now_s


class Quota:
    """`limits` may be replaced at any time: what was taken before still counts."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.running = 0
        self._buckets = {name: _Bucket() for name in RATES}

    def enter(self, now_s: float, share: float = 1.0) -> Refusal | None:
        """Count one more request, or return the limit that makes it wait longest."""
        refusals = [self._refusal(name, now_s, share) for name in RATES]
        most = self.limits.concurrent_requests * share
        if self.running + 1 > max(1.0, most):
            refusals.append(Refusal(CONCURRENT, max(1, int(most)), _SOON_S))
        reached = [refusal for refusal in refusals if refusal is not None]
        if reached:
            return max(reached, key=lambda refusal: refusal.retry_after_s)
        self.running += 1
        self._take(REQUESTS, 1, now_s, share)
        return None

    def leave(self) -> None:
        self.running -= 1

    def take_prompt(self, tokens: int, now_s: float, share: float = 1.0) -> Refusal | None:
        """Take the tokens of a request that has entered, or return why it must still wait."""
        refusal = self._refusal(PROMPT_TOKENS, now_s, share)
        if refusal is None:
            self._take(PROMPT_TOKENS, tokens, now_s, share)
        return refusal

    def take_output(self, tokens: int, now_s: float, share: float = 1.0) -> None:
        self._take(OUTPUT_TOKENS, tokens, now_s, share)

    def give_back(self, prompt_tokens: int, requests: int, now_s: float, share: float = 1.0) -> None:
        self._take(REQUESTS, -requests, now_s, share)
        self._take(PROMPT_TOKENS, -prompt_tokens, now_s, share)

    def _refusal(self, name: str, now_s: float, share: float) -> Refusal | None:
        per_minute = getattr(self.limits, name) * share
        if per_minute == math.inf:
            return None
        wait_s = self._buckets[name].wait_s(per_minute, now_s)
        return Refusal(name, per_minute, wait_s) if wait_s > _ROUNDING_S else None

    def _take(self, name: str, amount: float, now_s: float, share: float) -> None:
        per_minute = getattr(self.limits, name) * share
        if per_minute < math.inf:
            self._buckets[name].take(amount, per_minute, now_s)
