"""A conversation as a file."""

import json
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from services.cli.chat.conversation import Conversation


def write(conversation: Conversation, path: Path) -> None:
    """Raises OSError; FileExistsError where there is one already."""
    as_json = path.suffix == ".json"
    text = _json(conversation) if as_json else "\n".join(_lines(conversation))
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def _json(conversation: Conversation) -> str:
    """Messages as the API has them, with the ids of the answers, and what each turn did."""
    said = {
        "conversation_id": conversation.id,
        "messages": [MessageToDict(m, preserving_proto_field_name=True) for m in conversation.messages()],
        "turns": [
            MessageToDict(turn.answer.finish, preserving_proto_field_name=True)
            for turn in conversation.turns
            if turn.answer.finish is not None
        ],
    }
    return json.dumps(said, ensure_ascii=False, indent=2) + "\n"


def _lines(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages():
        yield f"{message.role}:\n{message.content}\n"
        yield from (f"calls {call.name} {call.arguments}\n" for call in message.tool_calls)
