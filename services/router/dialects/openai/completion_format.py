"""GenerateResponse as completions' choices."""

from collections.abc import Sequence

from services.router.dialects.answer import Json
from services.router.dialects.openai.choice import Piece, TokenBytes, TokenText, finite
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, token_text: TokenText, token_bytes: TokenBytes) -> None:
        self._token_text = token_text  # its log-probabilities have no bytes
        self._text_offset = 0

    def whole(self, piece: Piece) -> Json:
        return piece.choice({"text": piece.text}, self._logprobs(piece.logprobs))

    def delta(self, piece: Piece) -> Json:
        return self.whole(piece)

    def opening(self, index: int) -> Json | None:
        return None

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        tokens = [self._token_text(token.chosen.token_id) for token in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(token.chosen.logprob) for token in logprobs],
            "top_logprobs": [
                {self._token_text(other.token_id): finite(other.logprob) for other in token.top}
                for token in logprobs
            ],
            "text_offset": [self._count(text) for text in tokens],
        }

    def _count(self, text: str) -> int:
        """Where the token begins."""
        offset = self._text_offset
        self._text_offset += len(text)
        return offset
