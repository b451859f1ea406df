"""This module splits a chunk with drafts into the single tokens that plain decoding would compute."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import overload

from services.engine.paged.model_runner import Chunk


@dataclass(frozen=True, slots=True)
class DraftedHistory(Sequence[int]):
    """This is a history of token ids followed by drafts.

    Each token of a chunk has one. The ids are not copied, since they may be many.
    """

    ids: Sequence[int]
    drafts: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids) + len(self.drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if not isinstance(index, slice) or index.step is not None:
            return [*self.ids, *self.drafts][index]
        start, stop, _ = index.indices(len(self))
        begun = len(self.ids)
        return [*self.ids[start:stop], *self.drafts[max(0, start - begun) : max(0, stop - begun)]]

    def __iter__(self) -> Iterator[int]:
        return chain(self.ids, self.drafts)


def single_tokens(chunk: Chunk) -> tuple[Chunk, ...]:
    """Return each token with the drafts before it in its history. A chunk without drafts stays whole."""
    if chunk.num_drafts == 0:
        return (chunk,)
    return tuple(_single_token(chunk, nth) for nth in range(len(chunk.token_ids)))


def _single_token(chunk: Chunk, nth: int) -> Chunk:
    return replace(
        chunk,
        token_ids=chunk.token_ids[nth : nth + 1],
        start=chunk.start + nth,
        history=DraftedHistory(chunk.history, chunk.drafts[:nth]),
        num_output_ids=chunk.num_output_ids + nth,
        num_drafts=0,
    )
