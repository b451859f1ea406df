"""Responses that clients go on from, or look at again, are kept in this router's memory alone, and bounded.

Each has its own turns and the id of the one before it; those of a chain together are the conversation. The
least recently used of the tenant that has the most goes first, and a chain that is used is used as a whole.
"""

from dataclasses import dataclass

from services.router.tenant_lru import TenantLru
from services.values.errors import NotFound
from services.wire.isthmus.v1.generation_pb2 import ChatMessage


@dataclass(frozen=True, slots=True)
class Stored:
    """`turns` are its input's and its output's, serialized."""

    response: bytes  # It is the object as JSON.
    turns: tuple[bytes, ...]
    previous_id: str  # The first of a chain has none: it is empty.
    conversation_id: str

    @property
    def size_bytes(self) -> int:
        return len(self.response) + sum(map(len, self.turns))


class ResponseStore:
    """A tenant finds its own responses alone, as if there were no others, and has its share of the memory."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._stored: TenantLru[str, Stored] = TenantLru(max_bytes, max_responses)

    def __repr__(self) -> str:
        return f"ResponseStore({len(self._stored)} responses, {self._stored.size} bytes)"

    def put(self, tenant: str, response_id: str, stored: Stored) -> None:
        """Keep the response, but not one that is larger than all the memory that there is."""
        self._stored.put(tenant, response_id, stored, stored.size_bytes)

    def get(self, tenant: str, response_id: str) -> Stored:
        """Return the response. Raises NotFound."""
        stored = self._stored.get(tenant, response_id)
        if stored is None:
            raise NotFound(
                f"response {response_id!r} is not known here: it was not stored or was deleted, another "
                "router has it, this one was started again, or it had to make room"
            )
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        self.get(tenant, response_id)
        self._stored.pop(tenant, response_id)

    def turns(self, tenant: str, response_id: str) -> list[ChatMessage]:
        """Return the turns of the whole chain that ends with this response, the oldest first. Raises
        NotFound."""
        chain = []
        while response_id:
            stored = self.get(tenant, response_id)
            chain.append(stored)
            response_id = stored.previous_id
        return [ChatMessage.FromString(turn) for stored in reversed(chain) for turn in stored.turns]
