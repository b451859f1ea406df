"""What a rank has told of a prompt's tokens, in pieces of a response each."""

from collections.abc import Sequence
from itertools import islice

from services.values.prompt_logprobs import PromptLogprobs, ScoredToken
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs

# TokenLogprobs of a piece: they take some ten milliseconds to make, and 100 KB. A client's gRPC takes 4 MiB.
_PIECE = 8_192


class PromptScores:
    """The last tokens of a prompt, as many as have been told of."""

    def __init__(self, prompt_ids: Sequence[int], told: PromptLogprobs) -> None:
        self._ids = iter(prompt_ids[len(prompt_ids) - len(told) :])
        self._tokens = told.tokens()
        self._num_left = len(told)
        self._size = max(1, _PIECE // (1 + told.num_top))

    @property
    def is_last(self) -> bool:
        """Whether one more piece has all that is left."""
        return self._num_left <= self._size

    def next_piece(self) -> list[TokenLogprobs]:
        self._num_left -= self._size
        pairs = islice(zip(self._ids, self._tokens, strict=True), self._size)
        return [_message(token_id, scored) for token_id, scored in pairs]


def _message(token_id: int, scored: ScoredToken) -> TokenLogprobs:
    chosen = TokenLogprob(token_id=token_id, logprob=scored.logprob, rank=scored.rank)
    top = [
        TokenLogprob(token_id=other, logprob=logprob, rank=rank)
        for rank, (other, logprob) in enumerate(scored.top, start=1)
    ]
    return TokenLogprobs(chosen=chosen, top=top)
