"""Code that numba compiles builds the tables of a step's pieces and their parts (page_pieces.py).

A step of 64 rows has tens of thousands of pages, and the device waits while they are sorted.
"""

from typing import Any

import numpy as np

from services.engine.torch.compiled import compiled, inner

_compiled = compiled()
_inner = inner()


@_compiled
def plan_pieces(pages: Any, counts: Any, first_pages: Any, skips: Any, ends: Any, page_size: Any) -> Any:
    """Return the fields of PagePieces.

    Query i reads the next counts[i] of `pages`, whose first one is page first_pages[i] of its sequence. It
    reads the first one from slot skips[i] on, and the last one up to slot ends[i].
    """
    readings, groups = _group(pages, counts, first_pages, skips, ends, page_size)
    reader_starts, readers = _readers(readings, counts, len(groups))
    bounds = _bounds_of_pieces(groups, reader_starts, readers)
    order = _by_place(groups, bounds)
    num_pieces, num_pages = len(order), len(groups)
    read, page_starts = np.empty((3, num_pages), np.int64), np.zeros(num_pieces + 1, np.int64)
    piece_reader_starts = np.zeros(num_pieces + 1, np.int64)
    at = 0
    for i in range(num_pieces):
        first, end = bounds[order[i]], bounds[order[i] + 1]
        for group in range(first, end):
            read[0, at], read[1, at], read[2, at] = groups[group, 0], groups[group, 2], groups[group, 3]
            at += 1
        page_starts[i + 1] = at
        piece_reader_starts[i + 1] = piece_reader_starts[i] + reader_starts[first + 1] - reader_starts[first]
    of_pieces = np.empty(piece_reader_starts[num_pieces], np.int64)
    at = 0
    for i in range(num_pieces):
        first = bounds[order[i]]
        for j in range(reader_starts[first], reader_starts[first + 1]):
            of_pieces[at] = readers[j]
            at += 1
    return read[0], read[1], read[2], page_starts, of_pieces, piece_reader_starts


