"""What a step costs, learned from the steps made: so that a target for the time between tokens can be held.

    decode step   ~  fixed + per_sequence * batch        a line through recent steps, older ones fade
    mixed step    ~  that, and prompt_tokens / rate on top

Pure; the caller measures.
"""

from dataclasses import dataclass

_FADING = 0.98  # of a step's weight, per later step
_MIN_SPREAD = 0.05  # of the batch sizes seen (variance); below it they tell no slope
_UNMEASURED_BATCH = 4  # tried without having measured anything
_MIN_CHUNK = 16  # prompt tokens that a step computes, whatever the target: or a prompt would never be done
_MIN_PROMPT_SAMPLE = 16  # fewer tokens tell more of the step than of the rate
# A step counts for so many times what was expected at most: in one that took far longer the process was
# stopped. Else routers would never send this rank anything again by which it could measure anew.
_MOST = 3.0


@dataclass(slots=True)
class _Sums:
    """Weighted sums over decode steps: x the batch size, y the seconds."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, _FADING * getattr(self, name) + value)


class StepTimes:
    def __init__(self) -> None:
        self._sums = _Sums()
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0

    def __repr__(self) -> str:
        return f"StepTimes(batch_of_8={self.decode_s(8):.4f}s prompt={self.prompt_tokens_per_s:.0f}/s)"

    def note(self, num_decoding: int, prompt_tokens: int, took_s: float) -> None:
        """A step was made."""
        if (expected_s := self._expected_s(num_decoding, prompt_tokens)) > 0:
            took_s = min(took_s, _MOST * expected_s)
        if prompt_tokens == 0:
            self._sums.add(num_decoding, took_s)
        elif prompt_tokens >= _MIN_PROMPT_SAMPLE:
            # At least a tenth is the prompt's: an expectation that is off must not make the rate infinite.
            prompt_s = max(took_s - self.decode_s(num_decoding), 0.1 * took_s)
            self._prompt_tokens = _FADING * self._prompt_tokens + prompt_tokens
            self._prompt_s = _FADING * self._prompt_s + prompt_s

    def _expected_s(self, num_decoding: int, prompt_tokens: int) -> float:
        """0 where one of its parts was never measured."""
        rate, decode_s = self.prompt_tokens_per_s, self.decode_s(num_decoding)
        if (num_decoding and decode_s == 0) or (prompt_tokens and rate == 0):
            return 0.0
        return decode_s + (prompt_tokens / rate if prompt_tokens else 0.0)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of steps that compute prompts and nothing else; 0: not measured."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0

    def decode_s(self, batch: int) -> float:
        """Expected of a step of single tokens; 0 when nothing was measured, or for no batch."""
        mean_batch, mean_s = self._means()
        return max(0.0, mean_s + (self._slope() or 0.0) * (batch - mean_batch)) if batch else 0.0

    def allows(self, batch: int, target_s: float, receiving: int = 0) -> bool:
        """Whether a batch of that size is expected to hold the target; one always may.

        Far beyond what was seen nothing is known: there it grows in small strides. `receiving` of it do not
        decode yet: how many they may be, strides do not say, only what they will cost.
        """
        mean_batch, mean_s = self._means()
        if batch <= 1 or mean_batch == 0:
            return batch <= _UNMEASURED_BATCH
        slope = self._slope()
        stride = mean_batch / 4 + 1 if slope is None else mean_batch
        known = max(_UNMEASURED_BATCH, mean_batch + stride)
        # Where no slope is known they may cost as much as those that were seen.
        extra_s = receiving * mean_s / mean_batch if slope is None else 0.0
        return batch - receiving <= known and self.decode_s(batch) + extra_s <= target_s

    def chunk_tokens(self, num_decoding: int, target_s: float | None, limit: int) -> int:
        """Prompt tokens that a step may compute beside `num_decoding` single tokens."""
        if target_s is None or num_decoding == 0:
            return limit
        spare_s = target_s - self.decode_s(num_decoding)
        return max(min(_MIN_CHUNK, limit), min(limit, int(spare_s * self.prompt_tokens_per_s)))

    def effective_tokens_per_s(self, num_decoding: int, chunk_tokens: int) -> float:
        """The rate at which a newcomer's prompt would be computed now; 0: not measured."""
        rate = self.prompt_tokens_per_s
        if rate == 0.0:
            return 0.0
        return chunk_tokens / (self.decode_s(num_decoding) + chunk_tokens / rate)

    def _means(self) -> tuple[float, float]:
        sums = self._sums
        return (sums.x / sums.weight, sums.y / sums.weight) if sums.weight > 0 else (0.0, 0.0)

    def _slope(self) -> float | None:
        """Seconds per sequence; None where the batch was of one size only."""
        if (sums := self._sums).weight == 0:
            return None
        mean_batch, mean_s = self._means()
        spread = sums.xx / sums.weight - mean_batch**2
        if spread < _MIN_SPREAD:
            return None
        return max(0.0, (sums.xy / sums.weight - mean_batch * mean_s) / spread)
