"""OpenAI's response is one object, or a stream of events; the parts of an answer are the items of its output.

The events are response.created, response.in_progress, those of each item (ItemEvents), and one of
response.completed, response.incomplete and response.failed.

A stored response, which a client may continue or read again, is in this router's memory alone, which is
bounded. It holds its own turns and the id of the previous response; a chain of them is the conversation. The
tenant with the most bytes loses its least recently used response first; using a chain uses all of it. A
client may also refer to an item of a stored response by its id.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.dialects.answer_parts import Closed, Grown, Kind, Opened, Part, Parts, Step, parts_of
from services.router.dialects.dialect import Envelope, Event, Json
from services.router.dialects.http_errors import RESPONSES_PROMPT, error_json
from services.router.dialects.responses_call import (
    ResponsesCall,
    turn_of,
    turns_of,
    with_instructions,
)
from services.router.dialects.usage_json import isthmus_json, word_of
from services.router.tenant_lru import TenantLru
from services.values.errors import NotFound
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import (
    ChatMessage,
    Finish,
    GenerateRequest,
    GenerateResponse,
    Usage,
)


@dataclass(frozen=True, slots=True)
class KeptResponse:
    response: bytes  # This is the response object as JSON.
    turns: tuple[bytes, ...]
    previous_id: str  # This is empty for the first response of a chain.
    conversation_id: str

    @property
    def size_bytes(self) -> int:
        return len(self.response) + sum(map(len, self.turns))


class ResponseStore:
    """A tenant finds only its own responses, and has its own share of the memory."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._stored: TenantLru[str, KeptResponse] = TenantLru(max_bytes, max_responses)

    def __repr__(self) -> str:
        return f"ResponseStore({len(self._stored)} responses, {self._stored.size} bytes)"

    def put(self, tenant: str, response_id: str, stored: KeptResponse) -> None:
        self._stored.put(tenant, response_id, stored, stored.size_bytes)

    def get(self, tenant: str, response_id: str) -> KeptResponse:
        stored = self._stored.get(tenant, response_id)
        if stored is None:
            raise _unknown(f"response {response_id!r}")
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        self.get(tenant, response_id)
        self._stored.pop(tenant, response_id)

    def turns(self, tenant: str, response_id: str) -> list[ChatMessage]:
        """Return the turns of the chain that ends with this response, the oldest first. Raises NotFound."""
        chain = []
        while response_id:
            stored = self.get(tenant, response_id)
            chain.append(stored)
            response_id = stored.previous_id
        return [ChatMessage.FromString(turn) for stored in reversed(chain) for turn in stored.turns]

    def items(self, tenant: str, ids: Sequence[str]) -> list[Json]:
        """Return the items of stored outputs that have these ids, in the same order. Raises NotFound."""
        found: dict[str, Json] = {}
        for response_id in dict.fromkeys(map(response_id_of, ids)):
            if (stored := self._stored.get(tenant, response_id)) is not None:
                found |= {item["id"]: item for item in json.loads(stored.response)["output"]}
        if (unknown := next((each for each in ids if each not in found), None)) is not None:
            raise _unknown(f"item {unknown!r}")
        return [found[each] for each in ids]


def _unknown(what: str) -> NotFound:
    return NotFound(
        f"{what} is not known here: it was not stored or was deleted, another router has it, this one was "
        "started again, or it had to make room"
    )


_PREFIXES = {Kind.THINKING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
COMPLETED, IN_PROGRESS, INCOMPLETE = "completed", "in_progress", "incomplete"


def item_id(part: Part, stem: str) -> str:
    return f"{_PREFIXES[part.kind]}_{stem}_{part.index}"


def response_id_of(item: str) -> str:
    """Return the id of the response that the item of this id is part of."""
    return f"resp_{item.partition('_')[2].rpartition('_')[0]}"


def item(part: Part, stem: str, status: str, answer_id: str = "") -> Json:
    """Return the item. An item in progress is empty. `answer_id` is the handle that a client sends back with
    its thinking; only the router reads it."""
    head = {"id": item_id(part, stem), "status": status}
    has_content = status != IN_PROGRESS
    match part.kind:
        case Kind.THINKING:
            content = [content_part(part)] if has_content else []
            handle = {"encrypted_content": answer_id} if answer_id else {}
            return {**head, "type": "reasoning", "summary": [], "content": content, **handle}
        case Kind.TEXT:
            content = [content_part(part)] if has_content else []
            return {**head, "type": "message", "role": "assistant", "content": content}
        case Kind.CALL:
            called = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**head, "type": "function_call", **called}


def content_part(part: Part) -> Json:
    if part.kind is Kind.THINKING:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


_TEXTS = {
    Kind.THINKING: "response.reasoning_text",
    Kind.TEXT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}


