"""A GenerateResponse becomes a choice of a completion or of a chat."""

from collections.abc import Sequence

from services.router.dialects.dialect_answer import Json
from services.router.dialects.openai.answer_choice import ChoicePiece, TokenBytes, TokenText, finite
from services.router.dialects.openai.chat_tools import call_deltas, joined_calls
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    has_prompts = True

    def __init__(self, token_text: TokenText, token_bytes: TokenBytes) -> None:
        self._token_text = token_text  # A completion's log-probabilities have no bytes.
        self._text_offset = 0

    def whole(self, piece: ChoicePiece) -> Json:
        told = {} if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}
        return piece.choice({"text": piece.text, **told}, self._logprobs(piece))

    def delta(self, piece: ChoicePiece) -> Json:
        return self.whole(piece)

    def beside(self, piece: ChoicePiece) -> Json:
        return {}

    def opening(self, index: int) -> Json | None:
        return None

    def _logprobs(self, piece: ChoicePiece) -> Json | None:
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
        offset = self._text_offset
        self._text_offset += len(text)
        return offset


def _reasoning(piece: ChoicePiece) -> Json:
    """Return the reasoning in two words, as OpenAI's chats have none for it: DeepSeek's, which most servers
    took over, and vLLM's."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    has_prompts = False

    def __init__(self, token_text: TokenText, token_bytes: TokenBytes) -> None:
        self._token_text = token_text
        self._token_bytes = token_bytes

    def whole(self, piece: ChoicePiece) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        message |= _reasoning(piece)
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": joined_calls(piece.calls)}
        return piece.choice({"message": message}, self._logprobs(piece.logprobs))

    def delta(self, piece: ChoicePiece) -> Json:
        delta = _reasoning(piece)
        if piece.calls:
            delta["tool_calls"] = call_deltas(piece.calls)
        if piece.text or not (delta or piece.finish_reason):
            delta["content"] = piece.text
        return piece.choice({"delta": delta}, self._logprobs(piece.logprobs))

    def beside(self, piece: ChoicePiece) -> Json:
        return {} if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}

    def opening(self, index: int) -> Json | None:
        return ChoicePiece("", index=index).choice({"delta": {"role": "assistant", "content": ""}}, None)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {
            "content": [
                {**self._entry(token.chosen), "top_logprobs": [self._entry(other) for other in token.top]}
                for token in logprobs
            ]
        }

    def _entry(self, token: common_pb2.TokenLogprob) -> Json:
        text = self._token_text(token.token_id)
        # A part of a character is U+FFFD as text; null is OpenAI's word for bytes that nobody knows.
        utf8 = self._token_bytes(token.token_id) if "\ufffd" in text else text.encode()
        known = None if utf8 is None else list(utf8)
        return {"token": text, "logprob": finite(token.logprob), "bytes": known}
