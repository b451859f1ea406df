"""Single tokens that read the same pages at the same place read them together.

Neighbouring pages that the same queries read are a *piece*: a prefix that several sequences share, a longer
prefix that fewer of them share, and what each has for itself. Where windows cut a page, it is shared by those
that begin at the same slot. Of a page that is still being filled every reader may know another part: it is
read alone. PagePieces come in the order of their places, so that each query reads its tokens in their order.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from services.engine.torch.attention.kernels.numba_kernel import Ids, PagePieces
from services.engine.torch.attention.kernels.plan_kernel import plan_pieces
from services.values.kv import PageId

# Where the tables of pages are as long as that on average, they are kept from step to step, so many of them.
_LONG_TABLE, _KEPT_TABLES = 48, 1024


class Read(NamedTuple):
    """One query reads slots [skip, skip + num_tokens) of its pages, counted from the first one on."""

    pages: Sequence[PageId]
    first_page: int  # the place of pages[0] in the sequence
    skip: int  # less than a page
    num_tokens: int  # they end in the last page


def pieces_of(reads: Sequence[Read], page_size: int) -> PagePieces:
    if len(reads) == 1:
        return _alone(reads[0], page_size)
    tables, first_pages, skips, nums_tokens = zip(*reads, strict=True)
    counts = np.array([len(pages) for pages in tables])
    pages = _joined(tables, int(counts.sum()))
    ends = (np.array(skips) + np.array(nums_tokens) - 1) % page_size + 1
    return PagePieces(*plan_pieces(pages, counts, np.array(first_pages), np.array(skips), ends, page_size))


def _joined(tables: Sequence[Sequence[PageId]], num_pages: int) -> Ids:
    if num_pages < _LONG_TABLE * len(tables):
        return np.fromiter(chain.from_iterable(tables), np.int64, num_pages)
    return np.concatenate([_known.array_of(pages) for pages in tables])


class _KnownTables:
    """A row reads the pages of the step before, but for one in many: their array is kept by the last of them.

    To compare a list of the same numbers takes a twentieth of what it takes to make an array of them.
    """

    def __init__(self) -> None:
        self._by_last_page: dict[PageId, tuple[list[PageId], Ids]] = {}

    def array_of(self, pages: Sequence[PageId]) -> Ids:
        known = self._by_last_page.get(pages[-1])
        if known is not None and known[0] == pages:
            return known[1]
        array = np.fromiter(pages, np.int64, len(pages))
        if len(self._by_last_page) >= _KEPT_TABLES:
            self._by_last_page.clear()
        self._by_last_page[pages[-1]] = list(pages), array
        return array


_known = _KnownTables()


def _alone(read: Read, page_size: int) -> PagePieces:
    """Make the pieces without a search: where there is one query alone, every microsecond counts."""
    pages = np.array(read.pages, np.int64)
    firsts, ends = np.zeros(len(pages), np.int64), np.full(len(pages), page_size, np.int64)
    firsts[0], ends[-1] = read.skip, (read.skip + read.num_tokens - 1) % page_size + 1
    starts = np.array([0, len(pages), 0, 1])
    return PagePieces(pages, firsts, ends, starts[:2], starts[:1], starts[2:])
