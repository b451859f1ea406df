"""Triton kernels round rows to floats of 8 bits, and multiply with weights of 4 bits. See stored_products.py.

`round_rows` rounds each row by a scale of its own, in one launch for all rows. `round_groups` does so for
each 128 numbers of a row. Both are compiled once for each width, and do not wait for the device.

`multiply` launches _multiply for each tile of the weight, some of its steps, and up to 64 rows: integers are
multiplied, and each half's sums less its zero points get its scale. If a tile's steps were shared among
programs, _join adds their sums in order. `dequantize` is for prompts: each number less its zero point, times
its scale.

A tile's steps are divided so that a few tiles keep all processors busy. The division depends only on the
weight's shape, and not on the number of rows. Shapes do not specialize kernels: _multiply is compiled for 16,
32 and 64 rows, each with the types of both sums, and the others once. Sums are in float32.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.quantized.stored_products import BLOCK, TILE_ROWS, Int4Kernels, Int4Weight

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-12)
_MAX_COLUMNS, _NUMBERS_OF_A_WARP, _MAX_WARPS = 4096, 512, 8
_GROUPS = 8


@triton.jit
def _round_row(rows, numbers, scales, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program i computes row i; a row that is wider than its columns is read twice."""
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
    """Program (i, j) computes the j-th block of groups of row i."""
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
    """Return the contiguous `rows` [n, depth] as floats of 8 bits, and their scales [n, 1]."""
    num_rows, depth = rows.shape
    numbers = torch.empty((num_rows, depth), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    columns = min(_MAX_COLUMNS, triton.next_power_of_2(depth))
    warps = max(1, min(_MAX_WARPS, columns // _NUMBERS_OF_A_WARP))
    with torch.cuda.device_of(rows):  # Triton launches on the current device.
        _round_row[(num_rows,)](rows, numbers, scales, depth, columns, num_warps=warps)
    return numbers, scales


def round_groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the contiguous `rows` [n, depth] as floats of 8 bits, and the scale of each 128 of them.

    The scales are [n, depth / 128], with those of one group contiguous.
    """
    num_rows, depth = rows.shape
    groups = depth // BLOCK
    numbers = torch.empty((num_rows, depth), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((groups, num_rows), dtype=torch.float32, device=rows.device)
    grid = (num_rows, triton.cdiv(groups, _GROUPS))
    with torch.cuda.device_of(rows):
        _round_groups[grid](rows, numbers, scales, num_rows, depth, BLOCK, _GROUPS, num_warps=4)
    return numbers, scales.t()


_FEWEST_ROWS = 16
_PROGRAMS_OF_A_PROCESSOR = 2
_FEWEST_STEPS = 4  # This is the fewest for a program.
_JOINED = 256


@triton.jit
def _sums_of(rows, values, points, scales):
    """Return the products of rows and integers with a zero point and a scale for each column."""
    products = tl.dot(rows, values, input_precision="ieee")
    totals = tl.sum(rows.to(tl.float32), 1)
    return (products - totals[:, None] * points[None, :]) * scales[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_steps", "steps", "num_tiles", "halves"])
def _multiply(
    rows,
    tiles,
    scales,
    points,
    products,
    num_rows,
    num_steps,
    steps,
    num_tiles,
    halves,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, j) computes the j-th block of steps of tile i; `halves` of these are a group.

    `products` is [programs of a tile, num_rows, num_tiles * TILE].
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    nth, k, n = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, TILE)
    is_row = (nth < num_rows)[:, None]
    columns = tile * TILE + n
    depth = num_steps * (2 * HALF)
    width = num_tiles * TILE
    at_rows = rows + nth[:, None] * depth + k[None, :]
    at_tiles = tiles + tile.to(tl.int64) * num_steps * (HALF * TILE) + k[:, None] * TILE + n[None, :]
    sums = tl.zeros((ROWS, TILE), tl.float32)
    first = part * steps
    for step in range(first, tl.minimum(first + steps, num_steps)):
        low_rows = tl.load(at_rows + step * (2 * HALF), mask=is_row, other=0.0)
        high_rows = tl.load(at_rows + step * (2 * HALF) + HALF, mask=is_row, other=0.0)
        pairs = tl.load(at_tiles + step * (HALF * TILE))
        low = (pairs & 15).to(low_rows.dtype)
        high = ((pairs >> 4) & 15).to(low_rows.dtype)
        at_low = (2 * step // halves) * width + columns
        at_high = ((2 * step + 1) // halves) * width + columns
        sums += _sums_of(low_rows, low, tl.load(points + at_low), tl.load(scales + at_low))
        sums += _sums_of(high_rows, high, tl.load(points + at_high), tl.load(scales + at_high))
    to = products + (part * num_rows + nth[:, None]) * width + columns[None, :]
    tl.store(to, sums.to(products.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["count", "num_parts"])
def _join(parts, products, count, num_parts, JOINED: tl.constexpr):
    at = tl.program_id(0) * JOINED + tl.arange(0, JOINED)
    is_there = at < count
    sums = tl.zeros((JOINED,), tl.float32)
    for part in range(num_parts):
        sums += tl.load(parts + part * count + at, mask=is_there, other=0.0)
    tl.store(products + at, sums.to(products.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_steps", "num_tiles", "halves"])
def _dequantize(
    tiles, scales, points, weight, num_steps, num_tiles, halves, HALF: tl.constexpr, TILE: tl.constexpr
):
    """Program (i, j) computes step j of tile i; `weight` is [num_tiles * TILE, depth]."""
    tile, step = tl.program_id(0), tl.program_id(1)
    width = num_tiles * TILE
    k, n = tl.arange(0, HALF), tl.arange(0, TILE)
    columns = tile * TILE + n
    at = (tile.to(tl.int64) * num_steps + step) * (HALF * TILE) + k[:, None] * TILE + n[None, :]
    pairs = tl.load(tiles + at)
    to = weight + columns[None, :].to(tl.int64) * num_steps * (2 * HALF) + step * (2 * HALF) + k[:, None]
    at_low = (2 * step // halves) * width + columns
    at_high = ((2 * step + 1) // halves) * width + columns
    low = (pairs & 15).to(tl.float32) - tl.load(points + at_low)[None, :]
    high = ((pairs >> 4) & 15).to(tl.float32) - tl.load(points + at_high)[None, :]
    tl.store(to, (low * tl.load(scales + at_low)[None, :]).to(weight.dtype.element_ty))
    tl.store(to + HALF, (high * tl.load(scales + at_high)[None, :]).to(weight.dtype.element_ty))


def multiply(rows: Tensor, weight: Int4Weight) -> Tensor:
    """Return the product of up to 64 contiguous `rows` [n, depth]: [n, num_rows of the weight]."""
    num_rows, (num_tiles, num_steps, half, _) = len(rows), weight.tiles.shape
    num_columns = num_tiles * TILE_ROWS
    wanted = -(-_PROGRAMS_OF_A_PROCESSOR * _num_processors(rows.device) // num_tiles)
    parts = max(1, min(wanted, num_steps // _FEWEST_STEPS))
    steps = -(-num_steps // parts)
    parts = -(-num_steps // steps)
    dtype = rows.dtype if parts == 1 else torch.float32
    sums = torch.empty((parts, num_rows, num_columns), dtype=dtype, device=rows.device)
    with torch.cuda.device_of(rows):  # Triton launches on the current device.
        _multiply[(num_tiles, parts)](
            rows,
            weight.tiles,
            weight.scales,
            weight.points,
            sums,
            num_rows,
            num_steps,
            steps,
            num_tiles,
            _halves_of_a_group(weight),
            half,
            TILE_ROWS,
            max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)),
            num_warps=4,
            num_stages=4,
        )
        if parts == 1:
            product = sums[0]
        else:
            product = torch.empty((num_rows, num_columns), dtype=rows.dtype, device=rows.device)
            count = num_rows * num_columns
            _join[(triton.cdiv(count, _JOINED),)](sums, product, count, parts, _JOINED, num_warps=2)
    return product[:, : weight.num_rows]


def dequantize(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    num_tiles, num_steps, half, _ = weight.tiles.shape
    device = weight.tiles.device
    whole = torch.empty((num_tiles * TILE_ROWS, weight.depth), dtype=dtype, device=device)
    with torch.cuda.device_of(whole):
        _dequantize[(num_tiles, num_steps)](
            weight.tiles,
            weight.scales,
            weight.points,
            whole,
            num_steps,
            num_tiles,
            _halves_of_a_group(weight),
            half,
            TILE_ROWS,
            num_warps=4,
        )
    return whole[: weight.num_rows]


KERNELS = Int4Kernels(multiply, dequantize)


def _halves_of_a_group(weight: Int4Weight) -> int:
    return weight.depth // len(weight.scales) // weight.half


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
