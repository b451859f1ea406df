"""A ClientRequest is a checked request of a client. Its ChatTools say which tools it may call, and whether
its answer is parsed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Any, Self

from services.router.text.chat_turns import content_of
from services.router.text.prompt import PastAnswers
from services.values.adapter import Adapter, kv_scope
from services.values.errors import InvalidRequest
from services.values.request import SamplingParams, TenantShare
from services.wire.generation_messages import PackedIds
from services.wire.isthmus.v1.generation_pb2 import Chat, GenerateRequest, Tool, ToolChoice

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class CallMode(Enum):
    AUTO = "the model decides"
    NONE = "none is called"
    REQUIRED = "at least one is called"


_MODES = {
    ToolChoice.MODE_UNSPECIFIED: CallMode.AUTO,
    ToolChoice.MODE_AUTO: CallMode.AUTO,
    ToolChoice.MODE_NONE: CallMode.NONE,
    ToolChoice.MODE_REQUIRED: CallMode.REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ContinuedTurn:
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatTools:
    """`schemas` has the schema of each tool's arguments, by its name. `named` is the tool that must be
    called. `past_ids` are the ids of calls in the chat."""

    schemas: Mapping[str, Any] = field(default_factory=dict)
    mode: CallMode = CallMode.AUTO
    named: str = ""
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    parsed: bool = False  # The answer to a chat is parsed, unless the client wants it raw.
    continued: ContinuedTurn | None = None
    past_ids: frozenset[str] = frozenset()

    @property
    def callable(self) -> Mapping[str, Any] | None:
        """Return the schemas of the tools that may be called, or None where none may be."""
        return self.schemas if self.schemas and self.mode is not CallMode.NONE else None

    @property
    def must_call(self) -> bool:
        return self.mode is CallMode.REQUIRED


def read_tools(request: GenerateRequest) -> ChatTools:
    if request.WhichOneof("prompt") != "chat":
        return ChatTools()
    chat = request.chat
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"must be at most {MAX_TOOLS}, got {len(chat.tools)}")
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(chat.tools):
        name = f"chat.tools[{index}]"
        if tool.name in schemas:
            raise InvalidRequest(f"{name}.name", f"is another tool's already: {tool.name!r}")
        schemas[tool.name] = _schema(tool, name)
    mode, named = _choice(chat, schemas)
    return ChatTools(
        schemas,
        mode,
        named,
        parallel=chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls"),
        strict=frozenset(tool.name for tool in chat.tools if tool.strict),
        parsed=not chat.raw_answer,
        continued=_continued(chat),
        past_ids=frozenset(call.id for message in chat.messages for call in message.tool_calls),
    )


def _continued(chat: Chat) -> ContinuedTurn | None:
    if not (chat.continue_final_message and chat.messages):
        return None
    last = chat.messages[-1]
    return ContinuedTurn(content_of(last), tuple(last.token_ids))


def _schema(tool: Tool, name: str) -> Any:
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequest(
            f"{name}.name", f"must be 1 to 128 letters, digits or any of _.:/-; got {tool.name[:200]!r}"
        )
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        schema = json.loads(tool.parameters)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}.parameters", f"must be a JSON schema: {error}") from error
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequest(f"{name}.parameters", "must be the JSON schema of an object")
    return schema


def _choice(chat: Chat, schemas: Mapping[str, Any]) -> tuple[CallMode, str]:
    choice, name = chat.tool_choice, "chat.tool_choice"
    if choice.mode not in _MODES:
        raise InvalidRequest(f"{name}.mode", f"is not known: {choice.mode}")
    if choice.name and choice.mode != ToolChoice.MODE_UNSPECIFIED:
        raise InvalidRequest(f"{name}.mode", "and its name must not both be set")
    if choice.name:
        if choice.name not in schemas:
            raise InvalidRequest(f"{name}.name", f"is none of chat.tools: {choice.name[:200]!r}")
        return CallMode.REQUIRED, choice.name
    mode = _MODES[choice.mode]
    if mode is CallMode.REQUIRED and not schemas:
        raise InvalidRequest(name, "requires a call, and there are no chat.tools")
    return mode, ""


_NO_IDS = PackedIds.of(())
_64_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A new request has no prompt; `encoded` returns one that does."""

    request_id: str
    sampling: SamplingParams
    conversation_id: str = ""
    tenant: str = ""
    model: str = ""
    cache_salt: str | None = None  # None stands for the tenant's name.
    share: TenantShare | None = None  # Without it ranks let salts take turns.
    priority: int = 0
    runs_few: bool = False  # Its tenant ran few requests beside many of others when it arrived.
    operation: str = "text_completion"  # This may also be "chat".
    constraint: str = ""  # This is the kind that the client requested, or "".
    tools: ChatTools = field(default_factory=ChatTools)
    answers: int = 1  # This many are generated.
    answered: int = 1  # The client gets this many, the best.
    index: int = 0  # This is the index of this answer.
    tells_logprobs: bool = True  # They may only be needed to rank the answers.
    deadline: float = inf  # This is on the router's clock.
    heeds_deadline: bool = False  # Ranks know of it, as the client itself set one.
    prompt: PackedIds = _NO_IDS
    past: PastAnswers | None = None  # Only a chat has these.
    adapter: Adapter | None = None

    @property
    def salt(self) -> str:
        return self.tenant if self.cache_salt is None else self.cache_salt

    @property
    def turn_of(self) -> str:
        """Return with whose requests it takes turns."""
        return self.tenant if self.share is None else self.share.tenant

    @property
    def scope(self) -> str:
        """Return what separates its KV from that of others."""
        return kv_scope(self.salt, self.adapter)

    @property
    def answer_name(self) -> str:
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def answer_key(self) -> str:
        """Return the answer's key in flight: tenants have separate ids, and none has a NUL."""
        return f"{self.tenant}\0{self.request_id}\0{self.index}"

    @property
    def memory_key(self) -> str:
        """Return the conversation's key, as tenants have separate ids, or "" where the request names none."""
        return f"{self.tenant}\0{self.conversation_id}" if self.conversation_id else ""

    def encoded(self, prompt: PackedIds, past: PastAnswers | None, sampling: SamplingParams) -> Self:
        return replace(self, prompt=prompt, past=past, sampling=sampling)

    def of_answer(self, index: int) -> Self:
        """Return the request of one of the answers, which has its own seed. Only the first requests the
        prompt's log-probabilities."""
        sampling = replace(self.sampling, seed=seed_of(self.sampling.seed, index))
        if index:
            sampling = sampling.without_prompt_logprobs
        return replace(self, sampling=sampling, index=index)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of an answer. The first answer has the request's own, so that it equals the answer to n
    = 1; answer i has the i-th number of SplitMix64 from there, and no two are equal.

    https://prng.di.unimi.it/splitmix64.c
    """
    if index == 0:
        return seed
    mixed = (seed + index * _STEP) & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return mixed ^ mixed >> 31
