"""Who reads which pages: single tokens that read the same ones, wherever they are, read them together.

Pages that the same queries read are a *piece*: a prefix that several sequences share, a longer prefix that
fewer of them share, and what each has for itself. Where windows cut a page, it is shared by those that begin
at the same slot. Of a page that is still being filled every reader may know another part: it is read alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from services.engine.torch.attention.kernels.decode_kernel import Ids, Pieces
from services.values.kv import PageId


@dataclass(frozen=True, slots=True)
class Read:
    """What one query reads: slots [skip, skip + num_tokens) of its pages, counted from the first one on."""

    pages: Sequence[PageId]
    skip: int  # less than a page
    num_tokens: int  # they end in the last page


def pieces_of(reads: Sequence[Read], page_size: int) -> Pieces:
    """Query i reads reads[i]."""
    pages, firsts, ends, queries = _page_reads(reads, page_size)
    if len(reads) == 1:  # as below, without the search: where there is one alone, every microsecond counts
        return Pieces(pages, firsts, ends, _starts([len(pages)]), queries[:1], _starts([1]))
    slots = pages * page_size + firsts
    names = np.where(ends == page_size, slots, slots.max() + 1 + np.arange(len(pages)))
    by_name = np.argsort(names, kind="stable")
    _, first_reads, counts = np.unique(names[by_name], return_index=True, return_counts=True)
    # By first reader and number of readers: of a tree's pages those with the same ones are neighbours then.
    by_readers = np.lexsort((counts, queries[by_name[first_reads]]))
    first_reads, counts = first_reads[by_readers], counts[by_readers]
    starts = _starts(counts)
    readers = queries[by_name[np.arange(starts[-1]) + np.repeat(first_reads - starts[:-1], counts)]]
    stretches: dict[bytes, list[Ids]] = {}  # by readers
    for start, end in _with_the_same_readers(readers, starts):
        stretch = by_name[first_reads[start:end]]
        stretches.setdefault(readers[starts[start] : starts[start + 1]].tobytes(), []).append(stretch)
    read = np.concatenate([stretch for of_piece in stretches.values() for stretch in of_piece])
    return Pieces(
        pages[read],
        firsts[read],
        ends[read],
        _starts([sum(map(len, of_piece)) for of_piece in stretches.values()]),
        np.frombuffer(b"".join(stretches), readers.dtype).copy(),  # else read-only, to numba another type
        _starts([len(of_piece) // readers.itemsize for of_piece in stretches]),
    )


def _page_reads(reads: Sequence[Read], page_size: int) -> tuple[Ids, Ids, Ids, Ids]:
    """For each page of each query, sorted by query: page, first slot, end slot, query."""
    counts = [len(read.pages) for read in reads]
    tables = [np.asarray(read.pages, np.int64) for read in reads]
    ends_at = np.cumsum(counts)
    firsts, ends = np.zeros(ends_at[-1], np.int64), np.full(ends_at[-1], page_size)
    firsts[ends_at - counts] = [read.skip for read in reads]
    ends[ends_at - 1] = [(read.skip + read.num_tokens - 1) % page_size + 1 for read in reads]
    return np.concatenate(tables), firsts, ends, np.repeat(np.arange(len(reads)), counts)


def _with_the_same_readers(readers: Ids, starts: Ids) -> list[tuple[int, int]]:
    """Stretches [start, end) of pages; those of page i are readers[starts[i] : starts[i + 1]]."""
    counts = np.diff(starts)
    of_next = np.arange(len(readers)) + np.repeat(counts, counts)
    are_equal = readers == readers[np.minimum(of_next, len(readers) - 1)]
    is_like_next = np.logical_and.reduceat(are_equal, starts[:-1])[:-1] & (np.diff(counts) == 0)
    return list(pairwise([0, *(np.flatnonzero(~is_like_next) + 1).tolist(), len(counts)]))


def _starts(lengths: ArrayLike) -> Ids:
    return np.concatenate([[0], np.cumsum(lengths)])
