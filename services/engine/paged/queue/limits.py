"""What an operator lets a rank do at once."""

from dataclasses import dataclass, field

from services.engine.paged.queue.overtaking import Patience


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step, and who comes in."""

    max_running_requests: int = 64
    chunk_size: int = 512  # prompt tokens per step
    itl_target_s: float | None = None  # bounds the batch, and prompt chunks beside it
    expected_output: float = 0.5  # share of max_tokens expected of a sequence, until some have ended
    patience: Patience = field(default_factory=Patience)
    step_limit_s: float = 120.0  # a step that takes longer counts as hung; 0: none does
