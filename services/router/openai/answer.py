"""GenerateResponse as OpenAI's objects: whole answers, chunks of a stream, usage and log-probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.values.errors import Aborted
from services.wire.isthmus.v1 import common_pb2, generation_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs

Json = dict[str, Any]
TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes | None]

# Clients that know an enumeration fail of any other word. `isthmus.finish_reason` tells the last two apart.
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CAPACITY: "length",
}
_PLANS = {common_pb2.PLAN_REMOTE: "remote", common_pb2.PLAN_LOCAL: "local"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer, or all of it. `logprobs` is None where none were asked for."""

    text: str
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None

    def choice(self, content: Json, logprobs: Json | None) -> Json:
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": self.finish_reason}
        if self.token_ids is not None:
            choice["token_ids"] = list(self.token_ids)
        return choice


class AnswerFormat(Protocol):
    """One of the two shapes. Made for one answer: offsets into its text are counted."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def whole(self, piece: Piece) -> Json:
        """The one entry of `choices`."""

    def delta(self, piece: Piece) -> Json:
        """The one entry of a chunk's `choices`."""

    def opening(self) -> Json | None:
        """The choice of a chunk that comes before all text, if the shape has one."""


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, token_text: TokenText, token_bytes: TokenBytes) -> None:
        self._token_text = token_text
        self._token_bytes = token_bytes

    def whole(self, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return piece.choice({"message": message}, self._logprobs(piece.logprobs))

    def delta(self, piece: Piece) -> Json:
        delta = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        return piece.choice({"delta": delta}, self._logprobs(piece.logprobs))

    def opening(self) -> Json | None:
        return Piece("").choice({"delta": {"role": "assistant", "content": ""}}, None)

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
        return {"token": text, "logprob": _finite(token.logprob), "bytes": known}


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

    def opening(self) -> Json | None:
        return None

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        tokens = [self._token_text(token.chosen.token_id) for token in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(token.chosen.logprob) for token in logprobs],
            "top_logprobs": [
                {self._token_text(other.token_id): _finite(other.logprob) for other in token.top}
                for token in logprobs
            ],
            "text_offset": [self._count(text) for text in tokens],
        }

    def _count(self, text: str) -> int:
        """Where the token begins."""
        offset = self._text_offset
        self._text_offset += len(text)
        return offset


def finish_reason(finish: generation_pb2.Finish) -> str:
    """Raises Aborted for an answer that somebody stopped: OpenAI has no word for it."""
    if finish.reason not in _FINISH_REASONS:
        raise Aborted("the request was aborted before its answer was complete")
    return _FINISH_REASONS[finish.reason]


def usage_json(usage: generation_pb2.Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
    }


def isthmus_json(finish: generation_pb2.Finish) -> Json:
    """What OpenAI has no place for: where the request ran and what crossed the isthmus. What stands outside
    of `placements` and `totals` is of the first placement, as OpenAI's usage is."""
    usage = finish.usage
    return {
        "finish_reason": common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
        **_where(finish.placement),
        **_kv_json(usage),
        "computed_tokens": usage.computed_tokens,
        "drift_tokens": usage.drift_tokens if usage.HasField("drift_tokens") else None,
        "matched_stop": finish.matched_stop or None,
        "placements": [_placement_json(placement) for placement in finish.placements],
        "totals": _numbers(finish.totals),
        "stages": _numbers(finish.stages),
    }


def _where(placement: generation_pb2.Placement) -> Json:
    return {
        "plan": _PLANS.get(placement.plan),
        "decode_rank": _rank_name(placement.decode) if placement.HasField("decode") else None,
        "prefill_rank": _rank_name(placement.prefill) if placement.HasField("prefill") else None,
        "reason": placement.reason,
        "predicted_prefix_len": placement.predicted_prefix_len,
        "predicted_reused_tokens": placement.predicted_reused_tokens,
    }


def _placement_json(placement: generation_pb2.Placement) -> Json:
    usage = placement.usage
    names = ("prompt_tokens", "completion_tokens", "reused_tokens", "computed_tokens")
    return {**_where(placement), **{name: getattr(usage, name) for name in names}, **_kv_json(usage)}


def _kv_json(usage: generation_pb2.Usage) -> Json:
    moved = ("decode_prefix_len", "delta_tokens", "prefill_prefix_len", "kv_bytes_moved", "kv_bytes_saved")
    names = (*moved, "drafted_tokens", "accepted_draft_tokens")
    return {**{name: getattr(usage, name) for name in names}, "carried_bytes": dict(usage.carried_bytes)}


def _numbers(message: generation_pb2.Totals | generation_pb2.StageTimes) -> Json:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _finite(logprob: float) -> float:
    # JSON has neither infinity nor NaN; -9999.0 is OpenAI's word for what is impossible.
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0


def _rank_name(rank: common_pb2.RankId) -> str:
    return f"{rank.worker}/{rank.rank}"
