"""These commands are yet to be sent to a decode rank: requests to start, and to abort.

A message costs both ends the same with one command as with ten, and one is written at a time: what comes
while it is written goes together in the next.
"""

import asyncio
from collections import deque

from services.wire.isthmus.v1 import decode_pb2
from services.wire.packed_ids import length_delimited

_FURTHER = decode_pb2.Command.FURTHER_FIELD_NUMBER
# That are joined to one. The rank obeys them in one turn of its loop, in which no token leaves it: a start
# takes some 60 us there.
_MOST = 32
_MOST_BYTES = 1 << 20


class Commands:
    """Serialized Commands, in the order in which they were given. `joins`: the rank reads several at once."""

    def __init__(self) -> None:
        self.joins = False
        self._waiting: deque[bytes] = deque()
        self._came = asyncio.Event()

    def put(self, command: bytes) -> None:
        self._waiting.append(command)
        self._came.set()

    async def message(self) -> bytes:
        """Wait until there is any, and return the next one with those behind it."""
        await self._came.wait()
        message = self._waiting.popleft()
        if self.joins and self._waiting:
            message = self._joined(message)
        if not self._waiting:
            self._came.clear()
        return message

    def _joined(self, first: bytes) -> bytes:
        parts, size = [first], len(first)
        while self._waiting and len(parts) < _MOST and size + len(self._waiting[0]) <= _MOST_BYTES:
            further = self._waiting.popleft()
            parts.append(length_delimited(_FURTHER, further))
            size += len(further)
        return b"".join(parts)
