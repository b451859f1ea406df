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

from services.engine.torch.attention.kernels.numba_kernel import PagePieces
from services.engine.torch.attention.kernels.plan_kernel import plan_pieces
from services.values.kv import PageId


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
    pages = np.fromiter(chain.from_iterable(tables), np.int64, int(counts.sum()))
    ends = (np.array(skips) + np.array(nums_tokens) - 1) % page_size + 1
    return PagePieces(*plan_pieces(pages, counts, np.array(first_pages), np.array(skips), ends, page_size))


def _alone(read: Read, page_size: int) -> PagePieces:
    """Make the pieces without a search: where there is one query alone, every microsecond counts."""
    pages = np.array(read.pages, np.int64)
    firsts, ends = np.zeros(len(pages), np.int64), np.full(len(pages), page_size, np.int64)
    firsts[0], ends[-1] = read.skip, (read.skip + read.num_tokens - 1) % page_size + 1
    starts = np.array([0, len(pages), 0, 1])
    return PagePieces(pages, firsts, ends, starts[:2], starts[:1], starts[2:])
