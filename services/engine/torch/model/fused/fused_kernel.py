"""Triton kernels compute a norm, a rotation, and a gated activation with one launch each.

They round where a definition does in half precision, in the order of plain_kernels.py. So a product and a sum
must not be fused into one operation, which rounds once instead of twice. LLVM would fuse two products of
bfloat16 and their sum, although each product is rounded here.

Values that change from step to step do not specialize a kernel, so Triton compiles each kernel once for a
layer's width; the number of rows is only in the grid. Strides are in units of eight numbers where they are
multiples of that, so that a thread reads 16 bytes at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.model.fused.plain_kernels import Activation, Kernels, NormForm, RotaryForm

_UNIT = 8
_NUMBERS_OF_A_WARP = 512
_MAX_WARPS = 8
_HEADS, _COLUMNS = 4, 1024  # A program computes so many of each.


@triton.jit
def _rounded(numbers, DTYPE: tl.constexpr):
    return numbers.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["epsilon", "inner", "outer_stride", "inner_stride", "outer_to", "inner_to"])
def _normalize(
    rows,
    weight,
    normed,
    epsilon,
    inner,
    outer_stride,
    inner_stride,
    outer_to,
    inner_to,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Program i computes row (i // inner, i % inner); the strides to read and to write are in units."""
    row = tl.program_id(0)
    outer, nth = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    start = (outer * outer_stride + nth * inner_stride) * UNIT
    numbers = tl.load(rows + start + columns, mask=is_column, other=0.0).to(tl.float32)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / WIDTH + epsilon)
    if ROUNDS_FIRST:
        numbers = _rounded(numbers, normed.dtype.element_ty)
    if HAS_WEIGHT:
        factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
        if ADDS_ONE:
            factors = factors + 1.0
        numbers = numbers * factors
    place = (outer * outer_to + nth * inner_to) * UNIT
    tl.store(normed + place + columns, numbers.to(normed.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["epsilon"])
def _add_and_normalize(
    first,
    second,
    total,
    weight,
    normed,
    epsilon,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Program i computes row i: its sum, rounded, and the norm of that."""
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + columns
    numbers = tl.load(first + place, mask=is_column, other=0.0).to(tl.float32)
    numbers = numbers + tl.load(second + place, mask=is_column, other=0.0).to(tl.float32)
    tl.store(total + place, numbers.to(total.dtype.element_ty), mask=is_column)
    numbers = _rounded(numbers, total.dtype.element_ty)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / WIDTH + epsilon)
    if ROUNDS_FIRST:
        numbers = _rounded(numbers, normed.dtype.element_ty)
    if HAS_WEIGHT:
        factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
        if ADDS_ONE:
            factors = factors + 1.0
        numbers = numbers * factors
    tl.store(normed + place, numbers.to(normed.dtype.element_ty), mask=is_column)


def add_and_normalize(
    first: Tensor, second: Tensor, total: Tensor, weight: Tensor | None, form: NormForm
) -> Tensor:
    width, normed = first.shape[-1], torch.empty_like(total)
    columns = triton.next_power_of_2(width)
    with torch.cuda.device_of(first):
        _add_and_normalize[(first.numel() // width,)](
            first,
            second,
            total,
            total if weight is None else weight,
            normed,
            form.epsilon,
            width,
            columns,
            weight is not None,
            form.adds_one,
            form.rounds_first,
            num_warps=_num_warps(columns),
            enable_fp_fusion=False,
        )
    return normed


def normalize(rows: Tensor, weight: Tensor | None, form: NormForm) -> Tensor:
    width = rows.shape[-1]
    normed = torch.empty_like(rows)  # Rows that lie in another order keep it.
    lead = _two_dims(rows, normed)
    if lead is None:
        return normalize(rows.contiguous(), weight, form)
    inner, strides = lead
    unit = _unit(*strides)
    columns = triton.next_power_of_2(width)
    with torch.cuda.device_of(rows):  # Triton launches on the current device.
        _normalize[(rows.numel() // width,)](
            rows,
            rows if weight is None else weight,
            normed,
            form.epsilon,
            inner,
            *(stride // unit for stride in strides),
            width,
            columns,
            unit,
            weight is not None,
            form.adds_one,
            form.rounds_first,
            num_warps=_num_warps(columns),
            enable_fp_fusion=False,
        )
    return normed


def _two_dims(rows: Tensor, normed: Tensor) -> tuple[int, tuple[int, int, int, int]] | None:
    """Return the layout of the rows in two dimensions, or None where they need more.

    The result is the size of the inner dimension, and the strides of the outer and the inner one in `rows`
    and in `normed`.
    """
    width = rows.shape[-1]
    if rows.is_contiguous():
        return 1, (width, 0, width, 0)
    if rows.stride(-1) != 1 or normed.stride(-1) != 1:
        return None
    dims: list[tuple[int, int, int]] = []
    lying = zip(rows.shape[:-1], rows.stride()[:-1], normed.stride()[:-1], strict=True)
    for size, stride, to in sorted((each for each in lying if each[0] > 1), key=lambda each: -each[2]):
        if dims and dims[-1][1:] == (size * stride, size * to):
            dims[-1] = (dims[-1][0] * size, stride, to)
        else:
            dims.append((size, stride, to))
    if len(dims) > 2:
        return None
    (_, outer, outer_to), (inner, stride, to) = [*dims, (1, 0, 0), (1, 0, 0)][:2]
    return inner, (outer, stride, outer_to, to)


def _unit(*strides: int) -> int:
    return 1 if any(stride % _UNIT for stride in strides) else _UNIT


def _num_warps(columns: int) -> int:
    return max(1, min(_MAX_WARPS, columns // _NUMBERS_OF_A_WARP))


@triton.jit
def _rotate_heads(
    heads,
    cos,
    sin,
    rotated,
    block,
    head_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    SECOND_ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate `HEADS` heads of one token; `heads`, `cos`, `sin` and `rotated` point to that token's."""
    dtype: tl.constexpr = rotated.dtype.element_ty
    nth = block * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < HALF
    is_number = (nth < NUM_HEADS)[:, None] & is_column[None, :]
    at = nth[:, None] * head_stride * UNIT + columns[None, :]
    first = tl.load(heads + at, mask=is_number, other=0.0).to(tl.float32)
    second = tl.load(heads + at + HALF, mask=is_number, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + SECOND_ANGLES + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + SECOND_ANGLES + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    turned_first = _rounded(first * first_cos, dtype) - _rounded(second * first_sin, dtype)
    turned_second = _rounded(second * second_cos, dtype) + _rounded(first * second_sin, dtype)
    to = nth[:, None] * DIM + columns[None, :]
    tl.store(rotated + to, turned_first.to(dtype), mask=is_number)
    tl.store(rotated + to + HALF, turned_second.to(dtype), mask=is_number)
    if REST_COLUMNS > 0:
        columns = 2 * HALF + tl.arange(0, REST_COLUMNS)
        is_number = (nth < NUM_HEADS)[:, None] & (columns < DIM)[None, :]
        rest = tl.load(
            heads + nth[:, None] * head_stride * UNIT + columns[None, :], mask=is_number, other=0.0
        )
        tl.store(rotated + nth[:, None] * DIM + columns[None, :], rest, mask=is_number)


@triton.jit(
    do_not_specialize=[
        *("query_stride", "query_head_stride", "key_stride", "key_head_stride", "cos_stride", "sin_stride")
    ]
)
def _rotate(
    query,
    key,
    cos,
    sin,
    rotated_query,
    rotated_key,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    cos_stride,
    sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    SECOND_ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    ANGLES_UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (i, j) computes the j-th block of token i's query heads, and then of its KV heads.

    The strides are those of a token and of a head, in units.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    cos += token * cos_stride * ANGLES_UNIT
    sin += token * sin_stride * ANGLES_UNIT
    if block < query_blocks:
        _rotate_heads(
            query + token * query_stride * UNIT,
            cos,
            sin,
            rotated_query + token * (NUM_HEADS * DIM),
            block,
            query_head_stride,
            NUM_HEADS,
            DIM,
            HALF,
            COLUMNS,
            REST_COLUMNS,
            SECOND_ANGLES,
            UNIT,
            HEADS,
        )
    else:
        _rotate_heads(
            key + token * key_stride * UNIT,
            cos,
            sin,
            rotated_key + token * (NUM_KV_HEADS * DIM),
            block - query_blocks,
            key_head_stride,
            NUM_KV_HEADS,
            DIM,
            HALF,
            COLUMNS,
            REST_COLUMNS,
            SECOND_ANGLES,
            UNIT,
            HEADS,
        )


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> tuple[Tensor, Tensor]:
    _, num_heads, total, dim = query.shape
    num_kv_heads = key.shape[1]
    query, key, cos, sin = (_with_dense_rows(each) for each in (query, key, cos, sin))
    # The code that reads them wants a token's heads one after another.
    rotated_query = query.new_empty(1, total, num_heads, dim)
    rotated_key = key.new_empty(1, total, num_kv_heads, dim)
    strides = (query.stride(2), query.stride(1), key.stride(2), key.stride(1))
    angle_strides = (cos.stride(1), sin.stride(1))
    unit, angles_unit = _unit(*strides), _unit(*angle_strides)
    rest = dim - 2 * form.half
    with torch.cuda.device_of(query):
        _rotate[(total, -(-num_heads // _HEADS) + -(-num_kv_heads // _HEADS))](
            query,
            key,
            cos,
            sin,
            rotated_query,
            rotated_key,
            *(stride // unit for stride in strides),
            *(stride // angles_unit for stride in angle_strides),
            num_heads,
            num_kv_heads,
            dim,
            form.half,
            triton.next_power_of_2(form.half),
            triton.next_power_of_2(rest) if rest else 0,
            form.half if form.has_own_angles else 0,
            unit,
            angles_unit,
            _HEADS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return rotated_query.transpose(1, 2), rotated_key.transpose(1, 2)


def _with_dense_rows(numbers: Tensor) -> Tensor:
    return numbers if numbers.stride(-1) == 1 else numbers.contiguous()


@triton.jit(do_not_specialize=["gate_stride", "up_stride"])
def _activate(
    gate,
    up,
    activated,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SILU: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (i, j) computes the j-th block of columns of row i. The strides are in units."""
    dtype: tl.constexpr = activated.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    numbers = tl.load(gate + row * gate_stride * UNIT + columns, mask=is_column, other=0.0).to(tl.float32)
    factors = tl.load(up + row * up_stride * UNIT + columns, mask=is_column, other=0.0).to(tl.float32)
    opening = numbers
    if not IS_SILU:
        # (1 + tanh(x)) / 2 is 1 / (1 + e**-2x); these are GELU's own constants.
        opening = 1.5957691216057308 * (numbers + 0.044715 * numbers * numbers * numbers)
    numbers = _rounded(numbers / (1.0 + tl.exp(-opening)), dtype)
    tl.store(activated + row * WIDTH + columns, (numbers * factors).to(dtype), mask=is_column)


def activate(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    width = gate.shape[-1]
    gates, ups = (_with_dense_rows(each.reshape(-1, width)) for each in (gate, up))
    activated = gates.new_empty(gate.shape)
    strides = (gates.stride(0), ups.stride(0))
    unit = _unit(*strides)
    with torch.cuda.device_of(gates):
        _activate[(len(gates), -(-width // _COLUMNS))](
            gates,
            ups,
            activated,
            *(stride // unit for stride in strides),
            width,
            _COLUMNS,
            activation == "silu",
            unit,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return activated


KERNELS = Kernels(normalize, rotate, activate, add_and_normalize)
