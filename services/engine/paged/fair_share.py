"""FairShare counts what tenants have had on a rank, so that each gets its share of the tokens; it is pure.

All counts are tokens over the tenant's weight, on one scale: of two tenants that always want more, both have
had equally much. A tenant that comes back after a pause begins where the others are, so that nobody saves up:

    had   a  ======*======>          b comes: it starts at *, where the prompt that is computed now began,
          b  ==    ...*====>         and not where a's prompts will end that were let in already

It may begin a little behind, for what it did not use. A prompt is charged when it is let in, and a generated
token when it comes, with a part of what its sequence holds. Within a tenant the session that has had least
goes first: a request stands as if it had come when the tenant had had so much more, up to a bound, so that
nobody starves.
"""

import math
from collections import Counter

from services.values.request import TenantShare

# A step reads all weights for a generated token, and a prompt's tokens share that.
_GENERATED = 2.0
_HELD_SHARE = 1 / 4096  # A generated token costs one more for so many tokens that its sequence holds.
MOST_SESSION_TOKENS = 1 << 16
# Tenants whose counts differ by less have had equally much; then the one that runs fewer goes first.
GRAIN_TOKENS = 256
SLACK_TOKENS = 8192  # A tenant may be so far ahead, and still go first where more of its prompt is cached.
LAG_TOKENS = 4096  # Who has had so much less may take a place from another tenant.
CREDIT_TOKENS = 8192  # Who comes after a pause may have had so much less than the others, and catch up.


def token_cost(held_tokens: int) -> float:
    return _GENERATED + held_tokens * _HELD_SHARE


class FairShare:
    """Tenants that no router has told of count as having had what is the least now."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._present = Counter[str]()  # It counts the sequences of each that wait or run.
        self._serving: float | None = None  # The prompt that is computed now began here.
        self._now = 0.0  # A tenant that comes begins here at least.

    @property
    def is_on(self) -> bool:
        return bool(self._present)

    def came(self, share: TenantShare | None) -> float:
        """Count one more sequence of the tenant, and return its place among the tenant's own."""
        if share is None:
            return 0.0
        tenant = share.tenant
        if not self._present[tenant]:
            self._now = max(self._now, self._least())
            self._had[tenant] = max(self._had.get(tenant, -math.inf), self._now - CREDIT_TOKENS)
        self._present[tenant] += 1
        self._weights[tenant] = share.weight
        return self._had[tenant] + min(share.session_tokens, MOST_SESSION_TOKENS) / share.weight

    def left(self, share: TenantShare | None) -> None:
        if share is None:
            return
        self._present[share.tenant] -= 1
        if self._present[share.tenant]:
            return
        del self._present[share.tenant]
        if not self._present:
            self._serving = None
        # What a tenant has had is kept while it would have less if it came anew: a pause makes no count less.
        for name in [name for name, had in self._had.items() if had <= self._now - CREDIT_TOKENS]:
            if name not in self._present:
                del self._had[name], self._weights[name]

    def charge(self, share: TenantShare | None, tokens: float) -> None:
        """Count tokens, or take them back if there are fewer than none."""
        if share is not None:
            self._had[share.tenant] += tokens / share.weight

    def serves(self, start: float | None) -> None:
        """Note where the prompt that is computed now began, or that none is."""
        self._serving = start

    def had(self, tenant: str) -> float:
        return self._had.get(tenant, self._now)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def rank(self, tenant: str) -> int:
        return int(self.had(tenant) // GRAIN_TOKENS)

    def may_pass(self, tenant: str, first: str) -> bool:
        """Return whether the tenant may go before the first one because of what is cached."""
        return self.had(tenant) <= self.had(first) + SLACK_TOKENS

    def lags(self, tenant: str, other: str) -> bool:
        """Return whether the tenant has had so much less that it may take a place from the other one."""
        return self.had(tenant) + LAG_TOKENS <= self.had(other)

    def _least(self) -> float:
        if self._serving is not None:
            return self._serving
        return min((self._had[name] for name in self._present), default=self._now)
