"""A dialect is one API's way to ask for a generation and to be answered.

body, headers                -> Dialect.read()   -> Call: a GenerateRequest, and what is said beside it
Call                         -> Dialect.answer() -> Answer
GenerateResponse, joined     -> Answer.whole()   -> one JSON value
GenerateResponse, one by one -> Answer.events()  -> server-sent events, which the last answer's last one ends
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.observe import traces
from services.router.dialects.json_body import Body, InvalidParameter
from services.values.request import MAX_ID_CHARS, is_id
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    data: Json | str
    name: str = ""


def json_text(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class Answer(Protocol):
    """Makes of the responses to one call either a whole or events, in the words of one API."""

    request: GenerateRequest  # The router gets this request.

    @property
    def ping(self) -> Event | None:
        """Return the event that a stream sends while there is nothing to report; None is a comment."""

    def whole(self, answers: Sequence[GenerateResponse]) -> Json | list[Json]:
        """Return the whole of each answer's joined responses, which come by their indexes. Raises Aborted
        where somebody stopped an answer."""

    def events(self, response: GenerateResponse) -> list[Event]:
        """Return the events of the next response, in order, or none where it has nothing that a client sees.
        Raises as `whole`."""

    def failure(self, error: Exception) -> list[Event]:
        """Return the events that end a stream which has begun."""


REQUEST_ID = "x-request-id"
TENANT = "x-isthmus-tenant"
# Agents call the session whose turns a request is one of by these names, which are looked for in this order;
# docs/clients.md tells whose each is.
SESSION_HEADERS = (
    "session-id",
    "x-session-id",
    "x-session-affinity",
    "x-affinity",
    "x-claude-code-session-id",
    "x-conversation-id",
    "session_id",
    "conversation_id",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    request: GenerateRequest
    # They are those behind the first of a list of prompts, alike in all else.
    more: tuple[GenerateRequest, ...] = ()
    stream: bool
    traceparent: str  # It is empty where the client sent none.
    constraint_param: str = ""  # The body calls the constraint so.
    tells_prompt: bool = False  # The ids of each prompt are reported.
    # The client requested these kinds of tools, and nothing can be done about them but to say so.
    left_out: tuple[str, ...] = ()

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        return self.request, *self.more

    @property
    def answers_each(self) -> int:
        return self.request.n or 1

    @property
    def num_answers(self) -> int:
        """Return the number of answers to all prompts. An answer's index is prompt * answers_each +
        answer."""
        return len(self.requests) * self.answers_each


def read_addressee(
    body: Body, headers: Mapping[str, str], request: GenerateRequest, conversation: str = ""
) -> None:
    """Fill in who asks, whom, and in which conversation.

    `conversation` is what the body says of it in words of its own; it may be any text. Raises
    InvalidParameter.
    """
    request.model = body.text("model")
    request.request_id = headers.get(REQUEST_ID, "")
    request.tenant = _read_tenant(body.text("cache_salt"), headers.get(TENANT, ""))
    given = headers.get("x-isthmus-conversation") or body.text("conversation_id")
    request.conversation_id = given or _as_id(conversation or _session_of(headers))


def traceparent_of(headers: Mapping[str, str]) -> str:
    return headers.get(traces.TRACEPARENT, "")


def _session_of(headers: Mapping[str, str]) -> str:
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")


def _as_id(text: str) -> str:
    """Return the text, or its digest where it cannot be an id: no rule of ours binds another API's key."""
    return text if is_id(text) else hashlib.sha256(text.encode()).hexdigest()


def _read_tenant(cache_salt: str, of_header: str) -> str:
    """Return the tenant, which is what vLLM calls cache_salt. Where both are given they must be the same, for
    neither may be left out: who set the header keeps tenants apart, and so does who set the salt."""
    if cache_salt and of_header and cache_salt != of_header:
        raise InvalidParameter(
            "cache_salt", "differs from the header x-isthmus-tenant; leave one of them out"
        )
    if not is_id(cache_salt):
        raise InvalidParameter("cache_salt", f"must be at most {MAX_ID_CHARS} printable characters")
    return of_header or cache_salt


CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True, slots=True)
class Envelope:
    id: str  # It is random and of letters and digits; an answer and its parts are named by it.
    model: str
    created: int  # It counts seconds since the epoch.


class Dialect(Protocol[CallT]):
    name: str  # Metrics have this name.

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> CallT:
        """Return the call that a body and its headers request. It may be called in any thread. Raises
        InvalidParameter."""

    def answer(self, call: CallT, envelope: Envelope) -> Answer:
        """Return what makes the one answer to a call. Raises IsthmusError."""
