"""Protobuf messages to the bytes that are kept in etcd, and back."""

from google.protobuf.message import DecodeError, Message

from services.values.errors import ProtocolError


def to_bytes(pb: Message) -> bytes:
    value: bytes = pb.SerializeToString()
    return value


def fill(pb: Message, value: bytes) -> None:
    """Raises ProtocolError when the bytes are not such a message."""
    try:
        pb.ParseFromString(value)
    except DecodeError as error:
        raise ProtocolError(f"not a {type(pb).__name__}: {error}") from error
