"""Of how many tokens of each page a draft model's KV holds. Pure.

That KV is a shadow: a pool of its own with the same page ids, lent with the target's pages and by nobody
else. So a page may have the target's KV, and the draft's of none or some of its tokens:

    page:      lent, lent anew --> 0 tokens --computed, received--> the first ones --> all
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
    start: int  # position of the first
    ids: tuple[int, ...]


class ShadowValidity:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = np.zeros(num_pages, np.int64)  # by page: how many, from its first on
        self._foreseen: dict[
            PageId, _Foreseen
        ] = {}  # by the page of the first: nobody else's, for it is open

    def __repr__(self) -> str:
        return f"ShadowValidity(tokens={int(self._tokens.sum())} foreseen={len(self._foreseen)})"

    def lent(self, pages: Sequence[PageId]) -> None:
        """Whatever was in them is somebody else's."""
        self._tokens[list(pages)] = 0
        for page in pages:
            self._foreseen.pop(page, None)

    def valid_len(self, pages: Sequence[PageId]) -> int:
        """Leading tokens of a sequence with these pages that it holds without a gap."""
        tokens = self._tokens[np.frombuffer(array("q", pages), np.int64)]  # in half the time of a list
        partial = np.flatnonzero(tokens < self._page_size)
        if not len(partial):
            return len(pages) * self._page_size
        first = int(partial[0])
        return first * self._page_size + int(tokens[first])

    def lacking(self, pages: Sequence[PageId], start: int, end: int) -> range:
        """Of [start, end) what is to be computed; nothing where what comes before `start` is not there."""
        valid = self.valid_len(pages)
        return range(min(valid, end), end) if valid >= start else range(0)

    def computed(self, pages: Sequence[PageId], start: int, end: int) -> None:
        """It holds of [start, end) now, as it did before of what comes before."""
        self._note(pages, start // self._page_size, end)

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        """It came by wire, of so many tokens from the first page's first on."""
        self._note(pages, 0, num_tokens)

    def foreseen(self, pages: Sequence[PageId], start: int, ids: Sequence[int]) -> None:
        """It was computed of drafts at `start` and behind, as far as `pages` reach: what comes will tell."""
        room = len(pages) * self._page_size - start
        if kept := tuple(ids[: max(0, room)]):
            self._foreseen[pages[start // self._page_size]] = _Foreseen(start, kept)

    def settle(self, pages: Sequence[PageId], ids: Sequence[int]) -> int:
        """For how many of a sequence's ids it holds, those included that were foreseen as they came."""
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
        """For pages and ids of each: positions to compute next, where they are few up to and with its last.

        That one always, for its logits. Who lacks more than what is left of `max_tokens`, after those that
        lack less, gets a part of it, or nothing.
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
    """Equal leading ids."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