@_inner
def _group(pages: Any, counts: Any, first_pages: Any, skips: Any, ends: Any, page_size: Any) -> Any:
    """Return the group of each read, and (page, place, first, end) of each group.

    Reads of the same slots of a page at the same place are a group, if they end with the page. Groups are in
    the order of their first readers, then of their places.
    """
    total, bits = len(pages), 1
    while 1 << bits < 2 * total:
        bits += 1
    lists, following = np.full(1 << bits, -1, np.int32), np.empty(total, np.int32)
    groups, of_reads = np.empty((total, 4), np.int64), np.empty(total, np.int32)
    num_groups, at, last = 0, 0, -1
    for query in range(len(counts)):
        count = counts[query]
        for nth in range(count):
            page, place = pages[at], first_pages[query] + nth
            first = skips[query] if nth == 0 else 0
            end = ends[query] if nth == count - 1 else page_size
            # Readers that share a page mostly share the next one, too.
            found, bucket = last + 1, 0
            if end < page_size:
                found = num_groups
            elif not (found < num_groups and _is(groups[found], page, place, first, end)):
                bucket = ((page * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - bits)
                found = lists[bucket]
                while found >= 0 and not _is(groups[found], page, place, first, end):
                    found = following[found]
                if found < 0:
                    found = num_groups
                    following[found], lists[bucket] = lists[bucket], found
            if found == num_groups:
                row = groups[found]
                row[0], row[1], row[2], row[3] = page, place, first, end
                num_groups += 1
            of_reads[at], last = found, found
            at += 1
    return of_reads, groups[:num_groups]


@_inner
def _is(group: Any, page: Any, place: Any, first: Any, end: Any) -> Any:
    return group[0] == page and group[1] == place and group[2] == first and group[3] == end


@_inner
def _readers(of_reads: Any, counts: Any, num_groups: Any) -> Any:
    """Return the queries that read each group, in order: those from starts[i] to starts[i + 1]."""
    starts = np.zeros(num_groups + 1, np.int64)
    for group in of_reads:
        starts[group + 1] += 1
    for group in range(num_groups):
        starts[group + 1] += starts[group]
    filled, readers = starts[:-1].copy(), np.empty(len(of_reads), np.int64)
    at = 0
    for query in range(len(counts)):
        for _ in range(counts[query]):
            group = of_reads[at]
            readers[filled[group]] = query
            filled[group] += 1
            at += 1
    return starts, readers


@_inner
def _bounds_of_pieces(groups: Any, starts: Any, readers: Any) -> Any:
    """Return the first groups of the pieces: neighbouring groups with the same readers are one piece."""
    num_groups, num_pieces = len(groups), 0
    bounds = np.empty(num_groups + 1, np.int64)
    for group in range(num_groups):
        goes_on = group > 0 and groups[group, 1] == groups[group - 1, 1] + 1
        if goes_on:
            before, own, count = starts[group - 1], starts[group], starts[group + 1] - starts[group]
            goes_on = count == own - before
            i = 0
            while goes_on and i < count:
                goes_on = readers[before + i] == readers[own + i]
                i += 1
        if not goes_on:
            bounds[num_pieces] = group
            num_pieces += 1
    bounds[num_pieces] = num_groups
    return bounds[: num_pieces + 1]


@_inner
def _by_place(groups: Any, bounds: Any) -> Any:
    """Return the pieces in the order of their first pages' places; pieces of one place keep their order."""
    num_pieces = len(bounds) - 1
    least, most = groups[0, 1], groups[0, 1]
    for i in range(num_pieces):
        least, most = min(least, groups[bounds[i], 1]), max(most, groups[bounds[i], 1])
    ends = np.zeros(most - least + 2, np.int64)
    for i in range(num_pieces):
        ends[groups[bounds[i], 1] - least + 1] += 1
    for place in range(most - least + 1):
        ends[place + 1] += ends[place]
    order = np.empty(num_pieces, np.int64)
    for i in range(num_pieces):
        place = groups[bounds[i], 1] - least
        order[ends[place]] = i
        ends[place] += 1
    return order


@_compiled
def plan_parts(outline: Any, sizes: Any) -> Any:
    """Compute the fields of PieceParts and of its Joins from the fields of an Outline.

    `sizes` are (most rows of a narrow part, most readers of any part, query heads per KV head, KV heads,
    programs, fewest pages of a part, page size).
    """
    first_slots, end_slots, page_starts, readers, reader_starts = outline
    narrow, most_readers, group, num_kv_heads, num_programs, least_pages, page_size = sizes
    num_pieces, num_reads = len(page_starts) - 1, 0
    for i in range(num_pieces):
        cuts = -(-(reader_starts[i + 1] - reader_starts[i]) // most_readers)
        num_reads += (page_starts[i + 1] - page_starts[i]) * cuts * num_kv_heads
    most_pages = max(-(-num_reads // num_programs), least_pages)
    num_narrow, num_parts, num_outputs = 0, 0, 0
    for i in range(num_pieces):
        num_pages, num_readers = page_starts[i + 1] - page_starts[i], reader_starts[i + 1] - reader_starts[i]
        page_cuts, reader_cuts = -(-num_pages // most_pages), -(-num_readers // most_readers)
        num_parts += page_cuts * reader_cuts
        num_outputs += page_cuts * num_readers
        for cut in range(reader_cuts):
            own = num_readers * (cut + 1) // reader_cuts - num_readers * cut // reader_cuts
            num_narrow += page_cuts if own * group <= narrow else 0
    table, to_narrow, to_wide = np.empty((num_parts, 7), np.int64), 0, num_narrow
    for i in range(num_pieces):
        num_pages, num_readers = page_starts[i + 1] - page_starts[i], reader_starts[i + 1] - reader_starts[i]
        page_cuts, reader_cuts = -(-num_pages // most_pages), -(-num_readers // most_readers)
        for cut in range(reader_cuts):
            first_reader = reader_starts[i] + num_readers * cut // reader_cuts
            end_reader = reader_starts[i] + num_readers * (cut + 1) // reader_cuts
            for nth in range(page_cuts):
                first_page = page_starts[i] + num_pages * nth // page_cuts
                end_page = page_starts[i] + num_pages * (nth + 1) // page_cuts
                if (end_reader - first_reader) * group <= narrow:
                    part = table[to_narrow]
                    to_narrow += 1
                else:
                    part = table[to_wide]
                    to_wide += 1
                part[0], part[1], part[2], part[3] = first_page, end_page, first_reader, end_reader
                part[5] = first_slots[i] if nth == 0 else 0
                part[6] = end_slots[i] if nth == page_cuts - 1 else page_size
    at, num_queries = 0, 0
    for i in range(num_parts):
        table[i, 4] = at
        at += table[i, 3] - table[i, 2]
    for reader in readers:
        num_queries = max(num_queries, reader + 1)
    readings, starts = _joins(table, readers, num_outputs, num_queries)
    return table, num_narrow, readings, starts


@_compiled
def last_pieces(readers: Any, reader_starts: Any, num_queries: Any) -> Any:
    """Return each query's last piece, or nothing where another query reads one of these, too."""
    lasts, alone = np.empty(num_queries, np.int64), True
    for i in range(len(reader_starts) - 1):
        for j in range(reader_starts[i], reader_starts[i + 1]):
            lasts[readers[j]] = i
    for query in range(num_queries):
        alone = alone and reader_starts[lasts[query] + 1] - reader_starts[lasts[query]] == 1
    return lasts if alone else lasts[:0]


@_compiled
def go_on(pages: Any, page_starts: Any, end_slots: Any, lasts: Any, new_pages: Any) -> Any:
    """Let each query read one slot more in its last piece, and return the pages.

    Query i reads that slot in new_pages[i], which follows its last page, or in its last page if that is -1.
    `page_starts` and `end_slots` are changed.
    """
    num_pieces, num_new = len(end_slots), 0
    added = np.full(num_pieces, -1, np.int64)
    for query in range(len(lasts)):
        added[lasts[query]] = new_pages[query]
        num_new += new_pages[query] >= 0
        end_slots[lasts[query]] = 1 if new_pages[query] >= 0 else end_slots[lasts[query]] + 1
    following, at = np.empty(len(pages) + num_new, pages.dtype), 0
    first = 0  # Pages from here on are not copied yet.
    for i in range(num_pieces):
        end, page_starts[i] = page_starts[i + 1], page_starts[i] + at
        if added[i] >= 0:
            following[first + at : end + at] = pages[first:end]
            following[end + at] = added[i]
            first, at = end, at + 1
    following[first + at :] = pages[first:]
    page_starts[num_pieces] += at
    return following


@_inner
def _joins(table: Any, readers: Any, num_outputs: Any, num_queries: Any) -> Any:
    """Return the outputs of each query, in order: readings from starts[i] to starts[i + 1]."""
    starts = np.zeros(num_queries + 1, np.int64)
    for i in range(len(table)):
        for j in range(table[i, 2], table[i, 3]):
            starts[readers[j] + 1] += 1
    for query in range(num_queries):
        starts[query + 1] += starts[query]
    filled, readings = starts[:-1].copy(), np.empty(num_outputs, np.int64)
    for i in range(len(table)):
        for j in range(table[i, 2], table[i, 3]):
            query = readers[j]
            readings[filled[query]] = table[i, 4] + j - table[i, 2]
            filled[query] += 1
    return readings, starts
