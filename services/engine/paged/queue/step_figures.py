"""The figures tell how steps of late went, and what the next one may take on for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.engine.paged.queue.limits import Limits
from services.engine.paged.queue.step_time import StepTimes
from services.engine.paged.runner import RunnerFailed
from services.values.step_histogram import NO_STEPS


class StepFigures:
    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self.times = StepTimes()
        self.step_s = 0.0  # It is a mean, and 0 before the first step.
        self.drafting_s = 0.0  # It counts what the step that runs took before its batch stood.
        self.decode_steps = self.prompt_steps = NO_STEPS
        self.failed = 0  # It counts those in a row.
        self.prompt_tokens = 0  # They were computed since the start, whatever became of their requests.

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Raises RunnerFailed for whatever fails."""
        try:
            yield
        except Exception as error:
            self.failed += 1
            raise RunnerFailed(type(error).__name__) from error

    def note(self, num_decoding: int, num_drafts: int, prompt_tokens: int, took_s: float) -> None:
        self.failed = 0
        self.prompt_tokens += prompt_tokens
        self.times.note(num_decoding, prompt_tokens, took_s, num_drafts)
        whole_s = took_s + self.drafting_s
        self.step_s = whole_s if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * whole_s
        if prompt_tokens:
            self.prompt_steps = self.prompt_steps.with_steps(whole_s)
        else:
            self.decode_steps = self.decode_steps.with_steps(whole_s)

    def chunk_tokens(self, num_decoding: int, num_drafts: int) -> int:
        return self._chunk_tokens(num_decoding, num_drafts, self.drafting_s)

    def prefill_tokens_per_s(self, num_decoding: int) -> float:
        return self.times.effective_tokens_per_s(num_decoding, self._chunk_tokens(num_decoding, 0, 0.0))

    def _chunk_tokens(self, num_decoding: int, num_drafts: int, drafting_s: float) -> int:
        limits = self._limits
        left_s = limits.itl_target_s - drafting_s if limits.itl_target_s is not None else None
        return self.times.chunk_tokens(num_decoding, left_s, limits.chunk_size, num_drafts)
