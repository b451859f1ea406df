"""Anthropic's message is one object, or a stream of events; errors have Anthropic's own format.

message_start, ping, (content_block_start, content_block_delta*, content_block_stop)*, message_delta,
message_stop
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from services.router.dialects.answer_parts import Closed, Grown, Kind, Opened, Part, Parts, Step, parts_of
from services.router.dialects.dialect import Envelope, Event, Json
from services.router.dialects.http_errors import status_of
from services.router.dialects.messages_call import MessagesCall
from services.router.dialects.usage_json import isthmus_json, word_of
from services.router.text.answer_message import with_whole_characters
from services.values.errors import InvalidRequest, IsthmusError
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateResponse, Usage

_STOP_REASONS = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_CAPACITY: "max_tokens",
}
_DELTAS = {
    Kind.THINKING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    ping = Event({"type": "ping"}, "ping")

    def __init__(self, call: MessagesCall, envelope: Envelope) -> None:
        self.request = call.request
        self._call = call
        self._envelope = envelope
        self._parts = Parts(call.shows_thinking)
        self._signature = ""
        self._started = False

    def whole(self, answers: Sequence[GenerateResponse]) -> Json:
        (joined,) = answers
        reason, sequence = self._stop(joined.finish)
        self._signature = joined.answer_id or joined.finish.answer_id
        content = [self._block(part) for part in parts_of(joined, self._call.shows_thinking)]
        message = self._message(content, reason, sequence, joined.finish.usage)
        return {**message, "isthmus": isthmus_json(joined.finish)}

    def events(self, response: GenerateResponse) -> list[Event]:
        self._signature = self._signature or response.answer_id or response.finish.answer_id
        ends = [] if not response.HasField("finish") else self._end(response.finish)
        steps = [event for step in self._parts.take(response) for event in self._step(step)]
        return [*self._start(), *steps, *ends]

    def failure(self, error: Exception) -> list[Event]:
        return [Event(error_json(error), "error")]

    def _start(self) -> list[Event]:
        if self._started:
            return []
        self._started = True
        # The tokens are reported at the end.
        message = self._message([], None, None, Usage())
        return [_event("message_start", message=message), self.ping]

    def _step(self, step: Step) -> list[Event]:
        index, kind = step.part.index, step.part.kind
        match step:
            case Opened(part):
                return [_event("content_block_start", index=index, content_block=_opening(part))]
            case Grown(_, delta) if kind is Kind.THINKING and self._call.omits_thinking:
                return []
            case Grown(_, delta):
                name, member = _DELTAS[kind]
                return [_delta(index, {"type": name, member: delta})]
            case Closed():
                signature = {"type": "signature_delta", "signature": self._signature}
                signed = [_delta(index, signature)] if kind is Kind.THINKING else []
                return [*signed, _event("content_block_stop", index=index)]

    def _end(self, finish: Finish) -> list[Event]:
        reason, sequence = self._stop(finish)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        members = {"delta": delta, "usage": _usage(finish.usage), "isthmus": isthmus_json(finish)}
        return [_event("message_delta", **members), _event("message_stop")]

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: Usage) -> Json:
        return {
            "id": f"msg_{self._envelope.id}",
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(usage),
        }

    def _block(self, part: Part) -> Json:
        block = _opening(part)
        if part.kind is Kind.CALL:
            return {**block, "input": _arguments(part.text)}
        if part.kind is Kind.TEXT:
            return {**block, "text": part.text}
        shown = "" if self._call.omits_thinking else part.text
        return {**block, "thinking": shown, "signature": self._signature}

    def _stop(self, finish: Finish) -> tuple[str, str | None]:
        reason = word_of(finish, _STOP_REASONS)
        if (
            finish.reason == common_pb2.FINISH_REASON_STOP
            and finish.matched_stop in self.request.sampling.stop
        ):
            return "stop_sequence", finish.matched_stop
        return reason, None


def _opening(part: Part) -> Json:
    match part.kind:
        case Kind.THINKING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _arguments(text: str) -> Json:
    """Return a call's arguments, or none where the text broke off or a number is too large."""
    try:
        arguments = json.loads(with_whole_characters(text or "{}"))
        json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _usage(usage: Usage) -> Json:
    """Return the usage in Anthropic's words: `input_tokens` counts the tokens that were not cached, and
    writing to the cache is never billed."""
    return {
        "input_tokens": usage.prompt_tokens - usage.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.reused_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _delta(index: int, delta: Json) -> Event:
    return _event("content_block_delta", index=index, delta=delta)


def _event(name: str, **members: object) -> Event:
    return Event({"type": name, **members}, name)


_VERSION = "anthropic-version"  # All clients of Anthropic send this header.


def sent_by_client(headers: Mapping[str, str]) -> bool:
    """Return whether Anthropic's client sent the request: OpenAI's clients use the same path."""
    return _VERSION in headers


def model_json(name: str, created: int) -> Json:
    """Return a model's entry. `created` is in seconds since the epoch."""
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": moment}


def models_json(models: Sequence[Json]) -> Json:
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
    return {"data": list(models), "has_more": False, "first_id": None, "last_id": None, **ends}


# Anthropic's SDKs raise by the status. A status below 500 that is not here is the request's fault.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_json(error: Exception) -> Json:
    # An error that we did not raise on purpose is for the log, not for the client.
    message = str(error) if isinstance(error, IsthmusError) else "internal error"
    if isinstance(error, InvalidRequest) and error.field:  # The body itself has these members.
        message = message.removeprefix("sampling.").removeprefix("chat.")
    return error_object(message, status_of(error))


def error_object(message: str, status: int) -> Json:
    fallback = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(status, fallback), "message": message}}
