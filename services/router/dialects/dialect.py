"""A dialect is one API's format of a request for a generation and of the answer to it.

body, headers                -> Dialect.read()   -> Call: a GenerateRequest, and options of the answer
Call                         -> Dialect.answer() -> Answer
GenerateResponse, joined     -> Answer.whole()   -> one JSON value
GenerateResponse, one by one -> Answer.events()  -> server-sent events
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from services.observe import traces
from services.router.dialects.json_body import INT32_MAX, Body, InvalidParameter, check_integer
from services.values.request import MAX_ID_CHARS, is_id
from services.wire.isthmus.v1.generation_pb2 import ChatMessage, GenerateRequest, GenerateResponse

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    data: Json | str
    name: str = ""


def json_text(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class Answer(Protocol):
    request: GenerateRequest  # The router gets this request.

    @property
    def ping(self) -> Event | None:
        """Return the event that an idle stream sends, or None for a comment."""

    def whole(self, answers: Sequence[GenerateResponse]) -> Json | list[Json]:
        """Return one JSON value for the answers, each of joined responses and in the order of their indexes.
        Raises Aborted where an answer was aborted."""

    def events(self, response: GenerateResponse) -> list[Event]:
        """Return the events of the next response in order. There may be none where it has nothing for the
        client. Raises as `whole` does."""

    def failure(self, error: Exception) -> list[Event]: ...


REQUEST_ID = "x-request-id"
TENANT = "x-isthmus-tenant"
PRIORITY = "x-isthmus-priority"
MODEL = "x-isthmus-model"  # The answer to a call that named an alias has the model in this header.
# Agents send the session of a request in these headers, which are tried in this order; docs/clients.md says
# which agent sends which.
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
    # These are the requests for all prompts of a list but the first; nothing but the prompt differs.
    more: tuple[GenerateRequest, ...] = ()
    stream: bool
    traceparent: str  # It is empty where the client sent none.
    constraint_param: str = ""  # This is the constraint's name in the body.
    reports_prompt: bool = False  # The answer reports the ids of each prompt.
    # These kinds of tools were requested and cannot be served; a header reports them.
    left_out: tuple[str, ...] = ()

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        return self.request, *self.more

    @property
    def answers_each(self) -> int:
        return self.request.n or 1

    @property
    def num_answers(self) -> int:
        """Return the number of answers to all prompts. An answer's index is prompt * answers_each
        + answer."""
        return len(self.requests) * self.answers_each


def read_addressee(
    body: Body, headers: Mapping[str, str], request: GenerateRequest, conversation: str = ""
) -> None:
    """Set the model, the request id, the tenant, the priority and the conversation of the request.

    `conversation` is the conversation's name in a parameter of one API alone, and may be any text. Raises
    InvalidParameter.
    """
    request.model = body.text("model")
    request.request_id = headers.get(REQUEST_ID, "")
    request.tenant = _read_tenant(body.text("cache_salt"), headers.get(TENANT, ""))
    request.priority = _read_priority(headers)
    given = headers.get("x-isthmus-conversation") or body.text("conversation_id")
    request.conversation_id = given or _as_id(conversation or _session_of(headers))


def _read_priority(headers: Mapping[str, str]) -> int:
    """Return the priority. It is a header because bodies disagree: vLLM prefers a smaller number."""
    value = headers.get(PRIORITY, "0")
    try:
        return check_integer(int(value), PRIORITY, -INT32_MAX, INT32_MAX)
    except ValueError:
        raise InvalidParameter(PRIORITY, f"must be an integer, got {value!r}") from None


def traceparent_of(headers: Mapping[str, str]) -> str:
    return headers.get(traces.TRACEPARENT, "")


def _session_of(headers: Mapping[str, str]) -> str:
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")


def _as_id(text: str) -> str:
    """Return the text, or its digest where it is no valid id: another API's key follows none of our rules."""
    return text if is_id(text) else hashlib.sha256(text.encode()).hexdigest()


def _read_tenant(cache_salt: str, of_header: str) -> str:
    """Return the tenant, which vLLM calls cache_salt. Two different ones are an error: a proxy that sets the
    header keeps tenants apart, and so does a client that sets the salt."""
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
    id: str  # This is of random letters and digits. The answer and its parts are named by it.
    model: str
    created: int  # This is in seconds since the epoch.


class Words(Protocol):
    """The texts of tokens are those of the model that answers."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Dialect(Generic[CallT]):
    name: str  # This is the name in metrics.
    # This returns the call that a body and its headers request. It may run in any thread, and raises
    # InvalidParameter.
    read: Callable[[Mapping[str, object], Mapping[str, str]], CallT]
    # This returns the formatter of the answer to a call, and raises IsthmusError.
    answer: Callable[[CallT, Envelope, Words], Answer]
    # This puts what the router has stored into the call's request where the body only refers to it, and
    # raises NotFound.
    complete: Callable[[CallT], None] = lambda call: None
    # This returns the turns before those of the call's request, which the router has stored.
    past: Callable[[CallT], Sequence[ChatMessage]] = lambda call: ()
