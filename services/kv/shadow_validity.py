"""A draft model's KV may hold fewer tokens of each page than the target's. This is pure.

That KV is a shadow: a pool of its own with the same page ids, allocated with the target's pages and by nobody
else. So a page may have the target's KV, and the draft's of none or some of its tokens:

    page:      allocated, or anew --> 0 tokens --computed, received--> the first ones --> all
    drafts:    foreseen --ids come true--> as if computed
                        \\-> others came: computed anew

What is wrong here costs drafts that come true, never a token: the target chooses.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.values.kv import PageId


@dataclass(frozen=True, slots=True)
class _Foreseen:
    start: int  # It is the position of the first.
    ids: tuple[int, ...]


class ShadowValidity:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = np.zeros(num_pages, np.int64)  # It has by page how many it holds, from its first on.
        self._foreseen: dict[
            PageId, _Foreseen
        ] = {}  # It goes by the page of the first, which is nobody else's, for it is open.

    def __repr__(self) -> str:
        return f"ShadowValidity(tokens={int(self._tokens.sum())} foreseen={len(self._foreseen)})"

    def lent(self, pages: Sequence[PageId]) -> None:
        """Forget what was in these pages: somebody else has them now."""
        self._tokens[list(pages)] = 0
        for page in pages:
            self._foreseen.pop(page, None)

    def valid_len(self, pages: Sequence[PageId]) -> int:
        """Return how many leading tokens of a sequence with these pages it holds without a gap."""
        # This takes half the time of a list.
        tokens = self._tokens[np.frombuffer(array("q", pages), np.int64)]
        partial = np.flatnonzero(tokens < self._page_size)
        if not len(partial):
            return len(pages) * self._page_size
        first = int(partial[0])
        return first * self._page_size + int(tokens[first])

    def lacking(self, pages: Sequence[PageId], start: int, end: int) -> range:
        """Return what of [start, end) is to be computed; nothing where what comes before `start` is not
        there."""
        valid = self.valid_len(pages)
        return range(min(valid, end), end) if valid >= start else range(0)

    def computed(self, pages: Sequence[PageId], start: int, end: int) -> None:
        """Note that it holds [start, end) now, as it did before what comes before."""
        self._note(pages, start // self._page_size, end)

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        """Note that it came by wire, `num_tokens` tokens from the first page's first on."""
        self._note(pages, 0, num_tokens)

    def foreseen(self, pages: Sequence[PageId], start: int, ids: Sequence[int]) -> None:
        """Note that it was computed of drafts at `start` and behind, as far as `pages` reach: time will
        tell."""
        room = len(pages) * self._page_size - start
        if kept := tuple(ids[: max(0, room)]):
            self._foreseen[pages[start // self._page_size]] = _Foreseen(start, kept)

    def settle(self, pages: Sequence[PageId], ids: Sequence[int]) -> int:
        """Return for how many of a sequence's ids it holds, those included that were foreseen as they
        came."""
        valid = min(self.valid_len(pages), len(ids))
        if valid == len(ids):
            return valid
        drafts = self._foreseen.pop(pages[valid // self._page_size], None)
        if drafts is None or drafts.start != valid:
            return valid
        came = _common(drafts.ids, ids[valid : valid + len(drafts.ids)])
        self.computed(pages, valid, valid + came)
        return valid + came

    def to_compute(
        self, sequences: Sequence[tuple[Sequence[PageId], Sequence[int]]], max_tokens: int
    ) -> list[range]:
        """Return positions to compute next for the pages and ids of each sequence.

        Where they are few these go up to and with its last, which is always one of them, for its logits. A
        sequence that lacks more than what is left of `max_tokens`, after those that lack less, gets a part of
        it, or nothing.
        """
        lacking = [range(min(self.settle(pages, ids), len(ids) - 1), len(ids)) for pages, ids in sequences]
        for which in sorted(range(len(lacking)), key=lambda which: len(lacking[which])):
            positions = lacking[which][: max(0, max_tokens)]
            lacking[which] = positions
            max_tokens -= len(positions)
        return lacking

    def _note(self, pages: Sequence[PageId], first: int, end: int) -> None:
        for index in range(first, -(-end // self._page_size)):
            page = pages[index]
            held = min(self._page_size, end - index * self._page_size)
            self._tokens[page] = max(self._tokens[page], held)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
