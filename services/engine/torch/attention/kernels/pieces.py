"""Single tokens that read the same pages at the same place read them together.

Neighbouring pages that the same queries read are a *piece*: a prefix that several sequences share, a longer
prefix that fewer of them share, and what each has for itself. Where windows cut a page, it is shared by those
that begin at the same slot. Of a page that is still being filled every reader may know another part: it is
read alone. PagePieces come in the order of their places, so that each query reads its tokens in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.engine.torch.attention.kernels.numba_kernel import Ids, PagePieces
from services.values.kv import PageId


@dataclass(frozen=True, slots=True)
class Read:
    """One query reads slots [skip, skip + num_tokens) of its pages, counted from the first one on."""

    pages: Sequence[PageId]
    first_page: int  # the place of pages[0] in the sequence
    skip: int  # less than a page
    num_tokens: int  # they end in the last page


def pieces_of(reads: Sequence[Read], page_size: int) -> PagePieces:
    if len(reads) == 1:
        return _alone(reads[0], page_size)
    pages, places, firsts, ends, queries = _page_reads(reads, page_size)
    slots = (places * (pages.max() + 1) + pages) * page_size + firsts
    names = np.where(ends == page_size, slots, slots.max() + 1 + np.arange(len(pages)))
    by_name = np.argsort(names, kind="stable")
    starts = np.flatnonzero(np.diff(names[by_name], prepend=-1))
    counts = np.diff(starts, append=len(pages))
    # The order is by first reader, then by place: pages that are neighbours for the same readers are
    # neighbours then.
    first_reads = by_name[starts]
    by_readers = np.lexsort((places[first_reads], queries[first_reads]))
    first_reads, counts = first_reads[by_readers], counts[by_readers]
    readers = queries[by_name[_stretches(starts[by_readers], counts)]]
    reader_starts = _starts(counts)
    begins = _are_first_of_a_piece(readers, reader_starts, places[first_reads])
    bounds = np.append(np.flatnonzero(begins), len(counts))
    order = np.argsort(places[first_reads[bounds[:-1]]], kind="stable")
    firsts_of, sizes = bounds[:-1][order], np.diff(bounds)[order]
    read = first_reads[_stretches(firsts_of, sizes)]
    return PagePieces(
        pages[read],
        firsts[read],
        ends[read],
        _starts(sizes),
        readers[_stretches(reader_starts[firsts_of], counts[firsts_of])],
        _starts(counts[firsts_of]),
    )


def _alone(read: Read, page_size: int) -> PagePieces:
    """Make the pieces without a search: where there is one query alone, every microsecond counts."""
    pages = np.array(read.pages, np.int64)
    firsts, ends = np.zeros(len(pages), np.int64), np.full(len(pages), page_size, np.int64)
    firsts[0], ends[-1] = read.skip, (read.skip + read.num_tokens - 1) % page_size + 1
    starts = np.array([0, len(pages), 0, 1])
    return PagePieces(pages, firsts, ends, starts[:2], starts[:1], starts[2:])


def _page_reads(reads: Sequence[Read], page_size: int) -> tuple[Ids, Ids, Ids, Ids, Ids]:
    """Return for each page of each query, sorted by query: page, its place, first slot, end slot, query."""
    counts = [len(read.pages) for read in reads]
    tables = [np.asarray(read.pages, np.int64) for read in reads]
    ends_at = np.cumsum(counts)
    firsts, ends = np.zeros(ends_at[-1], np.int64), np.full(ends_at[-1], page_size)
    firsts[ends_at - counts] = [read.skip for read in reads]
    ends[ends_at - 1] = [(read.skip + read.num_tokens - 1) % page_size + 1 for read in reads]
    places = _stretches(np.array([read.first_page for read in reads]), np.array(counts))
    return np.concatenate(tables), places, firsts, ends, np.repeat(np.arange(len(reads)), counts)


def _are_first_of_a_piece(readers: Ids, starts: Ids, places: Ids) -> NDArray[np.bool]:
    counts = np.diff(starts)
    of_next = np.arange(len(readers)) + np.repeat(counts, counts)
    are_equal = readers == readers[np.minimum(of_next, len(readers) - 1)]
    is_like_next = np.logical_and.reduceat(are_equal, starts[:-1])[:-1]
    goes_on = is_like_next & (np.diff(counts) == 0) & (np.diff(places) == 1)
    return np.append(True, ~goes_on)


def _stretches(starts: Ids, lengths: Ids) -> Ids:
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def _starts(lengths: ArrayLike) -> Ids:
    return np.concatenate([[0], np.cumsum(lengths)])
