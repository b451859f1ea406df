"""Agents in tool loops have models that say this, and send it back in one of these ways."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.templates.formats import Call, Format, Said
from services.wire.isthmus.v1.generation_pb2 import ChatMessage, Tool

LOOK_UP = Tool(name="look_up", description="Looks up", parameters='{"type": "object", "properties": {}}')
ARGUMENTS = {"what": "the café's ß", "limit": 3, "where": {"b": [1, 2], "a": None}}
RESULT = "It's 3 < 4 & ä"


@dataclass(frozen=True)
class Client:
    """It does this to an answer before it sends it back."""

    gives_reasoning: bool = False
    arguments: Callable[[str], str] = str
    keeps_ids: bool = True

    def sends(self, message: ChatMessage) -> ChatMessage:
        sent = ChatMessage()
        sent.CopyFrom(message)
        if not self.gives_reasoning:
            sent.reasoning = ""
        for number, call in enumerate(sent.tool_calls):
            call.arguments = self.arguments(call.arguments)
            call.id = call.id if self.keeps_ids else f"own_{number}"
        return sent


def _reordered(arguments: str) -> str:
    return json.dumps(dict(reversed(json.loads(arguments).items())), ensure_ascii=False)


def _compact(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"))


CLIENTS = {
    "gives reasoning back": Client(gives_reasoning=True),
    "gives none": Client(),
    "reorders keys": Client(arguments=_reordered),
    "sends arguments compact": Client(arguments=_compact),
    "has ids of its own": Client(keeps_ids=False),
}


def answers(format_: Format, number: int) -> Iterator[Said]:
    """Yield what a model says in a loop of so many calls; the last is the answer to all."""
    for index in range(number):
        calls = [Call("look_up", ARGUMENTS | {"turn": index})] * (
            2 if format_.parallel and index % 3 == 2 else 1
        )
        yield Said("", f"First the {index}th café.\nThen more." * format_.thinks, calls)
    yield Said("It is\n42, ä!", "Done." * format_.thinks)
