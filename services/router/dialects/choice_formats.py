"""This module turns a GenerateResponse into an entry of `choices`, of a completion or of a chat.

The entry reports on its prompt in two ways: by the text and tokens that `echo` puts before the answer's own,
and by vLLM's `prompt_logprobs`.

    echo, logprobs: 1      The prompt's tokens come before the answer's; the first one has null.
    prompt_logprobs: 1     [null, {id: {logprob, rank, decoded_token}, ...}, ...]
    echo, max_tokens: 0    The prompt comes alone. Ranks generate at least one token, which is left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.dialects.dialect import Json, Words
from services.router.dialects.json_body import UINT32_MAX, Body
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, ToolCallDelta

# Clients that know an enumeration fail at any other word. `isthmus.finish_reason` tells LENGTH from CAPACITY.
FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CAPACITY: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    text: str
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    calls: Sequence[ToolCallDelta] = ()
    index: int = 0
    first_id: int | None = None  # This is the first id of an echoed prompt, which has no log-probability.
    prompt_logprobs: Sequence[Json | None] | None = None  # This is vLLM's prompt_logprobs.

    @property
    def is_empty(self) -> bool:
        parts = (self.text, self.reasoning, self.calls, self.logprobs, self.token_ids, self.finish_reason)
        return not any(parts) and self.first_id is None

    def choice(self, content: Json, logprobs: Json | None) -> Json:
        choice = {"index": self.index, **content, "logprobs": logprobs, "finish_reason": self.finish_reason}
        if self.token_ids is not None:
            choice["token_ids"] = list(self.token_ids)
        return choice


class AnswerFormat(Protocol):
    """An object of this class formats one answer, as it counts offsets into the answer's text."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    has_prompts: bool  # Each choice has its prompt's ids, as with vLLM; else the answer has them.

    def whole(self, piece: ChoicePiece) -> Json: ...

    def delta(self, piece: ChoicePiece) -> Json: ...

    def beside(self, piece: ChoicePiece) -> Json:
        """Return the members that the whole answer has beside its choices."""

    def opening(self, index: int) -> Json | None:
        """Return the choice of the chunk before all text, or None where this format has no such chunk."""


def finite(logprob: float) -> float:
    # JSON has neither infinity nor NaN; OpenAI writes -9999.0 for an impossible token.
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0


@dataclass(frozen=True, slots=True)
class Echo:
    """These options say how the prompt is reported. `num_top` is vLLM's prompt_logprobs; None means that they
    were not requested."""

    echoes: bool = False
    only: bool = False  # The prompt is reported without its answer.
    num_top: int | None = None


NO_ECHO = Echo()


def read_prompt_logprobs(body: Body, request: GenerateRequest, *, echoes: bool = False) -> Echo:
    """Set what is requested about the prompt, after `logprobs` was read. Raises InvalidParameter."""
    num_top = body.integer("prompt_logprobs", 0, UINT32_MAX)
    if num_top is not None and body.flag("stream"):
        raise body.wrong("prompt_logprobs", "is not streamed: set stream to false")
    sampling = request.sampling
    wanted = [] if num_top is None else [num_top]
    if echoes and sampling.HasField("logprobs"):
        wanted.append(sampling.logprobs)
        if body.flag("stream") and request.n > 1:
            raise body.wrong("echo", "with logprobs and n above 1 is not streamed: set stream to false")
    if wanted:
        sampling.prompt_logprobs = max(wanted)
    return Echo(echoes=echoes, num_top=num_top)


def prompt_text(request: GenerateRequest, words: Words) -> str:
    """Return the prompt's text. A character may span several ids, so their bytes are joined."""
    if request.WhichOneof("prompt") == "text":
        return str(request.text)
    return b"".join(_utf8(i, words) for i in request.token_ids.ids).decode(errors="replace")


def cut(logprobs: Sequence[TokenLogprobs], num_top: int) -> Sequence[TokenLogprobs]:
    if not logprobs or len(logprobs[0].top) <= num_top:
        return logprobs
    return [TokenLogprobs(chosen=token.chosen, top=token.top[:num_top]) for token in logprobs]


def vllm_prompt_logprobs(logprobs: Sequence[TokenLogprobs], num_top: int, words: Words) -> list[Json | None]:
    """Return vLLM's prompt_logprobs: by id, each token itself and the `num_top` most probable."""
    return [None, *(_by_id([token.chosen, *token.top[:num_top]], words) for token in logprobs)]


def _by_id(reported: Sequence[TokenLogprob], words: Words) -> Json:
    by_id: Json = {}
    for each in reported:
        entry = {
            "logprob": finite(each.logprob),
            "rank": each.rank or None,
            "decoded_token": words.token_text(each.token_id),
        }
        by_id.setdefault(str(each.token_id), entry)
    return by_id


def _utf8(token_id: int, words: Words) -> bytes:
    text = words.token_text(token_id)
    utf8 = words.token_bytes(token_id) if "\ufffd" in text else None
    return text.encode() if utf8 is None else utf8


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    has_prompts = True

    def __init__(self, words: Words) -> None:
        self._words = words
        self._text_offset = 0

    def whole(self, piece: ChoicePiece) -> Json:
        extra = {} if piece.prompt_logprobs is None else {"prompt_logprobs": piece.prompt_logprobs}
        return piece.choice({"text": piece.text, **extra}, self._logprobs(piece))

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
        tokens = list(map(self._words.token_text, [*first, *(token.chosen.token_id for token in logprobs)]))
        return {
            "tokens": tokens,
            "token_logprobs": [*unknown, *(finite(token.chosen.logprob) for token in logprobs)],
            "top_logprobs": [*unknown, *map(self._others, logprobs)],
            "text_offset": [self._count(text) for text in tokens],
        }

    def _others(self, token: TokenLogprobs) -> Json:
        return {self._words.token_text(other.token_id): finite(other.logprob) for other in token.top}

    def _count(self, text: str) -> int:
        offset = self._text_offset
        self._text_offset += len(text)
        return offset


def _reasoning(piece: ChoicePiece) -> Json:
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def joined_calls(deltas: Iterable[ToolCallDelta]) -> list[Json]:
    calls: dict[int, Json] = {}
    for delta in deltas:
        function = calls.setdefault(
            delta.index,
            {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}},
        )["function"]
        function["arguments"] += delta.arguments
    return [calls[index] for index in sorted(calls)]


def call_deltas(deltas: Sequence[ToolCallDelta]) -> list[Json]:
    """Return the calls as a chunk has them. Only a call's first piece has the id and the name."""
    return [
        {
            "index": delta.index,
            **({"id": delta.id, "type": "function"} if delta.id else {}),
            "function": {**({"name": delta.name} if delta.name else {}), "arguments": delta.arguments},
        }
        for delta in deltas
    ]


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    has_prompts = False

    def __init__(self, words: Words) -> None:
        self._words = words

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
        text = self._words.token_text(token.token_id)
        # U+FFFD is the text of a part of a character; OpenAI writes null for bytes that are not known.
        utf8 = self._words.token_bytes(token.token_id) if "\ufffd" in text else text.encode()
        known = None if utf8 is None else list(utf8)
        return {"token": text, "logprob": finite(token.logprob), "bytes": known}
