"""Tools that say the same are spelt as they were at first, so that a prompt that shows them begins as before.

Clients order the keys of a schema anew when they start again; to a cache of prefixes that is another prompt.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from services.router.text.chats.answers import canonical_json, digest
from services.wire.isthmus.v1.generation_pb2 import Chat

_ENTRY_BYTES = 256  # an entry of a table takes about that beside its text

_Key = TypeVar("_Key")


class ToolSpellings:
    """The first spelling of each tool's parameters, by tenant. Tools differ where their names do, or their
    descriptions, or where their parameters do as JSON values; the order of an object's keys is no part of a
    JSON value (RFC 8259, 4)."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds what is remembered; what was not used for the longest is forgotten first."""
        self._known: _Texts[tuple[str, str, str, str]] = _Texts(max_bytes // 2)
        self._first: _Texts[bytes] = _Texts(max_bytes // 2)

    @property
    def size_bytes(self) -> int:
        return self._known.size_bytes + self._first.size_bytes

    def restore(self, tenant: str, chat: Chat) -> None:
        """Gives each tool of the chat the spelling that the tenant used first."""
        for tool in chat.tools:
            spelling = self._spelling(tenant, tool.name, tool.description, tool.parameters)
            if spelling != tool.parameters:
                tool.parameters = spelling

    def _spelling(self, tenant: str, name: str, description: str, parameters: str) -> str:
        as_sent = (tenant, name, description, parameters)
        known = self._known.get(as_sent)
        if known is not None:
            return known
        value = digest(tenant, name, description, canonical_json(parameters))
        first = self._first.get(value) or parameters
        self._first.put(value, first, len(first))
        self._known.put(as_sent, first, sum(map(len, as_sent)))
        return first


class _Texts(Generic[_Key]):
    """Texts by a key, so many bytes of them; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self._texts: OrderedDict[_Key, tuple[str, int]] = OrderedDict()

    def get(self, key: _Key) -> str | None:
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        return self._texts[key][0]

    def put(self, key: _Key, text: str, size_bytes: int) -> None:
        if key in self._texts:
            return
        self._texts[key] = text, size_bytes + _ENTRY_BYTES
        self.size_bytes += size_bytes + _ENTRY_BYTES
        while self.size_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._texts.popitem(last=False)
            self.size_bytes -= freed_bytes
