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
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import njit
from numpy.typing import NDArray

from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.lanes import (
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

# Query heads that are computed at once. Eight sums of 16 fit into the registers of AVX-512, not into those of
# AVX2 (what 32 queries share takes 28 ms there instead of 25). With 32 it would be 10 % faster, and take a
# second more to compile.
_FEW_LANES, _MAX_LANES = 8, 16 if get_host_cpu_features().get("avx512f") else 8

_compiled = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)
_inner = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)


class Pieces(NamedTuple):
    """Piece i is slots [firsts[j], ends[j]) of pages[j], for j from page_starts[i] to page_starts[i + 1].

    The queries readers[j] read it, for each j from reader_starts[i] to reader_starts[i + 1]. Nobody reads
    nothing: every query has a piece, and every piece a page and a reader.
    """

    pages: Ids
    firsts: Ids
    ends: Ids
    page_starts: Ids  # [num_pieces + 1]
    readers: Ids
    reader_starts: Ids  # [num_pieces + 1]


class Joins(NamedTuple):
    """Query i is Pieces.readers[readings[j]] for each j from starts[i] to starts[i + 1]."""

    readings: Ids
    starts: Ids  # [num_queries + 1]


def attend_pages(
    query: Floats,
    numbers: NDArray[Any],
    shape: PageShape,
    layer: int,
    pieces: Pieces,
    joins: Joins,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Floats | None = None,
    shares: Sequence[range] = (),
    executor: Executor | None = None,
) -> Floats:
    """Each query's attention over all that it reads, [num_queries, num_heads, v_head_dim].

    `query` is [num_queries, num_heads, head_dim]; `numbers` are the pool's, in pages of `shape`: float32,
    bfloat16 as uint16, or float16 as int16. `softcap` and `sinks` [num_heads] are as in Scores. `shares` cut
    [0, num_pieces * num_kv_heads) into what the caller computes and, beside it, the `executor`; without one
    there is a single share.
    """
    num_heads = query.shape[1]
    outputs = np.empty((len(pieces.readers), num_heads, shape.v_head_dim), np.float32)
    log_sums = np.empty((len(pieces.readers), num_heads), np.float32)
    # In the usual order, whatever `query` is a view of: for another one the kernel would be compiled anew.
    # With a soft cap, scores are made as parts of it.
    scaled = np.multiply(query, np.float32(scaling / (softcap or 1.0)), order="C")
    cap = np.float32(softcap or 0.0)
    attend = partial(_attend_pieces, scaled, numbers, shape, layer, cap, pieces, outputs, log_sums)
    own, *others = shares or [range((len(pieces.page_starts) - 1) * shape.num_kv_heads)]
    assert executor is not None or not others
    futures = [executor.submit(attend, share.start, share.stop) for share in others] if executor else []
    attend(own.start, own.stop)
    for future in futures:
        future.result()
    joined: Floats = _joined(joins, outputs, log_sums, _no_sinks(num_heads) if sinks is None else sinks)
    return joined


@cache
def _no_sinks(num_heads: int) -> Floats:
    return np.full(num_heads, -np.inf, np.float32)


@_compiled
def _attend_pieces(
    query: Any,
    numbers: Any,
    shape: Any,
    layer: Any,
    softcap: Any,
    pieces: Any,
    outputs: Any,
    log_sums: Any,
    first: Any,
    end: Any,
) -> None:
    """Item i * num_kv_heads + k of [first, end): piece i, the heads of its readers that share KV head k."""
    num_kv_heads = shape.num_kv_heads
    group = query.shape[1] // num_kv_heads
    rows_of_lanes = shape.head_dim + shape.v_head_dim + shape.page_size + 3
    scratch = np.zeros(rows_of_lanes * _MAX_LANES, np.float32)
    for item in range(first, end):
        piece, kv_head = item // num_kv_heads, item % num_kv_heads
        num_rows = (pieces.reader_starts[piece + 1] - pieces.reader_starts[piece]) * group
        for first_row in range(0, num_rows, _MAX_LANES):
            place = (layer, piece, kv_head, first_row, min(_MAX_LANES, num_rows - first_row))
            of_step = (query, numbers, shape, softcap, pieces, scratch, outputs, log_sums)
            if place[4] <= _FEW_LANES:
                _attend_rows(zeros(_FEW_LANES), place, of_step)
            else:
                _attend_rows(zeros(_MAX_LANES), place, of_step)


