"""A draft model's KV may cover fewer tokens of each page than the target's. This module does no I/O.

The draft's KV is a shadow of the target's: it has a pool of its own with the same page ids, which are
allocated only together with the target's pages. So a page that has the target's KV may have the draft's KV of
none, some or all of its tokens:

    page:      allocated (again) --> 0 tokens --computed, received--> the first ones --> all
    drafts:    foreseen --the target chose the same ids--> as if computed
                        \\-> it chose others: computed anew

A mistake here makes fewer drafts right, and never changes a token, because the target chooses.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.values.kv import PageId


@dataclass(frozen=True, slots=True)
class _Foreseen:
    start: int  # This is the position of the first id.
    ids: tuple[int, ...]


class ShadowValidity:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = np.zeros(num_pages, np.int64)  # This counts the valid leading tokens of each page.
        # The key is the page of the first draft. No other sequence has it, because it is not full yet.
        self._foreseen: dict[PageId, _Foreseen] = {}

    def __repr__(self) -> str:
        return f"ShadowValidity(tokens={int(self._tokens.sum())} foreseen={len(self._foreseen)})"

    def lent(self, pages: Sequence[PageId]) -> None:
        self._tokens[list(pages)] = 0
        for page in pages:
            self._foreseen.pop(page, None)

    def valid_len(self, pages: Sequence[PageId]) -> int:
        """Return how many leading tokens of a sequence with these pages have draft KV, without a gap."""
        # An array takes half the time of a list here.
        tokens = self._tokens[np.frombuffer(array("q", pages), np.int64)]
        partial = np.flatnonzero(tokens < self._page_size)
        if not len(partial):
            return len(pages) * self._page_size
        first = int(partial[0])
        return first * self._page_size + int(tokens[first])

    def lacking(self, pages: Sequence[PageId], start: int, end: int) -> range:
        """Return the part of [start, end) to compute; it is empty if tokens before `start` are missing."""
        valid = self.valid_len(pages)
        return range(min(valid, end), end) if valid >= start else range(0)

    def computed(self, pages: Sequence[PageId], start: int, end: int) -> None:
        """Note that [start, end) is valid now. The tokens before `start` have to be valid already."""
        self._note(pages, start // self._page_size, end)

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        self._note(pages, 0, num_tokens)

    def foreseen(self, pages: Sequence[PageId], start: int, ids: Sequence[int]) -> None:
        """Note that KV of drafts was computed at `start` and behind, as far as `pages` reach."""
        room = len(pages) * self._page_size - start
        if kept := tuple(ids[: max(0, room)]):
            self._foreseen[pages[start // self._page_size]] = _Foreseen(start, kept)

    def settle(self, pages: Sequence[PageId], ids: Sequence[int]) -> int:
        """Return how many leading ids have valid KV. Foreseen drafts count as far as they equal `ids`."""
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
        """Return the positions to compute next for each sequence, given as its pages and its ids.

        They begin at the first invalid position and end with the sequence's last one, which is always
        included for its logits. Sequences that lack the least are served first from `max_tokens`; a sequence
        that lacks more than what is left gets a part of its positions, or none.
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
