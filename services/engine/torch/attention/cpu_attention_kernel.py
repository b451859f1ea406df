"""Tokens attend to pages in place, in one pass over K and V that numba compiles.

`attend_pages` takes each KV head and some of its query heads at once, and goes through the pages that they
see. `store_tokens` stores K and V of a step's tokens in pages.

A query's softmax is summed page by page, in the order of its tokens, with one lane of a vector for each of
its heads. The sums are stored between pages without loss. So the result does not depend on which other
queries read a page, or on the thread: a token's attention is the same alone, with the same pages as others,
and in a chunk of a prompt, however that is cut.

With one query or many, a page is read from memory once and multiplied by all of them: query heads are the
lanes of a vector, and each number of K or V scales all of them at once. While a page's K is multiplied its V
is prefetched, then the next page's K. So eight heads take as long as one, and from 16 on the multiplication
decides (float32, one thread, pages of 64 tokens of head_dim 64: 1.9 us per page and KV head for up to 8 query
heads, 3.0 us for 16).

torch's kernels for the CPU are made for many queries and whole sequences. With one query they take twice as
long, and also for pages that 32 queries share.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numpy.typing import NDArray

from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.compiled import compiled, inner
from services.engine.torch.vector_lanes import (
    add,
    exp,
    greater,
    load,
    multiply,
    multiply_rows,
    store,
    subtract,
    tanh,
    width_of,
    zeros,
)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# So many query heads are computed at once. Eight sums of 16 fit into the registers of AVX-512, but not into
# those of AVX2 (pages that 32 queries share take 28 ms there instead of 25). With 32 lanes it would be 10 %
# faster, and take a second more to compile.
_FEW_LANES, _MAX_LANES = 8, 16 if get_host_cpu_features().get("avx512f") else 8

# It is below every score, and finite: the difference from itself is 0.
_LOWEST = np.float32(-3.0e38)

_compiled = compiled()
_inner = inner()


class PagePieces(NamedTuple):
    """Piece i is slots [firsts[j], ends[j]) of pages[j], for j from page_starts[i] to page_starts[i + 1].

    The queries readers[j] read it, for each j from reader_starts[i] to reader_starts[i + 1]; these ascend.
    Every query has a piece, and every piece a page and a reader. A query's pieces are in the order of its
    tokens.
    """

    pages: Ids
    firsts: Ids
    ends: Ids
    page_starts: Ids  # The length is num_pieces + 1.
    readers: Ids
    reader_starts: Ids  # The length is num_pieces + 1.


class Span(NamedTuple):
    """A span is consecutive tokens of a sequence.

    Query i sees the slots [firsts[i], ends[i]), counted through all of `pages`. `firsts` and `ends` ascend.
    """

    pages: Ids
    firsts: Ids  # The length is num_queries.
    ends: Ids  # The length is num_queries.


class _Softmax(NamedTuple):
    # This is the sum of V weighted by exp(score - greatest), [num_queries, num_heads, v_head_dim].
    weighted: Floats
    totals: Floats  # This is the sum of these exponentials, [num_queries, num_heads].
    greatest: Floats  # This is the greatest score, [num_queries, num_heads].


def attend_pages(
    query: Floats,
    numbers: NDArray[Any],
    shape: PageShape,
    layer: int,
    reads: PagePieces | Span,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Floats | None = None,
    shares: Sequence[range] = (),
    executor: Executor | None = None,
) -> Floats:
    """Return each query's attention over all that it reads, [num_queries, num_heads, v_head_dim].

    `query` is [num_queries, num_heads, head_dim]. `numbers` are the pool's, in pages of `shape`: float32,
    bfloat16 as uint16, float16 as int16, or float8_e4m3fn as uint8. `softcap` and `sinks` [num_heads] are as
    in Scores. `shares` cuts [0, num_kv_heads * num_queries): the caller computes the first share, and the
    `executor` the others. Without an executor there is one share.
    """
    num_queries, num_heads = query.shape[:2]
    # The query is made contiguous, since numba would compile the kernel again for other strides.
    query = np.ascontiguousarray(query)
    softmax = _Softmax(
        np.empty((num_queries, num_heads, shape.v_head_dim), np.float32),
        np.empty((num_queries, num_heads), np.float32),
        np.empty((num_queries, num_heads), np.float32),
    )
    sinks = _no_sinks(num_heads) if sinks is None else sinks
    # With a soft cap, scores are computed as parts of it.
    factors = np.float32(scaling / (softcap or 1.0)), np.float32(softcap or 0.0)
    compiled = _attend_pieces if isinstance(reads, PagePieces) else _attend_span
    attend = partial(compiled, query, numbers, shape, layer, factors, reads, softmax, sinks)
    own, *others = shares or [range(shape.num_kv_heads * num_queries)]
    assert executor is not None or not others
    futures = [executor.submit(attend, each.start, each.stop) for each in others] if executor else []
    attend(own.start, own.stop)
    for future in futures:
        future.result()
    return softmax.weighted


@cache
def _no_sinks(num_heads: int) -> Floats:
    return np.full(num_heads, -np.inf, np.float32)


@_compiled
def _attend_pieces(
    query: Any,
    numbers: Any,
    shape: Any,
    layer: Any,
    factors: Any,
    pieces: Any,
    softmax: Any,
    sinks: Any,
    first: Any,
    end: Any,
) -> None:
    """Item k * num_queries + i of [first, end) is query i, its heads that share KV head k."""
    num_queries, group = len(query), query.shape[1] // shape.num_kv_heads
    of_step = (query, numbers, shape, layer, factors, _scratch(shape), softmax)
    nobody = pieces.readers[:0]
    for kv_head in range(first // num_queries, -(-end // num_queries)):
        first_query = max(first - kv_head * num_queries, 0)
        end_query = min(end - kv_head * num_queries, num_queries)
        heads = kv_head * group, (kv_head + 1) * group
        _begin(softmax, heads, (first_query, end_query))
        for piece in range(len(pieces.page_starts) - 1):
            at, end_reader = pieces.reader_starts[piece], pieces.reader_starts[piece + 1]
            while at < end_reader and pieces.readers[at] < first_query:
                at += 1
            while at < end_reader and pieces.readers[end_reader - 1] >= end_query:
                end_reader -= 1
            bounds = pieces.page_starts[piece], pieces.page_starts[piece + 1]
            table = (pieces.pages, pieces.firsts, pieces.ends, bounds, (nobody, nobody))
            num_rows = (end_reader - at) * group
            for first_row in range(0, num_rows, _MAX_LANES):
                rows = (pieces.readers, at, kv_head, first_row, min(_MAX_LANES, num_rows - first_row))
                _attend_some(rows, table, of_step)
        _finish(softmax, sinks, heads, (first_query, end_query))


@_compiled
def _attend_span(
    query: Any,
    numbers: Any,
    shape: Any,
    layer: Any,
    factors: Any,
    span: Any,
    softmax: Any,
    sinks: Any,
    first: Any,
    end: Any,
) -> None:
    """Attend as _attend_pieces does: the rows of neighbouring tokens read the union of what they see."""
    num_queries, group = len(query), query.shape[1] // shape.num_kv_heads
    of_step = (query, numbers, shape, layer, factors, _scratch(shape), softmax)
    queries, page_size = np.arange(num_queries), shape.page_size
    firsts, ends = np.empty(len(span.pages), np.int64), np.empty(len(span.pages), np.int64)
    for kv_head in range(first // num_queries, -(-end // num_queries)):
        first_query = max(first - kv_head * num_queries, 0)
        end_query = min(end - kv_head * num_queries, num_queries)
        heads = kv_head * group, (kv_head + 1) * group
        _begin(softmax, heads, (first_query, end_query))
        num_rows = (end_query - first_query) * group
        for first_row in range(0, num_rows, _MAX_LANES):
            count = min(_MAX_LANES, num_rows - first_row)
            seen_from = span.firsts[first_query + first_row // group]
            seen_to = span.ends[first_query + (first_row + count - 1) // group]
            bounds = seen_from // page_size, -(-seen_to // page_size)
            for j in range(bounds[0], bounds[1]):
                firsts[j] = max(seen_from - j * page_size, 0)
                ends[j] = min(seen_to - j * page_size, page_size)
            table = (span.pages, firsts, ends, bounds, (span.firsts, span.ends))
            _attend_some((queries, first_query, kv_head, first_row, count), table, of_step)
        _finish(softmax, sinks, heads, (first_query, end_query))


@_inner
def _scratch(shape: Any) -> Any:
    return np.zeros((shape.head_dim + shape.v_head_dim + shape.page_size + 3) * _MAX_LANES, np.float32)


@_inner
def _attend_some(rows: Any, table: Any, of_step: Any) -> None:
    """Attend with at most _MAX_LANES `rows`, (readers, at, kv_head, first_row, num_rows): see _row_of.

    `table` is (pages, firsts, ends, (start, end), (seen_firsts, seen_ends)): slots [firsts[j], ends[j]) of
    pages[j] for each j from start to end. Each reader sees what a Span's does, or all slots if seen_firsts
    and seen_ends are empty.
    """
    if rows[4] <= _FEW_LANES:
        _attend_rows(zeros(_FEW_LANES), rows, table, of_step)
    else:
        _attend_rows(zeros(_MAX_LANES), rows, table, of_step)


@_inner
def _attend_rows(zero: Any, rows: Any, table: Any, of_step: Any) -> None:
    query, numbers, shape, layer, (scaling, softcap), scratch, softmax = of_step
    pages, firsts, ends, bounds, seen = table
    kv_head, num_rows = rows[2], rows[4]
    num_layers, num_kv_heads, page_size, head_dim, v_head_dim = shape
    group, width = query.shape[1] // num_kv_heads, width_of(zero)
    # These are the places of this head's K and V in a page.
    keys_size, values_size = page_size * head_dim, page_size * v_head_dim
    of_layer = num_kv_heads * (keys_size + values_size)
    own_keys = layer * of_layer + kv_head * keys_size
    own_values = layer * of_layer + num_kv_heads * keys_size + kv_head * values_size
    # These lie in scratch, each with a row of lanes for each index: [head_dim, width], [v_head_dim, width],
    # ...
    weighted, scores = head_dim * width, (head_dim + v_head_dim) * width
    sums = scores + page_size * width
    caps = sums + 2 * width
    scratch[:scores] = 0.0
    scratch[sums:caps] = 0.0
    scratch[caps : caps + width] = softcap
    for lane in range(num_rows):
        reader, head = _row_of(rows, lane, group)
        for d in range(head_dim):
            scratch[d * width + lane] = query[reader, head, d] * scaling
        for d in range(v_head_dim):
            scratch[weighted + d * width + lane] = softmax.weighted[reader, head, d]
        scratch[sums + lane] = softmax.greatest[reader, head]
        scratch[sums + width + lane] = softmax.totals[reader, head]
    greatest, total = load(scratch, sums, zero), load(scratch, sums + width, zero)
    start_page, end_page = bounds
    for j in range(start_page, end_page):
        first, num_tokens = firsts[j], ends[j] - firsts[j]
        page = pages[j] * num_layers * of_layer
        keys, values = page + own_keys + first * head_dim, page + own_values + first * v_head_dim
        _multiply(numbers, keys, (head_dim, 1), (num_tokens, head_dim), scratch, 0, scores, zero, values)
        if softcap > 0.0:
            cap = load(scratch, caps, zero)
            for slot in range(num_tokens):
                part = load(scratch, scores + slot * width, zero)
                store(scratch, scores + slot * width, multiply(tanh(part), cap))
        is_hiding = _hide(
            rows, group, seen, (j * page_size + first, num_tokens), scratch, scores, width, _LOWEST
        )
        peak = greatest
        for slot in range(num_tokens):
            peak = greater(load(scratch, scores + slot * width, zero), peak)
        shrunk = exp(subtract(greatest, peak))
        greatest, total = peak, multiply(total, shrunk)
        for slot in range(num_tokens):
            weight = exp(subtract(load(scratch, scores + slot * width, zero), peak))
            store(scratch, scores + slot * width, weight)
        if is_hiding:
            _hide(rows, group, seen, (j * page_size + first, num_tokens), scratch, scores, width, 0.0)
        for slot in range(num_tokens):
            total = add(total, load(scratch, scores + slot * width, zero))
        ahead = pages[min(j + 1, end_page - 1)] * num_layers * of_layer + own_keys
        of_values = (v_head_dim, num_tokens)
        _multiply(numbers, values, (1, v_head_dim), of_values, scratch, scores, weighted, shrunk, ahead)
    store(scratch, sums, greatest)
    store(scratch, sums + width, total)
    for lane in range(num_rows):
        reader, head = _row_of(rows, lane, group)
        for d in range(v_head_dim):
            softmax.weighted[reader, head, d] = scratch[weighted + d * width + lane]
        softmax.greatest[reader, head] = scratch[sums + lane]
        softmax.totals[reader, head] = scratch[sums + width + lane]


@_inner
def _row_of(rows: Any, lane: Any, group: Any) -> Any:
    readers, at, kv_head, first_row, _ = rows
    row = first_row + lane
    return readers[at + row // group], kv_head * group + row % group


@_inner
def _hide(
    rows: Any, group: Any, seen: Any, slots: Any, scratch: Any, scores: Any, width: Any, value: Any
) -> Any:
    """Write `value` to scores of `slots` (first, count) that a row's token does not see; return if any."""
    (seen_firsts, seen_ends), (first, num_slots), is_hiding = seen, slots, False
    if len(seen_firsts) == 0:
        return False
    for lane in range(rows[4]):
        reader, _ = _row_of(rows, lane, group)
        start = min(max(seen_firsts[reader] - first, 0), num_slots)
        stop = min(max(seen_ends[reader] - first, start), num_slots)
        if start > 0 or stop < num_slots:
            is_hiding = True
            for slot in range(start):
                scratch[scores + slot * width + lane] = value
            for slot in range(stop, num_slots):
                scratch[scores + slot * width + lane] = value
    return is_hiding


