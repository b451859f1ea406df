"""What a load is sent through: our gRPC API, or the OpenAI API over HTTP."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; `conversation` may be empty."""

    token_ids: Sequence[int]
    max_tokens: int
    conversation: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one request, or the sums of many, as usage has them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    decode_prefix_len: int = 0
    delta_tokens: int = 0
    kv_bytes_moved: int = 0
    kv_bytes_saved: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


COUNTED = tuple(each.name for each in fields(Counts))


@dataclass(frozen=True, slots=True)
class Came:
    """Tokens that came together; the last one has what the request counted. `token_ids` are empty where a
    server tells its text alone."""

    num_tokens: int = 0
    token_ids: Sequence[int] = ()
    counts: Counts | None = None


class Side(Protocol):
    name: str

    def ask(self, asked: Asked) -> AsyncIterator[Came]:
        """Raises an IsthmusError, or TimeoutError."""

    async def is_token(self, token_id: int) -> bool: ...

    async def close(self) -> None: ...


async def vocab_size_of(side: Side) -> int:
    """Found by asking which ids are tokens: there is no call that tells it."""
    low, high = 0, 1
    while await side.is_token(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await side.is_token(middle) else (low, middle)
    return high
