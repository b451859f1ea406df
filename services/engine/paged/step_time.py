"""The cost of a step is learned from earlier steps, and used to meet a target for the time between tokens.

    decode step   ~  fixed + per_sequence * batch        a line through recent steps, older ones fade
    drafts        ~  that, and per_draft for each that is verified
    mixed step    ~  that, and prompt_tokens / rate on top

This module is pure; the caller measures the time.
"""

from dataclasses import dataclass

_FADING = 0.98  # A step's weight is multiplied by this for each later step.
_MIN_SPREAD = 0.05  # It is a variance of batch sizes; below it they show no slope.
_UNMEASURED_BATCH = 4  # A batch of this size is tried before anything was measured.
_MIN_CHUNK = 16  # A step computes so many prompt tokens whatever the target, or a prompt would never end.
_MIN_PROMPT_SAMPLE = 16  # Fewer tokens show more about the step than about the rate.
# A step counts for at most so many times its expected duration, because in a much longer one the process was
# stopped. Otherwise routers would never again send this rank requests with which to measure anew.
_MOST = 3.0


# While a draft's cost is unknown, a step of R rows is taken to cost as R + 8. The guess has this weight.
_FIXED_ROWS = 8.0
_GUESS_WEIGHT = 8.0  # It counts steps with one draft more or less than the others.
_TRUSTED_WEIGHT = 40.0  # From this weight on a measured cost is kept for later.
_MOST_FIXED_ROWS = 1000.0
# A step without information forgets this share of what was kept, so that an expensive size is tried again.
_FORGETTING = 0.001


@dataclass(slots=True)
class _Sums:
    """These are weighted sums over decode steps: x is the batch size, d the drafts, y the seconds."""

    weight: float = 0.0
    x: float = 0.0
    d: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xd: float = 0.0
    dd: float = 0.0
    xy: float = 0.0
    dy: float = 0.0

    def add(self, x: float, d: float, y: float) -> None:
        self.weight = _FADING * self.weight + 1.0
        self.x = _FADING * self.x + x
        self.d = _FADING * self.d + d
        self.y = _FADING * self.y + y
        self.xx = _FADING * self.xx + x * x
        self.xd = _FADING * self.xd + x * d
        self.dd = _FADING * self.dd + d * d
        self.xy = _FADING * self.xy + x * y
        self.dy = _FADING * self.dy + d * y


