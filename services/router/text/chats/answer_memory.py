"""The ids of past answers, by whatever a later chat may name them with. Pure."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Beside its ids, what an answer costs, its digests and our books of it; and what each of its keys does.
_OVERHEAD_BYTES = 512
_KEY_BYTES = 256


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    """`prompt_end`: the last ids of its prompt. `said` and `reasoning`: digests of what it said and thought;
    `reasoning` is empty where it did not think."""

    ids: "array[int]"
    prompt_end: "array[int]"
    said: bytes
    reasoning: bytes = b""

    def size_bytes(self, num_keys: int) -> int:
        return _OVERHEAD_BYTES + _KEY_BYTES * num_keys + 4 * (len(self.ids) + len(self.prompt_end))


class AnswerMemory:
    """Key -> answer; the least recently used answers go first.

    A key under which two answers of other ids were remembered is ambiguous, and finds nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._next_number = 0
        self._answers: OrderedDict[int, tuple[RememberedAnswer, Sequence[bytes]]] = OrderedDict()
        self._owners: dict[
            bytes, tuple[int, bool]
        ] = {}  # the answer's number, and whether it is the only one

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def remember(self, keys: Sequence[bytes], answer: RememberedAnswer) -> bool:
        """Whether there is room for it."""
        size_bytes = answer.size_bytes(len(keys))
        if size_bytes > self._max_bytes:
            return False
        number, self._next_number = self._next_number, self._next_number + 1
        for key in set(keys):
            self._owners[key] = (number, self._is_only(key, answer))
        self._answers[number] = (answer, keys)
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            self._forget_oldest()
        return True

    def recall(self, key: bytes) -> RememberedAnswer | None:
        number, is_only = self._owners.get(key, (-1, False))
        if not is_only:
            return None
        self._answers.move_to_end(number)
        return self._answers[number][0]

    def _is_only(self, key: bytes, answer: RememberedAnswer) -> bool:
        if key not in self._owners:
            return True
        number, is_only = self._owners[key]
        return is_only and self._answers[number][0] == answer

    def _forget_oldest(self) -> None:
        number, (answer, keys) = self._answers.popitem(last=False)
        self._size_bytes -= answer.size_bytes(len(keys))
        for key in keys:
            if self._owners.get(key, (-1, False))[0] == number:
                del self._owners[key]
