"""This module remembers the ids of past answers by all names that a later chat may use for them. It is pure.

It also remembers the ids that each conversation last had, and finds how many of them a new prompt repeats.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.tenant_lru import TenantLru

# An answer costs about this much memory beside its ids, and each of its keys this much.
_OVERHEAD_BYTES = 512
_KEY_BYTES = 256


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    """`prompt_end` are the last ids of its prompt. `message_digest` and `reasoning` are digests of its
    message and its thinking; the latter is empty without thinking."""

    ids: "array[int]"
    prompt_end: "array[int]"
    message_digest: bytes
    reasoning: bytes = b""

    def size_bytes(self, num_keys: int) -> int:
        return _OVERHEAD_BYTES + _KEY_BYTES * num_keys + 4 * (len(self.ids) + len(self.prompt_end))


class AnswerMemory:
    """This maps keys to answers. When memory is full, the tenant with the most bytes loses its least recently
    used answers.

    A key of two answers with different ids is ambiguous, and finds nothing. Tenants must not share a key,
    which the caller ensures.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._next_number = 0
        self._answers: TenantLru[int, tuple[RememberedAnswer, Sequence[bytes]]] = TenantLru(max_bytes)
        # Each key has the number of its answer, and whether that answer is the only one.
        self._owners: dict[bytes, tuple[int, bool]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def size_bytes(self) -> int:
        return self._answers.size

    def remember(self, tenant: str, keys: Sequence[bytes], answer: RememberedAnswer) -> bool:
        size_bytes = answer.size_bytes(len(keys))
        if size_bytes > self._max_bytes:
            return False
        number, self._next_number = self._next_number, self._next_number + 1
        for key in set(keys):
            self._owners[key] = (number, self._is_only(tenant, key, answer))
        gone = self._answers.put(tenant, number, (answer, keys), size_bytes)
        for forgotten, (_, names) in gone:
            self._forget(forgotten, names)
        return all(forgotten != number for forgotten, _ in gone)

    def recall(self, tenant: str, key: bytes) -> RememberedAnswer | None:
        number, is_only = self._owners.get(key, (-1, False))
        known = self._answers.get(tenant, number) if is_only else None
        return None if known is None else known[0]

    def _is_only(self, tenant: str, key: bytes, answer: RememberedAnswer) -> bool:
        if key not in self._owners:
            return True
        number, is_only = self._owners[key]
        known = self._answers.peek(tenant, number)
        return is_only and known is not None and known[0] == answer

    def _forget(self, number: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._owners.get(key, (-1, False))[0] == number:
                del self._owners[key]


def drift_tokens(remembered: Sequence[int], prompt: Sequence[int]) -> int:
    return len(remembered) - _common_prefix_len(array("I", remembered), array("I", prompt))


def _common_prefix_len(first: "array[int]", second: "array[int]") -> int:
    """Compare by halves, so that the work is done in C."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # first[:low] == second[:low], and they differ somewhere in [low, high] or end there.
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class ConversationMemory:
    """This remembers the ids of the last turn, prompt and output, of each tenant's conversations. When memory
    is full, the tenant with the most ids loses its least recently used conversation."""

    def __init__(self, max_conversations: int, max_token_ids: int) -> None:
        """`max_token_ids` limits the ids of all conversations together; an id takes 4 bytes."""
        self._last_turns: TenantLru[str, array[int]] = TenantLru(max_token_ids, max_conversations)

    def __len__(self) -> int:
        return len(self._last_turns)

    def remember(self, tenant: str, conversation_id: str, token_ids: Sequence[int]) -> None:
        """Remember the turn instead of the last one, or no turn where it is above the limit."""
        self._last_turns.put(tenant, conversation_id, array("I", token_ids), len(token_ids))

    def recall(self, tenant: str, conversation_id: str) -> Sequence[int] | None:
        return self._last_turns.get(tenant, conversation_id)
