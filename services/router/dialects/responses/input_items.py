"""Items of a response's input become the turns of a chat, and those of its output a turn of the next one's.

instructions                                           ->  system
message of a system, developer or user                 ->  the same
reasoning, message of the model, function_call, ...    ->  one assistant turn
function_call_output                                   ->  tool
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from services.router.dialects.answer_parts import Kind, Part
from services.router.dialects.json_body import Body, check_text
from services.values.request import is_id
from services.wire.isthmus.v1.generation_pb2 import ChatMessage, ToolCall

_SYSTEM_ROLES = ("system", "developer")
_ROLES = (*_SYSTEM_ROLES, "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def read_input(body: Body) -> list[ChatMessage]:
    given = body.get("input")
    if isinstance(given, str):
        return [ChatMessage(role="user", content=check_text(given, "input"))]
    items = body.objects("input")
    if not items:
        raise body.wrong("input", "must be a string or at least one item")
    turns = _Turns()
    for item in items:
        turns.add(item)
    return turns.all()


def with_instructions(instructions: str, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    system = [ChatMessage(role="system", content=instructions)] if instructions else []
    return [*system, *turns]


class _Turns:
    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        # These are the last turn's, while it is the model's. They are joined once: a protobuf message keeps
        # what a field was for as long as it lives, so that one which grows with each item takes the square of
        # its length.
        self._said: list[str] = []
        self._thought: list[str] = []
        self._readers: Mapping[str, Callable[[Body], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def all(self) -> list[ChatMessage]:
        self._close()
        return self._turns

    def add(self, item: Body) -> None:
        kind = item.text("type") or "message"
        if kind not in self._readers:
            raise item.wrong("type", f"is {kind!r}, which this server does not read; send the item itself")
        self._readers[kind](item)

    def _message(self, item: Body) -> None:
        role = item.required_text("role")
        if role not in _ROLES:
            raise item.wrong("role", f"must be one of {', '.join(_ROLES)}")
        parts = _texts(item, "content")
        if role == "assistant":
            self._model_turn()
            self._said += parts
        else:
            self._add_texts(ChatMessage(role=role), parts)

    def _reasoning(self, item: Body) -> None:
        turn = self._model_turn()
        if any(self._said) or turn.tool_calls:  # Thinking begins a turn.
            turn = self._begin_model_turn()
        self._thought += [part.required_text("text") for part in item.objects("content")]
        handle = item.text("encrypted_content")
        # One that cannot be ours names nothing here: a conversation may have begun elsewhere.
        turn.answer_id = handle if handle and is_id(handle) else turn.answer_id

    def _call(self, item: Body) -> None:
        call = ToolCall(
            id=item.required_text("call_id"),
            name=item.required_text("name"),
            arguments=item.required_text("arguments"),
        )
        self._model_turn().tool_calls.append(call)

    def _output(self, item: Body) -> None:
        turn = ChatMessage(role="tool", tool_call_id=item.required_text("call_id"))
        self._add_texts(turn, _texts(item, "output"))

    def _add_texts(self, turn: ChatMessage, parts: list[str]) -> None:
        if len(parts) == 1:
            turn.content = parts[0]
        else:
            turn.parts.extend(parts)
        self._close()
        self._turns.append(turn)

    def _model_turn(self) -> ChatMessage:
        is_open = bool(self._turns) and self._turns[-1].role == "assistant"
        return self._turns[-1] if is_open else self._begin_model_turn()

    def _begin_model_turn(self) -> ChatMessage:
        self._close()
        self._turns.append(ChatMessage(role="assistant"))
        return self._turns[-1]

    def _close(self) -> None:
        if self._said:
            self._turns[-1].content = "".join(self._said)
        if self._thought:
            self._turns[-1].reasoning = "".join(self._thought)
        self._said, self._thought = [], []


def _texts(item: Body, name: str) -> list[str]:
    if isinstance(item.get(name), str):
        return [item.text(name)]
    return [_text(part) for part in item.objects(name)]


def _text(part: Body) -> str:
    kind = part.required_text("type")
    if kind not in _TEXT_PARTS:
        raise part.wrong("type", f"is {kind!r}, which this server does not read; it reads text alone")
    return part.required_text("refusal" if kind == "refusal" else "text")


def turn_of(parts: Iterable[Part], answer_id: str) -> ChatMessage:
    turn = ChatMessage(role="assistant", answer_id=answer_id)
    for part in parts:
        match part.kind:
            case Kind.THINKING:
                turn.reasoning += part.text
            case Kind.TEXT:
                turn.content += part.text
            case Kind.CALL:
                turn.tool_calls.add(id=part.call_id, name=part.name, arguments=part.text)
    return turn
