"""The router remembers the ids that each conversation last held, and finds how much a new prompt repeats.
Pure."""

from array import array
from collections.abc import Sequence

from services.router.tenant_lru import TenantLru


def drift_tokens(remembered: Sequence[int], prompt: Sequence[int]) -> int:
    return len(remembered) - _common_prefix_len(array("I", remembered), array("I", prompt))


def _common_prefix_len(first: "array[int]", second: "array[int]") -> int:
    """Compare by halves, so that the work is done in C."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # first[:low] == second[:low], and they differ somewhere in [low, high] or end
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class ConversationMemory:
    """It remembers the ids of the last turn, prompt and output, of each tenant's conversations. Where memory
    is short, the least recently used one of the tenant that has the most goes."""

    def __init__(self, max_conversations: int, max_token_ids: int) -> None:
        """`max_token_ids`, of 4 bytes, bounds those of all conversations together."""
        self._last_turns: TenantLru[str, array[int]] = TenantLru(max_token_ids, max_conversations)

    def __len__(self) -> int:
        return len(self._last_turns)

    def remember(self, tenant: str, conversation_id: str, token_ids: Sequence[int]) -> None:
        """A turn that is longer than all may be together is not remembered, nor is the one before it."""
        self._last_turns.put(tenant, conversation_id, array("I", token_ids), len(token_ids))

    def recall(self, tenant: str, conversation_id: str) -> Sequence[int] | None:
        return self._last_turns.get(tenant, conversation_id)
