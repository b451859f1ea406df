"""A conversation's turns are kept here: one that fails leaves no trace."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import InvalidRequest
from isthmus.values.answer import Answer
from isthmus.values.message import Message, ToolCall

_CUTTING = ("stop", "stop_token_ids")  # What ends an answer by these is among its ids, and was not said.


class History:
    """`messages` is all that was said. Results of tools wait in it for the next question."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)

    def asked(self, text: str | None) -> list[Message]:
        """Return what is sent next. Raises InvalidRequest where there is nothing to answer."""
        question = [] if text is None else [Message("user", text)]
        asked = [*self.messages, *question]
        if not asked or asked[-1].role not in ("user", "tool"):
            raise InvalidRequest("there is nothing to answer: say something, or give a tool's result")
        return asked

    def keep(self, asked: Sequence[Message], answer: Answer, options: Mapping[str, Any]) -> None:
        """Keep `asked` and its answer, unless that was stopped from outside."""
        if answer.finish_reason == "aborted":
            return
        exact = not any(options.get(name) for name in _CUTTING)
        self.messages = [*asked, answer.message(exact)]

    def add_result(self, call: ToolCall | str, content: str) -> None:
        """Add the result of a call of the last answer. Raises InvalidRequest where none such waits."""
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
    """Raise InvalidRequest for several answers: a conversation goes on from one."""
    if options.get("n") not in (None, 1):
        raise InvalidRequest(
            "a conversation has one answer to each question: leave n out, or use client.answers"
        )
