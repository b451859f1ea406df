"""OpenAI's response is one object, or the events that make it.

The events are response.created, response.in_progress, those of each item (output_items.py), and one of
response.completed, response.incomplete, response.failed.
"""

import json
from collections.abc import Mapping, Sequence

from services.router.dialects.answer_parts import Closed, Part, Parts, parts_of
from services.router.dialects.dialect import Envelope
from services.router.dialects.dialect_answer import Event, Json
from services.router.dialects.openai.openai_errors import RESPONSES_PROMPT, error_json
from services.router.dialects.openai.usage_json import isthmus_json
from services.router.dialects.responses.input_items import turn_of, with_instructions
from services.router.dialects.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    ItemEvents,
    item,
)
from services.router.dialects.responses.response_store import ResponseStore, Stored
from services.router.dialects.responses.responses_call import ResponsesCall, read_responses_call, turns_of
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.values.errors import Aborted
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateRequest, GenerateResponse, Usage

_STATUSES = {
    common_pb2.FINISH_REASON_STOP: COMPLETED,
    common_pb2.FINISH_REASON_TOOL_CALLS: COMPLETED,
    common_pb2.FINISH_REASON_LENGTH: INCOMPLETE,
    common_pb2.FINISH_REASON_CAPACITY: INCOMPLETE,
}


class ResponseAnswer:
    """The answer is kept in the store, if it is to be, before its last event is sent."""

    ping = None

    def __init__(self, call: ResponsesCall, envelope: Envelope, store: ResponseStore) -> None:
        """Raises NotFound where the response before it is not known."""
        self._call = call
        self._said = envelope
        self._store = store
        self._id = f"resp_{envelope.id}"
        self.request = self._asked()
        self._parts = Parts()
        self._closed: list[Part] = []
        self._items = ItemEvents(envelope.id)
        self._answer_id = ""
        self._num_events = 0

    def whole(self, answers: Sequence[GenerateResponse]) -> Json:
        (joined,) = answers
        self._hear_of(joined)
        self._closed = parts_of(joined)
        return self._ended(joined.finish)

    def events(self, response: GenerateResponse) -> list[Event]:
        self._hear_of(response)
        status = _status_of(response.finish) if response.HasField("finish") else COMPLETED
        events = [] if self._num_events else self._opening()
        for step in self._parts.take(response):
            if isinstance(step, Closed):
                self._closed.append(step.part)
            is_last = isinstance(step, Closed) and response.HasField("finish")
            item_status = status if is_last else COMPLETED
            events += map(self._numbered, self._items.of(step, item_status, self._answer_id))
        if response.HasField("finish"):
            ended = self._ended(response.finish)
            events.append(self._event(f"response.{ended['status']}", response=ended))
        return events

    def failure(self, error: Exception) -> list[Event]:
        reported = error_json(error, RESPONSES_PROMPT)["error"]
        problem = {"code": _code_of(reported), "message": reported["message"]}
        return [self._event("response.failed", response=self._object("failed", error=problem))]

    def _hear_of(self, response: GenerateResponse) -> None:
        self._answer_id = self._answer_id or response.answer_id or response.finish.answer_id

    def _asked(self) -> GenerateRequest:
        call, request = self._call, GenerateRequest()
        request.CopyFrom(call.request)
        past = self._store.turns(request.tenant, call.previous_id)
        turns = with_instructions(call.instructions, [*past, *call.request.chat.messages])
        del request.chat.messages[:]
        request.chat.messages.extend(turns)
        if not call.names_conversation:
            request.conversation_id = self._conversation_id()
        return request

    def _conversation_id(self) -> str:
        """Return the conversation's id. A chain's is its first response's id, from the second on: most are
        never gone on from, and each would have a pin written for nothing."""
        previous_id = self._call.previous_id
        if not previous_id:
            return ""
        return self._store.get(self._call.request.tenant, previous_id).conversation_id or previous_id

    def _opening(self) -> list[Event]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._object(IN_PROGRESS)) for name in names]

    def _event(self, name: str, **members: object) -> Event:
        return self._numbered({"type": name, **members})

    def _numbered(self, data: Json) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return Event({**data, "sequence_number": number}, data["type"])

    def _ended(self, finish: Finish) -> Json:
        status = _status_of(finish)
        ended = {
            **self._object(status, usage=_usage(finish.usage)),
            "isthmus": isthmus_json(finish),
        }
        if status == INCOMPLETE:
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._call.is_stored:
            self._keep(ended)
        return ended

    def _object(self, status: str, error: Json | None = None, usage: Json | None = None) -> Json:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._said.created,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "model": self._said.model,
            "output": self._output(self._closed, status),
            **self._call.echo,
            "usage": usage,
        }

    def _output(self, parts: Sequence[Part], status: str) -> list[Json]:
        last = INCOMPLETE if status == INCOMPLETE else COMPLETED
        statuses = [COMPLETED] * (len(parts) - 1) + [last]
        return [
            item(part, self._said.id, its, self._answer_id)
            for part, its in zip(parts, statuses, strict=False)  # There may be no part.
        ]

    def _keep(self, ended: Json) -> None:
        turns = [*turns_of(self._call), turn_of(self._closed, self._answer_id)]
        stored = Stored(
            json.dumps(ended, ensure_ascii=False).encode(),
            tuple(turn.SerializeToString() for turn in turns),
            self._call.previous_id,
            self.request.conversation_id,
        )
        self._store.put(self.request.tenant, self._id, stored)


def _status_of(finish: Finish) -> str:
    """Return the response's status. Raises Aborted where somebody stopped the answer."""
    if finish.reason not in _STATUSES:
        raise Aborted("the request was aborted before its answer was complete")
    return _STATUSES[finish.reason]


def _code_of(reported: Json) -> str:
    """Return the error's code. OpenAI's codes are words; ours of most errors is the status."""
    if isinstance(reported["code"], str):
        return reported["code"]
    return "rate_limit_exceeded" if reported["code"] == 429 else "server_error"


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponsesDialect:
    name = "responses"

    def __init__(self, defaults: SamplingDefaults, store: ResponseStore) -> None:
        self._defaults = defaults
        self._store = store

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> ResponsesCall:
        return read_responses_call(fields, headers, self._defaults)

    def answer(self, call: ResponsesCall, envelope: Envelope) -> ResponseAnswer:
        return ResponseAnswer(call, envelope, self._store)
