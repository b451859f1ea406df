"""Attention of single tokens over pages, where they lie: one pass over K and V, compiled by numba.

    attend_pages   1. for each piece and KV head: all heads of all its readers, over all its pages
                   2. each query joins what it reads in several pieces, by their log-sum-exps

A piece is pages that the same queries read. Whether those are one or many, a page is read from memory once
and multiplied by all of them: query heads are the lanes of a vector, and each number of K or V scales all of
them at once. While a page's K is multiplied its V is fetched, then the next page's K. So eight heads cost
what one does, and from 16 on it takes what the processor needs to multiply (float32, one thread, pages of 64
tokens of head_dim 64: 1.9 us a page and KV head for up to 8 query heads, 3.0 us for 16).

torch's kernels for the CPU are made for many queries and whole sequences. With one query they take twice as
long, and so they do for what 32 queries share in such pages.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import njit
from numpy.typing import NDArray

from services.engine.torch.lanes import (
    add,
    exp,
    greater,
    load,
    multiply,
    multiply_rows,
    store,
    subtract,
    width_of,
    zeros,
)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Query heads that are computed at once. Eight sums of 16 fit into the registers of AVX-512, not into those of
# AVX2 (what 32 queries share takes 28 ms there instead of 25). With 32 it would be 10 % faster, and take a
# second more to compile.
_FEW_LANES, _MAX_LANES = 8, 16 if get_host_cpu_features().get("avx512f") else 8

_compiled = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)
_inner = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)


class Pieces(NamedTuple):
    """Piece i is the first tokens[j] slots of pages[j], for each j from page_starts[i] to page_starts[i + 1].

    The queries readers[j] read it, for each j from reader_starts[i] to reader_starts[i + 1]. Nobody reads
    nothing: every query has a piece, and every piece a page and a reader.
    """

    pages: Ids
    tokens: Ids
    page_starts: Ids  # [num_pieces + 1]
    readers: Ids
    reader_starts: Ids  # [num_pieces + 1]


class Joins(NamedTuple):
    """Query i is Pieces.readers[readings[j]] for each j from starts[i] to starts[i + 1]."""

    readings: Ids
    starts: Ids  # [num_queries + 1]


def attend_pages(
    query: Floats,
    kv: NDArray[Any],
    layer: int,
    pieces: Pieces,
    joins: Joins,
    scaling: float,
    *,
    shares: Sequence[range] = (),
    executor: Executor | None = None,
) -> Floats:
    """Each query's attention over all that it reads, [num_queries, num_heads, head_dim] as `query`.

    `kv` is the pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim] and contiguous, of
    float32, bfloat16 as uint16, or float16 as int16. `shares` cut [0, num_pieces * num_kv_heads) into what
    the caller computes and, beside it, the `executor`; without one there is a single share.
    """
    num_heads, head_dim = query.shape[1:]
    outputs = np.empty((len(pieces.readers), num_heads, head_dim), np.float32)
    log_sums = np.empty((len(pieces.readers), num_heads), np.float32)
    # In the usual order, whatever `query` is a view of: for another one the kernel would be compiled anew.
    numbers, scaled = kv.reshape(-1), np.multiply(query, np.float32(scaling), order="C")
    attend = partial(_attend_pieces, scaled, numbers, kv.shape, layer, pieces, outputs, log_sums)
    own, *others = shares or [range((len(pieces.page_starts) - 1) * kv.shape[3])]
    assert executor is not None or not others
    futures = [executor.submit(attend, share.start, share.stop) for share in others] if executor else []
    attend(own.start, own.stop)
    for future in futures:
        future.result()
    joined: Floats = _joined(joins, outputs, log_sums)
    return joined


@_compiled
def _attend_pieces(
    query: Any,
    kv: Any,
    shape: Any,
    layer: Any,
    pieces: Any,
    outputs: Any,
    log_sums: Any,
    first: Any,
    end: Any,
) -> None:
    """Item i * num_kv_heads + k of [first, end): piece i, the heads of its readers that share KV head k."""
    num_kv_heads, page_size, head_dim = shape[3:]
    group = query.shape[1] // num_kv_heads
    scratch = np.zeros((2 * head_dim + page_size + 2) * _MAX_LANES, np.float32)
    for item in range(first, end):
        piece, kv_head = item // num_kv_heads, item % num_kv_heads
        num_rows = (pieces.reader_starts[piece + 1] - pieces.reader_starts[piece]) * group
        for first_row in range(0, num_rows, _MAX_LANES):
            place = (layer, piece, kv_head, first_row, min(_MAX_LANES, num_rows - first_row))
            if place[4] <= _FEW_LANES:
                _attend_rows(zeros(_FEW_LANES), place, query, kv, shape, pieces, scratch, outputs, log_sums)
            else:
                _attend_rows(zeros(_MAX_LANES), place, query, kv, shape, pieces, scratch, outputs, log_sums)


@_inner
def _attend_rows(
    zero: Any,
    place: Any,
    query: Any,
    kv: Any,
    shape: Any,
    pieces: Any,
    scratch: Any,
    outputs: Any,
    log_sums: Any,
) -> None:
    """Rows [first_row, first_row + num_rows) of a piece: as many as `zero` has lanes, or fewer."""
    layer, piece, kv_head, _, num_rows = place
    num_layers, _, num_kv_heads, page_size, head_dim = shape[1:]
    width, head_size = width_of(zero), page_size * head_dim
    # In scratch, each with a row of lanes for each index: [head_dim, width], [page_size, width], ...
    weighted, scores = head_dim * width, 2 * head_dim * width
    sums = scores + page_size * width
    scratch[:sums] = 0.0
    scratch[sums : sums + width] = -np.inf
    for lane in range(num_rows):
        reading, head = _row_of(place, lane, pieces, query.shape[1] // num_kv_heads)
        for d in range(head_dim):
            scratch[d * width + lane] = query[pieces.readers[reading], head, d]
    # Of the softmax so far: the greatest score, and the sum of all exponentials over that one's.
    greatest, total = load(scratch, sums, zero), zero
    end_page = pieces.page_starts[piece + 1]
    for j in range(pieces.page_starts[piece], end_page):
        num_tokens = pieces.tokens[j]
        head_index = 2 * layer * num_kv_heads + kv_head
        keys = (pieces.pages[j] * num_layers * 2 * num_kv_heads + head_index) * head_size
        values = keys + num_kv_heads * head_size
        _multiply(kv, keys, (head_dim, 1), (num_tokens, head_dim), scratch, 0, scores, zero, values)
        peak = greatest
        for slot in range(num_tokens):
            peak = greater(load(scratch, scores + slot * width, zero), peak)
        shrunk = exp(subtract(greatest, peak))
        greatest, total = peak, multiply(total, shrunk)
        for slot in range(num_tokens):
            weight = exp(subtract(load(scratch, scores + slot * width, zero), peak))
            store(scratch, scores + slot * width, weight)
            total = add(total, weight)
        next_page = pieces.pages[min(j + 1, end_page - 1)]
        ahead = (next_page * num_layers * 2 * num_kv_heads + head_index) * head_size
        _multiply(kv, values, (1, head_dim), (head_dim, num_tokens), scratch, scores, weighted, shrunk, ahead)
    store(scratch, sums, greatest)
    store(scratch, sums + width, total)
    for lane in range(num_rows):
        reading, head = _row_of(place, lane, pieces, query.shape[1] // num_kv_heads)
        share = np.float32(1.0) / scratch[sums + width + lane]
        for d in range(head_dim):
            outputs[reading, head, d] = scratch[weighted + d * width + lane] * share
        log_sums[reading, head] = scratch[sums + lane] + np.log(scratch[sums + width + lane])


@_inner
def _row_of(place: Any, lane: Any, pieces: Any, group: Any) -> Any:
    """Which reading (an index of readers), and which of its heads."""
    _, piece, kv_head, first_row, _ = place
    row = first_row + lane
    return pieces.reader_starts[piece] + row // group, kv_head * group + row % group


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
    """multiply_rows for any number of rows; `shape` is the matrix's. Fetches as many numbers as it reads."""
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


@_compiled
def _joined(joins: Any, outputs: Any, log_sums: Any) -> Any:
    num_queries, num_heads, head_dim = len(joins.starts) - 1, outputs.shape[1], outputs.shape[2]
    joined = np.zeros((num_queries, num_heads, head_dim), np.float32)
    for i in range(num_queries):
        readings = joins.readings[joins.starts[i] : joins.starts[i + 1]]
        for head in range(num_heads):
            peak = np.float32(-np.inf)
            for reading in readings:
                peak = max(peak, log_sums[reading, head])
            total = np.float32(0.0)
            for reading in readings:
                total += np.exp(log_sums[reading, head] - peak)
            for reading in readings:
                share = np.exp(log_sums[reading, head] - peak) / total
                for d in range(head_dim):
                    joined[i, head, d] += share * outputs[reading, head, d]
    return joined