class ItemEvents:
    def __init__(self, stem: str) -> None:
        self._stem = stem

    def of(self, step: Step, status: str, answer_id: str) -> list[Json]:
        match step:
            case Opened(part):
                opened = self._item("added", part, IN_PROGRESS, "")
                return [opened, *self._content("added", part)]
            case Grown(part, delta):
                return [self._text("delta", part, delta=delta)]
            case Closed(part):
                whole = "arguments" if part.kind is Kind.CALL else "text"
                named = {"name": part.name} if part.kind is Kind.CALL else {}
                done = self._text("done", part, **{whole: part.text}, **named)
                return [done, *self._content("done", part), self._item("done", part, status, answer_id)]

    def _item(self, verb: str, part: Part, status: str, answer_id: str) -> Json:
        whole = item(part, self._stem, status, answer_id)
        return {"type": f"response.output_item.{verb}", "output_index": part.index, "item": whole}

    def _content(self, verb: str, part: Part) -> list[Json]:
        if part.kind is Kind.CALL:
            return []
        place = {**self._place(part), "content_index": 0}
        return [{"type": f"response.content_part.{verb}", **place, "part": content_part(part)}]

    def _text(self, verb: str, part: Part, **members: str) -> Json:
        index = {} if part.kind is Kind.CALL else {"content_index": 0}
        logprobs: Json = {"logprobs": []} if part.kind is Kind.TEXT else {}
        return {"type": f"{_TEXTS[part.kind]}.{verb}", **self._place(part), **index, **members, **logprobs}

    def _place(self, part: Part) -> Json:
        return {"item_id": item_id(part, self._stem), "output_index": part.index}


_STATUSES = {
    common_pb2.FINISH_REASON_STOP: COMPLETED,
    common_pb2.FINISH_REASON_TOOL_CALLS: COMPLETED,
    common_pb2.FINISH_REASON_LENGTH: INCOMPLETE,
    common_pb2.FINISH_REASON_CAPACITY: INCOMPLETE,
}


class ResponseAnswer:
    """The answer is stored, where that is requested, before its last event is sent."""

    ping = None

    def __init__(self, call: ResponsesCall, envelope: Envelope, store: ResponseStore) -> None:
        """Raises NotFound where the previous response is unknown."""
        self._call = call
        self._envelope = envelope
        self._store = store
        self._id = f"resp_{envelope.id}"
        self.request = self._with_past_turns()
        self._parts = Parts()
        self._closed: list[Part] = []
        self._items = ItemEvents(envelope.id)
        self._answer_id = ""
        self._num_events = 0

    def whole(self, answers: Sequence[GenerateResponse]) -> Json:
        (joined,) = answers
        self._note_answer_id(joined)
        self._closed = parts_of(joined)
        return self._ended(joined.finish)

    def events(self, response: GenerateResponse) -> list[Event]:
        self._note_answer_id(response)
        status = word_of(response.finish, _STATUSES) if response.HasField("finish") else COMPLETED
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

    def _note_answer_id(self, response: GenerateResponse) -> None:
        self._answer_id = self._answer_id or response.answer_id or response.finish.answer_id

    def _with_past_turns(self) -> GenerateRequest:
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
        """Return the conversation's id. It is the id of the chain's first response, but only from the second
        one on: most responses are never continued, and each would write a pin for nothing."""
        referred = map(response_id_of, self._call.references)
        previous_id = self._call.previous_id or next(referred, "")
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
        status = word_of(finish, _STATUSES)
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
            "created_at": self._envelope.created,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "model": self._envelope.model,
            "output": self._output(self._closed, status),
            **self._call.echo,
            **_sampling_echo(self.request.sampling),
            "usage": usage,
        }

    def _output(self, parts: Sequence[Part], status: str) -> list[Json]:
        last = INCOMPLETE if status == INCOMPLETE else COMPLETED
        statuses = [COMPLETED] * (len(parts) - 1) + [last]
        return [
            item(part, self._envelope.id, its, self._answer_id)
            for part, its in zip(parts, statuses, strict=False)  # There may be no part.
        ]

    def _keep(self, ended: Json) -> None:
        turns = [*turns_of(self._call), turn_of(self._closed, self._answer_id)]
        stored = KeptResponse(
            json.dumps(ended, ensure_ascii=False).encode(),
            tuple(turn.SerializeToString() for turn in turns),
            self._call.previous_id,
            self.request.conversation_id,
        )
        self._store.put(self.request.tenant, self._id, stored)


def _sampling_echo(sampling: SamplingParams) -> Json:
    """Return the two parameters, by the model where the request sets none. They are float32."""
    return {
        name: round(getattr(sampling, name), 6) if sampling.HasField(name) else 1.0
        for name in ("temperature", "top_p")
    }


def _code_of(reported: Json) -> str:
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
