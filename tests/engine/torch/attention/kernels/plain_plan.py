"""pieces_of and cut_pieces by numpy, as plainly as it can: what is compiled is held against them."""

import numpy as np

from services.engine.torch.attention.cpu_attention_kernel import PagePieces
from services.engine.torch.attention.page_pieces import _LEAST_TOKENS, Joins, PieceParts, rows_of


def pieces_plainly(reads, page_size):
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


def _page_reads(reads, page_size):
    """Return for each page of each query, sorted by query: page, its place, first slot, end slot, query."""
    counts = [len(read.pages) for read in reads]
    tables = [np.asarray(read.pages, np.int64) for read in reads]
    ends_at = np.cumsum(counts)
    firsts, ends = np.zeros(ends_at[-1], np.int64), np.full(ends_at[-1], page_size)
    firsts[ends_at - counts] = [read.skip for read in reads]
    ends[ends_at - 1] = [(read.skip + read.num_tokens - 1) % page_size + 1 for read in reads]
    places = _stretches(np.array([read.first_page for read in reads]), np.array(counts))
    return np.concatenate(tables), places, firsts, ends, np.repeat(np.arange(len(reads)), counts)


def _are_first_of_a_piece(readers, starts, places):
    counts = np.diff(starts)
    of_next = np.arange(len(readers)) + np.repeat(counts, counts)
    are_equal = readers == readers[np.minimum(of_next, len(readers) - 1)]
    is_like_next = np.logical_and.reduceat(are_equal, starts[:-1])[:-1]
    goes_on = is_like_next & (np.diff(counts) == 0) & (np.diff(places) == 1)
    return np.append(True, ~goes_on)


def _stretches(starts, lengths):
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def _starts(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


def cut_plainly(pieces, kv, num_heads, num_programs):
    num_kv_heads, page_size = kv.shape.num_kv_heads, kv.shape.page_size
    group = num_heads // num_kv_heads
    narrow, wide = rows_of(kv, num_heads)
    num_pages, num_readers = np.diff(pieces.page_starts), np.diff(pieces.reader_starts)
    reader_cuts = -(-num_readers // (wide // group))
    num_reads = int((num_pages * reader_cuts).sum()) * num_kv_heads
    page_cuts = -(-num_pages // max(-(-num_reads // num_programs), -(-_LEAST_TOKENS // page_size)))
    counts = page_cuts * reader_cuts
    piece = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_pages = _bounds(pieces.page_starts, page_cuts, piece, nth % page_cuts[piece])
    by_readers = _bounds(pieces.reader_starts, reader_cuts, piece, nth // page_cuts[piece])
    is_wide = (by_readers[1] - by_readers[0]) * group > narrow
    columns = np.stack([*by_pages, *by_readers], axis=1)[np.argsort(is_wide, kind="stable")]
    sizes = columns[:, 3] - columns[:, 2]
    first_outputs = np.cumsum(sizes) - sizes
    slots = pieces.firsts[columns[:, 0]], pieces.ends[columns[:, 1] - 1]
    table = np.concatenate([columns, np.stack([first_outputs, *slots], axis=1)], axis=1)
    return PieceParts(table, int((~is_wide).sum()), _joins(pieces.readers, table))


def _bounds(starts, cuts, piece, nth):
    start, length, count = starts[piece], np.diff(starts)[piece], cuts[piece]
    return start + length * nth // count, start + length * (nth + 1) // count


def _joins(readers, table):
    first_readers, end_readers, first_outputs = table[:, 2:5].T
    sizes = end_readers - first_readers
    queries = readers[np.arange(sizes.sum()) + np.repeat(first_readers - first_outputs, sizes)]
    readings = np.argsort(queries, kind="stable")
    return Joins(readings, np.searchsorted(queries[readings], np.arange(queries.max() + 2)))
