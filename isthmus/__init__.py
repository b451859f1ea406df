"""This package is a Python client of a router's gRPC API, blocking or asynchronous."""

from isthmus.aio import AsyncClient, AsyncConversation, AsyncStream
from isthmus.blocking import Client, Conversation, Stream
from isthmus.channel import Tls
from isthmus.errors import (
    AlreadyRunning,
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    Forbidden,
    IncompleteAnswer,
    InvalidRequest,
    IsthmusError,
    NotFound,
    NotSupported,
    Overloaded,
    ServerFailed,
    Unauthenticated,
    Unavailable,
)
from isthmus.functions import tool_of
from isthmus.request import Options
from isthmus.retries import Retries
from isthmus.values.answer import Answer, Piece
from isthmus.values.message import Message, Tool, ToolCall

__all__ = [
    "AlreadyRunning",
    "Answer",
    "AsyncClient",
    "AsyncConversation",
    "AsyncStream",
    "Cancelled",
    "Client",
    "ContextExceeded",
    "Conversation",
    "DeadlineExceeded",
    "Forbidden",
    "IncompleteAnswer",
    "InvalidRequest",
    "IsthmusError",
    "Message",
    "NotFound",
    "NotSupported",
    "Options",
    "Overloaded",
    "Piece",
    "Retries",
    "ServerFailed",
    "Stream",
    "Tls",
    "Tool",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "tool_of",
]
