"""Fields of the API that this router does not act on yet: what asks for them is refused, not left out."""

from google.protobuf.message import Message

from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

_OF_CHATS = ("continue_final_message",)


def refuse_unread(request: GenerateRequest) -> None:
    """Raises InvalidRequest, naming the first of them that is set."""
    parts: list[tuple[str, Message, tuple[str, ...]]] = [
        ("chat.", request.chat, _OF_CHATS),
    ]
    for prefix, message, unread in parts:
        for field, _ in message.ListFields():
            if field.name in unread:
                raise InvalidRequest(f"{prefix}{field.name} is not supported yet; leave it out")
