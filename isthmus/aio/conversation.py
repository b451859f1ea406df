"""A conversation whose turns find the KV of those before."""

import inspect
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Unpack

from isthmus.aio.stream import AsyncStream, Ended
from isthmus.errors import IncompleteAnswer
from isthmus.functions import result_of, text_of, tool_of
from isthmus.history import History, check_options
from isthmus.request import Options
from isthmus.values.answer import Answer
from isthmus.values.message import Message, ToolCall


class Asks(Protocol):
    def ask(self, messages: Sequence[Message], ended: Ended, options: Options) -> AsyncStream: ...


class AsyncConversation:
    """Made by `AsyncClient.conversation`. Past answers go back as the ids that were generated, under one
    conversation id: the rank that holds the KV of the turns before gets the next one. One turn at a time.

    A turn that fails, or is left before its end, is as if it had not been: `messages` is as it was.
    """

    def __init__(self, client: Asks, messages: Sequence[Message], options: Options) -> None:
        check_options(options)
        self.id = options.get("conversation_id") or secrets.token_hex(8)
        self.tools = [tool_of(tool) for tool in options.get("tools") or ()]
        self._client = client
        self._history = History(messages)
        self._options: Options = {**options, "tools": self.tools, "conversation_id": self.id}

    @property
    def messages(self) -> list[Message]:
        """All that was said so far."""
        return list(self._history.messages)

    async def say(self, text: str | None = None, **options: Unpack[Options]) -> Answer:
        """The answer to it; without a text, to the results of tools that were given since. Raises as
        `generate`."""
        return await self.stream(text, **options).read()

    def stream(self, text: str | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The same as it comes."""
        check_options(options)
        asked = self._history.asked(text)
        merged: Options = {**self._options, **options}
        return self._client.ask(asked, lambda answer: self._history.keep(asked, answer, merged), merged)

    def tool_result(self, call: ToolCall | str, result: Any) -> None:
        """What a call came to; what is no text is sent as JSON. Raises InvalidRequest where no such call
        waits."""
        self._history.add_result(call, text_of(result))

    async def run(
        self,
        text: str | None = None,
        *,
        most_turns: int = 10,
        called: Callable[[ToolCall, str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Say it, call the functions that the model calls, plain or `async`, and go on until it answers
        without a call.

        `called` is told each call and its result. A call that no function takes goes back to the model as an
        error; what a function raises is raised. Raises IncompleteAnswer when the model still calls after
        `most_turns`.
        """
        for _ in range(most_turns):
            answer = await self.say(text, **options)
            if not answer.tool_calls:
                return answer
            text = None
            for call in answer.tool_calls:
                call_it, result = result_of(self.tools, call)
                if call_it is not None:
                    returned = call_it()
                    result = text_of(await returned if inspect.isawaitable(returned) else returned)
                self.tool_result(call, result)
                if called is not None:
                    called(call, result)
        raise IncompleteAnswer(f"the model still calls tools after {most_turns} turns")
