"""A Triton kernel lets prompts attend together on a GPU where torch's flash attention cannot.

That has no soft caps, and K and V of one width. The arguments are those of prompts.py: K and V that the
chunks see are packed, and each chunk has a run of rows and a run of what it sees.

A program computes some rows of one chunk and one head, in the order of what they see (FlashAttention, arXiv
2205.14135). The grid depends only on the room that the tables have, so a graph can replay the launch.
Programs past a chunk's end do nothing. Values that change from step to step do not specialize the kernel, as
in gpu_attention_kernel.py.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.attention.gpu_attention_kernel import (
    FACTORS,
    IS_INTERPRETED,
    columns_of,
    in_units,
    sinks_of,
)
from services.engine.torch.attention.paged_kv import Scores

_LOG2_E = tl.constexpr(math.log2(math.e))
# With these a program fits into 99 KiB of shared memory, except with head_dim 256, which needs 1 KiB more.
_ROWS, _MOST_TOKENS, _TILE_BYTES, _UNIT = 64, 64, 16 << 10, 16
_NUM_STAGES, _NUM_WARPS, _WIDE_WARPS, _WIDE = 2, 4, 8, 128


@triton.jit(
    do_not_specialize=[
        *("query_row", "query_head", "key_row", "key_head", "value_row", "value_head"),
        *("window", "scaling", "softcap"),
    ],
    do_not_specialize_on_alignment=["row_starts", "seen_starts", "sinks"],
)
def _attend_rows(
    query,
    keys,
    values,
    row_starts,
    seen_starts,
    sinks,
    output,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    window,
    scaling,
    softcap,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    V_UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Program (i, j, h) computes the i-th rows of chunk j and head h. `softcap` and `window` 0 mean none."""
    chunk, head = tl.program_id(1), tl.program_id(2)
    end_row, end_seen = tl.load(row_starts + chunk + 1), tl.load(seen_starts + chunk + 1)
    first_row = tl.load(row_starts + chunk) + tl.program_id(0) * ROWS
    if first_row >= end_row:
        return
    rows, columns, v_columns = first_row + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, V_COLUMNS)
    is_row, is_column, is_v_column = rows < end_row, columns < HEAD_DIM, v_columns < V_HEAD_DIM
    of_rows = (rows.to(tl.int64) * query_row + head.to(tl.int64) * query_head) * UNIT
    queries = tl.load(
        query + of_rows[:, None] + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
    ).to(FACTOR)
    # The chunk's rows are the last tokens of what it sees: row i is token places[i].
    places = rows + (end_seen - end_row)
    begin = tl.load(seen_starts + chunk)
    if window > 0:
        begin = tl.maximum(begin, first_row + (end_seen - end_row) - window + 1)
    end = tl.minimum(end_seen, first_row + ROWS + (end_seen - end_row))
    greatest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, V_COLUMNS], tl.float32)
    kv_head = (head // GROUP).to(tl.int64)
    for start in range(begin, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        is_token, wide = tokens < end, tokens.to(tl.int64)
        of_keys = (wide * key_row + kv_head * key_head) * UNIT
        of_tokens = tl.load(
            keys + of_keys[None, :] + columns[:, None],
            mask=is_token[None, :] & is_column[:, None],
            other=0.0,
        ).to(FACTOR)
        scores = tl.dot(queries, of_tokens, input_precision="tf32x3") * (scaling * _LOG2_E)
        if softcap > 0:
            # tanh(x) is 1 - 2 / (1 + e**2x); where that overflows it is 1.
            power = tl.exp2(scores * (2 / softcap))
            scores = (1 - 2 / (1 + power)) * (softcap * _LOG2_E)
        is_seen = is_token[None, :] & (tokens[None, :] <= places[:, None])
        if window > 0:
            is_seen = is_seen & (tokens[None, :] > places[:, None] - window)
        scores = tl.where(is_seen, scores, -float("inf"))
        greatest_now = tl.maximum(greatest, tl.max(scores, 1))
        # A row may see none of the first tokens; then all its scores are -inf.
        peak = tl.where(greatest_now == -float("inf"), 0.0, greatest_now)
        shrunk = tl.exp2(greatest - peak)
        weights = tl.exp2(scores - peak[:, None])
        of_values = (wide * value_row + kv_head * value_head) * V_UNIT
        numbers = tl.load(
            values + of_values[:, None] + v_columns[None, :],
            mask=is_token[:, None] & is_v_column[None, :],
            other=0.0,
        ).to(FACTOR)
        weighted = tl.dot(weights.to(FACTOR), numbers, weighted * shrunk[:, None], input_precision="tf32x3")
        total = total * shrunk + tl.sum(weights, 1)
        greatest = greatest_now
    sink = tl.load(sinks + head) * _LOG2_E
    peak = tl.maximum(greatest, sink)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    shrunk = tl.exp2(greatest - peak)
    total = total * shrunk + tl.exp2(sink - peak)
    total = tl.where(total > 0, total, 1.0)  # Rows of no chunk see nothing, and get 0.
    results = output + (rows.to(tl.int64) * NUM_HEADS + head)[:, None] * V_HEAD_DIM + v_columns[None, :]
    given = (weighted * (shrunk / total)[:, None]).to(output.dtype.element_ty)
    tl.store(results, given, mask=is_row[:, None] & is_v_column[None, :])


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_starts: Tensor,
    seen_starts: Tensor,
    longest: int,
    window: int,
    scores: Scores,
) -> Tensor:
    """Return the attention [total, num_heads, v_head_dim]; rows of no chunk are uninitialized.

    `query` is [total, num_heads, head_dim], `keys` and `values` are [num_seen, num_kv_heads, ..], with any
    strides. The tables are those of PackedChunks, and no chunk has more than `longest` rows.
    """
    num_heads, head_dim, v_head_dim = query.shape[1], query.shape[2], values.shape[2]
    constants = row_constants(num_heads, num_heads // keys.shape[1], head_dim, v_head_dim, query.dtype)
    query, query_strides = in_units(query, constants["UNIT"])
    keys, key_strides = in_units(keys, constants["UNIT"])
    values, value_strides = in_units(values, constants["V_UNIT"])
    output = query.new_empty(len(query), num_heads, v_head_dim)
    with torch.cuda.device_of(query):  # Triton launches on the current device.
        _attend_rows[-(-longest // _ROWS), len(row_starts) - 1, num_heads](
            query,
            keys,
            values,
            row_starts,
            seen_starts,
            sinks_of(scores, num_heads, query.device),
            output,
            *query_strides,
            *key_strides,
            *value_strides,
            window,
            scores.scaling,
            scores.softcap or 0.0,
            **constants,
            num_warps=warps_of(head_dim, v_head_dim),
            num_stages=_NUM_STAGES,
        )
    return output


def warps_of(head_dim: int, v_head_dim: int) -> int:
    return _NUM_WARPS if max(head_dim, v_head_dim) <= _WIDE else _WIDE_WARPS


@cache
def row_constants(
    num_heads: int, group: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    columns, v_columns = columns_of(head_dim), columns_of(v_head_dim)
    fitting = _TILE_BYTES // (max(columns, v_columns) * dtype.itemsize)
    return {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "ROWS": _ROWS,
        "COLUMNS": columns,
        "V_COLUMNS": v_columns,
        "TOKENS": max(16, min(_MOST_TOKENS, fitting)),
        "UNIT": math.gcd(head_dim, _UNIT),
        "V_UNIT": math.gcd(v_head_dim, _UNIT),
        # The interpreter multiplies the bits of bfloat16 as integers, so there it is widened.
        "FACTOR": tl.float32 if IS_INTERPRETED else FACTORS[dtype],
    }