class StepTimes:
    def __init__(self) -> None:
        self._sums = _Sums()
        self._fixed_rows = _FIXED_ROWS
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self._prompt_steps = 0.0

    def __repr__(self) -> str:
        return f"StepTimes(batch_of_8={self.decode_s(8):.4f}s prompt={self.prompt_tokens_per_s:.0f}/s)"

    def note(self, num_decoding: int, prompt_tokens: int, took_s: float, num_drafts: int = 0) -> None:
        if (expected_s := self._expected_s(num_decoding, prompt_tokens, num_drafts)) > 0:
            took_s = min(took_s, _MOST * expected_s)
        if prompt_tokens == 0:
            self._sums.add(num_decoding, num_drafts, took_s)
            self._keep_fixed_rows()
        elif prompt_tokens >= _MIN_PROMPT_SAMPLE:
            # At least a tenth is the prompt's: a wrong expectation must not make the rate infinite.
            prompt_s = max(took_s - self.decode_s(num_decoding, num_drafts), 0.1 * took_s)
            self._prompt_tokens = _FADING * self._prompt_tokens + prompt_tokens
            self._prompt_s = _FADING * self._prompt_s + prompt_s
            self._prompt_steps = _FADING * self._prompt_steps + 1.0

    def _expected_s(self, num_decoding: int, prompt_tokens: int, num_drafts: int) -> float:
        rate, decode_s = self.prompt_tokens_per_s, self.decode_s(num_decoding, num_drafts)
        if (num_decoding and decode_s == 0) or (prompt_tokens and rate == 0):
            return 0.0
        return decode_s + (prompt_tokens / rate if prompt_tokens else 0.0)

    @property
    def prompt_tokens_per_s(self) -> float:
        return self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0

    @property
    def prompt_step_s(self) -> float:
        """Return the seconds that a step takes for the prompts in it; 0 where unknown. A step with more of
        them takes no less, though its rate is higher."""
        return self._prompt_s / self._prompt_steps if self._prompt_steps > 0 else 0.0

    def decode_s(self, batch: int, num_drafts: int = 0) -> float:
        """Return the seconds of a step with single tokens and drafts; 0 where unknown, or for no batch."""
        if not batch or self._sums.weight == 0:
            return 0.0
        mean_batch, mean_s = self._means()
        drafts_s = 0.0
        if num_drafts or self._sums.d:
            drafts_s = self.draft_s * (num_drafts - self._sums.d / self._sums.weight)
        return max(0.0, mean_s + (self._slope() or 0.0) * (batch - mean_batch) + drafts_s)

    @property
    def draft_s(self) -> float:
        """Return the seconds that each draft adds to a step; 0 where nothing was measured.

        The fewer drafts there were, or the more even their numbers, the more the result follows a guess: that
        each step consists of its rows and a fixed number of further ones, all at the same cost.
        """
        if (sums := self._sums).weight == 0:
            return 0.0
        spread, told_s = self._of_drafts_alone()
        rows = self._fixed_rows + (sums.x + sums.d) / sums.weight
        guess_s = sums.y / sums.weight / rows
        return max(0.0, told_s + _GUESS_WEIGHT * guess_s) / (spread + _GUESS_WEIGHT)

    def allows(self, batch: int, target_s: float, receiving: int = 0) -> bool:
        """Return whether a batch of that size is expected to meet the target; one of one always may.

        Far beyond the sizes measured nothing is known, so the batch grows in small strides. `receiving`
        sequences of it do not decode yet: strides do not limit their number, only their expected cost does.
        """
        mean_batch, mean_s = self._means()
        if batch <= 1 or mean_batch == 0:
            return batch <= _UNMEASURED_BATCH
        slope = self._slope()
        stride = mean_batch / 4 + 1 if slope is None else mean_batch
        known = max(_UNMEASURED_BATCH, mean_batch + stride)
        # Without a known slope they are taken to cost as much as the measured ones.
        extra_s = receiving * mean_s / mean_batch if slope is None else 0.0
        return batch - receiving <= known and self.decode_s(batch) + extra_s <= target_s

    def chunk_tokens(self, num_decoding: int, target_s: float | None, limit: int, num_drafts: int = 0) -> int:
        if target_s is None or num_decoding == 0:
            return limit
        spare_s = target_s - self.decode_s(num_decoding, num_drafts)
        return max(min(_MIN_CHUNK, limit), min(limit, int(spare_s * self.prompt_tokens_per_s)))

    def effective_tokens_per_s(self, num_decoding: int, chunk_tokens: int) -> float:
        rate = self.prompt_tokens_per_s
        if rate == 0.0:
            return 0.0
        return chunk_tokens / (self.decode_s(num_decoding) + chunk_tokens / rate)

    def _means(self) -> tuple[float, float]:
        sums = self._sums
        return (sums.x / sums.weight, sums.y / sums.weight) if sums.weight > 0 else (0.0, 0.0)

    def _slope(self) -> float | None:
        if (sums := self._sums).weight == 0:
            return None
        mean_batch, mean_s = self._means()
        spread = self._spread()
        if spread < _MIN_SPREAD:
            return None
        drafts_s = 0.0
        if sums.d:
            drafts_s = self.draft_s * ((sums.xd - mean_batch * sums.d) / sums.weight)
        return max(0.0, (sums.xy / sums.weight - mean_batch * mean_s - drafts_s) / spread)

    def _spread(self) -> float:
        sums = self._sums
        return sums.xx / sums.weight - (sums.x / sums.weight) ** 2

    def _of_drafts_alone(self) -> tuple[float, float]:
        """Return two sums about the means: of the drafts' squares, and of the products of drafts and seconds.

        The part that the batch size explains is taken out.
        """
        sums = self._sums
        squares, told_s = sums.dd - sums.d**2 / sums.weight, sums.dy - sums.d * sums.y / sums.weight
        if (spread := self._spread()) < _MIN_SPREAD:
            return max(0.0, squares), told_s
        by_batch = (sums.xd - sums.x * sums.d / sums.weight) / (spread * sums.weight)
        with_batch_s = sums.xy - sums.x * sums.y / sums.weight
        squares -= by_batch**2 * spread * sums.weight
        return max(0.0, squares), told_s - by_batch * with_batch_s

    def _keep_fixed_rows(self) -> None:
        """Keep the part of a draft's cost that still holds later: after few drafts, or for other batches."""
        sums = self._sums
        if not sums.dd or self._of_drafts_alone()[0] < _TRUSTED_WEIGHT:
            self._fixed_rows += _FORGETTING * (_FIXED_ROWS - self._fixed_rows)
            return
        rows, mean_s = (sums.x + sums.d) / sums.weight, sums.y / sums.weight
        fixed = mean_s / self.draft_s - rows if self.draft_s > 0 else _MOST_FIXED_ROWS
        self._fixed_rows = min(_MOST_FIXED_ROWS, max(0.0, fixed))
