"""GenerateResponse as completions' choices."""

from services.router.dialects.answer import Json
from services.router.dialects.openai.choice import Piece, TokenBytes, TokenText, finite
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    has_prompts = True

    def __init__(self, token_text: TokenText, token_bytes: TokenBytes) -> None:
        self._token_text = token_text  # its log-probabilities have no bytes
        self._text_offset = 0

    def whole(self, piece: Piece) -> Json:
        told = {} if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}
        return piece.choice({"text": piece.text, **told}, self._logprobs(piece))

    def delta(self, piece: Piece) -> Json:
        return self.whole(piece)

    def beside(self, piece: Piece) -> Json:
        return {}

    def opening(self, index: int) -> Json | None:
        return None

    def _logprobs(self, piece: Piece) -> Json | None:
        if (logprobs := piece.logprobs) is None:
            return None
        first = [] if piece.first_id is None else [piece.first_id]
        unknown = [None] * len(first)
        tokens = list(map(self._token_text, [*first, *(token.chosen.token_id for token in logprobs)]))
        return {
            "tokens": tokens,
            "token_logprobs": [*unknown, *(finite(token.chosen.logprob) for token in logprobs)],
            "top_logprobs": [*unknown, *map(self._others, logprobs)],
            "text_offset": [self._count(text) for text in tokens],
        }

    def _others(self, token: TokenLogprobs) -> Json:
        return {self._token_text(other.token_id): finite(other.logprob) for other in token.top}

    def _count(self, text: str) -> int:
        """Where the token begins."""
        offset = self._text_offset
        self._text_offset += len(text)
        return offset
