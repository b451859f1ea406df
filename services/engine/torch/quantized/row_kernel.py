"""A Triton kernel rounds rows to floats of 8 bits, each by a scale of its own: a launch for all of them.

It is compiled once for each width: the number of rows is in the grid alone, and nothing waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-12)
_MAX_COLUMNS, _NUMBERS_OF_A_WARP, _MAX_WARPS = 4096, 512, 8


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
    tl.store(scales + row, largest / _LARGEST)
    factor = _LARGEST / largest
    for start in tl.static_range(0, DEPTH, COLUMNS):
        at = start + columns
        part = tl.load(rows + row * DEPTH + at, mask=at < DEPTH, other=0.0).to(tl.float32)
        part = tl.minimum(tl.maximum(part * factor, -_LARGEST), _LARGEST)
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
