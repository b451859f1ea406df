"""A chunk that brings text alone, written down once and then filled in: most of a stream's are no other."""

from collections.abc import Callable
from json.encoder import encode_basestring

from services.router.dialects.answer import Json, json_text
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse

_MARK = "\0text\0"  # no id has a NUL


class TextChunk:
    """`chunk_of` makes the chunk of a text."""

    def __init__(self, chunk_of: Callable[[str], Json]) -> None:
        self._head, self._tail = json_text(chunk_of(_MARK)).split(encode_basestring(_MARK))

    def filled(self, text: str) -> str:
        """As JSON."""
        return f"{self._head}{encode_basestring(text)}{self._tail}"


def is_text_alone(response: GenerateResponse) -> bool:
    """Of those that are not an answer's first, and of which no ids or log-probabilities are told."""
    has_more = response.reasoning or response.tool_calls or response.HasField("finish")
    return bool(response.text) and not has_more
