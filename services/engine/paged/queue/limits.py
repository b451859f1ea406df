"""An operator's limits say what a rank does at once."""

from dataclasses import dataclass, field

from services.engine.paged.queue.overtaking import Patience


@dataclass(frozen=True, slots=True)
class Limits:
    max_running_requests: int = 64
    chunk_size: int = 512  # It counts prompt tokens per step.
    itl_target_s: float | None = None  # It bounds the batch, and prompt chunks beside it.
    expected_output: float = 0.5  # This share of max_tokens is expected of a sequence until some have ended.
    patience: Patience = field(default_factory=Patience)
    step_limit_s: float = 120.0  # A step that takes longer counts as hung; with 0 none does.
