"""Log-probabilities of a prompt's tokens stay packed, because some ranks only forward them as bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import iter_unpack
from typing import Any, Self

MAX_BYTES = 48 << 20  # This limits one prompt, as ranks and routers get all in one message.

_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """The logarithm is natural, before penalties and temperature. `rank` is 1 plus the number of more
    probable tokens; 0 means unknown.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # Each is (token id, logprob), the most probable first.


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The fields are those of PackedLogprobs in common.proto. Raises ValueError if sizes do not fit."""

    num_top: int = 0
    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    def __post_init__(self) -> None:
        parts = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        sizes, one = tuple(map(len, parts)), len(self) * _NUMBER_BYTES
        if sizes != (one, one, one * self.num_top, one * self.num_top):
            raise ValueError(f"logprobs of {len(self)} tokens, {self.num_top} others of each: {sizes} bytes")

    def __len__(self) -> int:
        return len(self.logprobs) // _NUMBER_BYTES

    @property
    def num_bytes(self) -> int:
        return size_bytes(len(self), self.num_top)

    @classmethod
    def joined(cls, pieces: Sequence[Self], num_top: int = 0) -> Self:
        """Join the pieces in order; all must have the same `num_top`, which the argument gives for none."""
        return cls(
            pieces[0].num_top if pieces else num_top,
            b"".join(piece.logprobs for piece in pieces),
            b"".join(piece.ranks for piece in pieces),
            b"".join(piece.top_ids for piece in pieces),
            b"".join(piece.top_logprobs for piece in pieces),
        )

    def tokens(self) -> Iterator[ScoredToken]:
        others = zip(_unpacked("I", self.top_ids), _unpacked("f", self.top_logprobs), strict=True)
        for logprob, rank in zip(_unpacked("f", self.logprobs), _unpacked("I", self.ranks), strict=True):
            top = islice(others, self.num_top)
            yield ScoredToken(logprob, rank, tuple(pair for pair in top if not math.isnan(pair[1])))


def size_bytes(num_tokens: int, num_top: int) -> int:
    return num_tokens * _NUMBER_BYTES * (2 + 2 * num_top)


def _unpacked(kind: str, packed: bytes) -> Iterator[Any]:
    return (number for (number,) in iter_unpack(f"<{kind}", packed))
