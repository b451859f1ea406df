"""Log-probabilities of a prompt's tokens: which rows of a chunk report them, and what they have reported.

    position     0   1   2   3   4   5         a prompt of 6, asked for from 3 on
    its row      .   .   3   4   5   next      the row of a token tells of the one behind it

So who computes takes nothing from the cache past position 2, and rows 2, 3 and 4 are asked, in any chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.values.errors import PeerFailed
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Scoring:
    """A chunk's rows are asked for each id how probable it is behind the tokens before it."""

    first: int  # It is the position of the first id, whose row is the one before.
    token_ids: Sequence[int]
    num_top: int
    tell: Callable[[PromptLogprobs], None]  # The step calls it once, with all of them.

    @property
    def rows(self) -> range:
        return range(self.first - 1, self.first - 1 + len(self.token_ids))


@dataclass(slots=True, eq=False)
class ScoredPrompt:
    """It belongs to one sequence and is touched by the engine's thread only."""

    prompt_ids: Sequence[int]
    next: int  # It is the position of the first token about which nothing has been reported.
    num_top: int
    pieces: list[PromptLogprobs] = field(default_factory=list)

    @property
    def matchable_tokens(self) -> int:
        return self.next - 1

    def asked_of(self, start: int, end: int) -> Scoring | None:
        """Return what is requested of a chunk of positions [start, end), or None where nothing is.

        The chunk may compute again what has been reported, and skip nothing.
        """
        assert start < self.next, (
            f"nobody computes what tells of token {self.next}: a chunk starts at {start}"
        )
        token_ids = self.prompt_ids[self.next : end + 1]
        return Scoring(self.next, token_ids, self.num_top, self._take) if token_ids else None

    def whole(self) -> PromptLogprobs:
        assert self.next == len(self.prompt_ids), f"told of {self.next} tokens of {len(self.prompt_ids)}"
        return PromptLogprobs.joined(self.pieces, self.num_top)

    def _take(self, told: PromptLogprobs) -> None:
        self.pieces.append(told)
        self.next += len(told)


def scores_of(request: GenerationRequest) -> ScoredPrompt | None:
    """Return None where no scores are requested. Raises InvalidRequest where they cannot be had."""
    scored, num_top = request.scored, request.sampling.prompt_logprobs
    return None if num_top is None else ScoredPrompt(request.prompt_ids, scored.start, num_top)


def check_told(told: PromptLogprobs | None, request: GenerationRequest) -> None:
    """Raises PeerFailed where a prefill rank has reported other tokens than it was asked for."""
    num_told = None if told is None else (len(told), told.num_top)
    num_top = request.sampling.prompt_logprobs
    asked = None if num_top is None else (len(request.scored), num_top)
    if num_told != asked:
        raise PeerFailed(f"prefill told of (tokens, others) {num_told} of the prompt where {asked} were due")
