"""Triton kernels store K and V in pages on a GPU, and let single tokens attend to them in place.

`store_kv` stores K and V of a step in one launch. `attend_parts` launches _attend_part, which computes for
each part and KV head all heads of the part's readers over its pages, and then _join_parts, which joins the
parts of each query and head by their log-sum-exps.

Online softmax is as in FlashAttention (arXiv 2205.14135), and parts along the sequence as in Flash-Decoding.
The rows of a product are query heads, also of several readers that share pages, so K and V are read once for
all of them. Tables are built once per step (page_pieces.py); no kernel waits for the host. Exponentials have
base 2, as GPUs compute those.

Values that change from step to step do not specialize a kernel, so that each is compiled once, when the
runner starts (kernel_choice.py), and not in a step.

`make gpu` tests this on a GPU, and `make test-triton` without one in Triton's interpreter.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.attention.page_pieces import TUNING, PartsView, Tuning, rows_of
from services.engine.torch.attention.paged_kv import PagedKv, PageShape, Scores

_LOG2_E = tl.constexpr(math.log2(math.e))
# A program stores so many numbers of K, and of V. They are assumed to begin at multiples of the unit.
_STORED_NUMBERS, _UNIT = 2048, 16


@triton.jit(
    do_not_specialize=["layer", "num_layers", "scaling", "softcap"],
    do_not_specialize_on_alignment=["query", "pages", "readers", "parts", "counts"],
)
def _attend_part(
    query,
    kv,
    pages,
    readers,
    parts,
    counts,
    outputs,
    log_sums,
    layer,
    num_layers,
    scaling,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (j, k) computes the j-th narrow or wide part (see PartsView), if there are so many.

    It computes the heads of the part's readers that share KV head k. `softcap` 0 means none.
    """
    nth_part = tl.program_id(0)
    if WIDE:
        nth_part += tl.load(counts)
    if nth_part >= tl.load(counts + WIDE):
        return
    part = parts + nth_part * 7
    kv_head = tl.program_id(1)
    first_page, end_page = tl.load(part), tl.load(part + 1)
    first_reader, end_reader = tl.load(part + 2), tl.load(part + 3)
    rows, columns, v_columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, V_COLUMNS)
    heads = kv_head * GROUP + rows % GROUP
    is_row = rows < (end_reader - first_reader) * GROUP
    is_column, is_v_column = columns < HEAD_DIM, v_columns < V_HEAD_DIM
    offsets = tl.load(readers + first_reader + rows // GROUP, mask=is_row, other=0).to(tl.int64)
    row_starts = (offsets * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM
    queries = tl.load(
        query + row_starts[:, None] + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
    ).to(FACTOR)
    # These belong to the softmax so far: the greatest score, the sum of exp(score - greatest), and the sum of
    # V weighted by it.
    greatest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, V_COLUMNS], tl.float32)
    # The slots of the part's pages are counted through, starting at its first page.
    first_slot = tl.load(part + 5)
    end_slot = (end_page - first_page - 1) * PAGE_SIZE + tl.load(part + 6)
    first_start = first_slot // SLOTS * SLOTS
    # Each iteration loads the page id of the next one. If the iteration that reads the page loaded it, Triton
    # would prefetch page ids instead of tiles of K and V, since it pipelines dependent loads as a chain of
    # stages.
    next_page = tl.load(pages + first_page + _nth_page(first_start, end_slot, PAGE_SIZE, SLOTS))
    for start in range(first_start, end_slot, SLOTS):
        page = next_page.to(tl.int64)
        next_page = tl.load(pages + first_page + _nth_page(start + SLOTS, end_slot, PAGE_SIZE, SLOTS))
        nth = start + tl.arange(0, SLOTS)
        is_token = (first_slot <= nth) & (nth < end_slot)
        slot = nth % PAGE_SIZE
        of_layer = (page * num_layers + layer) * (NUM_KV_HEADS * PAGE_SIZE * (HEAD_DIM + V_HEAD_DIM))
        keys_at = of_layer + (kv_head * PAGE_SIZE + slot) * HEAD_DIM
        keys = tl.load(
            kv + keys_at[None, :] + columns[:, None], mask=is_token[None, :] & is_column[:, None], other=0.0
        ).to(FACTOR)
        scores = tl.dot(queries, keys, input_precision="tf32x3") * (scaling * _LOG2_E)
        if softcap > 0:
            # tanh(x) is 1 - 2 / (1 + e**2x); where that overflows it is 1.
            power = tl.exp2(scores * (2 / softcap))
            scores = (1 - 2 / (1 + power)) * (softcap * _LOG2_E)
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        # Every iteration has a token, so the greatest score is a number.
        peak = tl.maximum(greatest, tl.max(scores, 1))
        shrunk = tl.exp2(greatest - peak)
        weights = tl.exp2(scores - peak[:, None])
        values_at = of_layer + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM + (kv_head * PAGE_SIZE + slot) * V_HEAD_DIM
        values = tl.load(
            kv + values_at[:, None] + v_columns[None, :],
            mask=is_token[:, None] & is_v_column[None, :],
            other=0.0,
        ).to(FACTOR)
        weighted = tl.dot(weights.to(FACTOR), values, weighted * shrunk[:, None], input_precision="tf32x3")
        total = total * shrunk + tl.sum(weights, 1)
        greatest = peak
    places = (tl.load(part + 4) + rows // GROUP).to(tl.int64) * NUM_KV_HEADS * GROUP + heads
    tl.store(log_sums + places, greatest + tl.log2(total), mask=is_row)
    results = outputs + places[:, None] * V_HEAD_DIM + v_columns[None, :]
    tl.store(results, weighted / total[:, None], mask=is_row[:, None] & is_v_column[None, :])


@triton.jit
def _nth_page(start, end_slot, PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """Return the page of the slots from `start` on, or of each slot if a page is not a multiple of tiles.

    For slots from `end_slot` on this is the last page.
    """
    slots = start if PAGE_SIZE % SLOTS == 0 else start + tl.arange(0, SLOTS)
    return tl.minimum(slots, end_slot - 1) // PAGE_SIZE


@triton.jit(do_not_specialize_on_alignment=["readings", "starts", "ends", "offsets", "sinks", "joined"])
def _join_parts(
    outputs,
    log_sums,
    readings,
    starts,
    ends,
    offsets,
    sinks,
    joined,
    V_HEAD_DIM: tl.constexpr,
    V_COLUMNS: tl.constexpr,
):
    """Program (i, h) joins head h of query i. Its sink (-inf means none) is added once, here."""
    query, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, V_COLUMNS)
    is_column = columns < V_HEAD_DIM
    peak = tl.full([V_COLUMNS], -float("inf"), tl.float32)
    total = tl.zeros([V_COLUMNS], tl.float32)
    weighted = tl.zeros([V_COLUMNS], tl.float32)
    for k in range(tl.load(starts + query), tl.load(ends + query)):
        place = tl.load(readings + k).to(tl.int64) * num_heads + head
        log_sum = tl.load(log_sums + place)
        output = tl.load(outputs + place * V_HEAD_DIM + columns, mask=is_column, other=0.0)
        greatest = tl.maximum(peak, log_sum)
        shrunk, weight = tl.exp2(peak - greatest), tl.exp2(log_sum - greatest)
        weighted = weighted * shrunk + output * weight
        total = total * shrunk + weight
        peak = greatest
    sink = tl.load(sinks + head) * _LOG2_E
    greatest = tl.maximum(peak, sink)
    shrunk = tl.exp2(peak - greatest)
    total = total * shrunk + tl.exp2(sink - greatest)
    place = tl.load(offsets + query).to(tl.int64) * num_heads + head
    results = joined + place * V_HEAD_DIM + columns
    tl.store(results, (weighted * shrunk / total).to(joined.dtype.element_ty), mask=is_column)


@triton.jit(
    do_not_specialize=["layer", "num_layers", "key_row", "key_head", "value_row", "value_head"],
    do_not_specialize_on_alignment=["rows", "pages", "slots"],
)
def _store_kv(
    keys,
    values,
    kv,
    rows,
    pages,
    slots,
    layer,
    num_layers,
    key_row,
    key_head,
    value_row,
    value_head,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Program (i, k) stores some heads of the i-th entry. Strides are in units, so that they are aligned."""
    entry = tl.program_id(0)
    page = tl.load(pages + entry).to(tl.int64)
    if page < 0:
        return
    row, slot = tl.load(rows + entry).to(tl.int64), tl.load(slots + entry)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    is_head = heads < NUM_KV_HEADS
    of_layer = (page * num_layers + layer) * (NUM_KV_HEADS * PAGE_SIZE * (HEAD_DIM + V_HEAD_DIM))
    places = heads * PAGE_SIZE + slot
    columns, v_columns = tl.arange(0, COLUMNS)[None, :], tl.arange(0, V_COLUMNS)[None, :]
    is_key, is_value = is_head & (columns < HEAD_DIM), is_head & (v_columns < V_HEAD_DIM)
    key = tl.load(keys + (row * key_row + heads * key_head) * KEY_UNIT + columns, mask=is_key)
    value = tl.load(values + (row * value_row + heads * value_head) * VALUE_UNIT + v_columns, mask=is_value)
    number = kv.dtype.element_ty
    if ROUNDS:
        key, value = _within_float8(key), _within_float8(value)
    tl.store(kv + of_layer + places * HEAD_DIM + columns, key.to(number), mask=is_key)
    of_values = of_layer + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    tl.store(kv + of_values + places * V_HEAD_DIM + v_columns, value.to(number), mask=is_value)


@triton.jit
def _within_float8(numbers):
    """Return what PagedKv.rounded rounds, in float32; NaN stays NaN."""
    numbers = numbers.to(tl.float32)
    numbers = tl.where(numbers > 448.0, 448.0, numbers)
    return tl.where(numbers < -448.0, -448.0, numbers)


FACTORS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
IS_INTERPRETED = not isinstance(_attend_part, triton.JITFunction)


def attend_parts(
    view: PartsView,
    query: Tensor,
    kv: PagedKv,
    layer: int,
    scores: Scores,
    output: Tensor,
    tuning: Tuning = TUNING,
) -> None:
    """Write the attention of the step's single tokens to their rows of `output`.

    `query` is [total, num_heads, head_dim], `output` [total, num_heads, v_head_dim] and contiguous.
    """
    num_heads = query.shape[1]
    query = query.contiguous()
    sinks = sinks_of(scores, num_heads, query.device)
    with torch.cuda.device_of(query):  # Triton launches on the current device.
        for is_wide, num_programs, rows in zip((0, 1), view.grid, rows_of(kv, num_heads), strict=True):
            if num_programs == 0:
                continue
            _attend_part[num_programs, kv.shape.num_kv_heads](
                query,
                kv.numbers,
                view.pages,
                view.readers,
                view.parts,
                view.counts,
                view.outputs,
                view.log_sums,
                layer,
                kv.shape.num_layers,
                scores.scaling,
                scores.softcap or 0.0,
                **part_constants(kv.shape, _factor(kv), num_heads, rows, is_wide, tuning),
                num_warps=tuning.num_warps,
                num_stages=tuning.wide_stages if is_wide else tuning.num_stages,
            )
        _join_parts[len(view.offsets), num_heads](
            view.outputs,
            view.log_sums,
            view.readings,
            view.starts,
            view.ends,
            view.offsets,
            sinks,
            output,
            V_HEAD_DIM=kv.shape.v_head_dim,
            V_COLUMNS=columns_of(kv.shape.v_head_dim),
        )


def sinks_of(scores: Scores, num_heads: int, device: torch.device) -> Tensor:
    if scores.sinks is None:
        return _no_sinks(num_heads, device)
    return scores.sinks.float()


@cache
def _no_sinks(num_heads: int, device: torch.device) -> Tensor:
    return torch.full((num_heads,), -math.inf, device=device)


def store_kv(
    keys: Tensor, values: Tensor, kv: PagedKv, layer: int, rows: Tensor, pages: Tensor, slots: Tensor
) -> None:
    """Store K and V of the step's token rows[i] in slot slots[i] of pages[i], for each i.

    An entry with page -1 is not stored. `keys` and `values` are [total, num_kv_heads, ..] with any strides.
    """
    if len(rows) == 0:
        return
    constants = store_constants(kv.shape)
    keys, key_strides = in_units(keys, constants["KEY_UNIT"])
    values, value_strides = in_units(values, constants["VALUE_UNIT"])
    with torch.cuda.device_of(keys):
        _store_kv[len(rows), -(-kv.shape.num_kv_heads // constants["HEADS"])](
            keys,
            values,
            kv.numbers,
            rows,
            pages,
            slots,
            layer,
            kv.shape.num_layers,
            *key_strides,
            *value_strides,
            **constants,
            ROUNDS=kv.widened is not None,
        )


def in_units(numbers: Tensor, unit: int) -> tuple[Tensor, tuple[int, int]]:
    """Return [total, num_heads, dim] in the kernel's layout, and the strides of rows and heads in units.

    The kernel is compiled for starts at multiples of 16 bytes, and for units. Other tensors are copied.
    """
    row, head = (0 if numbers.shape[i] == 1 else numbers.stride(i) for i in (0, 1))
    if row % unit or head % unit or numbers.stride(2) != 1 or numbers.data_ptr() % 16:
        numbers = numbers.clone(memory_format=torch.contiguous_format)
        row, head = numbers.stride()[:2]
    return numbers, (row // unit, head // unit)


@cache
def store_constants(shape: PageShape) -> dict[str, Any]:
    _, num_kv_heads, page_size, head_dim, v_head_dim = shape
    columns, v_columns = columns_of(head_dim), columns_of(v_head_dim)
    heads: int = triton.next_power_of_2(num_kv_heads)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "COLUMNS": columns,
        "V_COLUMNS": v_columns,
        "HEADS": max(1, min(heads, _STORED_NUMBERS // max(columns, v_columns))),
        "KEY_UNIT": math.gcd(head_dim, _UNIT),
        "VALUE_UNIT": math.gcd(v_head_dim, _UNIT),
    }


@cache
def part_constants(
    shape: PageShape, dtype: torch.dtype, num_heads: int, rows: int, is_wide: int, tuning: Tuning = TUNING
) -> dict[str, Any]:
    _, num_kv_heads, page_size, head_dim, v_head_dim = shape
    columns, v_columns = columns_of(head_dim), columns_of(v_head_dim)
    widest = max(columns, v_columns)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "ROWS": rows,
        "COLUMNS": columns,
        "V_COLUMNS": v_columns,
        "SLOTS": max(16, min(tuning.max_slots, tuning.tile_bytes // (widest * dtype.itemsize))),
        # The interpreter multiplies the bits of bfloat16 as integers, so there it is widened.
        "FACTOR": tl.float32 if IS_INTERPRETED else FACTORS[dtype],
        "WIDE": is_wide,
    }


def _factor(kv: PagedKv) -> torch.dtype:
    """Return the type for products: FP8 pages are exact in float16, and cheap to widen to it."""
    is_half = kv.compute_dtype.itemsize == torch.float16.itemsize
    return torch.float16 if kv.widened is not None and is_half else kv.compute_dtype


def columns_of(head_dim: int) -> int:
    columns: int = max(16, triton.next_power_of_2(head_dim))
    return columns