@_inner
def _attend_rows(zero: Any, place: Any, of_step: Any) -> None:
    """Rows [first_row, first_row + num_rows) of a piece: as many as `zero` has lanes, or fewer."""
    layer, piece, kv_head, _, num_rows = place
    query, numbers, shape, softcap, pieces, scratch, outputs, log_sums = of_step
    num_layers, num_kv_heads, page_size, head_dim, v_head_dim = shape
    width = width_of(zero)
    # Of the numbers: where in a page this head's K and V are.
    keys_size, values_size = page_size * head_dim, page_size * v_head_dim
    of_layer = num_kv_heads * (keys_size + values_size)
    own_keys = layer * of_layer + kv_head * keys_size
    own_values = layer * of_layer + num_kv_heads * keys_size + kv_head * values_size
    # In scratch, each with a row of lanes for each index: [head_dim, width], [v_head_dim, width], ...
    weighted, scores = head_dim * width, (head_dim + v_head_dim) * width
    sums = scores + page_size * width
    caps = sums + 2 * width
    scratch[:sums] = 0.0
    scratch[sums : sums + width] = -np.inf
    scratch[caps : caps + width] = softcap
    for lane in range(num_rows):
        reading, head = _row_of(place, lane, pieces, query.shape[1] // num_kv_heads)
        for d in range(head_dim):
            scratch[d * width + lane] = query[pieces.readers[reading], head, d]
    # Of the softmax so far: the greatest score, and the sum of all exponentials over that one's.
    greatest, total = load(scratch, sums, zero), zero
    end_page = pieces.page_starts[piece + 1]
    for j in range(pieces.page_starts[piece], end_page):
        first, num_tokens = pieces.firsts[j], pieces.ends[j] - pieces.firsts[j]
        page = pieces.pages[j] * num_layers * of_layer
        keys, values = page + own_keys + first * head_dim, page + own_values + first * v_head_dim
        _multiply(numbers, keys, (head_dim, 1), (num_tokens, head_dim), scratch, 0, scores, zero, values)
        if softcap > 0.0:
            cap = load(scratch, caps, zero)
            for slot in range(num_tokens):
                part = load(scratch, scores + slot * width, zero)
                store(scratch, scores + slot * width, multiply(tanh(part), cap))
        peak = greatest
        for slot in range(num_tokens):
            peak = greater(load(scratch, scores + slot * width, zero), peak)
        shrunk = exp(subtract(greatest, peak))
        greatest, total = peak, multiply(total, shrunk)
        for slot in range(num_tokens):
            weight = exp(subtract(load(scratch, scores + slot * width, zero), peak))
            store(scratch, scores + slot * width, weight)
            total = add(total, weight)
        ahead = pieces.pages[min(j + 1, end_page - 1)] * num_layers * of_layer + own_keys
        of_values = (v_head_dim, num_tokens)
        _multiply(numbers, values, (1, v_head_dim), of_values, scratch, scores, weighted, shrunk, ahead)
    store(scratch, sums, greatest)
    store(scratch, sums + width, total)
    for lane in range(num_rows):
        reading, head = _row_of(place, lane, pieces, query.shape[1] // num_kv_heads)
        share = np.float32(1.0) / scratch[sums + width + lane]
        for d in range(v_head_dim):
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
def _joined(joins: Any, outputs: Any, log_sums: Any, sinks: Any) -> Any:
    """A head's sink, a score without a value (-inf: none), is joined here, and so once for each query."""
    num_queries, num_heads, v_head_dim = len(joins.starts) - 1, outputs.shape[1], outputs.shape[2]
    joined = np.zeros((num_queries, num_heads, v_head_dim), np.float32)
    for i in range(num_queries):
        readings = joins.readings[joins.starts[i] : joins.starts[i + 1]]
        for head in range(num_heads):
            peak = sinks[head]
            for reading in readings:
                peak = max(peak, log_sums[reading, head])
            total = np.exp(sinks[head] - peak)
            for reading in readings:
                total += np.exp(log_sums[reading, head] - peak)
            for reading in readings:
                share = np.exp(log_sums[reading, head] - peak) / total
                for d in range(v_head_dim):
                    joined[i, head, d] += share * outputs[reading, head, d]
    return joined
