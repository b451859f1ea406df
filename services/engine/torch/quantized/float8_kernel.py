"""Triton kernels round rows, or each 128 of a row, to floats of 8 bits, by scales of their own.

One launch does it for all rows. It is compiled once for each width, and nothing waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.quantized.float8_products import BLOCK

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-12)
_MAX_COLUMNS, _NUMBERS_OF_A_WARP, _MAX_WARPS = 4096, 512, 8
_GROUPS = 8


@triton.jit
def _round_row(rows, numbers, scales, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program i has row i; a row that is wider than its columns is read twice."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    most = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.static_range(0, DEPTH, COLUMNS):
        at = start + columns
        part = tl.load(rows + row * DEPTH + at, mask=at < DEPTH, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(part))
    largest = tl.maximum(tl.max(most, 0), _SMALLEST)
    scale = largest / _LARGEST
    tl.store(scales + row, scale)
    factor = 1.0 / scale
    for start in tl.static_range(0, DEPTH, COLUMNS):
        at = start + columns
        part = tl.load(rows + row * DEPTH + at, mask=at < DEPTH, other=0.0).to(tl.float32)
        part = tl.minimum(tl.maximum(part * factor, -_LARGEST), _LARGEST)
        tl.store(numbers + row * DEPTH + at, part.to(numbers.dtype.element_ty), mask=at < DEPTH)


@triton.jit(do_not_specialize=["num_rows"])
def _round_groups(
    rows, numbers, scales, num_rows, DEPTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """Program (i, j) has the j-th few groups of row i."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    part = tl.load(rows + row * DEPTH + at, mask=at < DEPTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(part), 1), _SMALLEST) / _LARGEST
    tl.store(scales + groups.to(tl.int64) * num_rows + row, scale, mask=groups * GROUP < DEPTH)
    factor = 1.0 / scale
    part = part * factor[:, None]
    part = tl.minimum(tl.maximum(part, -_LARGEST), _LARGEST)
    tl.store(numbers + row * DEPTH + at, part.to(numbers.dtype.element_ty), mask=at < DEPTH)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, depth], which are contiguous, as floats of 8 bits, and their scales [n, 1]."""
    num_rows, depth = rows.shape
    numbers = torch.empty((num_rows, depth), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    columns = min(_MAX_COLUMNS, triton.next_power_of_2(depth))
    warps = max(1, min(_MAX_WARPS, columns // _NUMBERS_OF_A_WARP))
    with torch.cuda.device_of(rows):  # Triton launches on the current device
        _round_row[(num_rows,)](rows, numbers, scales, depth, columns, num_warps=warps)
    return numbers, scales


def round_groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, depth], which are contiguous, as floats of 8 bits, and the scale of each 128 of them.

    Those are [n, depth / 128], of one group one after another.
    """
    num_rows, depth = rows.shape
    groups = depth // BLOCK
    numbers = torch.empty((num_rows, depth), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((groups, num_rows), dtype=torch.float32, device=rows.device)
    grid = (num_rows, triton.cdiv(groups, _GROUPS))
    with torch.cuda.device_of(rows):
        _round_groups[grid](rows, numbers, scales, num_rows, depth, BLOCK, _GROUPS, num_warps=4)
    return numbers, scales.t()
