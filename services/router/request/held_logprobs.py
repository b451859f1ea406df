"""HeldLogprobs bounds the log-probabilities that are held for a client that gets all of them at once."""

from collections.abc import Sequence

from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse

MOST = 1 << 20  # some hundred bytes each, and as much again as JSON


class HeldLogprobs:
    """A call's answers are counted as they come: each token, and the others that are reported beside it."""

    def __init__(self, times_prompt: int = 1, most: int | None = None) -> None:
        """A prompt's log-probabilities are sent `times_prompt` times."""
        self._times_prompt = times_prompt
        self._most = MOST if most is None else most
        self.count = 0

    def add(self, response: GenerateResponse) -> None:
        """Count a response. Raises InvalidRequest where they are too many."""
        self.count += _count(response.prompt_logprobs) * self._times_prompt + _count(response.logprobs)
        if self.count > self._most:
            raise InvalidRequest(
                "sampling.logprobs",
                "must be asked for of fewer tokens, or of fewer others, or streamed: a "
                f"call that is answered as a whole tells {self._most} of them, those of prompts among them",
            )


def _count(logprobs: Sequence[TokenLogprobs]) -> int:
    """All tokens have as many others as the first."""
    return len(logprobs) * (1 + len(logprobs[0].top)) if logprobs else 0
