"""Fields of the API that this router does not act on yet: what asks for them is refused, not left out."""

from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

_OF_CHATS = ("tools",)
_OF_MESSAGES = ("reasoning", "tool_calls", "tool_call_id", "answer_id")


def refuse_unread(request: GenerateRequest) -> None:
    """Raises InvalidRequest, naming the first of them that is set."""
    parts = [
        ("chat", request.chat, _OF_CHATS),
        *((f"chat.messages[{i}]", message, _OF_MESSAGES) for i, message in enumerate(request.chat.messages)),
    ]
    for prefix, message, unread in parts:
        for field, _ in message.ListFields():
            if field.name in unread:
                raise InvalidRequest(f"{prefix}.{field.name} is not supported yet; leave it out")