@_inner
def _begin(softmax: Any, heads: Any, queries: Any) -> None:
    softmax.weighted[queries[0] : queries[1], heads[0] : heads[1]] = 0.0
    softmax.totals[queries[0] : queries[1], heads[0] : heads[1]] = 0.0
    softmax.greatest[queries[0] : queries[1], heads[0] : heads[1]] = _LOWEST


@_inner
def _finish(softmax: Any, sinks: Any, heads: Any, queries: Any) -> None:
    """Divide by the totals.

    A head's sink, a score without a value (-inf means none), is added once, here.
    """
    for i in range(queries[0], queries[1]):
        for head in range(heads[0], heads[1]):
            greatest = softmax.greatest[i, head]
            peak = max(greatest, sinks[head])
            shrunk = np.exp(greatest - peak)
            share = shrunk / (softmax.totals[i, head] * shrunk + np.exp(sinks[head] - peak))
            for d in range(softmax.weighted.shape[2]):
                softmax.weighted[i, head, d] *= share


@_inner
def _multiply(
    matrix: Any,
    first: Any,
    strides: Any,
    shape: Any,
    scratch: Any,
    factors: Any,
    products: Any,
    kept: Any,
    ahead: Any,
) -> None:
    """Call multiply_rows for any number of rows; `shape` is the matrix's.

    It prefetches as many numbers as it reads.
    """
    num_rows, num_columns = shape
    i = 0
    while i < num_rows:
        at, to, fetched = first + i * strides[0], products + i * width_of(kept), ahead + i * num_columns
        if i + 8 <= num_rows:
            multiply_rows(8, matrix, at, strides, num_columns, scratch, factors, to, kept, fetched)
            i += 8
        elif i + 4 <= num_rows:
            multiply_rows(4, matrix, at, strides, num_columns, scratch, factors, to, kept, fetched)
            i += 4
        else:
            multiply_rows(1, matrix, at, strides, num_columns, scratch, factors, to, kept, fetched)
            i += 1


