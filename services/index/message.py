"""Protobuf messages become the bytes that are kept in etcd, and come back."""

from google.protobuf.message import DecodeError, Message

from services.values.errors import ProtocolError


def to_bytes(pb: Message) -> bytes:
    value: bytes = pb.SerializeToString()
    return value


def fill(pb: Message, value: bytes) -> None:
    """Fill the message from the bytes. Raises ProtocolError when they are no such message."""
    try:
        pb.ParseFromString(value)
    except DecodeError as error:
        raise ProtocolError(f"not a {type(pb).__name__}: {error}") from error
