"""A rank's predicted hits have been worth the tokens delivered of the tokens predicted. Pure.

A rank that evicts faster than the index tells, or whose publisher lags, is trusted less: a hit there is
priced as the part of it that such hits brought. Distrust fades, or the rank would never be tried again.
"""

import math
from dataclasses import dataclass

from services.values.rank import RankKey

_PRIOR_TOKENS = 8_192.0  # delivered as predicted, before anything was seen
_KEPT = 0.95  # of the past's weight with every new observation
_HALF_LIFE_S = 60.0
_WHOLE = 0.95  # from here on a hit counts whole: blocks and pages end at different tokens


@dataclass(slots=True)
class _Record:
    predicted: float
    delivered: float
    seen_s: float


class Trust:
    """Each rank has a trust in [0, 1]; it is 1 for a rank of which nothing was seen."""

    def __init__(self) -> None:
        self._records: dict[RankKey, _Record] = {}

    def observe(self, rank: RankKey, predicted_tokens: int, delivered_tokens: int, now: float) -> None:
        """Compare what the index said that the rank held of a prompt with what it had. Nothing predicted
        proves nothing."""
        if predicted_tokens <= 0:
            return
        record = self._records.setdefault(rank, _Record(_PRIOR_TOKENS, _PRIOR_TOKENS, now))
        kept = _KEPT * math.exp2((record.seen_s - now) / _HALF_LIFE_S)
        # The faded part of the record is forgotten, not held against the rank or for it.
        record.predicted = kept * record.predicted + (1 - kept) * _PRIOR_TOKENS + predicted_tokens
        delivered = min(predicted_tokens, delivered_tokens)
        record.delivered = kept * record.delivered + (1 - kept) * _PRIOR_TOKENS + delivered
        record.seen_s = now

    def of(self, rank: RankKey, now: float) -> float:
        record = self._records.get(rank)
        if record is None:
            return 1.0
        distrust = 1 - record.delivered / record.predicted
        return 1 - distrust * math.exp2((record.seen_s - now) / _HALF_LIFE_S)

    def worth(self, rank: RankKey, matched_tokens: int, now: float) -> int:
        """Return the tokens that a hit of so many counts as."""
        record = self._records.get(rank)
        if matched_tokens == 0 or record is None or record.delivered >= record.predicted:
            return matched_tokens
        trust = self.of(rank, now)
        return matched_tokens if trust >= _WHOLE else int(trust * matched_tokens)

    def forget(self, rank: RankKey) -> None:
        self._records.pop(rank, None)