class Slots(NamedTuple):
    """K and V of the step's token rows[i] go into slot slots[i] of pages[i]."""

    rows: Ids
    pages: Ids
    slots: Ids


def store_tokens(
    keys: NDArray[Any],
    values: NDArray[Any],
    numbers: NDArray[Any],
    shape: PageShape,
    layer: int,
    slots: Slots,
) -> None:
    """Store `keys` and `values` [total, num_kv_heads, ..] in the pool's `numbers`, in pages of `shape`.

    All have the same type.
    """
    # They are made contiguous, as attend_pages does with its query.
    _store(np.ascontiguousarray(keys), np.ascontiguousarray(values), numbers, shape, layer, slots)


@compiled()
def _store(keys: Any, values: Any, numbers: Any, shape: Any, layer: Any, to: Any) -> None:
    num_layers, num_kv_heads, page_size, head_dim, v_head_dim = shape
    keys_size = num_kv_heads * page_size * head_dim
    of_layer = keys_size + num_kv_heads * page_size * v_head_dim
    for i in range(len(to.rows)):
        at = (to.pages[i] * num_layers + layer) * of_layer
        for head in range(num_kv_heads):
            slot = head * page_size + to.slots[i]
            for d in range(head_dim):
                numbers[at + slot * head_dim + d] = keys[to.rows[i], head, d]
            for d in range(v_head_dim):
                numbers[at + keys_size + slot * v_head_dim + d] = values[to.rows[i], head, d]
