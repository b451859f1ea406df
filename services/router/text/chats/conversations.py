"""What each conversation last held, in ids, and how much of that a new prompt does not begin with. Pure."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence


def drift_tokens(remembered: Sequence[int], prompt: Sequence[int]) -> int:
    """How many of the remembered ids the new prompt does not begin with."""
    return len(remembered) - _common_prefix_len(array("I", remembered), array("I", prompt))


def _common_prefix_len(first: "array[int]", second: "array[int]") -> int:
    """By halves, so that the comparing is done in C."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # first[:low] == second[:low], and they differ somewhere in [low, high] or end
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class ConversationMemory:
    """Conversation id -> the ids of its last turn, prompt and output; the least recently used go first.

    Tenants choose their ids independently: a caller that serves several puts the tenant into the id.
    """

    def __init__(self, max_conversations: int, max_token_ids: int) -> None:
        """`max_token_ids`, of 4 bytes, bounds those of all conversations together."""
        if max_conversations < 1:
            raise ValueError(f"max_conversations must be 1 or more, got {max_conversations}")
        self._max_conversations = max_conversations
        self._max_token_ids = max_token_ids
        self._num_token_ids = 0
        self._last_turns: OrderedDict[str, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_turns)

    def remember(self, conversation_id: str, token_ids: Sequence[int]) -> None:
        """A turn that is longer than all may be together is not remembered, nor the one before it."""
        self._num_token_ids -= len(self._last_turns.pop(conversation_id, ()))
        if len(token_ids) > self._max_token_ids:
            return
        self._last_turns[conversation_id] = array("I", token_ids)
        self._num_token_ids += len(token_ids)
        while len(self._last_turns) > self._max_conversations or self._num_token_ids > self._max_token_ids:
            _, forgotten = self._last_turns.popitem(last=False)
            self._num_token_ids -= len(forgotten)

    def recall(self, conversation_id: str) -> Sequence[int] | None:
        """None for a conversation that is not remembered."""
        if conversation_id in self._last_turns:
            self._last_turns.move_to_end(conversation_id)
        return self._last_turns.get(conversation_id)
