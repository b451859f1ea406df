"""This module keeps a conversation's messages; a turn that fails leaves no trace."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import InvalidRequest
from isthmus.values.answer import Answer
from isthmus.values.message import Message, ToolCall

# The ids of an answer that these end include the stop, but its text does not.
_CUTTING = ("stop", "stop_token_ids")


class History:
    """`messages` is the whole conversation. Results of tools wait in it for the next question."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)

    def with_question(self, text: str | None) -> list[Message]:
        """Return the messages of the next request. Raises InvalidRequest if there is nothing to answer."""
        question = [] if text is None else [Message("user", text)]
        messages = [*self.messages, *question]
        if not messages or messages[-1].role not in ("user", "tool"):
            raise InvalidRequest("there is nothing to answer: say something, or give a tool's result")
        return messages

    def keep(self, messages: Sequence[Message], answer: Answer, options: Mapping[str, Any]) -> None:
        """Keep the messages and their answer, unless it was aborted."""
        if answer.finish_reason == "aborted":
            return
        exact = not any(options.get(name) for name in _CUTTING)
        self.messages = [*messages, answer.message(exact)]

    def add_result(self, call: ToolCall | str, content: str) -> None:
        """Add the result of a call of the last answer. Raises InvalidRequest if no such call waits."""
        call_id = call if isinstance(call, str) else call.id
        if call_id not in self.waiting:
            raise InvalidRequest(f"no call {call_id!r} waits for a result")
        self.messages.append(Message("tool", content, tool_call_id=call_id, name=self.waiting[call_id].name))

    @property
    def waiting(self) -> dict[str, ToolCall]:
        """Return the last answer's calls without a result, by id."""
        calls: dict[str, ToolCall] = {}
        for message in self.messages:
            if message.role == "assistant":
                calls = {call.id: call for call in message.tool_calls}
            elif message.role == "tool":
                calls.pop(message.tool_call_id, None)
        return calls


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if several answers are requested: a conversation continues from one."""
    if options.get("n") not in (None, 1):
        raise InvalidRequest(
            "a conversation has one answer to each question: leave n out, or use client.answers"
        )
