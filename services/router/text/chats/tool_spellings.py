"""Tools that say the same are spelt as they were at first, so that a prompt that shows them begins as before.

Clients order the keys of a schema anew when they start again; to a cache of prefixes that is another prompt.
"""

from services.router.tenant_lru import TenantLru
from services.router.text.chats.answers import canonical_json, digest
from services.wire.isthmus.v1.generation_pb2 import Chat

_ENTRY_BYTES = 256  # an entry of a table takes about that beside its text
_MOST_TOOLS = 1024
_MOST_CHARS = 256 << 10  # of all tools of a chat: some 15 ms the first time

_AsSent = tuple[str, str, str]


class ToolSpellings:
    """The first spelling of each tool's parameters, by tenant. Tools differ where their names do, or their
    descriptions, or where their parameters do as JSON values; the order of an object's keys is no part of a
    JSON value (RFC 8259, 4)."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds what is remembered; the tenant that has the most forgets first."""
        self._known: TenantLru[_AsSent, str] = TenantLru(max_bytes // 2)
        self._first: TenantLru[bytes, str] = TenantLru(max_bytes // 2)

    @property
    def size_bytes(self) -> int:
        return self._known.size + self._first.size

    def restore(self, tenant: str, chat: Chat) -> None:
        """Gives each tool of the chat the spelling that the tenant used first; not where there is so much to
        compare that the loop would be held up."""
        if len(chat.tools) > _MOST_TOOLS or sum(len(tool.parameters) for tool in chat.tools) > _MOST_CHARS:
            return
        for tool in chat.tools:
            spelling = self._spelling(tenant, (tool.name, tool.description, tool.parameters))
            if spelling != tool.parameters:
                tool.parameters = spelling

    def _spelling(self, tenant: str, as_sent: _AsSent) -> str:
        known = self._known.get(tenant, as_sent)
        if known is not None:
            return known
        name, description, parameters = as_sent
        value = digest(name, description, canonical_json(parameters))
        first = self._first.get(tenant, value)
        if first is None:
            first = parameters
            self._first.put(tenant, value, first, len(first) + _ENTRY_BYTES)
        self._known.put(tenant, as_sent, first, sum(map(len, as_sent)) + _ENTRY_BYTES)
        return first
